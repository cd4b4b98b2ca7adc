"""Differentiate the iteration itself: for comparison, for pretraining, and for what is not at its solution yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit import autodiff
from implicitkit.errors import CapabilityError
from implicitkit.linear import LU
from implicitkit.registry.table import register_rule
from implicitkit.rule.base import Request, Rule
from implicitkit.solver.base import Method
from implicitkit.solver.evaluations import Function
from implicitkit.system import System

__all__ = ["Unroll"]


@register_rule("unroll")
@dataclass(frozen=True)
class Unroll(Rule):
    """The derivative of the solver's own steps, by ordinary differentiation.  Memory grows with the steps.

    The solve is run once without a graph to find how many steps it takes; as many are then taken again with one, from
    the same start (every sample takes as many as the slowest).  Unlike the implicit rule, ``z0`` has a derivative too.

    Args:
        steps: how many steps to take instead; ``None``: as many as the solve needs.

    Raises:
        CapabilityError: the solver is not an iteration of plain differentiable operations (``differentiable = True``).
    """

    steps: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        method = request.solver
        if not (isinstance(method, Method) and getattr(method, "differentiable", False)):
            name = getattr(method, "name", type(method).__name__)
            raise CapabilityError(
                f"rule 'unroll' differentiates the steps of the solver, and {name!r} does not offer that: use "
                'solver="picard" or a gradient descent with fixed step_size (methods with differentiable = True), or the '
                "rule 'implicit', which needs nothing from the solver"
            )
        found, stats = request.solve(LU(), rtol=0.0, atol=0.0, max_steps=None)
        steps = self.steps if self.steps is not None else int(request.record.outcome.steps.max())
        f = _Tracked(request.system, request.theta, method.solves)
        z, state = request.z0, method.init(f, request.z0)
        for _ in range(steps):
            z, state = method.step(f, z, state)
        return (z if torch.is_grad_enabled() or steps else found), stats


class _Tracked(Function):
    """``f`` with every operation visible to autograd and to the transforms around the call."""

    def __init__(self, system: System, theta: Sequence[Tensor], solves: str) -> None:
        super().__init__(system, theta, solves)
        self._how = "plain"

    def _kernel(self, z: Tensor) -> Tensor:
        return self.system.kernel(z, *self.theta)

    def _compute_plain(self, point: dict[str, Tensor], name: str) -> None:
        z, problem = point["z"], self.problem
        self._count()
        if self.solves == "fixed_point":
            point["f"] = self._kernel(z)
            point["residual"] = point["f"] - z
            return
        point["residual"] = problem.flat_residual(self._kernel, z)
        point["f"] = point["residual"]
        if self.solves != "root":
            point["value"], point["f"] = autodiff.gradient(lambda y: problem.flat_objective(self._kernel, y), z)
