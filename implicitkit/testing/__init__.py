"""Tools for testing problems and solvers."""
