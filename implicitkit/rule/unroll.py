"""Differentiate the iteration itself: for comparison, for pretraining, and for what is not at its solution yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from implicitkit.foundation import compat, recording
from implicitkit.foundation.errors import ConvergenceWarning, warn
from implicitkit.foundation.options import at_least, check_options, optional
from implicitkit.linear import LU
from implicitkit.problem.kind import Kind
from implicitkit.rule.base import Rule
from implicitkit.rule.catalogue import register_rule
from implicitkit.rule.request import Request


@register_rule("unroll")
@dataclass(frozen=True)
class Unroll(Rule):
    """The derivative of the solver's own steps, by ordinary differentiation.  Memory grows with the steps.

    The solve is run once without a graph to find how many steps it takes; as many are then taken again with one, from
    the same start (every sample takes as many as the slowest).  Unlike the implicit rule, ``z0`` has a derivative too; and
    it is one of so many steps: from a start near the solution they are few, and what the arguments have done to the start
    is left out.

    Source: Maclaurin, Duvenaud & Adams (2015); Griewank & Walther (2008), chapter 3.

    Args:
        steps: how many steps to take instead; ``None``: as many as the solve needs.  The solution's figures are then those
            of the point after so many steps; that it has not converged is no failure, but what was asked for.

    Raises:
        CapabilityError: the solver is not an iteration of plain differentiable operations (``differentiable = True``).

    Warns:
        ConvergenceWarning: the start is a solution already, so that there is no step to differentiate.
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        check_options(self, steps=optional(at_least(1)))

    def solver_for(self, kind: Kind) -> str | None:
        """The plain iteration, whose steps can be differentiated."""
        return "picard" if kind.iteration else None

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        request.unroll(0)  # raises at once where the solver cannot be unrolled
        if self.steps is not None:
            request = replace(request, options=replace(request.options, max_steps=self.steps))
            request.record.truncated = True
        found, stats = request.solve(LU(), rtol=0.0, atol=0.0, max_steps=None)
        with recording.unrecorded():
            steps = self.steps if self.steps is not None else int(request.record.outcome.steps.max())
        if steps == 0 and request.on_failure != "ignore" and _is_differentiated(request):
            warn(
                "rule 'unroll' has no step to differentiate: the start is a solution already, and its derivative by the "
                "arguments is taken to be zero. Say how many steps are to be taken, rule=ik.Unroll(steps=20), start "
                "elsewhere, or use rule='implicit', whose derivative does not depend on the start",
                ConvergenceWarning,
            )
        z = request.unroll(steps)
        return (z if torch.is_grad_enabled() or steps else found), stats


def _is_differentiated(request: Request) -> bool:
    return (torch.is_grad_enabled() or compat.has_forward_level()) and any(map(compat.tracked, request.theta))
