"""Sparsity of Jacobians: found by watching one evaluation, coloured, and compressed into a few products.

Modules here import NumPy and SciPy; they are imported at the first use.
"""
