"""One cell, one map: what would differ between two evaluations is held still during a solve, or done once."""
