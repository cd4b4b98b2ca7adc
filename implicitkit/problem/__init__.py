"""What must hold at the solution: one file a problem; :mod:`~implicitkit.problem.builtin` registers ours."""
