"""What a check of the conformance suite is, and what it is given.

A check gets a :class:`Subject` and raises ``AssertionError`` with what it saw.  ``mend`` says what the author of a solver
should change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.autocast import full_precision
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.base import Problem
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.root import Root
from implicitkit.problem.steady_state import SteadyState
from implicitkit.solution import Solution, Status
from implicitkit.solving.verbs import solve
from implicitkit.testing.known import Endless, Known, known_problems, limited

__all__ = ["CHECKS", "PROBLEMS", "Check", "Subject", "Unended", "Unsolved", "all_converged", "check", "close", "same"]

_ROUNDING = 1e-12  # what libraries of linear algebra leave between two runs: their sums follow the memory's alignment

_ENDS = "Count the steps, stop after max_steps of them, and bound every search inside a step: on NaN no test holds"

_NEAR = 1e-2  # of |F| at the start: what goes the right way and stops early


class Unsolved(AssertionError):
    """A known problem is not solved."""


class Unended(AssertionError):
    """A solve does not end."""


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

    def rtol(self, dtype: torch.dtype = torch.float64) -> float:
        """The tightest tolerance that is asked for: as large a share of this precision's digits as ``accuracy`` is of
        float64's, at most two thirds."""
        share = math.log(self.accuracy) / math.log(torch.finfo(torch.float64).eps)
        return float(torch.finfo(dtype).eps ** min(share, 2 / 3))

    def known(self, kind: str | None = None, *, batch: int = 3, dtype: torch.dtype = torch.float64) -> list[Known]:
        """Problems with known solutions, of the solver's own kind unless told."""
        return known_problems(kind or self.kind, batch=batch, size=self.size, dtype=dtype)

    def solve(self, known: Known, theta: Tensor | None = None, **options: Any) -> Solution:
        """Solve a known problem as a batch."""
        tolerance = self.rtol(known.z0.dtype)
        defaults = {"rtol": tolerance, "atol": tolerance, "batch_dims": 1, "in_dims": (0,), "solver": self.solver}
        args = (known.theta if theta is None else theta,)
        return solve(known.problem, options.pop("z0", known.z0), args, **(defaults | options))

    def tolerance(self, known: Known) -> float:
        """How far a solution within the tolerance of :meth:`solve` may be from the true one (condition below 20)."""
        rounding = 100 * torch.finfo(known.z0.dtype).eps
        tolerance = self.rtol(known.z0.dtype)
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
            with torch.inference_mode(False), torch.enable_grad(), full_precision("cpu"), limited():
                try:
                    run(subject)
                except ConvergenceError as error:
                    raise Unsolved(str(error)) from error
                except Endless as error:
                    raise Unended(f"a solve does not end: {error}. {_ENDS}") from None

        # solvers of constrained problems are judged by the optimality conditions at every call, not by this suite
        CHECKS[name] = Check(name, mend, recorded, lambda solver: solver.solves in _NATIVE and applies(solver))
        return run

    return register


def close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Assert that ``got`` is within ``tolerance`` of what is ``wanted``, everywhere."""
    worst = float((got - wanted).abs().max())
    assert worst <= tolerance, f"{what} is off by {worst:.3g} (allowed: {tolerance:.3g})"


def same(first: Solution, second: Solution, what: str) -> None:
    """Assert that two solves took the same steps, but for what rounding makes of the point."""
    assert torch.equal(first.steps, second.steps), f"{what}: {second.steps.tolist()} steps, not {first.steps.tolist()}"
    size = 1 + float(first.value.detach().abs().max())
    close(second.value.detach(), first.value.detach(), _ROUNDING * size, f"{what}: the point")


def all_converged(solution: Solution, known: Known) -> None:
    """Assert that every sample converged; say how those ended that did not, and whether they were near.

    Raises:
        Unsolved: some did not.
    """
    if bool(solution.converged.all()):
        return
    text = (
        f"{known.name}: status {[Status(s).name.lower() for s in solution.status.tolist()]}, "
        f"|F| = {[f'{r:.2g}' for r in solution.residual_norm.tolist()]} after {solution.steps.tolist()} steps"
        + (f" ({solution.message})" if solution.message else "")
    )
    start = known.residual(known.z0, known.theta).norm(dim=1)
    left = float((solution.residual_norm / start).max())
    if left < _NEAR:
        digits = 10.0 ** math.ceil(math.log10(max(left, 1e-300)) + 1)
        text += (
            f". It comes near: |F| falls to {left:.0e} of what it was. Go on to the tolerance that is asked for, by "
            f"f.residual(z); can it do no better (it compares values), check it with accuracy={digits:.0e}"
        )
    raise Unsolved(text)
