"""SciPy's minimisers with bounds and constraints as solvers, on float64 arrays, one sample at a time.

SciPy finds the point; the multipliers are those of least squares at it (for the active bounds and constraints), and the
optimality conditions over both are what convergence is judged by.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy.optimize
import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.problem.qp_data import QPData
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.qp.base import judge
from implicitkit.solver.qp.interior_point import interior_point
from implicitkit.solver.steps.refinement import refine

Array = np.ndarray
_NEAR = 1e-4  # what is active
_DENSE = 512


class _Sample:
    """One sample's objective and constraints, and their derivatives, at NumPy points; the last point is remembered."""

    def __init__(self, model: Model, z: Tensor, index: int) -> None:
        self.model, self.z, self.index = model, z, index
        self.point: Array | None = None
        self.finite = True

    def at(self, x: Array) -> tuple[float, Array, Array, Array]:
        if self.point is None or not np.array_equal(x, self.point):
            z = self.z.clone()
            z[self.index] = torch.from_numpy(np.array(x)).to(z)
            local = self.model.local(z)
            value, slope, constraints, jacobian = (t[self.index].double().cpu().numpy() for t in local)
            self.point, self.known = np.array(x), (float(value), slope, constraints, jacobian)
            self.finite = all(np.isfinite(part).all() for part in self.known)
        return self.known


@dataclass(frozen=True)
class _SciPy(Solver):
    """``scipy.optimize.minimize`` with one method.

    Args:
        refinements: Newton steps on the optimality conditions at the end, which SciPy's methods, of first order, meet to
            some digits only (none above 512 unknowns and multipliers).
    """

    solves: ClassVar[str] = "constrained"
    method: ClassVar[str] = ""
    general: ClassVar[bool] = True  # takes constraints, not only bounds
    default_max_steps: ClassVar[int] = 1000
    refinements: int = 5

    def __post_init__(self) -> None:
        if self.refinements < 0:
            raise ValueError(f"refinements cannot be negative, got {self.refinements}")

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        model = Model(f)
        if model.count and not self.general:
            raise CapabilityError(f"{self.name} takes bounds, but no constraints=: use 'scipy.slsqp' or 'auto'")
        z, multipliers = model.split(z0)
        bounds = model.bounds(z)
        start = options.size(f.residual(z0))
        if bounds is not None:
            z = z.maximum(bounds[0]).minimum(bounds[1])
        target = options.atol + options.rtol * torch.where(start.isfinite(), start, 0)
        steps = torch.zeros(len(z), dtype=torch.int64, device=z.device)
        found, message = z.clone(), ""
        sided = model.one_sided.cpu().numpy()
        for i in range(len(z)):
            sample = _Sample(model, z, i)
            box = None
            if bounds is not None:
                box = scipy.optimize.Bounds(*(b[i].double().cpu().numpy() for b in bounds))
            with warnings.catch_warnings(), contextlib.suppress(ArithmeticError), _refusals_of(sample):
                warnings.simplefilter("ignore")
                answer = scipy.optimize.minimize(
                    lambda x, s=sample: s.at(x)[0],
                    z[i].double().cpu().numpy(),
                    jac=lambda x, s=sample: s.at(x)[1],
                    method=self.method,
                    bounds=box,
                    constraints=self._constraints(sample, sided),
                    options=self._options(float(target[i]), options.max_steps or self.default_max_steps),
                )
                if np.isfinite(answer.x).all():
                    found[i] = torch.from_numpy(np.array(answer.x)).to(found)
                steps[i] = int(answer.get("nit", 0))  # absent where the bounds leave nothing to solve
                message = "" if answer.success else f"SciPy's {self.method}: {answer.message}"
        w = model.join(found, least_squares_multipliers(model, found, bounds, multipliers))
        if w.shape[1] <= _DENSE:
            w = refine(f, w, steps=self.refinements)
        norm = options.size(f.residual(w))
        outcome = judge(f, w, start, norm, torch.ones_like(steps), steps, options)
        outcome.message = message
        return outcome

    def _constraints(self, sample: _Sample, sided: Array) -> Any:
        """In the form of ``method="SLSQP"``: ``fun = 0`` and ``fun >= 0``."""
        parts: list[dict[str, Any]] = []
        if (~sided).any():
            parts.append(
                {"type": "eq", "fun": lambda x: sample.at(x)[2][~sided], "jac": lambda x: sample.at(x)[3][~sided]}
            )
        if sided.any():
            parts.append(
                {"type": "ineq", "fun": lambda x: -sample.at(x)[2][sided], "jac": lambda x: -sample.at(x)[3][sided]}
            )
        return parts

    def _options(self, target: float, max_steps: int) -> dict[str, Any]:
        raise NotImplementedError


@register_solver("scipy.lbfgsb", solves="constrained")
@dataclass(frozen=True)
class LBFGSB(_SciPy):
    """L-BFGS-B: minimisation within bounds (Byrd, Lu, Nocedal & Zhu 1995)."""

    method: ClassVar[str] = "L-BFGS-B"
    general: ClassVar[bool] = False

    def _options(self, target: float, max_steps: int) -> dict[str, Any]:
        return {"maxiter": max_steps, "gtol": 1e-2 * target, "ftol": 1e-16, "maxfun": 20 * max_steps, "maxcor": 20}


@register_solver("scipy.slsqp", solves="constrained")
@dataclass(frozen=True)
class SLSQP(_SciPy):
    """SLSQP: sequential least-squares programming (Kraft 1988)."""

    method: ClassVar[str] = "SLSQP"

    def _options(self, target: float, max_steps: int) -> dict[str, Any]:
        return {"maxiter": max_steps, "ftol": 1e-18}


@register_solver("scipy.trust_constr", solves="constrained")
@dataclass(frozen=True)
class TrustConstr(_SciPy):
    """trust-constr: trust-region SQP and interior point (Byrd, Hribar & Nocedal 1999), with BFGS Hessians."""

    method: ClassVar[str] = "trust-constr"
    default_max_steps: ClassVar[int] = 3000

    def _constraints(self, sample: _Sample, sided: Array) -> Any:
        if not len(sided):
            return ()
        lower = np.where(sided, -np.inf, 0.0)
        return scipy.optimize.NonlinearConstraint(
            lambda x: sample.at(x)[2], lower, np.zeros(len(sided)), jac=lambda x: sample.at(x)[3]
        )

    def _options(self, target: float, max_steps: int) -> dict[str, Any]:
        return {"maxiter": max_steps, "gtol": target, "xtol": 1e-15, "barrier_tol": 1e-12}


@contextlib.contextmanager
def _refusals_of(sample: _Sample) -> Iterator[None]:
    """What SciPy raises at numbers that are not finite ends one sample, not the batch."""
    try:
        yield
    except ValueError:
        if sample.finite:
            raise


def least_squares_multipliers(model: Model, z: Tensor, bounds: tuple[Tensor, Tensor] | None, start: Tensor) -> Tensor:
    """``(batch, m)``: ``argmin |df + J'y|^2`` over multipliers that are nonnegative where one-sided, zero for constraints
    that are not active (to 1e-4), free of charge for coordinates that stand at a bound."""
    if not model.count:
        return start
    at = model.local(z)
    J, g = at.jacobian.double(), at.slope.double()
    if bounds is not None:
        inside = ((z - bounds[0] > _NEAR) & (bounds[1] - z > _NEAR)).double()
        J, g = J * inside.unsqueeze(1), g * inside
    active = (~model.one_sided | (at.constraints > -_NEAR)).double()
    J = J * active.unsqueeze(2)
    batch, m = active.shape
    eye = torch.eye(m, dtype=J.dtype, device=J.device)
    rows = eye[model.one_sided].expand(batch, -1, -1)
    P = J @ J.mT + torch.diag_embed(1 - active) + 1e-14 * eye
    q = (J @ g.unsqueeze(2)).squeeze(2)
    none = q.new_zeros(batch, 0, m), q.new_zeros(batch, 0)
    point = interior_point(QPData(P, q, *none, -rows, q.new_zeros(batch, rows.shape[1])), tol=1e-12)
    return (torch.nan_to_num(point.z) * active).to(z)
