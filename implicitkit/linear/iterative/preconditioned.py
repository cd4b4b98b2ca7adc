"""Krylov methods that take a preconditioner by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import check_options, one_of, optional
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.iterative.preconditioners import NAMES, preconditioner

__all__ = ["PreconditionedSolver"]


@dataclass(frozen=True)
class PreconditionedSolver(LinearSolver):
    """A linear solver that uses ``A.preconditioner`` or, where there is none, one made of the matrix of ``A`` by name
    (:mod:`implicitkit.linear.iterative.preconditioners`).  Functions of the state and factorisations go to
    ``ik.Implicit(preconditioner=)``, which has priority.

    Args:
        preconditioner: ``"jacobi"``, ``"block_jacobi"``, ``"ilu"``, ``"amg"`` or ``None``.

    Raises:
        ValueError: another name, or, for a solver of symmetric systems, ``"ilu"``, which is not symmetric.
    """

    preconditions: ClassVar[bool] = True
    preconditioner: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        names = tuple(name for name in NAMES if name != "ilu" or "symmetric" not in self.needs)
        check_options(self, preconditioner=optional(one_of(*names)))

    def preconditioner_of(self, A: Operator) -> Any:
        """That of ``A``, given to it if it has none; ``None`` without either."""
        if A.preconditioner is None and self.preconditioner is not None:
            A.preconditioner = preconditioner(self.preconditioner, A, A.like)
        return A.preconditioner

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        self.preconditioner_of(A)  # one for all right-hand sides
        return super().solve_many(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
