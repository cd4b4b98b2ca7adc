"""The checks of the conformance suites: importing this module collects them, in the order in which they run.

Nothing in them looks inside a part but the two checks of ``Method.init`` and ``Method.step``.
"""

from implicitkit.testing import answers, conduct, unpolished
from implicitkit.testing.check import CHECKS, SOLVERS, Check, Subject, Suite
from implicitkit.testing.linear import LINEAR_SOLVERS
from implicitkit.testing.programs import PROGRAMS
from implicitkit.testing.rules import RULES

__all__ = [
    "CHECKS",
    "LINEAR_SOLVERS",
    "PROGRAMS",
    "RULES",
    "SOLVERS",
    "Check",
    "Subject",
    "Suite",
    "answers",
    "conduct",
    "unpolished",
]
