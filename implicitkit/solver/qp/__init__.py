"""Solvers of quadratic programs: one file a method."""

from implicitkit.solver.qp.plain import solve_qp

__all__ = ["solve_qp"]
