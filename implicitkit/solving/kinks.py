"""A program with its solution in a kink of its inequalities, once more by the smooth branches that meet there.

A solver that has come to rest in such a kink says which branches there are
(:mod:`implicitkit.solver.constrained.kinked`); with these for constraints
(:mod:`implicitkit.problem.kinked_inequalities`) it is a smooth program with the solution at the same point, which is
solved, judged and differentiated like any other.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from implicitkit.foundation import trees
from implicitkit.problem.base import Restated
from implicitkit.problem.kinked_inequalities import Agreement, Branches
from implicitkit.solution import Solution
from implicitkit.solver.base import account, counting_on

_SAME = 1e-5  # of 1 + |z|, as far as ways into branches go: how far their solution may be from the kink
_SHARE = 1e-2  # of the tolerance, what may be left of it


def along_a_kink(
    solve_once: functools.partial[Solution],
    found: Solution,
    restated: Restated | None,
    problem: Any,
    args: tuple[Any, ...],
) -> Solution | None:
    """The solution by branches, with the figures of both solves; ``None`` where these have another, or none.

    Args:
        solve_once: ``(problem, z0, args)`` with the user's options. found: the solve that came to rest in the kink, of the
            problem as it was ``restated``. problem, args: as the user gave them.
    """
    outcome, layout, constraints = found._record.outcome, found._layout, problem.constraints
    if restated is None or layout.batch_dims or len(outcome.z) != 1:  # branches are those of one sample
        return None
    if any(isinstance(c.function, Agreement) for c in constraints):
        return None  # it is one of branches
    w, ways = outcome.kink.w, outcome.kink.ways
    point = lambda w: restated.plain_parts(layout.unpack(w), 1)[0]  # noqa: E731
    with torch.no_grad():
        z = point(w)
        moved = [torch.cat([way, way.new_zeros(w.shape[1] - len(way))]) for way in ways]
        there = [trees.tree_map(torch.sub, point(w + way), z) for way in moved]
    atol = solve_once.keywords["atol"]
    if atol is None and outcome.tolerance is not None:
        # branches agree up to rounding at the start already, of which no row has its size
        atol = _SHARE * float(outcome.tolerance)
    smooth = replace(problem, constraints=Branches(tuple(there), outcome.kink.picks).of(constraints))
    limit = solve_once.keywords["max_steps"]  # of both solves together; there is one step left, at least
    limit = None if limit is None else max(1, limit - int(outcome.steps.max()))
    callback = counting_on(solve_once.keywords["callback"], outcome.shown)
    again = solve_once(smooth, z, args, atol=atol, max_steps=limit, callback=callback)
    after, n = again._record.outcome, ways.shape[1]
    if not after.all_converged or after.z.shape[0] != 1:
        return None
    if bool((after.z[:, :n] - w[:, :n]).abs().max() > _SAME * (1 + w[:, :n].abs().max())):
        return None
    account(after, outcome)
    after.steps = after.steps + outcome.steps
    again.multipliers = None if again.multipliers is None else again.multipliers[: len(constraints)]
    return again
