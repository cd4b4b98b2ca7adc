"""Solvers of the canonical program, one file each, behind one function (:func:`solve`)."""

from implicitkit_cvxpy.backends.base import Data, Found, Status
from implicitkit_cvxpy.backends.choice import Backend, resolve

__all__ = ["Backend", "Data", "Found", "Status", "resolve"]
