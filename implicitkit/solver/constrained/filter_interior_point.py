"""An interior-point method with a filter line search, batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.options import check_options, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.barrier import Barrier, Interior, Scales, Step, estimated
from implicitkit.solver.constrained.barrier_systems import Systems, after, corrected, systems_at
from implicitkit.solver.constrained.filter import Filter, Standing
from implicitkit.solver.constrained.limits import Limits, held_by_equalities
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

_STEEP = 100.0  # slopes of objective and constraints at the start are scaled down to this
_INSIDE = 1e-2  # slacks of the start, in units of a row of size one, at least
_SOLVED = 10.0  # times mu: the error at which a barrier problem is solved
_LINEAR, _SUPERLINEAR = 0.2, 1.5  # mu <- min(0.2 mu, mu^1.5)
_LAST = 5 / 3  # power of eps, of the mu at which no smaller one is tried: what is weakly active is off by its root
_ROUNDED = 1e4  # units of rounding: an error that is no larger may be of evaluation
_AT_REST = 1e2  # ... and one that is nothing else
_SHARE = 0.99  # of the way to a bound, at least
_HALVINGS = 12
_BLOCKED = 1e-2  # of a step: bounds that allow less are not overcome by another shift
_SHORT = 1e-2  # of the way that bounds allow
_DAMPS = 6  # of a step of restoration, before it is damped instead
_CORRECTIONS = 2  # of second order
_RESTORED = 0.9  # of the violation that a restoration may leave behind
_DAMPED = (1e-4, 1e12)  # the first damping of its steps, and the one at which it gives up
_NEAR = 1e-4  # mu from which on the active set is tried
_CROSSED = 0.5  # of the residual that a step by the active set may leave


class _Search(NamedTuple):
    """Where a line search has come: the new ``z``, ``s``, objective and constraints, how much of the step was taken (0: none
    was good), was it taken since the objective falls, and does the filter allow a restoration to end there?"""

    z: Tensor
    s: Tensor
    value: Tensor
    constraints: Tensor
    t: Tensor
    falling: Tensor
    allowed: Tensor


@register_solver("filter_interior_point", solves="constrained")
@dataclass(frozen=True)
class FilterInteriorPoint(Method):
    r"""Newton's method for the optimality conditions of a sequence of barrier problems

        minimise  f(z) - mu (sum log(z - lower) + sum log(upper - z) + sum log s)   subject to  h(z) = 0,  g(z) + s = 0

    with ``mu -> 0``.  One symmetric system a step, dense for the batch or sparse for each sample, its Hessian shifted until
    it has the inertia of a minimum.  A step is shortened until the barrier's objective or the violation falls below every
    pair of them that the filter keeps; where none is short enough only the violation is lowered, by damped least squares,
    until the filter allows its end.  Slacks are no smaller than the constraints allow.  From small ``mu`` on Newton's step
    for the conditions that hold with equality is tried first: it ends at the solution itself and not a little inside.

    A bound that an equality of one unknown puts it on is a little wider (:mod:`implicitkit.solver.constrained.limits`).

    Wächter & Biegler (2006), "On the implementation of an interior-point filter line-search algorithm for large-scale
    nonlinear programming", Math. Prog. 106, 25-57; the steps of restoration are simpler than there.

    Args:
        mu: of the first barrier problem, in units of an objective whose slope at the start is no more than 100.

    Raises:
        ValueError: ``mu`` not positive. CapabilityError: the problem has ``prox=`` or ``project=``, or more than 1,000
            unknowns and multipliers without a sparsity pattern.
    """

    mu: float = 0.1
    default_max_steps: ClassVar[int] = 300

    def __post_init__(self) -> None:
        check_options(self, mu=positive())

    def init(self, f: Evaluations, z: Tensor) -> Any:
        model = Model(f)
        bounds = model.bounds(z[:, : model.size])
        far = torch.full_like(z[:, : model.size], torch.inf)
        return {"limits": list(bounds or (-far, far)), "within": None}

    def step(self, f: Evaluations, w: Tensor, state: Any) -> tuple[Tensor, Any]:
        model, limits = Model(f), Limits(*state["limits"])
        if state["within"] is None:
            return self._begun(model, w, limits)
        crossing, wide, at = state["crossing"], Limits(*state["wide"]), Interior(*state["within"])
        inner = w
        if bool(crossing.any()):
            inner = torch.cat([model.inside(at.z), at.y], 1)
            inner = w if torch.equal(inner, w) else inner  # of which the linearisation is known
        if bool((crossing & f.active).any()):
            begin = torch.where(crossing.unsqueeze(1), w, inner)
            trial, crossed = _crossed(model, begin, at, limits, wide, crossing)
            if bool((crossed | ~f.active).all()):
                return trial, {**state, "crossing": crossed}
        else:
            trial, crossed = w, torch.zeros_like(crossing)
        new, state = self._step(model, inner, at, wide, state, f.active & ~crossed)
        return torch.where(crossed.unsqueeze(1), trial, new), {**state, "crossing": state["crossing"] | crossed}

    def _begun(self, model: Model, w: Tensor, limits: Limits) -> tuple[Tensor, Any]:
        """A first iterate, inside."""
        z = limits.pushed(model.split(w)[0])
        at = model.join(z)
        systems = systems_at(model, at, limits.free)
        value, constraints = model.values(z)
        steep, alone = systems.rows()
        given, limits = limits, held_by_equalities(z, constraints, model.one_sided, limits, steep, alone)
        wide = given.wider(limits)
        size = systems.slope.abs().amax(1)
        scales = Scales(_scaled(size), _scaled(steep.abs()))
        mu = self.mu / scales.objective
        s = torch.where(model.one_sided, torch.maximum(-constraints, _INSIDE / scales.rows), 1.0)
        force = (1 / scales.objective).unsqueeze(1)
        low, high = torch.where(wide.below, force, 0.0), torch.where(wide.above, force, 0.0)
        y = torch.where(model.one_sided, mu.unsqueeze(1) / s, estimated(model, systems, model.f.active, low - high))
        within = Interior(z, y, s, low, high, value, constraints)
        theta = Barrier(model, systems, within, wide, scales, systems.slope, mu).violation(constraints, s)
        none = torch.zeros_like(model.f.active)
        return torch.cat([z, y], 1), {
            "limits": list(limits), "wide": list(wide), "within": list(within), "scales": list(scales),
            "filter": list(Filter.empty(theta)),
            "mu": mu, "shift": torch.zeros_like(mu), "least": torch.zeros_like(mu),
            "restoring": none, "from": theta, "damping": torch.zeros_like(mu),
            "crossing": none,
        }  # fmt: skip

    def _step(
        self, model: Model, w: Tensor, at: Interior, limits: Limits, state: Any, active: Tensor
    ) -> tuple[Tensor, Any]:
        """One step of the barrier problem of the samples that are ``active``."""
        scales, filter_, restoring = Scales(*state["scales"]), Filter(*state["filter"]), state["restoring"]
        systems = systems_at(model, w, limits.free)
        barrier = Barrier(model, systems, at, limits, scales, systems.conditions[:, : model.size], state["mu"])
        mu = torch.where(active & ~restoring, _smaller(barrier, scales.objective), barrier.mu)
        lowered = mu < barrier.mu
        barrier.mu, filter_ = mu, filter_.cleared(lowered)
        normal = active & ~restoring
        shift, good = corrected(systems, normal, barrier.diagonal, state["shift"], state["least"])
        step = barrier.newton(barrier.missing(at.constraints, at.s))
        if bool((restoring & active).any()):
            back = barrier.restoring(restoring & active, state["damping"])
            step = Step(*(torch.where(restoring.unsqueeze(1), b, a) for a, b in zip(step, back, strict=True)))
        usable = active & torch.cat(list(step), 1).isfinite().all(1) & (good | restoring)
        step = Step(*(torch.where(usable.unsqueeze(1), part, 0.0) for part in step))
        share = torch.clamp(1 - barrier.mu * scales.objective, min=_SHARE)
        theta = barrier.violation(at.constraints, at.s)
        standing = Standing(theta, barrier.objective(at.z, at.s, at.value), barrier.slope(step))
        found = _searched(barrier, filter_, standing, step, share, usable, restoring, state["from"])
        if bool((usable & normal & (found.t == 0)).any()):
            found = _nearer(barrier, step, share, usable & normal & (found.t == 0), found)
        failed = active & (found.t == 0)
        # what the restoration does
        leaves = restoring & found.allowed
        room = barrier.longest(step, share)
        least, stiff = after(systems, shift, state["least"], normal & (found.t < _SHORT * room), normal & failed)
        eps = torch.finfo(theta.dtype).eps
        rounded = _AT_REST * eps
        at_rest = barrier.mu * scales.objective <= eps**_LAST
        if bool((failed & at_rest).any()):
            at_rest = at_rest & (barrier.error(barrier.mu) <= rounded)
        given_up = failed & ~restoring & (stiff | ~usable | (room < _BLOCKED) | at_rest)
        enters = given_up & (theta > rounded) & theta.isfinite()
        damping = torch.where(restoring & (found.t < 0.25), 16 * state["damping"], state["damping"])
        damping = torch.where(restoring & (found.t > 0.9), state["damping"] / 8, damping)
        damping = torch.where(enters, _DAMPED[0], damping)
        filter_ = filter_.with_pair(active & ~restoring & ~found.falling & (~failed | enters), standing)
        model.f.stuck = (given_up & ~enters) | (restoring & (damping >= _DAMPED[1]))
        dual = torch.where(found.t > 0, barrier.longest_of_multipliers(step, share), 0.0)
        y, low, high = barrier.multipliers(step, found.z, found.s, found.t, dual)
        new = Interior(found.z, y, found.s, low, high, found.value, found.constraints)
        if bool(leaves.any()):
            new = _restarted(barrier, new, leaves)
        new = Interior(*(torch.where(_like(active, b), b, a) for a, b in zip(at, new, strict=True)))
        # a step that moves nothing would be taken for ever
        model.f.stuck |= normal & ~failed & ~lowered & _same(at, new)
        return torch.cat([model.inside(new.z), new.y], 1), {
            **state, "within": list(new), "filter": list(filter_), "mu": barrier.mu, "damping": damping,
            "shift": torch.where(normal & (shift > state["least"]), shift, state["shift"]),
            "least": torch.where(enters, 0.0, least), "restoring": (restoring | enters) & ~leaves,
            "from": torch.where(enters, theta, state["from"]),
            "crossing": lowered & (barrier.mu * scales.objective <= _NEAR),
        }  # fmt: skip


def _searched(
    barrier: Barrier,
    filter_: Filter,
    standing: Standing,
    step: Step,
    share: Tensor,
    usable: Tensor,
    restoring: Tensor,
    origin: Tensor,
) -> _Search:
    """The step, shortened until it is good, by what a restoring sample and another ask for."""
    at, model = barrier.at, barrier.model
    square, none = barrier.square(at.constraints, at.s), torch.zeros_like(usable)
    t = barrier.longest(step, share)
    best = _Search(at.z, at.s, at.value, at.constraints, torch.zeros_like(t), none, none)
    done = ~usable

    def tried(z: Tensor, s: Tensor) -> tuple[_Search, Tensor]:
        """What is there, and is it good?"""
        value, constraints = model.values(model.inside(z))
        s = torch.where(barrier.sided, s.maximum(-constraints), s)  # both violation and objective fall
        theta, phi = barrier.violation(constraints, s), barrier.objective(z, s, value)
        good, falling = filter_.accepts(standing, theta, phi, t)
        allowed = filter_.allows(theta, phi) & (theta <= _RESTORED * origin)
        nearer = phi.isfinite() & (barrier.square(constraints, s) <= (1 - 1e-4 * t) * square)
        good = torch.where(restoring, nearer, good)
        return _Search(z, s, value, constraints, t, falling & ~restoring, allowed & nearer), good

    for number in range(_HALVINGS):
        trial, good = tried(*barrier.moved(step, t))
        best, done = _taken(best, trial, good & ~done), done | good
        if number == 0:
            open_, missing = ~done & ~restoring, barrier.missing(at.constraints, at.s)
            worse = barrier.violation(trial.constraints, trial.s) >= standing.theta
            for _ in range(_CORRECTIONS):
                left = barrier.missing(trial.constraints, trial.s)
                open_ = open_ & worse & left.isfinite().all(1)
                if not bool(open_.any()):
                    break
                missing = t.unsqueeze(1) * missing + torch.where(open_.unsqueeze(1), left, 0.0)
                second = barrier.newton(missing)
                trial, good = tried(*barrier.moved(second, barrier.longest(second, share)))
                best, done, open_ = _taken(best, trial, good & open_), done | (good & open_), open_ & ~good
        if bool((done | restoring).all() if number >= _DAMPS else done.all()):
            break
        t = torch.where(done, t, 0.5 * t)
    return best


def _nearer(barrier: Barrier, step: Step, share: Tensor, which: Tensor, found: _Search) -> _Search:
    """The whole step where that halves the error in the optimality conditions, whatever the filter says: near a solution
    what is left of objective and violation is rounding."""
    model, t = barrier.model, torch.ones_like(found.t)
    dual = barrier.longest_of_multipliers(step, share)
    z, s = barrier.moved(step, t)
    which = which & (barrier.longest(step, share) >= 1)
    forces = torch.where(barrier.sided, barrier.at.y + dual.unsqueeze(1) * step.y, barrier.at.y + step.y)
    value, constraints, gradient = model.slope(model.inside(z), lambda _: forces)
    s = torch.where(barrier.sided, s.maximum(-constraints), s)
    y, low, high = barrier.multipliers(step, z, s, t, dual)
    there = Interior(z, y, s, low, high, value, constraints)
    after = Barrier(model, barrier.systems, there, barrier.limits, barrier.scales, gradient, barrier.mu)
    good = which & (after.error(barrier.mu) <= _CROSSED * barrier.error(barrier.mu))
    return _taken(found, _Search(z, s, value, constraints, t, good, torch.zeros_like(good)), good)


def _taken(best: _Search, trial: _Search, which: Tensor) -> _Search:
    return _Search(*(torch.where(_like(which, b), b, a) for a, b in zip(best, trial, strict=True)))


def _crossed(
    model: Model, w: Tensor, at: Interior, limits: Limits, wide: Limits, which: Tensor
) -> tuple[Tensor, Tensor]:
    """Newton's step for the conditions that hold with equality, and of which samples it takes the residual down."""
    n, sided, f = model.size, model.one_sided, model.f
    low, high = limits.below & (at.low > at.z - wide.lower), limits.above & (at.high > wide.upper - at.z)
    held = torch.cat([limits.free & ~low & ~high, ~sided | (at.y > at.s)], 1)
    z, y = model.split(w)
    start = torch.where(low, limits.lower, torch.where(high, limits.upper, z))
    begin = torch.cat([start, torch.where(held[:, n:], y, 0.0)], 1)
    systems = systems_at(model, begin, held)
    none = torch.zeros_like(begin)
    good = systems.factor(which & f.active, none, none[:, 0])
    trial = begin + torch.where(held, torch.nan_to_num(systems.solve(-systems.conditions)), 0.0)
    trial = torch.cat([model.inside(trial[:, :n]), torch.where(sided, trial[:, n:].clamp_min(0), trial[:, n:])], 1)
    good = which & good & (torch.linalg.vector_norm(f.residual(trial), dim=1) <= _CROSSED * f.best_norm)
    if bool(good.all()):  # for the derivative
        f.system.factored = systems.known()
    return trial, good


def _smaller(barrier: Barrier, scale: Tensor) -> Tensor:
    """``mu`` after the barrier problem, if the iterate solves that, or if what it leaves may be rounding; ``(batch,)``."""
    mu, eps = barrier.mu, torch.finfo(scale.dtype).eps
    scaled, last, error = mu * scale, eps**_LAST, barrier.error(barrier.mu)
    solved = error <= (_SOLVED * scaled).clamp_min(_ROUNDED * eps)
    smaller = torch.minimum(_LINEAR * scaled, scaled**_SUPERLINEAR).clamp_min(last) / scale
    return torch.where(solved & (scaled > last), smaller, mu)


def _restarted(barrier: Barrier, at: Interior, which: Tensor) -> Interior:
    """Multipliers anew where a restoration ends."""
    model, u = barrier.model, barrier.mu.unsqueeze(1)
    below, above = barrier.room(at.z)
    low = torch.where(barrier.has_low, u / below, 0.0)
    high = torch.where(barrier.has_high, u / above, 0.0)
    systems: Systems = systems_at(model, torch.cat([model.inside(at.z), at.y], 1), barrier.free)
    y = torch.where(barrier.sided, u / at.s, estimated(model, systems, which, low - high))
    here = which.unsqueeze(1)
    return at._replace(
        y=torch.where(here, y, at.y), low=torch.where(here, low, at.low), high=torch.where(here, high, at.high)
    )


def _same(at: Interior, new: Interior) -> Tensor:
    """Where two iterates are the same to the last bit, ``(batch,)``."""
    return torch.stack([(a == b).view(len(a), -1).all(1) for a, b in zip(at, new, strict=True)]).all(0)


def _scaled(steep: Tensor) -> Tensor:
    return (_STEEP / steep.clamp_min(torch.finfo(steep.dtype).tiny)).clamp(max=1.0)


def _like(which: Tensor, value: Tensor) -> Tensor:
    return which.view(-1, *[1] * (value.ndim - 1))
