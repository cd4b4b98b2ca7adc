"""Sets and their Euclidean projections in closed form: one file a family."""
