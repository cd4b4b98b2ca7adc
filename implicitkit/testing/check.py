"""What a check of the conformance suite is, and what it is given.

A check gets a :class:`Subject` and raises ``AssertionError`` with what it saw.  ``mend`` says what the author of a solver
should change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.autocast import full_precision
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.base import Problem
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.root import Root
from implicitkit.problem.steady_state import SteadyState
from implicitkit.solution import Solution, Status
from implicitkit.solving.verbs import solve
from implicitkit.testing.known import Known, known_problems

__all__ = ["CHECKS", "PROBLEMS", "Check", "Subject", "all_converged", "check", "close"]

_NATIVE = {
    "fixed_point": "fixed_point",
    "root": "root",
    "minimise": "argmin",
    "least_squares": "least_squares",
    "steady_state": "steady_state",
}
PROBLEMS: dict[str, Callable[[Any], Problem]] = {
    "fixed_point": FixedPoint,
    "root": Root,
    "argmin": Argmin,
    "least_squares": LeastSquares,
    "steady_state": SteadyState,
}


@dataclass(frozen=True)
class Subject:
    """A solver under test.

    Attributes:
        solver: the configured object. accuracy: the tightest relative tolerance that is asked of it in float64.
    """

    solver: Any
    accuracy: float

    @property
    def kind(self) -> str:
        """The problem kind that the solver is made for."""
        return _NATIVE[self.solver.solves]

    @property
    def size(self) -> int:
        """Unknowns of one sample: 4, or what the solver is limited to."""
        return min(4, self.solver.max_size or 4)

    def known(self, kind: str | None = None, *, batch: int = 3, dtype: torch.dtype = torch.float64) -> list[Known]:
        """Problems with known solutions, of the solver's own kind unless told."""
        return known_problems(kind or self.kind, batch=batch, size=self.size, dtype=dtype)

    def solve(self, known: Known, theta: Tensor | None = None, **options: Any) -> Solution:
        """Solve a known problem as a batch."""
        tolerance = max(self.accuracy, torch.finfo(known.z0.dtype).eps ** (2 / 3))
        defaults = {"rtol": tolerance, "atol": tolerance, "batch_dims": 1, "in_dims": (0,), "solver": self.solver}
        args = (known.theta if theta is None else theta,)
        return solve(known.problem, options.pop("z0", known.z0), args, **(defaults | options))

    def tolerance(self, known: Known) -> float:
        """How far a solution within the tolerance of :meth:`solve` may be from the true one (condition below 20)."""
        rounding = 100 * torch.finfo(known.z0.dtype).eps
        tolerance = max(self.accuracy, torch.finfo(known.z0.dtype).eps ** (2 / 3))
        scale = known.residual(known.z0, known.theta).norm(dim=1).max() + known.solution.norm(dim=1).max()
        return 20 * (tolerance * (1 + float(scale)) + rounding)


@dataclass(frozen=True)
class Check:
    """One check: ``run(subject)`` raises if the solver does not pass; ``mend`` is advice to its author.

    ``applies(solver)``: does the check say anything about this solver?
    """

    name: str
    mend: str
    run: Callable[[Subject], None]
    applies: Callable[[Any], bool]

    @property
    def doc(self) -> str:
        """What is checked."""
        return " ".join((self.run.__doc__ or "").split())


CHECKS: dict[str, Check] = {}
"""Every check by name, in the order in which they run."""


def check(
    mend: str, applies: Callable[[Any], bool] = lambda solver: True
) -> Callable[[Callable[[Subject], None]], Callable[[Subject], None]]:
    """A decorator that makes a function a check; ``mend``: what the author of a solver that fails should change."""

    def register(run: Callable[[Subject], None]) -> Callable[[Subject], None]:
        name = run.__name__

        @functools.wraps(run)
        def recorded(subject: Subject) -> None:
            # a check differentiates, in the precision of its problems, whoever calls it
            with torch.inference_mode(False), torch.enable_grad(), full_precision("cpu"):
                run(subject)

        # solvers of constrained problems are judged by the optimality conditions at every call, not by this suite
        CHECKS[name] = Check(name, mend, recorded, lambda solver: solver.solves in _NATIVE and applies(solver))
        return run

    return register


def close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Assert that ``got`` is within ``tolerance`` of what is ``wanted``, everywhere."""
    worst = float((got - wanted).abs().max())
    assert worst <= tolerance, f"{what} is off by {worst:.3g} (allowed: {tolerance:.3g})"


def all_converged(solution: Solution, known: Known) -> None:
    """Assert that every sample converged; say how those ended that did not."""
    assert bool(solution.converged.all()), (
        f"{known.name}: status {[Status(s).name.lower() for s in solution.status.tolist()]}, "
        f"|F| = {[f'{r:.2g}' for r in solution.residual_norm.tolist()]} after {solution.steps.tolist()} steps"
        + (f" ({solution.message})" if solution.message else "")
    )
