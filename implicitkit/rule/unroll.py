"""Differentiate the iteration itself: for comparison, for pretraining, and for what is not at its solution yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, optional
from implicitkit.linear import LU
from implicitkit.problem.kind import Kind
from implicitkit.rule.base import Rule
from implicitkit.rule.catalogue import register_rule
from implicitkit.rule.request import Request

__all__ = ["Unroll"]


@register_rule("unroll")
@dataclass(frozen=True)
class Unroll(Rule):
    """The derivative of the solver's own steps, by ordinary differentiation.  Memory grows with the steps.

    The solve is run once without a graph to find how many steps it takes; as many are then taken again with one, from
    the same start (every sample takes as many as the slowest).  Unlike the implicit rule, ``z0`` has a derivative too.

    Source: Maclaurin, Duvenaud & Adams (2015); Griewank & Walther (2008), chapter 3.

    Args:
        steps: how many steps to take instead; ``None``: as many as the solve needs.  The solution's figures are then those
            of the point after so many steps; that it has not converged is no failure, but what was asked for.

    Raises:
        CapabilityError: the solver is not an iteration of plain differentiable operations (``differentiable = True``).
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
        steps = self.steps if self.steps is not None else int(request.record.outcome.steps.max())
        z = request.unroll(steps)
        return (z if torch.is_grad_enabled() or steps else found), stats
