"""A minimisation that meets kinks, by its epigraphs, and from there by its conditions in these kinks.

The relaxation (:mod:`implicitkit.problem.epigraph`) finds the minimum, at any number of unknowns and of samples; the
conditions (:mod:`implicitkit.problem.kinked_conditions`) find it to the last digits, and say how it moves.  A sample is
solved where both are, at one point; one that was solved before stays as it is, where that is another.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, seeded, trees
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.trees import Layout
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.base import Problem
from implicitkit.problem.epigraph import Relaxation, Sites, functions_of, pruned, rises, sites_of, size_of
from implicitkit.problem.kinked_conditions import conditions, is_smooth
from implicitkit.problem.kinked_minimum import KinkedMinimum, follows, takes_the_same
from implicitkit.rule.implicit import Implicit
from implicitkit.solution import Solution, Status
from implicitkit.solver.base import Outcome, account, counting_on
from implicitkit.solver.constrained.sqp import SQP
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage
from implicitkit.solver.root.newton import Newton

_MOST, _MANY = 4096, 1 << 20  # unknowns of sites of a sample, and before it is known which of them count
_STEPS = 20  # Newton's, from the minimum of the relaxation on
_SAME = 1e-3  # of |z|: by so much two solutions of a sample may differ
_NEAR = 0.05  # of |z|: how far from there they may end
_RELAXED = Polyalgorithm(
    (
        Stage(Impatient(SQP(), window=8, horizon=20), max_steps=60),
        Stage("filter_interior_point", max_steps=100),
        Stage("newton", max_steps=30, scale=None),
    )
)


def may_be_lifted(problem: Problem, solver: Any, rule: Any) -> bool:
    """Is it a minimisation of nothing but functions, within bounds or not, and left to us how it is solved and derived?"""
    ours = isinstance(rule, Implicit) or (isinstance(rule, str) and rule in ("auto", Implicit.name))
    if not (isinstance(problem, Argmin) and isinstance(solver, str) and solver == "auto" and ours):
        return False
    plain = problem.prox is None and problem.project is None and problem.manifold is None
    return plain and problem.degenerate != "smooth"


def by_epigraphs(
    solve_once: functools.partial[Solution],
    found: Solution,
    problem: Argmin,
    z0: Any,
    args: tuple[Any, ...],
    on_failure: str,
) -> Solution | None:
    """The solution, with the figures of all solves; ``None`` where there is nothing to be lifted.

    Args:
        solve_once: ``(problem, z0, args)`` with the user's options. found: the solve that came to an end beside kinks.
            problem, z0, args, on_failure: as the user gave them.
    """
    layout, outcome = found._layout, found._record.outcome
    solve = functools.partial(solve_once, on_failure="ignore")
    with compat.underived():
        lifted = _relaxation(problem, z0, args, layout)
        if lifted is None:
            return None
        relaxation, rising = lifted
        minimum = _minimum(solve, relaxation, outcome, _left(solve_once, outcome.taken, outcome.shown))
        if minimum is None:
            return None
        after = minimum._record.outcome
        if bool((after.status == int(Status.STOPPED)).any()):
            return _marked(~found.converged, found, Status.STOPPED)
        steps, shown = outcome.steps + after.steps, outcome.shown + after.shown
        z, forces = trees.tree_map(Tensor.detach, (minimum.value.z, minimum.multipliers or ()))
        equations, begin, given = conditions(problem, relaxation, z, forces, args, layout.batch_dims)
        minimises = KinkedMinimum(equations, degenerate=problem.degenerate)
        atol = torch.finfo(layout.dtype).eps ** 0.75  # in the units of the equations
        at = functools.partial(solve, minimises, args=(given, *args), solver=Newton(line_search=False), atol=atol)
        kept = at(begin, **_left(solve_once, int(steps.max()), shown, _STEPS))
        account(outcome, kept._record.outcome)
        there = trees.tree_map(Tensor.detach, kept.value)
        way = _way(there.z, z0, layout)
        plain = takes_the_same(functions_of(problem), relaxation.sites, there.z, way, args, layout.batch_dims)
        plain = plain & is_smooth(equations, there, given, args, way, layout.batch_dims)
    # once more from there, where it is at rest: this one is derived, and its derivative obeys what the user said
    policy = on_failure if kept._record.outcome.all_converged else "ignore"
    moved = at(kept.value, max_steps=_STEPS, callback=None, on_failure=policy)
    record = moved._record
    minimises.follows.append(lambda: follows(record.system.residual, record.outcome.z, record.theta))
    moved.multipliers, moved.value = moved.value.multipliers or None, moved.value.z
    after = moved._record.outcome
    account(after, outcome)
    after.steps, after.solver, moved.solver = kept._record.outcome.steps + steps, minimum.solver, minimum.solver
    size = _distance(z, None, layout)
    near = _distance(moved.value, z, layout) <= _NEAR * size + relaxation.reach
    moved = _marked(~(minimum.converged & near & plain & rising), moved, Status.STALLED)
    same = _distance(moved.value, found.value, layout) <= _SAME * size
    known = found.converged & ~(moved.converged & same)
    return chosen(known, found, moved) if bool(_rows(known).any()) else moved


def _minimum(
    solve: Callable[..., Solution], relaxation: Relaxation, outcome: Outcome, left: dict[str, Any]
) -> Solution | None:
    """The minimum of the relaxation, its figures added to those of ``outcome``; ``None`` where it is too large for dense
    matrices."""
    solver = _RELAXED if relaxation.problem.constraints else "auto"
    try:
        minimum = solve(relaxation.problem, relaxation.start, relaxation.args, solver=solver, **left)
    except CapabilityError:
        return None
    if not bool((minimum._record.outcome.status == int(Status.STOPPED)).any()):
        account(outcome, minimum._record.outcome)
    return minimum


def _relaxation(problem: Argmin, z0: Any, args: tuple[Any, ...], layout: Layout) -> tuple[Relaxation, Tensor] | None:
    """The relaxation, where there is one: the function meets kinks, in the same way at every point, and rises with them in
    these samples."""
    if any(layout.complex):
        return None
    with contextlib.suppress(RuntimeError):
        sites = sites_of(functions_of(problem), z0, args, tuple(layout.batch_shape))
        if any(isinstance(site.kind, int) for own in sites for site in own) and _count(sites) <= _MANY * layout.batch:
            sites = pruned(problem, sites, z0, args)
        if 0 < _count(sites) <= _MOST * layout.batch:
            rising = rises(problem, sites, z0, args, layout.batch_dims)
            if bool(compat.physical(rising).any()):
                return Relaxation(problem, sites, z0, args, layout.batch_dims), rising
    return None


def _count(sites: Sites) -> int:
    """How many numbers they are of, of all samples."""
    return sum(math.prod(site.shape) for own in sites for site in own if site.counts)


def _left(solve_once: functools.partial[Solution], taken: int, shown: int, most: int | None = None) -> dict[str, Any]:
    """What is left of the steps that the user allows, ``most`` of them, and the callback, which counts on."""
    limit, callback = solve_once.keywords["max_steps"], solve_once.keywords["callback"]
    limits = [n for n in (most, None if limit is None else max(0, limit - taken)) if n is not None]
    of_z = callback and (lambda step, state, norm: callback(step, state.z, norm))
    return {"max_steps": min(limits, default=None), "callback": counting_on(of_z, shown)}


def _distance(a: Any, b: Any, layout: Layout) -> Tensor:
    """``|a - b|`` of each sample, the largest number, of the batch's shape; ``b`` is zero if it is ``None``."""
    differ = trees.tree_map(Tensor.detach, a) if b is None else trees.tree_map(lambda s, t: (s - t).detach(), a, b)
    return size_of(trees.tree_flatten(differ)[0], layout.batch_dims)


def _way(z: Any, z0: Any, layout: Layout) -> Any:
    """A little way in no special direction: of the cube root of rounding, in units of ``z``, or of how far it has come."""
    size = torch.maximum(_distance(z, None, layout), _distance(z, z0, layout))
    size = torch.finfo(layout.dtype).eps ** (1 / 3) * torch.where(size > 0, size, 1)

    def along(t: Tensor) -> Tensor:
        shape = t.shape[layout.batch_dims :]
        direction = seeded.normal(shape.numel(), seed=1).to(t).reshape(shape)
        return size.reshape((*size.shape, *(1,) * len(shape))) * direction

    return trees.tree_map(along, z)


def _marked(which: Tensor, solution: Solution, status: Status) -> Solution:
    """The solution, of which these samples have ended otherwise."""
    outcome = solution._record.outcome
    outcome.status = torch.where(_rows(which), int(status), outcome.status)
    if solution._stats is not None:
        norm, steps, before = solution._stats.unbind(1)
        solution._stats = torch.stack([norm, steps, torch.where(which.reshape(-1), int(status), before)], 1)
    return solution


def chosen(which: Tensor, one: Solution, other: Solution) -> Solution:
    """``other``, of which these samples are those of ``one``: values, derivatives and figures."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(which.reshape((*which.shape, *(1,) * (a.ndim - which.ndim))), a, b)

    rows = _rows(which)
    before, after = one._record.outcome, other._record.outcome
    other.value = trees.tree_map(pick, one.value, other.value)
    other.multipliers = (
        trees.tree_map(pick, one.multipliers, other.multipliers) if one.multipliers is not None else None
    )
    for name in ("status", "residual_norm"):
        old, new = getattr(before, name), getattr(after, name)
        setattr(after, name, torch.where(rows, old.to(new), new))
    after.steps = torch.where(rows, before.steps, after.steps)
    if other._stats is not None and one._stats is not None:
        other._stats = torch.where(which.reshape(-1, 1), one._stats, other._stats)
    return other


def _rows(which: Tensor) -> Tensor:
    """A flag for each sample, below all transforms."""
    return compat.batches_in_front(which)[0].reshape(-1)
