"""Run the conformance suite on a solver, from Python, from pytest or from the command line."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from implicitkit.foundation.options import between, check_arguments, flag, instance, optional
from implicitkit.solver.catalogue import get_solver
from implicitkit.testing.check import Unended, Unsolved
from implicitkit.testing.checks import CHECKS, Check, Subject

__all__ = [
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "SolverCheck",
    "check_solver",
    "parametrize_with_checks",
]

_UNSOLVED, _ENDLESS = "unsolved", "endless"
_CAUSES: dict[type, str] = {Unsolved: _UNSOLVED, Unended: _ENDLESS}
_NOTHING = (
    "nothing was checked: no check that was asked for is for such a solver. Those of constrained problems and programs are "
    "judged by the optimality conditions at every solve; compare yours with what solver='auto' finds"
)
_FIRST = next(iter(CHECKS))  # says whether known problems are solved at all

ACCURACY = 1e-10
"""The tightest relative tolerance asked of a solver unless told otherwise (float64)."""


@dataclass(frozen=True)
class CheckResult:
    """What came of one check.

    ``outcome``: ``"passed"``, ``"failed"``, ``"skipped"`` (does not apply), ``"expected"`` (failed, as announced) or
    ``"unexpected"`` (announced to fail, but passed).  ``message``: what was seen.  ``mend``: what to change.  ``cause``:
    what makes several checks fail alike: ``"unsolved"``, ``"endless"``, or an exception of the solver.
    """

    check: str
    outcome: str
    message: str
    mend: str
    seconds: float
    cause: str = ""


@dataclass(frozen=True)
class ConformanceReport:
    """The results of all checks of one solver; ``print`` it."""

    solver: str
    results: tuple[CheckResult, ...]

    @property
    def passed(self) -> bool:
        """Did nothing fail that was not announced, and everything that was announced?"""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The results that make the solver fail."""
        return tuple(r for r in self.results if r.outcome in ("failed", "unexpected"))

    def __str__(self) -> str:
        width = max(len(r.check) for r in self.results)
        failed, left_out = len(self.failures), sum(r.outcome == "skipped" for r in self.results)
        total = len(self.results) - left_out
        verdict = f"{failed} of {total} checks failed" if failed else f"all of {total} checks in order"
        verdict += f", {left_out} left out" if left_out else ""
        if not total:
            return f"solver {self.solver!r}: {_NOTHING}"
        lines = [f"solver {self.solver!r}: {verdict}"]
        told: dict[str, str] = {}  # which check has told of a cause
        for r in self.results:
            lines.append(f"  {r.check.ljust(width)}  {r.outcome:10}  {r.seconds:6.2f} s")
            if r.outcome == "failed" and r.cause in told:
                lines.append(f"      as in {told[r.cause]}: mend that first")
            elif r.outcome in ("failed", "unexpected"):
                if r.cause and (r.cause != _UNSOLVED or r.check == _FIRST):
                    told[r.cause] = r.check
                raised = r.cause not in ("", *_CAUSES.values())
                lines += [f"      saw:  {r.message}", f"      mend: {'what raises this' if raised else r.mend}"]
            elif r.message:
                lines.append(f"      {r.message}")
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """A solver failed checks; ``report`` has them all."""

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class SolverCheck:
    """One check, ready to be called with a solver (what :func:`parametrize_with_checks` hands to a test)."""

    check: Check
    accuracy: float = ACCURACY

    def __call__(self, solver: Any) -> None:
        """Raise ``AssertionError`` with what was seen and what to mend, unless the solver passes."""
        try:
            self.check.run(Subject(get_solver(solver), self.accuracy))
        except AssertionError as error:
            raise AssertionError(f"{error}\nmend: {self.check.mend}") from error

    def __str__(self) -> str:
        return self.check.name


def check_solver(
    solver: Any,
    *,
    checks: Iterable[str] | None = None,
    accuracy: float = ACCURACY,
    expected_failed_checks: Mapping[str, str] | None = None,
    raise_on_failure: bool = True,
) -> ConformanceReport:
    """Run the conformance suite on a solver.

        ik.testing.check_solver("my_solver")
        ik.testing.check_solver(MySolver(memory=3), accuracy=1e-6)

    Args:
        solver: a registered name, a configured object, a ``Method`` subclass or a registered function.
        checks: names of the checks to run (default: all; ``ik.testing.CHECKS`` lists them).
        accuracy: the tightest relative tolerance in float64 that the solver is meant to reach.
        expected_failed_checks: by name of check, why it is known to fail.  Such a failure is reported, not raised; if
            the check passes after all, that is raised.
        raise_on_failure: raise; else only return the report.

    Returns:
        The :class:`ConformanceReport`.

    Raises:
        ConformanceError: a check failed (the message has every failure, what was seen and what to mend).
        UnknownNameError, TypeError, ValueError: no such solver or check.
    """
    configured = get_solver(solver)
    expected = _expected("check_solver", expected_failed_checks, accuracy)
    check_arguments("check_solver", raise_on_failure=(flag(), raise_on_failure))
    if isinstance(checks, str) or not (checks is None or isinstance(checks, Iterable)):
        raise TypeError(f"check_solver: checks must be a list of names of checks, or None for all; got {checks!r}")
    names = list(CHECKS) if checks is None else list(checks)
    for name in names:
        _check_name(name)
    if not names:
        raise ValueError("check_solver: checks is empty; None runs all of them")
    subject = Subject(configured, accuracy)
    label = solver if isinstance(solver, str) else getattr(configured, "name", "") or type(configured).__name__
    results: list[CheckResult] = []
    for name in names:
        if any(result.cause == _ENDLESS for result in results):
            results.append(CheckResult(name, "skipped", "not run: a solve does not end", CHECKS[name].mend, 0.0))
        else:
            results.append(_run(CHECKS[name], subject, expected.get(name)))
    report = ConformanceReport(label, tuple(results))
    if raise_on_failure and not report.passed:
        raise ConformanceError(report)
    return report


def _expected(of: str, given: Any, accuracy: Any) -> dict[str, str]:
    """Which checks are known to fail, and why; raises for what cannot be."""
    check_arguments(
        of,
        accuracy=(between(0, 1), accuracy),
        expected_failed_checks=(optional(instance("a dict, {check: why it fails}", Mapping)), given),
    )
    for name in given or ():
        _check_name(name)
    return dict(given or {})


def _check_name(name: Any) -> None:
    if name not in CHECKS:
        raise ValueError(f"there is no check {name!r}; the checks are {', '.join(CHECKS)}")


def _run(check: Check, subject: Subject, expected: str | None) -> CheckResult:
    start = time.perf_counter()
    outcome, message, cause = "passed", "", ""
    try:
        if check.applies(subject.solver):
            check.run(subject)
        else:
            outcome, message = "skipped", "does not apply to this solver"
    except AssertionError as error:
        outcome, message = "failed", str(error)
        cause = _CAUSES.get(type(error), "")
    except Exception as error:  # a solver may do anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        outcome, cause = "failed", f"{type(error).__name__}: {error}"
        message = f"{cause} ({place.filename}:{place.lineno}, in {place.name})"
    if expected is not None:
        if outcome == "failed":
            outcome, message = "expected", f"{expected}: {message}"
        elif outcome == "passed":
            outcome, message = "unexpected", f"announced to fail ({expected}), but it passed: take it off the list"
    return CheckResult(check.name, outcome, message, check.mend, time.perf_counter() - start, cause)


def parametrize_with_checks(
    solvers: Iterable[Any], *, accuracy: float = ACCURACY, expected_failed_checks: Mapping[str, str] | None = None
) -> Any:
    """A pytest decorator: one test for each solver and check, in the manner of scikit-learn.

        @ik.testing.parametrize_with_checks(["my_solver", MySolver(memory=3)])
        def test_conformance(solver, check):
            check(solver)

    Args:
        solvers: names or configured objects. accuracy, expected_failed_checks: as in :func:`check_solver`.

    Returns:
        A ``pytest.mark.parametrize`` with the arguments ``solver`` and ``check``.

    Raises:
        UnknownNameError: no solver has a name. ImportError: pytest is not installed.
    """
    import pytest

    expected = _expected("parametrize_with_checks", expected_failed_checks, accuracy)
    if isinstance(solvers, str) or not isinstance(solvers, Iterable):
        raise TypeError(f"parametrize_with_checks: solvers must be a list of solvers, got {solvers!r}")
    rows = []
    for solver in solvers:
        label = solver if isinstance(solver, str) else repr(solver)
        configured = get_solver(solver)
        for check in CHECKS.values():
            if not check.applies(configured):
                continue
            marks = [pytest.mark.xfail(reason=expected[check.name], strict=True)] if check.name in expected else []
            rows.append(pytest.param(configured, SolverCheck(check, accuracy), id=f"{label}-{check.name}", marks=marks))
    return pytest.mark.parametrize(("solver", "check"), rows)
