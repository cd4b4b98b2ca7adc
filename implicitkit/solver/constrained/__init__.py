"""Solvers of constrained and composite minimisation: one file a method."""
