"""Linear systems by products with the matrix: Krylov methods, series, and what preconditions them."""
