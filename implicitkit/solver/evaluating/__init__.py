"""What :class:`~implicitkit.solver.evaluations.Evaluations` is made of: what each kind of problem is asked at a point."""
