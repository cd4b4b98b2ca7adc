"""What a rule is: how the derivative of a solution is formed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.linear import BlockSubstitution, LinearSolver
from implicitkit.rule.primitive import Call, root
from implicitkit.solution import Record
from implicitkit.solver.driver import Options
from implicitkit.system import System

__all__ = ["Request", "Rule"]


@dataclass
class Request:
    """One solve, as a rule sees it: a system on matrices, a start, the explicit tensors, and how to find the solution."""

    system: System
    solver: Any
    options: Options
    z0: Tensor
    theta: tuple[Tensor, ...]
    on_failure: str
    record: Record
    first: Tensor | None  # the kernel's value at z0, if it is known

    def solve(self, linear_solver: LinearSolver, **linear_options: Any) -> tuple[Tensor, Tensor | None]:
        """Solve, and differentiate by the implicit function theorem with this linear solver.

        A truncated one works on the blocks of a composition one after another: as if layer by layer, where a few terms of
        the joint series would not even reach from the output to the input.
        """
        if self.system.problem.by_blocks and not linear_solver.exact:
            linear_solver = BlockSubstitution(linear_solver)
        call = Call(
            self.system,
            self.solver,
            self.options,
            linear_solver,
            linear_options,
            self.on_failure,
            self.record,
            self.first,
        )
        return root(call, self.z0, self.theta)


class Rule:
    """How the derivative is formed.

    :meth:`attach` returns the packed solution, differentiable by the rule, and the figures of the solve.
    ``needs`` names the problem kinds it is made for (empty: all).
    """

    name: ClassVar[str] = ""
    needs: ClassVar[tuple[str, ...]] = ()

    def attach(self, request: Request) -> tuple[Tensor, Tensor | None]:
        """``(z, stats)``: ``(batch, n)``, and what :meth:`Request.solve` returned beside it."""
        raise NotImplementedError(f"{type(self).__name__} must define attach(request)")
