"""Solvers of other libraries as registered solvers: one file a library."""

from implicitkit.interop import scipy

__all__ = ["scipy"]
