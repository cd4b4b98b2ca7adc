"""Linear systems by factors: dense and sparse, ours and other packages'."""
