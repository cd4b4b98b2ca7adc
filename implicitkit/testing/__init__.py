"""The conformance suites: is my solver, linear solver or rule right, honest, batched, deterministic?

    import implicitkit as ik
    ik.testing.check_solver("my_solver")                            # raises with what to mend
    ik.testing.check_linear_solver("my_linear_solver")
    ik.testing.check_rule("my_rule")

    @ik.testing.parametrize_with_checks(["my_solver"])              # one pytest test a check
    def test_conformance(solver, check):
        check(solver)

or ``python -m implicitkit check my_solver``.
"""

from implicitkit.testing.checks import CHECKS, Check
from implicitkit.testing.conformance import (
    CheckResult,
    ConformanceError,
    ConformanceReport,
    SolverCheck,
    check_linear_solver,
    check_rule,
    check_solver,
    parametrize_with_checks,
)
from implicitkit.testing.known import Known, known_problems

__all__ = [
    "CHECKS",
    "Check",
    "CheckResult",
    "ConformanceError",
    "ConformanceReport",
    "Known",
    "SolverCheck",
    "check_linear_solver",
    "check_rule",
    "check_solver",
    "known_problems",
    "parametrize_with_checks",
]
