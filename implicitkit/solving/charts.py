"""A solve on a manifold: chart after chart, until the solution lies at the origin of the last one.

A chart is good near its centre, and may have stationary points of its own far out.  So the solver is run in the chart about
``z0``; where it has come far, again in the chart about the point that it found; and in the end the point is judged, and
differentiated, at the origin of its own chart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.trees import tree_map
from implicitkit.solution import Solution, Status
from implicitkit.solver.base import Options, Outcome, Solver, account
from implicitkit.solver.black_box import verdict
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.judge import Judge

_CHARTS = 8
_NEAR = 0.5  # a sample that went no further than this in its chart is not looked at again
# ends that may be those of the chart, and not of the problem
_ENDS = (Status.CONVERGED, Status.STALLED, Status.DIVERGED, Status.UNBOUNDED)
_SAME = 10.0  # a residual that another chart shows so many times larger is the same


def through_charts(solve_once: Callable[..., Solution], problem: Any, z0: Any, args: Any, **options: Any) -> Solution:
    """Solve chart after chart; the last solve carries the derivative and the figures of all.

    Args:
        solve_once: ``(problem, z0, args, **options)``, a solve in the chart about ``z0``.
    """
    history: Outcome | None = None
    left = options["max_steps"]
    for _ in range(_CHARTS):
        with torch.no_grad():
            found = solve_once(
                problem, z0, args, **{**options, "rule": "auto", "on_failure": "ignore", "max_steps": left}
            )
        z0 = tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, found.value)
        outcome = found._record.outcome
        outcome.solver = outcome.solver or found.solver
        history = _after(history, outcome)
        far = torch.linalg.vector_norm(outcome.z, dim=1) > _NEAR
        if left is not None:
            # a solve that leaves a saddle goes on for more steps than it was given
            left = max(0, left - int(outcome.steps.max())) if outcome.steps.numel() else left
        ended = torch.zeros_like(far)
        for status in _ENDS:
            ended |= outcome.status == int(status)
        again = far & ended
        if not bool(again.any()) or left == 0:
            break
    return solve_once(
        problem,
        z0,
        args,
        **{**options, "solver": Arrived(history), "max_steps": None, "callback": None, "trace": False},
    )


def _after(history: Outcome | None, outcome: Outcome) -> Outcome:
    """The figures of two solves one after the other."""
    if history is None:
        return outcome
    outcome.steps = history.steps + outcome.steps
    account(outcome, history)
    outcome.trace = history.trace + outcome.trace[1:]
    return outcome


@dataclass(frozen=True, eq=False)
class Arrived(Solver):
    """Takes no step: the start is where another solve has ended, whose figures are these; judged once more."""

    history: Any
    name: ClassVar[str] = "arrived"
    solves: ClassVar[str] = "minimise"

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        """Evaluate at ``z0``."""
        before: Outcome = self.history
        f.evaluations, f.sample_evaluations = before.evaluations, before.sample_evaluations
        judge = Judge(f, options)
        norm = judge.norm(f.residual(z0))
        claimed = before.status == int(Status.CONVERGED)
        same = claimed & (norm <= _SAME * before.residual_norm)
        if bool(same.all()) and not bool((torch.linalg.vector_norm(before.z, dim=1) > _NEAR).any()):
            return self._as_before(f, z0, norm)
        outcome = verdict(judge, f, z0, z0, norm, before.steps, 0, options, before.message)
        status = torch.where(claimed, outcome.status, before.status)
        good = same | (outcome.status == int(Status.CONVERGED))
        outcome.status = torch.where(good, int(Status.CONVERGED), status)
        outcome.trace, outcome.solver, outcome.said = before.trace, before.solver, before.said
        return outcome

    def _as_before(self, f: Evaluations, z0: Tensor, norm: Tensor) -> Outcome:
        """What the solve before has found and judged, from nearby."""
        before: Outcome = self.history
        return replace(
            before, z=z0, residual_norm=norm, evaluations=f.evaluations, sample_evaluations=f.sample_evaluations,
            examined=True,
        )  # fmt: skip
