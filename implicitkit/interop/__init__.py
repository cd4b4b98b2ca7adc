"""Solvers of other libraries as registered solvers: one file a library."""

from implicitkit.interop import integrate, scipy, scipy_constrained

__all__ = ["integrate", "scipy", "scipy_constrained"]
