"""How a point is found: one file a method."""

from implicitkit.solvers.anderson import Anderson
from implicitkit.solvers.base import BlackBox, Direct, Found, Method
from implicitkit.solvers.gradient_descent import GradientDescent
from implicitkit.solvers.lbfgs import LBFGS
from implicitkit.solvers.newton import Newton
from implicitkit.solvers.picard import Picard

__all__ = ["LBFGS", "Anderson", "BlackBox", "Direct", "Found", "GradientDescent", "Method", "Newton", "Picard"]
