"""Solvers of quadratic programs: one file a method."""
