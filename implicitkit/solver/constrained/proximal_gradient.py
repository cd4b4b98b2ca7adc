"""Projected and proximal gradient, accelerated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import check_options, flag
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

__all__ = ["Momentum", "ProximalGradient", "proximal_step"]

Slope = Callable[[Tensor], tuple[Tensor, Tensor]]


class Momentum(NamedTuple):
    """State of the accelerated iteration: the last point ``(batch, n)``, ``theta`` and step lengths ``(batch,)``."""

    last: Tensor
    theta: Tensor
    length: Tensor


def proximal_step(
    slope: Slope, value: Callable[[Tensor], Tensor], prox: Callable[[Tensor, Tensor], Tensor], z: Tensor, state: Momentum,
    *, accelerated: bool = True, trials: int = 60,
) -> tuple[Tensor, Momentum]:  # fmt: skip
    r"""One step ``z <- prox(y - t df(y), t)`` from the extrapolated ``y = z + beta (z - last)``.

    ``t`` is halved until ``f(z+) <= f(y) + <df(y), z+ - y> + |z+ - y|^2 / 2t``, or, where rounding hides the decrease,
    until the gradients say so: ``<df(z+) - df(y), z+ - y> <= |z+ - y|^2 / t``; the next step tries a slightly longer one.
    Momentum starts again whenever it points uphill, ``<y - z+, z+ - z> > 0``.
    """
    last, theta, t = state
    theta_next = 0.5 * (1 + torch.sqrt(1 + 4 * theta * theta))
    beta = ((theta - 1) / theta_next).unsqueeze(1)
    y = z + beta * (z - last) if accelerated else z
    base, g = slope(y)
    bad = ~(base.isfinite() & g.isfinite().all(1))
    if bool(bad.any()):  # extrapolated out of the domain
        y = torch.where(bad.unsqueeze(1), z, y)
        base, g = slope(y)
    noise, lost = 1e-10 * (1 + base.abs()), ~(base.isfinite() & g.isfinite().all(1))
    for trial in range(trials):
        z_next = prox(y - t.unsqueeze(1) * g, t)
        d = z_next - y
        square = d.square().sum(1)
        new = value(z_next)
        model = base + (g * d).sum(1) + 0.5 * square / t
        short = (new <= model) | lost  # no length mends what is not finite here
        close = ~short & (new <= model + noise)
        if bool(close.any()):
            curvature = ((slope(z_next)[1] - g) * d).sum(1)
            short = short | (close & (curvature <= square / t))
        if trial == trials - 1 or bool(short.all()):
            break
        t = torch.where(short, t, 0.5 * t)
    uphill = ((y - z_next) * (z_next - z)).sum(1) > 0
    theta_next = torch.where(uphill, 1.0, theta_next)
    last = torch.where(uphill.unsqueeze(1), z_next, z)
    return z_next, Momentum(last, theta_next, 1.05 * t)


def initial(slope: Slope, z: Tensor) -> Momentum:
    """The first step length: the inverse of a curvature measured along the gradient."""
    _, g = slope(z)
    norm = torch.linalg.vector_norm(g, dim=1)
    ahead = 1e-4 * (1 + torch.linalg.vector_norm(z, dim=1)) / norm.clamp_min(1e-30)
    _, further = slope(z - ahead.unsqueeze(1) * g)
    curvature = torch.linalg.vector_norm(further - g, dim=1) / (ahead * norm).clamp_min(1e-30)
    longest = min(1e6, torch.finfo(z.dtype).max)
    length = torch.where(curvature.isfinite() & (curvature > 0), 1 / curvature, 1.0).clamp(1e-12, longest)
    return Momentum(z, torch.ones_like(norm), length)


@register_solver("projected_gradient", solves="constrained")
@register_solver("proximal_gradient", solves="constrained")
@dataclass(frozen=True)
class ProximalGradient(Method):
    """``z <- prox(z - t df/dz, t)`` for a term or a set with a known proximal map (a projection: projected gradient).

    FISTA (Beck & Teboulle 2009) with backtracking for every sample and adaptive restart (O'Donoghue & Candes 2015,
    section 3.2).  Not for ``constraints=``.

    Args:
        accelerated: with momentum.
    """

    accelerated: bool = True
    default_max_steps: ClassVar[int] = 5000

    def __post_init__(self) -> None:
        check_options(self, accelerated=flag())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        model = Model(f)
        if model.count:
            raise CapabilityError(
                "proximal_gradient takes a set (bounds=, project=) or a term (prox=), but no constraints=: use "
                "solver='augmented_lagrangian', 'sqp' or 'auto'"
            )
        return initial(_slope(model), z)

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model, seen = Model(f), z
        slope_seen = z

        def value(x: Tensor) -> Tensor:  # its slope with it: at the next point it is asked for
            nonlocal seen, slope_seen
            seen, (found, _, slope_seen) = x, model.slope(x)
            return found

        z_next, momentum = proximal_step(
            _slope(model), value, model.proximal, z, Momentum(*state), accelerated=self.accelerated
        )
        if z_next is seen:
            f.know(z_next, model.problem.conditions(f.uncounted, z_next, slope_seen, f.limits(z_next)).detach())
        return z_next, momentum


def _slope(model: Model) -> Slope:
    def slope(z: Tensor) -> tuple[Tensor, Tensor]:
        value, _, gradient = model.slope(z)
        return value, gradient

    return slope
