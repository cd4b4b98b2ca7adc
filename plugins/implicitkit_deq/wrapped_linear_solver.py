"""A linear solver around another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import implicitkit as ik
from implicitkit.extend import LinearSolution

__all__ = ["Around"]


@dataclass(frozen=True)
class Around(ik.LinearSolver):
    """What is said of it (its name, what it needs, whether it is exact, and so on) is what is true of the one inside.

    Subclasses say what they do with a right-hand side; several are the inner solver's own business, if they say nothing.

    Args:
        inner: the solver.
    """

    inner: ik.LinearSolver

    @property
    def name(self) -> str:  # type: ignore[override]
        return str(self.inner.name)

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.inner.needs)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return bool(self.inner.exact)

    @property
    def matrix_free(self) -> bool:  # type: ignore[override]
        return bool(self.inner.matrix_free)

    @property
    def preconditions(self) -> bool:  # type: ignore[override]
        return bool(self.inner.preconditions)

    @property
    def factors(self) -> bool:  # type: ignore[override]
        return bool(self.inner.factors)

    @property
    def has_units(self) -> bool:  # type: ignore[override]
        return bool(self.inner.has_units)

    @property
    def checks_itself(self) -> bool:
        return bool(self.inner.checks_itself)

    def solve_many(self, A: Any, b: Tensor, **options: Any) -> LinearSolution:
        return self.inner.solve_many(A, b, **options)
