"""Levenberg-Marquardt within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import check_options, positive
from implicitkit.problem.bounded_least_squares import BoundedLeastSquares
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.normal_equations import column_scales, normal_equations
from implicitkit.solver.steps.robust_model import next_share, weights
from implicitkit.solver.steps.trials import taken_where

__all__ = ["ProjectedLevenbergMarquardt"]

_NEAR = 1e-3  # how near to a bound an unknown may be held by it, at most, relative to its size


@dataclass(frozen=True)
class ProjectedLevenbergMarquardt(Method):
    r"""``z <- P(z + p)``, ``(R_F'R_F + \mu D^2) p_F = -R_F'r`` for the unknowns ``F`` that no bound holds; by samples.

    An unknown is held where it is at a bound, or nearer than ``min(1e-3 |z_i|, |z - P(z - g)|)``, and the gradient
    ``g = R'r`` points outwards; it goes along its own gradient, ``-g_i / ((1 + \mu) D_i^2)``, up to the bound (two-metric
    projection: Bertsekas 1982, SIAM J. Control Optim. 20(2)).  With ``s`` the projected step and ``rho`` the decrease of
    ``|r|^2 / 2`` over the one that the linear model promised for ``s``, the damping ``\mu`` is steered as in
    :class:`LevenbergMarquardt`; the step shrinks with ``1 / \mu`` into a scaled gradient step, along which the objective
    falls.  Once the active bounds are found the steps are Levenberg-Marquardt's on the other unknowns (Kanzow, Yamashita &
    Fukushima 2004, J. Comput. Appl. Math. 172(2)).

    Sparse, dense, or by products, as :func:`~implicitkit.solver.steps.normal_equations.normal_equations` has it.

    Args:
        damping: the first ``\mu``, times the largest squared singular value of ``R_F D^-1``.

    Raises:
        ValueError: ``damping`` not positive. CapabilityError: the problem is not least squares within bounds.
    """

    damping: float = 1e-3
    name: ClassVar[str] = "projected_levenberg_marquardt"
    solves: ClassVar[str] = "constrained"
    default_max_steps: ClassVar[int] = 1000
    scales: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        check_options(self, damping=positive())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        if not isinstance(f.problem, BoundedLeastSquares):
            raise CapabilityError("this solver is for least squares within bounds: ik.least_squares(..., bounds=)")
        lower, upper = Model(f).bounds(z)  # type: ignore[misc]
        nan = z.new_full(z.shape[:1], torch.nan)  # not known yet
        return {"D": torch.zeros_like(z), "mu": nan, "lower": lower, "upper": upper, "share": torch.ones_like(nan)}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model, lower, upper = Model(f), state["lower"], state["upper"]
        z = z.maximum(lower).minimum(upper)  # where it starts outside
        value, _, g = model.slope(z)
        free = ~_held(z, g, lower, upper)
        normal = normal_equations(f, z, free, weights(f, z, state["share"]))
        D = column_scales(f, state["D"], normal.columns)
        scale = torch.where(D > 0, D, 1)
        normal.scale(scale)
        largest = normal.largest().clamp_min(1e-30)
        mu = torch.where(torch.isnan(state["mu"]), self.damping * largest, state["mu"])
        nu = torch.full_like(mu, 2)
        slope = torch.where(free, g, 0)
        smallest = torch.finfo(z.dtype).eps * torch.linalg.vector_norm(z, dim=1).clamp_min(torch.finfo(z.dtype).eps)
        z_next, found = z, ~f.active
        at_once, kept = None, torch.zeros_like(mu)
        while True:
            p = normal.solve(mu, slope)
            p = torch.where(free & torch.isfinite(p), p, -g / ((1 + mu.unsqueeze(1)) * scale.square())).to(z.dtype)
            trial = (z + p).maximum(lower).minimum(upper)
            s = trial - z
            promised = -(g * s).sum(1) - 0.5 * normal.times(s).square().sum(1)
            rho = model.decrease(z, value, g, trial) / promised
            rho = torch.where(promised > 0, rho, -1).nan_to_num(-1, -1, -1)
            accept = ~found & (rho > 0)
            at_once, kept = accept if at_once is None else at_once, torch.where(accept, rho, kept)
            z_next = taken_where(accept, trial, z_next)
            easier = mu * (1 - (2 * rho - 1) ** 3).clamp(1 / 3, 2)
            mu = torch.where(found, mu, torch.where(accept, easier, mu * nu))
            nu = torch.where(accept, 2, 2 * nu)
            found = found | accept
            hopeless = ~found & ~((torch.linalg.vector_norm(s, dim=1) > smallest) & (mu < torch.inf))
            if bool((found | hopeless).all()):
                break
        f.stuck = hopeless
        share = next_share(state["share"], kept, at_once)
        mu = torch.maximum(mu, 1e-3 * torch.finfo(mu.dtype).eps * largest)
        return z_next, state | {"D": D, "mu": mu, "share": share}


def _held(z: Tensor, g: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Which unknowns a bound holds, ``(batch, n)`` bool."""
    natural = torch.linalg.vector_norm(z - (z - g).maximum(lower).minimum(upper), dim=1, keepdim=True)
    near = torch.minimum(_NEAR * z.abs(), natural)
    return ((z - lower <= near) & (g > 0)) | ((upper - z <= near) & (g < 0)) | (upper == lower)
