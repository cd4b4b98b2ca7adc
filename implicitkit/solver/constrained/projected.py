"""Steps within bounds: Newton's, for as long as the objective looks convex and they pay, and Levenberg-Marquardt's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import check_options, positive
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.problem.bounded_least_squares import BoundedLeastSquares
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.convex_model import within
from implicitkit.solver.steps.factored import is_noise, leave
from implicitkit.solver.steps.normal_equations import NormalEquations, column_scales, normal_equations
from implicitkit.solver.steps.region import taken_where
from implicitkit.solver.steps.robust_model import next_share, weights

_PAYS = 0.5  # of the residual that a step may leave, if it is not to be forgiven
_FORGIVEN = 10  # such steps in a row
_HALVINGS = 10  # of a step
_ARMIJO = 1e-4
_LEAST = 1e-3  # of eps and of the largest entry on the diagonal of D^-1 R'R D^-1: the least damping
_NEAR = 1e-3  # how near to a bound an unknown may be held by it, at most, relative to its size


@dataclass(frozen=True)
class ProjectedNewton(Method):
    r"""``z <- P(z + t p)``, ``p`` the minimiser of ``g'p + p'Hp / 2`` within ``l <= z + p <= u``; sample by sample.

    That is a quadratic program (:func:`~implicitkit.solver.steps.convex_model.within`).  ``t = 1, 1/2, ...`` until ``f(z) -
    f(P(z + t p)) >= -1e-4 g'(P(z + t p) - z)``.  A quadratic takes one step; else once the active bounds are found the steps
    are Newton's on the other unknowns (Nocedal & Wright 2006, section 18.1, without constraints but bounds).

    A sample is given up (status ``STALLED``) as soon as ``H_FF`` is not positive definite beyond rounding, ten halvings
    are not enough, or eleven steps in a row each leave more than half of ``|z - P(z - g)|``; other methods go on from there.

    An evaluation or a few and ``n`` Hessian products (in one batched call) a step, ``O(batch n^3)`` work for each change
    of the bounds.

    Raises:
        CapabilityError: the problem has constraints, or another set than bounds.
    """

    name: ClassVar[str] = "projected_newton"
    solves: ClassVar[str] = "constrained"
    default_max_steps: ClassVar[int] = 50
    hands_over: ClassVar[bool] = True
    descends: ClassVar[bool] = True

    def init(self, f: Evaluations, z: Tensor) -> Any:
        bounds = None if Model(f).count else Model(f).bounds(z)
        if bounds is None:
            raise CapabilityError("this solver is for minimisation within bounds: ik.argmin(..., bounds=)")
        return {"lower": bounds[0], "upper": bounds[1], "idle": torch.zeros_like(f.active, dtype=torch.int64)}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model, lower, upper = Model(f), state["lower"], state["upper"]
        z = z.maximum(lower).minimum(upper)  # where it starts outside
        value, _, g = model.slope(z)
        try:
            H = model.hessian(z, z[:, :0])
        except RuntimeError as error:
            if not autodiff.lacks_second_derivative(error):
                raise
            f.stuck = torch.ones_like(f.active)
            return z, state
        p, convex = within(H, g, lower - z, upper - z, f.active)
        t, z_next, found = torch.ones_like(value), z, torch.zeros_like(f.active)
        for _ in range(_HALVINGS + 1):
            trial = torch.addcmul(z, t.unsqueeze(1), p).maximum(lower).minimum(upper)
            trial = taken_where(f.active & ~found, trial, z_next)
            promised = -(g * (trial - z)).sum(1)
            fallen = convex & (promised > 0) & (model.decrease(z, value, g, trial) >= _ARMIJO * promised)
            z_next = taken_where(fallen & ~found, trial, z_next)
            found = found | fallen
            if bool((found | ~f.active | ~convex).all()):
                break
            t = 0.5 * t
        pays = torch.linalg.vector_norm(f(z_next), dim=1) <= _PAYS * f.norm
        idle = torch.where(pays, 0, state["idle"] + 1)
        f.stuck = f.active & ~(found & (idle <= _FORGIVEN))
        failed = f.active & convex & ~found
        if bool(failed.any()):
            leave(f, failed & is_noise(DenseBlocks(H), z, f.norm.to(z.dtype), f(z_next)))
        return z_next, state | {"idle": idle}


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

    The first step that is tried is the linear model's minimiser within the bounds
    (:func:`~implicitkit.solver.steps.convex_model.within`) where ``R'R`` is formed dense, and taken if it keeps its promise
    to half of the digits, as it does of linear residuals.

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
    descends: ClassVar[bool] = True

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
        mu, size = state["mu"], (normal.columns / scale).square().amax(1)
        eps, first = torch.finfo(z.dtype).eps, bool(torch.isnan(mu).any())
        z_next, found = _at_once(model, normal, z, (value, g), (lower, upper)) if first else (z, ~f.active)
        if first:  # nothing is known yet
            mu = torch.where(found, eps**0.5 * size, mu)
            if not bool(found.all()):
                mu = torch.where(found, mu, self.damping * normal.largest().clamp_min(1e-30))
        nu, slope = torch.full_like(mu, 2), torch.where(free, g, 0)
        smallest = eps * torch.linalg.vector_norm(z, dim=1).clamp_min(eps)
        at_once, kept = None, found.to(mu)
        hopeless = torch.zeros_like(found)
        while not bool((found | hopeless).all()):
            p = normal.solve(mu, slope)
            p = torch.where(free & torch.isfinite(p), p, -g / ((1 + mu.unsqueeze(1)) * scale.square())).to(z.dtype)
            trial = taken_where(~found, (z + p).maximum(lower).minimum(upper), z_next)
            rho = _share_kept(model, normal, z, (value, g), trial)
            accept = ~found & (rho > 0)
            at_once, kept = accept | found if at_once is None else at_once, torch.where(accept, rho, kept)
            z_next = taken_where(accept, trial, z_next)
            easier = mu * (1 - (2 * rho - 1) ** 3).clamp(1 / 3, 2)
            mu = torch.where(found, mu, torch.where(accept, easier, mu * nu))
            nu = torch.where(accept, 2, 2 * nu)
            found = found | accept
            hopeless = ~found & ~((torch.linalg.vector_norm(trial - z, dim=1) > smallest) & (mu < torch.inf))
        f.stuck = hopeless
        share = next_share(state["share"], kept, found if at_once is None else at_once)
        return z_next, state | {
            "D": D,
            "mu": torch.maximum(mu, _LEAST * torch.finfo(mu.dtype).eps * size),
            "share": share,
        }


def _at_once(
    model: Model, normal: NormalEquations, z: Tensor, at: tuple[Tensor, Tensor], bounds: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The linear model's minimisers within the bounds where they keep its promise to half of the digits, else ``z``; and
    where nothing is left to be tried, ``(batch,)``.  ``at``: the objective and its gradient at ``z``."""
    active = model.f.active
    p = normal.within(at[1], bounds[0] - z, bounds[1] - z, active)
    if p is None:
        return z, ~active
    trial = taken_where(active, (z + p).maximum(bounds[0]).minimum(bounds[1]), z)
    rounding = torch.finfo(z.dtype).eps ** 0.5
    good = active & ((_share_kept(model, normal, z, at, trial) - 1).abs() <= rounding)
    return taken_where(good, trial, z), good | ~active


def _share_kept(model: Model, normal: NormalEquations, z: Tensor, at: tuple[Tensor, Tensor], trial: Tensor) -> Tensor:
    """What the objective falls by from ``z`` to ``trial`` of what the linear model promised; -1 where that is nothing."""
    s = trial - z
    promised = -(at[1] * s).sum(1) - 0.5 * normal.times(s).square().sum(1)
    rho = model.decrease(z, *at, trial) / promised
    return torch.where(promised > 0, rho, -1).nan_to_num(-1, -1, -1)


def _held(z: Tensor, g: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Which unknowns a bound holds, ``(batch, n)`` bool."""
    natural = torch.linalg.vector_norm(z - (z - g).maximum(lower).minimum(upper), dim=1, keepdim=True)
    near = torch.minimum(_NEAR * z.abs(), natural)
    return ((z - lower <= near) & (g > 0)) | ((upper - z <= near) & (g < 0)) | (upper == lower)
