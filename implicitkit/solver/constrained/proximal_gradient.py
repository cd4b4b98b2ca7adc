"""First-order methods for sets and terms.

Accelerated projected and proximal gradient, mirror descent on simplices, block coordinate descent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import at_least, check_options, flag
from implicitkit.sets.groups import blocks
from implicitkit.sets.simplex import Simplex
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

_TRIALS = 60  # step lengths
_STEEP = 100.0  # times the curvature that a step length stands for: along a step the gradient rises by no more
_OUTSIDE = 9  # halvings that nothing comes of: then where ``y`` is the objective may be another than in the domain
Slope = Callable[[Tensor], tuple[Tensor, Tensor]]
Value = Callable[[Tensor], tuple[Tensor, Tensor | None]]  # the gradient with it, where that costs nothing


class Momentum(NamedTuple):
    """State of the accelerated iteration: the last point ``(batch, n)``, ``theta`` and step lengths ``(batch,)``."""

    last: Tensor
    theta: Tensor
    length: Tensor


def proximal_step(
    slope: Slope, value: Value, prox: Callable[[Tensor, Tensor], Tensor], z: Tensor, state: Momentum,
    *, accelerated: bool = True,
) -> tuple[Tensor, Momentum]:  # fmt: skip
    r"""One step ``z <- prox(y - t df(y), t)`` from the extrapolated ``y = z + beta (z - last)``.

    ``t`` is halved until ``f(z+) <= f(y) + <df(y), z+ - y> + |z+ - y|^2 / 2t``, or, where rounding hides the decrease,
    until the gradients say so: ``<df(z+) - df(y), z+ - y> <= |z+ - y|^2 / t``; the next step tries a slightly longer one.
    Where gradients are known beside ``value``, a hundred times that is asked of every step: where an objective ends at the
    edge of its domain (``-log det`` on the cone) its value is infinite but for rounding, which may leave any number.
    Momentum starts again whenever it points uphill, ``<y - z+, z+ - z> > 0``.
    """
    last, theta, t = state
    theta_next = 0.5 * (1 + torch.sqrt(1 + 4 * theta * theta))
    beta = ((theta - 1) / theta_next).unsqueeze(1)
    y = z + beta * (z - last) if accelerated else z
    base, g = slope(y)
    bad = ~(base.isfinite() & g.isfinite().all(1))
    for trial in range(_TRIALS):
        if bool(bad.any()):  # extrapolated out of the domain
            y, t = torch.where(bad.unsqueeze(1), z, y), torch.where(bad, state.length, t)
            base, g = slope(y)
            bad = torch.zeros_like(bad)
        noise, lost = 1e-10 * (1 + base.abs()), ~(base.isfinite() & g.isfinite().all(1))
        z_next = prox(y - t.unsqueeze(1) * g, t)
        d = z_next - y
        square = d.square().sum(1)
        new, there = value(z_next)
        model = base + (g * d).sum(1) + 0.5 * square / t
        short = new <= model
        close = ~short & (new <= model + noise)
        if there is None and bool(close.any()):
            there = slope(z_next)[1]
        if there is not None:
            rise, straight = ((there - g) * d).sum(1), square / t
            short = (short & ~(rise.abs() > _STEEP * straight)) | (close & (rise <= straight))
        short = short | lost  # no length mends what is not finite here
        if trial == _TRIALS - 1 or bool(short.all()):
            break
        t = torch.where(short, t, 0.5 * t)
        bad = ~short & (y != z).any(1) if trial == _OUTSIDE else bad
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

        def value(x: Tensor) -> tuple[Tensor, Tensor | None]:  # its slope with it: at the next point it is asked for
            nonlocal seen, slope_seen
            seen, (found, _, slope_seen) = x, model.slope(x)
            return found, slope_seen

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


@register_solver("mirror_descent", solves="constrained")
@dataclass(frozen=True)
class MirrorDescent(Method):
    r"""Exponentiated gradient, ``z_i <- z_i exp(-t g_i) r / sum``, for ``project=ik.project.simplex(r)``.

    Mirror descent with the entropy as mirror map (Beck & Teboulle 2003); ``t`` is halved until
    ``f(z+) <= f(z) + <g, z+ - z> + KL(z+ | z) / t`` (relative smoothness, Bauschke, Bolte & Teboulle 2017; where rounding
    hides the decrease, until ``<dg, dz> <= <d log z, dz> / t``) and grows again after each step.  It begins inside the
    simplex, whatever ``z0``.  The last dimension of ``z`` is the simplex: a matrix is one simplex in each of its rows, all
    moved by one ``t`` a sample.

    Raises:
        CapabilityError: the problem is not over simplices, or has constraints.
    """

    default_max_steps: ClassVar[int] = 20000

    def init(self, f: Evaluations, z: Tensor) -> Any:
        self._rows(Model(f))
        return (torch.ones(len(z), dtype=z.dtype, device=z.device),)

    @staticmethod
    def _rows(model: Model) -> int:
        """How many simplices there are in a sample."""
        layout = model.problem.layout
        shape = layout.events[0] if len(layout.events) == 1 else ()
        if model.count or not shape or not isinstance(getattr(model.problem.prox, "project", None), Simplex):
            raise CapabilityError(
                "mirror_descent is for one tensor whose last dimension is a simplex, project=ik.project.simplex(), without "
                "constraints=; use solver='proximal_gradient' or 'auto'"
            )
        return math.prod(shape[:-1])

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model = Model(f)
        (t,), rows = state, self._rows(model)

        def split(x: Tensor) -> Tensor:
            return x.reshape(len(x), rows, -1)

        inside, x = split(model.proximal(z, 1.0)), split(z)
        radius = inside.sum(2, keepdim=True)
        outside = ((x - inside).abs().amax(2, keepdim=True) > 1e-9 * radius) | (x <= 0).any(2, keepdim=True)
        x = torch.where(outside, inside.clamp_min(0) + 1e-2 * radius / x.shape[2], x)
        x = x * radius / x.sum(2, keepdim=True)
        value, _, slope = model.slope(x.flatten(1))
        noise = 1e-10 * (1 + value.abs())
        g = split(slope)
        g = g - g.mean(2, keepdim=True)  # on the simplex only differences count
        for _ in range(60):
            new = (radius * torch.softmax(torch.log(x) - t[:, None, None] * g, 2)).clamp_min(torch.finfo(z.dtype).tiny)
            ratio, d = torch.log(new) - torch.log(x), (new - x).flatten(1)
            divergence = (new * ratio - new + x).flatten(1).sum(1)
            bound = value + (g.flatten(1) * d).sum(1) + divergence / t
            reached = model.values(new.flatten(1))[0]
            short, close = reached <= bound, (reached - bound).abs() <= noise
            if bool(close.any()):  # rounding hides the decrease: ask the gradients, for KL(z+ | z) + KL(z | z+)
                curvature = ((model.slope(new.flatten(1))[2] - slope) * d).sum(1)
                short = torch.where(close, curvature <= (ratio.flatten(1) * d).sum(1) / t, short)
            if bool((short | ~f.active).all()):
                break
            t = torch.where(short, t, 0.5 * t)
        return new.flatten(1), (1.2 * t,)


@register_solver("block_coordinate_descent", solves="constrained")
@dataclass(frozen=True)
class BlockCoordinateDescent(Method):
    """Proximal gradient steps on one block of coordinates after another, each with its own step length; a step is a sweep.

    (Beck & Tetruashvili 2013; Wright 2015, "Coordinate descent algorithms"; with groups, Qin, Scheinberg & Goldfarb 2013.)
    The proximal map must act on each block alone: on single numbers (``ik.prox.l1``, ``ik.prox.elastic_net``, bounds, ...),
    or on groups, which are then the blocks (rows of a matrix for ``ik.prox.l2``, balls and simplices; the groups of
    ``ik.prox.group_lasso``).  One gradient a block.

    ``z_b <- prox(z_b - t_b df/dz_b, t_b)`` for one block ``b`` after another.

    Args:
        block_size: coordinates in a block, at least; groups are never split.

    Raises:
        ValueError: ``block_size`` below 1. CapabilityError: constraints, or a proximal map that couples everything.
    """

    block_size: int = 1
    default_max_steps: ClassVar[int] = 2000

    def __post_init__(self) -> None:
        check_options(self, block_size=at_least(1))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        return (torch.ones(len(z), len(self._blocks(Model(f))), dtype=z.dtype, device=z.device),)

    def _blocks(self, model: Model) -> list[slice]:
        """Consecutive coordinates that the proximal map couples with no others."""
        prox = getattr(model.problem.prox, "project", model.problem.prox)
        sizes: list[int] | None = []
        for shape in model.problem.layout.events:
            found = blocks(prox, tuple(shape))
            sizes = None if sizes is None or found is None else sizes + found
        if model.count or sizes is None:
            raise CapabilityError(
                "block_coordinate_descent takes bounds, or a prox= or project= that is separable or acts on groups, and no "
                "constraints=: use solver='proximal_gradient' or 'auto'"
            )
        ends = [0]
        for stop in itertools.accumulate(sizes):
            if stop - ends[-1] >= self.block_size or stop == model.size:
                ends.append(stop)
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model = Model(f)
        lengths = state[0].clone()
        for number, block in enumerate(self._blocks(model)):
            value, _, g = model.slope(z)
            noise = 1e-10 * (1 + value.abs())
            t = lengths[:, number]
            for _ in range(60):
                trial = z.clone()
                trial[:, block] = model.proximal(z - t.unsqueeze(1) * g, t)[:, block]
                d = (trial - z)[:, block]
                square = d.square().sum(1)
                bound = value + (g[:, block] * d).sum(1) + 0.5 * square / t
                new = model.values(trial)[0]
                short = new <= bound
                close = ~short & (new <= bound + noise)
                if bool(close.any()):  # rounding hides the decrease: ask the gradients
                    curvature = ((model.slope(trial)[2] - g)[:, block] * d).sum(1)
                    short = short | (close & (curvature <= square / t))
                if bool((short | ~f.active).all()):
                    break
                t = torch.where(short, t, 0.5 * t)
            z = trial
            lengths[:, number] = 1.2 * t
        return z, (lengths,)
