r"""How far is this solution, and its derivative, from the exact one?

Let ``F(z*) = 0``, ``A = dF/dz`` at the point ``z`` found, ``\beta = |A^{-1}|_2``, ``\eta = |A^{-1} F(z)|_2`` and ``K`` a
Lipschitz constant of ``dF/dz`` near ``z``.  If ``h = \beta K \eta <= 1/2`` there is a solution ``z*`` with

    |z - z*| <= 2 \eta / (1 + sqrt(1 - 2 h))        (Newton-Kantorovich)

and it is the only one nearby.  For a fixed point ``z = f(z)`` whose map contracts by ``L < 1``, also

    |z - z*| <= |f(z) - z| / (1 - L)                (Banach)

and the smaller bound holds (``L`` is taken with what ``K`` may add to it on the way to ``z*``).  The derivative is formed
with ``A`` at ``z`` instead of at ``z*``, two matrices that differ by at most ``K |z - z*|``, so that its linear solution
``u = A^{-T} g`` is wrong, relatively, by at most

    \epsilon / (1 - \epsilon),   \epsilon = \beta K |z - z*|    (perturbation of linear systems)

and what the linear solver left, a residual ``\rho``, adds at most ``\beta \rho`` absolutely.

``\beta`` and ``L = |df/dz|_2`` are computed at ``z``; ``K`` is *measured*, as the largest ``|A(z + s) - A(z)|_2 / |s|``
over the Newton step and two random directions, times two, since it may grow on the way to ``z*``.  So this is a
certificate to the accuracy of that measurement, not a proof; what rounding does to ``F(z)`` itself is not counted.

Source: Ortega & Rheinboldt, *Iterative Solution of Nonlinear Equations in Several Variables* (1970), theorems 12.6.2 and
5.1.3; Golub & Van Loan, *Matrix Computations* (4th ed., 2013), theorem 2.6.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, seeded
from implicitkit.foundation.operators import Operator, minus, shifted
from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.linear.factors.dense import factor_batched
from implicitkit.linear.independence import refuse_coupled
from implicitkit.linear.iterative.cycles import column
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solution import Solution
from implicitkit.system import System

_DENSE = 256  # unknowns a sample up to which norms come from singular values
_POWER_STEPS = 12
_SOLVE_RTOL = 1e-6  # of the linear solves with large blocks


@dataclass(frozen=True)
class Certificate:
    """Bounds for every sample, each of the batch's shape (NaN where the solve ended in NaN).

    Units: ``error`` and ``residual_norm`` have those of ``z`` and of the residual; what is relative is dimensionless.

    Attributes:
        holds: the condition ``h <= 1/2``, or ``L < 1``, is met: a solution exists within ``error``.
        error: ``|z - z*|_2`` is at most this; Inf where nothing can be said.
        relative_error: the same over ``|z|_2``.
        derivative_error: the relative error of the adjoint ``u`` that comes from differentiating at ``z`` and not at ``z*``.
        backward_error: the absolute error of ``u`` in the last backward from its linear solve; ``None`` if none has run.
        residual_norm: ``|F(z)|_2``.  inverse_norm: ``\\beta``.  condition: ``|A|_2 \\beta``.
        lipschitz: ``L = |df/dz|_2`` of a fixed-point map; ``None`` for other problems.
        curvature: ``K`` (with the factor of two).
    """

    holds: Tensor
    error: Tensor
    relative_error: Tensor
    derivative_error: Tensor
    backward_error: Tensor | None
    residual_norm: Tensor
    inverse_norm: Tensor
    condition: Tensor
    lipschitz: Tensor | None
    curvature: Tensor

    def __str__(self) -> str:
        def worst(t: Tensor) -> str:
            return f"{float(torch.nan_to_num(t, nan=torch.inf).max()):.2e}"

        good, total = int(self.holds.sum()), self.holds.numel()
        parts = [
            "holds" if good == total else f"holds for {good} of {total} samples",
            f"|z - z*| <= {worst(self.error)} (relative {worst(self.relative_error)})",
            f"derivative: relative error <= {worst(self.derivative_error)}",
        ]
        if self.backward_error is not None:
            parts.append(f"backward's linear solve: error <= {worst(self.backward_error)}")
        parts.append(f"condition {worst(self.condition)}")
        if self.lipschitz is not None:
            parts.append(f"contraction {worst(self.lipschitz)}")
        return f"Certificate({'; '.join(parts)})"


@despite_inference_mode
def certify(solution: Solution) -> Certificate:
    """Bound the distance of a solution, and of its derivative, from the exact ones (formulas at the top of this file).

    Costs four linearisations; up to 256 unknowns a sample their singular values (``n`` products each), above that about
    fifty products and twelve linear solves.

    For a root ``|z - z*| <= 2 eta / (1 + sqrt(1 - 2 h))``, ``h = beta K eta <= 1/2`` (Newton-Kantorovich); for a
    contraction also ``|z - z*| <= |f(z) - z| / (1 - L)``.  Units: bounds of ``z`` have those of ``z``, relative ones
    are dimensionless.  Source: Ortega & Rheinboldt (1970), theorems 12.6.2 and 5.1.3.

    Args:
        solution: what :func:`ik.solve` returned.

    Returns:
        A :class:`Certificate`.

    Raises:
        TypeError: not a solution.
        RuntimeError: called inside a transform of ``torch.func``.
        ValueError: the solution does not know its problem any more (it was unpickled, or made by hand), or is
            empty.
    """
    if not isinstance(solution, Solution):
        raise TypeError(f"certify needs the Solution that ik.solve returned, got {type(solution).__name__}")
    if compat.transforms_active():
        raise RuntimeError(
            "certify works on plain figures, not inside a transform of torch.func (vmap, grad, ...): keep the solution and "
            "certify it after the transform, or solve with batch_dims= instead of vmap"
        )
    record = solution._record
    if not solution._layout.batch:
        raise ValueError("the batch is empty: there is no solution to certify")
    if record.system is None:
        raise ValueError(
            "this solution does not carry its problem: certify what ik.solve returned, in the same process"
        )
    system, theta, z = record.system, record.theta, record.outcome.z
    with torch.no_grad():
        F, A = _linearise(system, theta, z)
        refuse_coupled(A, system.identity)
        size, inverse = _extremes(A)
        step = -_apply_inverse(A, F)
        newton = (1 + _SOLVE_RTOL) * torch.linalg.vector_norm(step, dim=1)
        curvature = _curvature(system, theta, z, A, step)
        error, holds = _newton_kantorovich(inverse * curvature * newton, newton)
        residual_norm = torch.linalg.vector_norm(F, dim=1)
        lipschitz = _largest(shifted(A, 1.0), _POWER_STEPS) if A.fixed_point else None
        if lipschitz is not None:
            banach, contracts = _banach(lipschitz, curvature, residual_norm)
            error = torch.where(contracts, torch.fmin(error, banach), error)
            holds = holds | contracts
        epsilon = inverse * curvature * error
        derivative = torch.where(epsilon < 1, epsilon / (1 - epsilon), math.inf)
        known = torch.isfinite(residual_norm)
        error, derivative = (torch.where(known, t, torch.nan) for t in (error, derivative))
        scale = torch.linalg.vector_norm(z, dim=1)
    shaped, backward = solution._layout.unpack_batch, solution.backward
    fits = backward is not None and backward.residual_norm.numel() == inverse.numel()
    return Certificate(
        holds=shaped(holds & known),
        error=shaped(error),
        relative_error=shaped(error / scale.clamp_min(torch.finfo(z.dtype).tiny)),
        derivative_error=shaped(derivative),
        backward_error=shaped(inverse * backward.residual_norm.reshape(-1).to(inverse)) if backward and fits else None,
        residual_norm=shaped(residual_norm),
        inverse_norm=shaped(inverse),
        condition=shaped(size * inverse),
        lipschitz=None if lipschitz is None else shaped(lipschitz),
        curvature=shaped(curvature),
    )


def _newton_kantorovich(h: Tensor, eta: Tensor) -> tuple[Tensor, Tensor]:
    """``|z - z*| <= 2 eta / (1 + sqrt(1 - 2 h))``, and where that holds."""
    holds = h <= 0.5
    return torch.where(holds, 2 * eta / (1 + torch.sqrt((1 - 2 * h).clamp_min(0))), math.inf), holds


def _banach(lipschitz: Tensor, curvature: Tensor, residual_norm: Tensor) -> tuple[Tensor, Tensor]:
    """``|z - z*| <= |f(z) - z| / (1 - L)`` with the ``L`` on the way to ``z*``, and where that holds."""
    nearby = lipschitz + curvature * 2 * residual_norm / (1 - lipschitz)
    return residual_norm / (1 - nearby), (lipschitz < 1) & (nearby < 1)


def _linearise(system: System, theta: tuple[Tensor, ...], z: Tensor) -> tuple[Tensor, Operator]:
    problem = system.problem
    value, A = autodiff.linearise(
        lambda y: system.residual(y, *theta), z, symmetric=problem.symmetric, fixed_point=problem.kind.iteration
    )
    return value.detach(), A


def _extremes(A: Operator) -> tuple[Tensor, Tensor]:
    """``|A|_2`` and ``|A^{-1}|_2`` of each block (Inf if singular, NaN if not finite)."""
    if A.size <= _DENSE:
        blocks = A.dense()
        finite = blocks.isfinite().flatten(1).all(1)
        values = torch.linalg.svdvals(torch.where(finite.view(-1, 1, 1), blocks, 0))
        return torch.where(finite, values[:, 0], torch.nan), torch.where(finite, 1 / values[:, -1], torch.nan)
    return _largest(A, _POWER_STEPS), _largest_of(
        lambda v: _apply_inverse(A, v), lambda w: _apply_inverse(A.T, w), A, _POWER_STEPS // 2
    )


def _apply_inverse(A: Operator, b: Tensor) -> Tensor:
    if A.size <= _DENSE:
        return factor_batched(A.dense()).solve(b)
    return GMRES().solve(A, b, rtol=_SOLVE_RTOL, atol=0.0, max_steps=None).x


def _largest(A: Operator, steps: int) -> Tensor:
    """``|A|_2`` of each block: singular values if small, else power iteration on ``A^T A``, a bound from below."""
    if A.size <= _DENSE:
        return _extremes(A)[0]
    return _largest_of(A.mv, A.rmv, A, steps)


def _largest_of(mv, rmv, A: Operator, steps: int) -> Tensor:  # type: ignore[no-untyped-def]
    v = _random(A)
    norm = v.new_zeros(len(v))
    for _ in range(steps):
        image = mv(v)
        norm = torch.linalg.vector_norm(image, dim=1)
        v = rmv(image)
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
    return norm


def _random(A: Operator, seed: int = 0) -> Tensor:
    """Unit vectors, always the same."""
    v = seeded.normal(A.batch, A.size, seed=seed).to(A.like)
    return v / torch.linalg.vector_norm(v, dim=1, keepdim=True)


def _curvature(system: System, theta: tuple[Tensor, ...], z: Tensor, A: Operator, step: Tensor) -> Tensor:
    """``K``: twice the largest ``|A(z + s) - A(z)|_2 / |s|`` over the Newton step and two random directions.

    Steps are at least ``eps^(1/3)`` of the size of ``z``, where rounding does not hide the change.
    """
    smallest = torch.finfo(z.dtype).eps ** (1 / 3) * (1 + torch.linalg.vector_norm(z, dim=1))
    newton = torch.linalg.vector_norm(step, dim=1)
    length = torch.where(newton.isfinite(), torch.maximum(newton, smallest), smallest)
    direction = torch.where(column(newton.isfinite() & (newton > 0)), step / column(newton), _random(A, 1))
    largest = torch.zeros_like(length)
    for unit in (direction, _random(A, 2), _random(A, 3)):
        _, there = _linearise(system, theta, torch.addcmul(z, column(length), unit))
        largest = torch.fmax(largest, _largest(minus(there, A), _POWER_STEPS // 2) / length)
    return 2 * largest
