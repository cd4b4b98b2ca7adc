"""How the derivative of a solution is formed: one file a family of rules."""

from implicitkit.rules.base import Request, Rule
from implicitkit.rules.implicit import Implicit
from implicitkit.rules.series import Neumann, OneStep, Phantom
from implicitkit.rules.unroll import Unroll

__all__ = ["Implicit", "Neumann", "OneStep", "Phantom", "Request", "Rule", "Unroll"]
