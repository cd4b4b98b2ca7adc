"""The checks of the conformance suite: importing this module collects them, in the order in which they run.

Nothing in them looks inside a solver but the two checks of ``Method.init`` and ``Method.step``.
"""

from implicitkit.testing import answers, conduct
from implicitkit.testing.check import CHECKS, Check, Subject

__all__ = ["CHECKS", "Check", "Subject", "answers", "conduct"]
