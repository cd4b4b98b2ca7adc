"""What may be wrong with a solver that does not solve a known problem: told by what it does elsewhere.

Of several causes the first that is seen is told: samples that are solved one at a time; NaN; a solution that was at hand,
since ``f`` was evaluated there, and was not returned; steps that go the right way, and are too short; an end that does not
depend on the tolerance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from implicitkit.solution import Solution, Status
from implicitkit.testing.check import PROBLEMS, Subject, Unsolved
from implicitkit.testing.known import Known

_SHORTER = 0.99  # of |F| after half of the steps: what is still falling
_LOOSE = 0.5  # an rtol that asks for little

ROWS = (
    "Rows of z are independent samples: norms, inner products, step lengths and coefficients are per row (dim=1, keepdim), "
    "never over the whole matrix, and every tensor in the state has the batch as its first dimension."
)
_ORDER = "Row i of what is returned belongs to row i of z0."
_RETURNED = "Return the point that was looked at last, not the one before it, nor one of another time."
_LONGER = "The steps go the right way, and are too short: lengthen them, let their length adapt, or accelerate them."
_NOT_FINITE = (
    "Out of finite numbers came one that is not: look for divisions by zero, 0 / 0 at a start of zeros, and roots of "
    "negative numbers in the solver's own operations."
)
_BY_TOLERANCE = (
    "Go on until |F| <= atol + rtol * |F| of the start, by f.residual(z), or max_steps: the number of steps is not to be "
    "fixed, nor the step itself taken for the error."
)


def diagnosed(subject: Subject, known: Known, solution: Solution, error: Unsolved) -> Unsolved:
    """The error of a known problem that a solver has not solved, with what else was seen, and what to mend then."""
    if error.mend:
        return error
    if _solved_alone(subject, known):
        return Unsolved(f"{error}. Each sample alone is solved", f"{ROWS} {_ORDER}")
    if "returned NaN" in solution.message:
        return Unsolved(str(error), _NOT_FINITE)
    place = _at_the_solution(subject, known)
    if place:
        return Unsolved(f"{error}. It was at the solution: f was evaluated there, in evaluation {place}", _RETURNED)
    left = ~solution.converged
    if bool((solution.status[left] == Status.MAX_STEPS).all()):
        half = subject.solve(known, max_steps=max(1, int(solution.steps.max()) // 2), on_failure="ignore").residual_norm
        if bool((solution.residual_norm < _SHORTER * half)[left].all()):
            return Unsolved(f"{error}. In the first half of these steps |F| fell to {_listed(half)}", _LONGER)
    elif not _ran_away(solution, left) and _same_end(subject, known, solution, left):
        return Unsolved(f"{error}. It ends there, too, where only rtol={_LOOSE:g} is asked for", _BY_TOLERANCE)
    return error


def _listed(norms: Tensor) -> str:
    return f"{[f'{r:.2g}' for r in norms.tolist()]}"


def _ran_away(solution: Solution, left: Tensor) -> bool:
    """Did no sample that is ``left`` stop by itself?  What was kept then is a point that it passed."""
    status = solution.status[left]
    return bool(((status == Status.NONFINITE) | (status == Status.DIVERGED)).all())


def _same_end(subject: Subject, known: Known, solution: Solution, left: Tensor) -> bool:
    """Do the samples that are ``left`` unsolved, nearer than they began, end at the same points at a loose tolerance?"""
    start = known.residual(known.z0, known.theta).norm(dim=1)
    loose = subject.solve(known, rtol=_LOOSE, on_failure="ignore")
    nearer = bool((solution.residual_norm < start)[left].all())
    return nearer and torch.equal(loose.value[left], solution.value[left])


def _solved_alone(subject: Subject, known: Known) -> bool:
    """Whether a solve of every sample by itself finds its solution."""
    for i in range(len(known.z0)):
        one = slice(i, i + 1)
        found = subject.solve(known, known.theta[one], z0=known.z0[one], on_failure="ignore")
        off = float((found.value - known.solution[one]).abs().max())
        if not (bool(found.converged.all()) and off <= subject.tolerance(known)):
            return False
    return True


def _at_the_solution(subject: Subject, known: Known) -> int:
    """In which evaluation of a solve that fails the last of the samples that fail was at its solution; 0: not all were."""
    function, near, calls = known.problem.function, subject.tolerance(known), 0
    first = torch.zeros(len(known.z0), dtype=torch.int64, device=known.z0.device)

    def looked_at(z: Tensor, theta: Tensor) -> Any:
        nonlocal calls
        calls += 1
        if z.shape == known.solution.shape:  # the whole batch, at no level of a transform
            there = (z.detach() - known.solution).abs().amax(1) <= near
            first[there & (first == 0)] = calls
        return function(z, theta)

    problem = PROBLEMS[known.problem.kind.name](looked_at)
    found = subject.solve(replace(known, problem=problem), in_dims=None, on_failure="ignore")
    off = (found.value - known.solution).abs().amax(1) > near
    return int(first[off].max()) if bool(off.any()) and bool((first[off] > 0).all()) else 0
