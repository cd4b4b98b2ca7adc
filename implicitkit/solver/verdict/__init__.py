"""What "converged" means: whether a point is a solution, a minimum, the end of a run to infinity, or rounding."""
