"""Powell's dogleg for least squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import check_options, positive
from implicitkit.linear.factors.dense import lstsq_batched, mv
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.least_squares.gauss_newton import gauss_newton_step
from implicitkit.solver.method import Method
from implicitkit.solver.steps.line_search import decrease
from implicitkit.solver.steps.normal_equations import NormalEquations, column_scales, normal_equations
from implicitkit.solver.steps.paths import way_to_boundary
from implicitkit.solver.steps.region import Region
from implicitkit.sparsity.patterns import SMALLEST


@register_solver("dogleg", solves="least_squares")
@dataclass(frozen=True)
class Dogleg(Method):
    r"""The Gauss-Newton step where it is short enough, else a point of the path from ``z`` over the minimum along the
    gradient to it, where that path leaves the ball ``|D p| <= radius``; sample by sample.

    Powell (1970); Nocedal & Wright (2006, section 4.1, with the model ``|R p + r|^2 / 2``, ``R = dr/dz``).  ``D`` is
    diagonal, the largest norm so far of each column of ``R`` (Moré 1978).  With ``rho`` the decrease over the one that the
    model promised, a step is taken when ``rho > 1e-4``; the radius shrinks to a quarter of the step below ``rho = 1/4`` and
    doubles above 3/4 at the boundary.

        ik.least_squares(residuals, z0, solver="dogleg")

    One Jacobian and one singular value decomposition ``O(m n^2)`` a step, however many trials; from 128 unknowns on normal
    equations, as in ``gauss_newton``.  Where ``R`` becomes singular
    at a solution that leaves a residual, the path goes along the gradient, slowly: use ``levenberg_marquardt``.  A sample
    whose radius has shrunk to rounding is given up.

    Args:
        radius: the first radius, times ``max(|D z|, |D p|)`` with ``p`` the step along the gradient.

    Raises:
        ValueError: ``radius`` not positive.
    """

    radius: float = 1.0
    default_max_steps: ClassVar[int] = 1000
    scales: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_options(self, radius=positive())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        return {"D": torch.zeros_like(z), "radius": z.new_full(z.shape[:1], torch.nan)}  # NaN: not known yet

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        g, value = f(z), f.value(z)
        R: _Dense | NormalEquations = _Dense(f, z) if z.shape[1] < SMALLEST else normal_equations(f, z)
        D = column_scales(f, state["D"], R.columns)
        scale = torch.where(D > 0, D, 1)
        slope = g / scale  # in the unknowns D z
        step = R.step(scale) if isinstance(R, _Dense) else gauss_newton_step(R, g)
        newton = scale * step.nan_to_num(0, 0, 0)
        bent = R.times(slope / scale).square().sum(1)
        cauchy = -slope * (slope.square().sum(1) / bent).nan_to_num(0, 0, 0).unsqueeze(1)
        length = torch.maximum(_length(scale * z), _length(cauchy))
        radius = torch.where(torch.isnan(state["radius"]), self.radius * length, state["radius"])
        smallest = torch.finfo(z.dtype).eps * _length(scale * z).clamp_min(torch.finfo(z.dtype).tiny)
        region = Region(radius, z, ~f.active)
        while True:
            p = _path(cauchy, newton, region.radius)
            promised = -(slope * p).sum(1) - 0.5 * R.times(p / scale).square().sum(1)
            trial = region.tried(z + p / scale)
            region.judge(trial, _length(p), decrease(f, z, value, g, trial), promised)
            hopeless = region.hopeless(smallest)
            if bool((region.found | hopeless).all()):
                break
        f.stuck = hopeless
        return region.z, {"D": D, "radius": region.radius}


def _path(cauchy: Tensor, newton: Tensor, radius: Tensor) -> Tensor:
    """The last point of ``0 - cauchy - newton`` in the ball, ``(batch, n)``."""
    along, full = _length(cauchy), _length(newton)
    shorter = cauchy * (radius / along).clamp(max=1).nan_to_num(0).unsqueeze(1)
    d = newton - cauchy
    s = way_to_boundary(cauchy, d, radius).nan_to_num(0, 0, 0).clamp(0, 1)
    bent = torch.addcmul(cauchy, s.unsqueeze(1), d)
    p = torch.where((along < radius).unsqueeze(1), bent, shorter)
    return torch.where((full <= radius).unsqueeze(1), newton, p)


def _length(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v, dim=1)


class _Dense:
    """``R`` as it is, by its singular values."""

    def __init__(self, f: Evaluations, z: Tensor) -> None:
        self.R, self.r = f.residuals_jacobian(z), f.residuals(z)
        self.columns = torch.linalg.vector_norm(self.R, dim=1)

    def step(self, D: Tensor) -> Tensor:
        """The minimiser of ``|R p + r|``, of least ``|D p|``."""
        return lstsq_batched(self.R / D.unsqueeze(1), -self.r)[0] / D

    def times(self, p: Tensor) -> Tensor:
        """``R p``."""
        return mv(self.R, p)
