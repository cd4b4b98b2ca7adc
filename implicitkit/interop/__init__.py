"""Solvers of other libraries as registered solvers: one file a library."""

from implicitkit.interop import integrate, scipy

__all__ = ["integrate", "scipy"]
