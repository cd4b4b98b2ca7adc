r"""Is the state found one that a small disturbance leaves, or returns to?

Near a state at rest of ``dz/dt = g(z)`` a disturbance obeys ``d(dz)/dt = J dz``, ``J = dg/dz``: it dies out if every
eigenvalue of ``J`` has a negative real part and grows if one has a positive real part (Lyapunov's indirect method; Khalil,
*Nonlinear Systems*, 3rd ed. 2002, theorem 4.7).  Near a fixed point of ``z <- f(z)`` the same holds with moduli below
and above 1 (Ortega & Rheinboldt 1970, theorem 10.1.3), near a stationary point of an objective with ``J = -H``, the gradient
flow: stable means a minimum.

The deciding eigenvalues come from LAPACK on dense Jacobians up to 512 unknowns a sample, above that from ARPACK's
restarted Arnoldi method with Jacobian-vector products (Lehoucq, Sorensen & Yang 1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse.linalg
import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_arguments
from implicitkit.foundation.trees import Layout, tree_map
from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.lifting.substitution import resolve
from implicitkit.problem.base import Problem
from implicitkit.solution import Solution
from implicitkit.system import System

_DENSE = 512  # unknowns a sample up to which the whole spectrum is computed


@dataclass(frozen=True)
class Stability:
    """Linear stability of every sample; fields have the batch's shape.

    Attributes:
        eigenvalues: the deciding ones, the worst first, complex, ``(*batch, k)``; NaN where none could be computed.
        growth_rate: the largest real part (for a fixed point: the logarithm of the largest modulus, per iteration): a
            disturbance changes by ``exp(growth_rate t)``.
        frequency: imaginary part of the worst eigenvalue (a fixed point: its argument), in radians per unit of time.
        stable, unstable: ``growth_rate`` is below zero, above zero, by more than ``margin``; neither: it cannot be told.
        margin: the error that ``growth_rate`` may have from a state solved to the default tolerance, ``eps^(2/3) |J|``.
        discrete: for an iteration ``z <- f(z)``, time counts iterations.
        exact: every eigenvalue is known (dense), not only those that Arnoldi's method has found.
    """

    eigenvalues: Tensor
    growth_rate: Tensor
    frequency: Tensor
    stable: Tensor
    unstable: Tensor
    margin: Tensor
    discrete: bool
    exact: bool

    def __str__(self) -> str:
        total = self.growth_rate.numel()
        if total == 1:
            return f"Stability({self._verdict(0)})"
        worst = int(torch.nan_to_num(self.growth_rate, nan=math.inf).reshape(-1).argmax())
        counts = f"{int(self.stable.sum())} of {total} states stable, {int(self.unstable.sum())} unstable"
        return f"Stability({counts}; worst: sample {worst}: {self._verdict(worst)})"

    def _verdict(self, i: int) -> str:
        rate, frequency = float(self.growth_rate.reshape(-1)[i]), abs(float(self.frequency.reshape(-1)[i]))
        if math.isnan(rate):
            return "unknown: no eigenvalue could be computed"
        unit = "iterations" if self.discrete else "units of time"
        if bool(self.stable.reshape(-1)[i]):
            text = f"stable: disturbances decay by a factor e in {-1 / rate:.3g} {unit}"
        elif bool(self.unstable.reshape(-1)[i]):
            text = f"unstable: a disturbance grows by a factor e in {1 / rate:.3g} {unit}"
        else:
            text = "neutral: the growth rate cannot be told from zero"
        if frequency > float(self.margin.reshape(-1)[i]):
            text += f", oscillating with period {2 * math.pi / frequency:.3g}"
        return f"{text}; rightmost eigenvalue {complex(self.eigenvalues.reshape(-1, self.eigenvalues.shape[-1])[i, 0]):.4g}"


@despite_inference_mode
def stability(
    subject: Solution | Problem, z: Any = None, args: Any = (), *, batch_dims: int = 0, count: int = 6
) -> Stability:
    """Linear stability of a state (see the top of this file).

    Args:
        subject: what :func:`ik.solve` returned, or a problem, of kind ``SteadyState``, ``FixedPoint``, ``Argmin`` or
            ``LeastSquares``.
        z, args, batch_dims: with a problem: the state and what goes with it, as in :func:`ik.solve`.
        count: eigenvalues to report, at least 1 (fewer if there are fewer).

    Returns:
        A :class:`Stability`; ``print`` it for a verdict.

    Raises:
        CapabilityError: the problem has no dynamics (equations are not a flow: state them as a ``SteadyState``).
        ValueError: ``count`` below 1, or a solution that does not carry its problem (unpickled, or made by hand).
        TypeError: ``subject`` is neither, or ``z`` is missing.
    """
    check_arguments("stability", count=(at_least(1), count), batch_dims=(at_least(0), batch_dims))
    system, theta, point, layout = _state(subject, z, args, batch_dims)
    kind = system.problem.kind
    if not kind.flow:
        raise CapabilityError(
            f"{type(system.problem).__name__} has no dynamics, and so no stability: state the flow as "
            "ik.SteadyState(rhs), with its sign, or the iteration as ik.FixedPoint(map)"
        )
    sign, shift = float(kind.flow), 1.0 if kind.iteration else 0.0
    with torch.no_grad():
        _, A = autodiff.linearise(lambda y: system.residual(y, *theta), point, symmetric=system.problem.symmetric)
        exact = A.size <= _DENSE
        values = _dense(A, sign, shift, count) if exact else _arnoldi(A, sign, shift, count)
        scale = values.abs().amax(1)
        if exact:
            scale = torch.linalg.matrix_norm(A.dense()) + shift
    discrete = kind.iteration
    worst = values[:, 0]
    rate = worst.abs().log() if discrete else worst.real
    frequency = worst.angle() if discrete else worst.imag
    margin = torch.finfo(scale.dtype).eps ** (2 / 3) * scale
    shaped = layout.unpack_batch
    return Stability(
        shaped(values.mT).movedim(0, -1),
        shaped(rate),
        shaped(frequency),
        shaped(rate < -margin),
        shaped(rate > margin),
        shaped(margin),
        discrete,
        exact,
    )


def _state(subject: Any, z: Any, args: Any, batch_dims: int) -> tuple[System, tuple[Tensor, ...], Tensor, Layout]:
    """The system, its tensors, the packed state and its layout."""
    if isinstance(subject, Solution):
        record = subject._record
        if record.system is None:
            raise ValueError(
                "this solution does not carry its problem: pass what ik.solve returned, in the same process"
            )
        return record.system, record.theta, record.outcome.z, subject._layout
    if not isinstance(subject, Problem):
        raise TypeError(f"stability takes a Solution, or a Problem and a state; got {type(subject).__name__}")
    if z is None:
        raise TypeError("with a problem, pass the state too: stability(problem, z, args)")
    args = args if isinstance(args, tuple) else (args,)
    layout = Layout(z, batch_dims, name="z")
    system = System.at(subject, layout, z, args)
    return system, tuple(t.detach() for t in system.lifted.theta), layout.pack(tree_map(resolve, z)).detach(), layout


def _dense(A: Operator, sign: float, shift: float, count: int) -> Tensor:
    """The deciding eigenvalues of ``sign A + shift I`` block by block, ``(batch, k)``; NaN where not finite."""
    J = sign * A.dense()
    finite = torch.isfinite(J).flatten(1).all(1)
    J = torch.where(finite[:, None, None], J, 0)
    values = torch.linalg.eigvals(J.to(torch.promote_types(J.dtype, torch.float32))) + shift
    key = values.abs() if shift else values.real
    order = key.argsort(dim=1, descending=True, stable=True)[:, : min(count, A.size)]
    return torch.where(finite.unsqueeze(1), values.gather(1, order), torch.nan)


def _arnoldi(A: Operator, sign: float, shift: float, count: int) -> Tensor:
    """Eigenvalues as of :func:`_dense`, by Arnoldi's method, block by block; NaN for a block where it has found none."""
    k = min(count, A.size - 2)
    rows = [_arnoldi_block(A, i, sign, shift, k) for i in range(A.batch)]
    return torch.from_numpy(np.stack(rows)).to(A.like.device, torch.promote_types(A.like.dtype, torch.complex64))


def _arnoldi_block(A: Operator, i: int, sign: float, shift: float, k: int) -> np.ndarray:
    def product(v: np.ndarray) -> np.ndarray:
        full = torch.zeros_like(A.like)
        full[i] = torch.from_numpy(np.array(v).reshape(-1)).to(full)
        return sign * A.mv(full)[i].cpu().double().numpy() + shift * v.reshape(-1)

    values = np.full(k, np.nan, dtype=np.complex128)
    start = np.random.default_rng(0).standard_normal(A.size)  # ARPACK's own start differs from call to call
    if not np.isfinite(product(start)).all():
        return values
    operator = scipy.sparse.linalg.LinearOperator((A.size, A.size), product, dtype=np.float64)
    tolerance = 10 * float(torch.finfo(A.like.dtype).eps) ** 0.75
    try:
        found = scipy.sparse.linalg.eigs(
            operator, k, which="LM" if shift else "LR", v0=start, ncv=min(A.size, max(2 * k + 1, 60)), tol=tolerance,
            return_eigenvectors=False,
        )  # fmt: skip
    except scipy.sparse.linalg.ArpackNoConvergence as error:
        found = error.eigenvalues
    key = np.abs(found) if shift else found.real
    found = found[np.argsort(-key, kind="stable")][:k]
    values[: len(found)] = found
    return values
