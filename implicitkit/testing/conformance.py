"""Run the conformance suites, from Python, from pytest or from the command line."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from implicitkit.foundation.options import between, check_arguments, flag, instance, one_of, optional
from implicitkit.foundation.wording import place_of
from implicitkit.registry.table import TABLES
from implicitkit.solver.catalogue import get_solver
from implicitkit.testing.check import NATIVE, RAISES, RETURNS, Unended, Unsolved
from implicitkit.testing.checks import LINEAR_SOLVERS, PROGRAMS, RULES, SOLVERS, Check, Suite

_NUMBERS = re.compile(r"\d+")  # sizes of the problems of a check, which do not tell causes apart
_UNSOLVED, _ENDLESS = "unsolved", "endless"
_CAUSES: dict[type, str] = {Unsolved: _UNSOLVED, Unended: _ENDLESS}
_NOTHING = (
    "nothing was checked: no check that was asked for is for such a part. A solver of a kind of problem of your own is "
    "judged by the equations of that kind at every solve"
)
_OTHERS = Suite("solver", lambda part, accuracy: None)  # of problems that nobody here knows a solution of
_SUITES = dict.fromkeys(NATIVE, SOLVERS) | dict.fromkeys(("constrained", "quadratic_program"), PROGRAMS)
_FIRST = (  # they say whether anything is solved at all: what others see then is the same
    "finds_known_solutions",
    "solves_well_conditioned_systems",
    "comes_nearer",
    "gradient_is_exact",
    "gradient_points_the_same_way",
)
_CONVERGING = "what keeps this solve from converging"
_KINDS = ("solvers", "linear_solvers", "rules")

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
    """The results of all checks of one part; ``print`` it.

    ``solver``: its name.  ``noun``: what it is.
    """

    solver: str
    results: tuple[CheckResult, ...]
    noun: str = "solver"

    @property
    def passed(self) -> bool:
        """Did nothing fail that was not announced, and everything that was announced?"""
        return not self.failures

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The results that make the solver fail."""
        return tuple(r for r in self.results if r.outcome in ("failed", "unexpected"))

    def __str__(self) -> str:
        width = max((len(r.check) for r in self.results), default=0)
        failed, left_out = len(self.failures), sum(r.outcome == "skipped" for r in self.results)
        total = len(self.results) - left_out
        verdict = f"{failed} of {total} checks failed" if failed else f"all of {total} checks in order"
        verdict += f", {left_out} left out" if left_out else ""
        if not total:
            return f"{self.noun} {self.solver!r}: {_NOTHING}"
        lines = [f"{self.noun} {self.solver!r}: {verdict}"]
        told: dict[str, str] = {}  # which check has told of a cause
        for r in self.results:
            lines.append(f"  {r.check.ljust(width)}  {r.outcome:10}  {r.seconds:6.2f} s")
            cause = _NUMBERS.sub("", r.cause)
            if r.outcome == "failed" and cause in told:
                lines.append(f"      as in {told[cause]}: mend that first")
            elif r.outcome in ("failed", "unexpected"):
                if r.cause and (r.cause != _UNSOLVED or r.check in _FIRST):
                    told[cause] = r.check
                lines += [f"      saw:  {r.message}", f"      mend: {r.mend}"]
            elif r.message:
                lines.append(f"      {r.message}")
        return "\n".join(lines)


class ConformanceError(AssertionError):
    """A part failed checks; ``report`` has them all."""

    def __init__(self, report: ConformanceReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class SolverCheck:
    """One check, ready to be called with a part (what :func:`parametrize_with_checks` hands to a test)."""

    check: Check
    accuracy: float = ACCURACY

    def __call__(self, solver: Any) -> None:
        """Raise ``AssertionError`` with what was seen and what to mend, unless the part passes."""
        suite, part = _suite_of(solver, None)
        try:
            self.check.run(suite.subject(part, self.accuracy))
        except AssertionError as error:
            raise AssertionError(f"{error}\nmend: {_advice(self.check, error)}") from error

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
    return _report("check_solver", solver, "solvers", checks, accuracy, expected_failed_checks, raise_on_failure)


def check_linear_solver(
    linear_solver: Any,
    *,
    checks: Iterable[str] | None = None,
    accuracy: float = ACCURACY,
    expected_failed_checks: Mapping[str, str] | None = None,
    raise_on_failure: bool = True,
) -> ConformanceReport:
    """Run the conformance suite on a linear solver.

        ik.testing.check_linear_solver("my_linear_solver")

    The matrices have the structure that the solver ``needs``.

    Args:
        linear_solver: a registered name, a configured object or a ``LinearSolver`` subclass.
        accuracy: the tightest ``rtol`` in float64 that the solver is meant to reach.
        checks, expected_failed_checks, raise_on_failure: as in :func:`check_solver`.

    Returns:
        The :class:`ConformanceReport`.

    Raises:
        ConformanceError: a check failed. UnknownNameError, TypeError, ValueError: no such linear solver or check.
    """
    how = "check_linear_solver", linear_solver, "linear_solvers", checks, accuracy, expected_failed_checks
    return _report(*how, raise_on_failure)


def check_rule(
    rule: Any,
    *,
    solver: Any = "auto",
    checks: Iterable[str] | None = None,
    accuracy: float = ACCURACY,
    expected_failed_checks: Mapping[str, str] | None = None,
    raise_on_failure: bool = True,
) -> ConformanceReport:
    """Run the conformance suite on a rule.

        ik.testing.check_rule("my_rule")

    Its derivatives are compared with closed forms, of every kind of problem that the rule ``needs`` (all, if none) and does
    not refuse; those of a rule with ``exact = False`` have to point the same way.

    Args:
        rule: a registered name, a configured object or a ``Rule`` subclass.
        solver: what solves; for rules that need a certain one.
        accuracy: the tightest relative tolerance in float64 that the derivative is meant to reach.
        checks, expected_failed_checks, raise_on_failure: as in :func:`check_solver`.

    Returns:
        The :class:`ConformanceReport`.

    Raises:
        ConformanceError: a check failed. UnknownNameError, TypeError, ValueError: no such rule, solver or check.
    """
    how = "check_rule", rule, "rules", checks, accuracy, expected_failed_checks
    return _report(*how, raise_on_failure, solver=solver if solver == "auto" else get_solver(solver))


def _suite_of(part: Any, kind: str | None) -> tuple[Suite, Any]:
    """The checks of a part, and the part configured; ``kind``: where its name stands (a name is a solver's, if not said)."""
    if not __debug__:
        raise RuntimeError("the checks are assertions, which python -O (PYTHONOPTIMIZE) leaves out: run without it")
    if isinstance(part, Tensor):  # which has a method "solve"
        raise TypeError("a tensor is not a solver, linear solver or rule")
    if kind is None and not isinstance(part, str):
        kind = "rules" if hasattr(part, "attach") else None
        kind = kind or ("linear_solvers" if hasattr(part, "solve") and not hasattr(part, "run") else None)
    if kind == "rules":
        return RULES, TABLES[kind].get(part, {}, "attach", "implicitkit.Implicit(linear_solver='gmres')")
    if kind == "linear_solvers":
        return LINEAR_SOLVERS, TABLES[kind].get(part, {}, "solve", "implicitkit.linear.GMRES(restart=20)")
    configured = get_solver(part)
    return _SUITES.get(configured.solves, _OTHERS), configured


def _report(
    of: str,
    part: Any,
    kind: str,
    checks: Iterable[str] | None,
    accuracy: float,
    given: Mapping[str, str] | None,
    raise_on_failure: bool,
    **options: Any,
) -> ConformanceReport:
    """Run checks one after another, as long as they end."""
    suite, configured = _suite_of(part, kind)
    expected = _expected(of, given, accuracy, suite)
    check_arguments(of, raise_on_failure=(flag(), raise_on_failure))
    if isinstance(checks, str) or not (checks is None or isinstance(checks, Iterable)):
        raise TypeError(f"{of}: checks must be a list of names of checks, or None for all; got {checks!r}")
    names = list(suite.checks) if checks is None else list(checks)
    for name in names:
        _check_name(name, suite)
    if checks is not None and not names:
        raise ValueError(f"{of}: checks is empty; None runs all of them")
    subject = suite.subject(configured, accuracy, **options)
    label = part if isinstance(part, str) else getattr(configured, "name", "") or type(configured).__name__
    results: list[CheckResult] = []
    for name in names:
        if any(result.cause == _ENDLESS for result in results):
            results.append(CheckResult(name, "skipped", "not run: a solve does not end", suite.checks[name].mend, 0.0))
        else:
            results.append(_run(suite.checks[name], subject, expected.get(name)))
    report = ConformanceReport(label, tuple(results), suite.noun)
    if raise_on_failure and not report.passed:
        raise ConformanceError(report)
    return report


def _expected(of: str, given: Any, accuracy: Any, *suites: Suite) -> dict[str, str]:
    """Which checks are known to fail, and why; raises for what cannot be."""
    check_arguments(
        of,
        accuracy=(between(0, 1), accuracy),
        expected_failed_checks=(optional(instance("a dict, {check: why it fails}", Mapping)), given),
    )
    for name in given or ():
        _check_name(name, *suites)
    return dict(given or {})


def _check_name(name: Any, *suites: Suite) -> None:
    if not any(name in suite.checks for suite in suites):
        there = dict.fromkeys(check for suite in suites for check in suite.checks)
        raise ValueError(f"there is no check {name!r}; the checks are {', '.join(there) or 'none'}")


def _run(check: Check, subject: Any, expected: str | None) -> CheckResult:
    start = time.perf_counter()
    outcome, message, cause, mend = "passed", "", "", check.mend
    try:
        if check.applies(subject.part):
            check.run(subject)
        else:
            outcome, message = "skipped", "does not apply to it"
    except AssertionError as error:
        outcome, message = "failed", str(error)
        cause, mend = _CAUSES.get(type(error), ""), _advice(check, error)
    except (Exception, SystemExit) as error:  # a solver may do anything
        defined = _definition(subject.part)
        place = place_of(error, defined)
        outcome, cause = "failed", f"{type(error).__name__}: {error}"
        message, mend = f"{cause} ({place})", RETURNS if defined and place == defined else RAISES
        mend += "" if check.name in _FIRST else f"; often: {check.mend}"
    if expected is not None:
        if outcome == "failed":
            outcome, message = "expected", f"{expected}: {message}"
        elif outcome == "passed":
            outcome, message = "unexpected", f"announced to fail ({expected}), but it passed: take it off the list"
    return CheckResult(check.name, outcome, message, mend, time.perf_counter() - start, cause)


def _advice(check: Check, error: AssertionError) -> str:
    """What to mend: as the error tells; where a solve ended that others had passed, there was nothing yet to see."""
    told: str = getattr(error, "mend", "")
    early = isinstance(error, Unsolved) and check.name not in _FIRST
    return told or (f"{_CONVERGING}; often: {check.mend}" if early else check.mend)


def _definition(part: Any) -> str:
    """Where somebody else's part begins, for what it returned: no line of it is running when that is looked at."""
    written = inspect.unwrap(getattr(part, "find", None) or type(part))
    try:
        file, line = inspect.getsourcefile(written), inspect.getsourcelines(written)[1]
    except (OSError, TypeError):  # typed into a prompt
        return ""
    ours = written.__module__.partition(".")[0] == "implicitkit"
    return "" if ours else f"{file}:{line}, {written.__name__}"


def parametrize_with_checks(
    solvers: Iterable[Any],
    *,
    kind: str | None = None,
    accuracy: float = ACCURACY,
    expected_failed_checks: Mapping[str, str] | None = None,
) -> Any:
    """A pytest decorator: one test for each part and check, in the manner of scikit-learn.

        @ik.testing.parametrize_with_checks(["my_solver", MySolver(memory=3)])
        def test_conformance(solver, check):
            check(solver)

    Args:
        solvers: names or configured objects: solvers, linear solvers, rules.
        kind: whose names these are: ``"solvers"`` (default), ``"linear_solvers"`` or ``"rules"``; objects say it themselves.
        accuracy, expected_failed_checks: as in :func:`check_solver`.

    Returns:
        A ``pytest.mark.parametrize`` with the arguments ``solver`` and ``check``.

    Raises:
        UnknownNameError: no part has a name. ImportError: pytest is not installed.
    """
    import pytest

    check_arguments("parametrize_with_checks", kind=(optional(one_of(*_KINDS)), kind))
    if isinstance(solvers, str) or not isinstance(solvers, Iterable):
        raise TypeError(f"parametrize_with_checks: solvers must be a list of solvers, got {solvers!r}")
    parts = [(part if isinstance(part, str) else repr(part), *_suite_of(part, kind)) for part in solvers]
    suites = [suite for _, suite, _ in parts]
    expected = _expected("parametrize_with_checks", expected_failed_checks, accuracy, *suites)
    rows = []
    for label, suite, configured in parts:
        for check in suite.checks.values():
            if not check.applies(configured):
                continue
            marks = [pytest.mark.xfail(reason=expected[check.name], strict=True)] if check.name in expected else []
            rows.append(pytest.param(configured, SolverCheck(check, accuracy), id=f"{label}-{check.name}", marks=marks))
    return pytest.mark.parametrize(("solver", "check"), rows)
