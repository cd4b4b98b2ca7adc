"""What a check of the conformance suite is, and what it is given.

A check gets what is under test (a solver's :class:`Subject`) and raises ``AssertionError`` with what it saw.  ``mend`` says
what the author should change.  The checks of one noun are a :class:`Suite`.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
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

_PARTS = 64  # of which it is remembered what they take
_ROUNDING = 1e-12  # what libraries of linear algebra leave between two runs: their sums follow the memory's alignment

_ENDS = "Count the steps, stop after max_steps of them, and bound every search inside a step: on NaN no test holds"

RAISES, RETURNS = "what raises this", "what it returns"
_GO_ON = (
    "Go on to the tolerance that is asked for, |F| <= atol + rtol * |F| of the start, by f.residual(z): a black box passes "
    "its rtol and atol on, or stops by them itself, and computes in the dtype of z0. Can it do no better (it compares "
    "values), check it with accuracy={:.0e}."
)
_NEAR = 1e-2  # of |F| at the start: what goes the right way and stops early


class Unsolved(AssertionError):
    """A known problem is not solved; ``mend``: what is to be changed, where what was seen tells it."""

    def __init__(self, text: str, mend: str = "") -> None:
        super().__init__(text)
        self.mend = mend


class Unended(AssertionError):
    """A solve does not end."""


NATIVE = {
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
        part: the configured object. accuracy: the tightest relative tolerance that is asked of it in float64.
    """

    part: Any
    accuracy: float

    @property
    def solver(self) -> Any:
        """The solver under test."""
        return self.part

    @property
    def kind(self) -> str:
        """The problem kind that the solver is made for."""
        return NATIVE[self.solver.solves]

    @property
    def size(self) -> int:
        """Unknowns of one sample: 4, or what the solver is limited to."""
        return min(4, self.solver.max_size or 4)

    def rtol(self, dtype: torch.dtype = torch.float64) -> float:
        """The tightest tolerance that is asked for: as large a share of this precision's digits as ``accuracy`` is of
        float64's, at most two thirds."""
        share = math.log(self.accuracy) / math.log(torch.finfo(torch.float64).eps)
        return float(torch.finfo(dtype).eps ** min(share, 2 / 3))

    def example(self) -> Tensor:
        """The argument of one solve."""
        return self.known()[0].theta.clone()

    def act(self, theta: Tensor) -> Tensor:
        """The solution for this argument."""
        return self.solve(self.known()[0], theta).value.detach()

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
    """One check: ``run(subject)`` raises if the part under test does not pass; ``mend`` is advice to its author.

    ``applies(part)``: does the check say anything about this part?
    """

    name: str
    mend: str
    run: Callable[[Any], None]
    applies: Callable[[Any], bool]

    @property
    def doc(self) -> str:
        """What is checked."""
        return " ".join((self.run.__doc__ or "").split())


@dataclass(frozen=True)
class Suite:
    """The checks of one noun.

    Attributes:
        noun: what messages call a part. subject: what checks are given, of a configured part and the accuracy asked for.
        checks: by name, in the order in which they run.
    """

    noun: str
    subject: Callable[..., Any]
    checks: dict[str, Check] = field(default_factory=dict)

    def check(
        self, mend: str, applies: Callable[[Any], bool] = lambda part: True
    ) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
        """A decorator that makes a function a check; ``mend``: what the author of a part that fails should change."""

        def register(run: Callable[[Any], None]) -> Callable[[Any], None]:
            self.checks[run.__name__] = Check(run.__name__, mend, _recorded(run), applies)
            return run

        return register


def _recorded(run: Callable[[Any], None]) -> Callable[[Any], None]:
    """A check that differentiates, in the precision of its problems, whoever calls it, and ends."""

    @functools.wraps(run)
    def recorded(subject: Any) -> None:
        with torch.inference_mode(False), torch.enable_grad(), full_precision("cpu"), limited():
            try:
                run(subject)
            except ConvergenceError as error:
                raise Unsolved(str(error)) from error
            except Endless as error:
                raise Unended(f"a solve does not end: {error}. {_ENDS}") from None

    return recorded


SOLVERS = Suite("solver", Subject)
"""Of solvers of fixed points, equations, minima, least squares and steady states."""

CHECKS = SOLVERS.checks
"""Every check of a solver by name, in the order in which they run."""

check = SOLVERS.check


def of_each_part(find: Callable[..., Any]) -> Callable[..., Any]:
    """The function, found once for each part that it is given, by identity: options of a part may have no hash."""
    known: deque[tuple[tuple[Any, ...], Any]] = deque(maxlen=_PARTS)

    @functools.wraps(find)
    def found(*part: Any) -> Any:
        for of, value in tuple(known):
            if all(a is b for a, b in zip(of, part, strict=True)):
                return value
        value = find(*part)
        known.append((part, value))
        return value

    return found


def close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Assert that ``got`` is within ``tolerance`` of what is ``wanted``, everywhere."""
    worst = float((got - wanted).detach().abs().max())
    assert worst <= tolerance, f"{what} is off by {worst:.3g} (allowed: {tolerance:.3g})"


def solved(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    """Assert :func:`close` of what every other check needs: without it they say nothing.

    Raises:
        Unsolved: it is not.
    """
    try:
        close(got, wanted, tolerance, what)
    except AssertionError as error:
        raise Unsolved(str(error)) from None


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
    if f"{solution.solver} raised " in solution.message:
        raise Unsolved(text, RAISES)
    if left < _NEAR:
        digits = 10.0 ** math.ceil(math.log10(max(left, 1e-300)) + 1)
        raise Unsolved(f"{text}. It comes near: |F| falls to {left:.0e} of what it was", _GO_ON.format(digits))
    raise Unsolved(text)
