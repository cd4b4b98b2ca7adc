"""A linear solver around another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import implicitkit as ik
from implicitkit.extend import LinearSolution, options

_SAID = "name", "needs", "exact", "matrix_free", "preconditions", "factors", "has_units", "checks_itself"


@dataclass(frozen=True)
@options.adopts("inner", *_SAID)
class Around(ik.LinearSolver):
    """A linear solver around another one.  What is said of it (its name, what it needs, whether it is exact, and so on) is
    what is true of the one inside.

    Subclasses say what they do with a right-hand side; several are the inner solver's own business, if they say nothing.

    Args:
        inner: the solver.
    """

    inner: ik.LinearSolver

    def solve_many(self, A: Any, b: Tensor, **how: Any) -> LinearSolution:
        return self.inner.solve_many(A, b, **how)
