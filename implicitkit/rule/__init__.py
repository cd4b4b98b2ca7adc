"""How the derivative of a solution is formed: one file a family of rules."""

from implicitkit.rule.base import Request, Rule
from implicitkit.rule.implicit import Implicit
from implicitkit.rule.series import Neumann, OneStep, Phantom
from implicitkit.rule.unroll import Unroll

__all__ = ["Implicit", "Neumann", "OneStep", "Phantom", "Request", "Rule", "Unroll"]
