"""Solvers of the canonical program, one file each, behind one function (:func:`solve`)."""

from implicitkit_cvxpy.backends.base import Data, Found, Status
from implicitkit_cvxpy.backends.choice import Backend, resolve, takes_dense
from implicitkit_cvxpy.backends.quadratic import active_rows

__all__ = ["Backend", "Data", "Found", "Status", "active_rows", "resolve", "takes_dense"]
