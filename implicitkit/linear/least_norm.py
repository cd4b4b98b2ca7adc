r"""The solution of least norm of a singular sparse system that has solutions, by factors.

    minimise  |x|^2 / 2   subject to   A x = b:        [ I   A' ] [ x ]   [ 0 ]
                                                       [ A   0  ] [ w ] = [ b ]

``x`` is unique although ``w`` is not where rows of ``A`` depend on each other.  The matrix is regularised,
``diag(rho, -delta)``, factored as a quasi-definite one, and refinement takes out again what that has put in, since ``b`` is
in the range of ``A`` (:mod:`implicitkit.linear.sparse_saddle`).  Where it is not, or singular values are so small that
``delta`` hides them, a residual is left: whoever asks judges it.

Source: Saunders (1995), "Solution of sparse rectangular systems using LSQR and Craig", BIT 35, section 4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.linear.sparse_blocks import SparseBlocks
from implicitkit.linear.sparse_saddle import Layout, SparseSaddle

__all__ = ["least_norm"]

_ROUNDS = 3  # of refinement, each of several sweeps


def least_norm(blocks: Any, b: Tensor) -> Tensor | None:
    """``A^+ b`` of every block, ``(batch, n)``, NaN where there are no factors; ``None`` of matrices that are not sparse."""
    if not isinstance(blocks, SparseBlocks):
        return None
    rhs = b.detach().to(device="cpu", dtype=torch.float64).numpy()
    x = np.full(rhs.shape, np.nan)
    for i, values in enumerate(blocks.values):
        if not rhs[i].any():
            x[i] = 0.0
        elif np.isfinite(rhs[i]).all():
            A = blocks.ready.matrix(values)
            x[i] = _one(sp.csc_matrix(A.T if blocks.transposed else A), rhs[i])
    return torch.from_numpy(x).to(b)


def _one(A: sp.csc_matrix, b: np.ndarray) -> np.ndarray:
    n = A.shape[0]
    K = sp.bmat([[sp.identity(n), A.T], [A, sp.identity(n)]], format="csc")
    K.sort_indices()
    layout = Layout(K)
    K.data[layout.diagonal[n:]] = 0.0  # there, and zero
    saddle = SparseSaddle(K, n, layout=layout)
    right, found = np.concatenate([np.zeros(n), b]), np.zeros(2 * n)
    for _ in range(_ROUNDS):
        more, left = saddle.solve(right - K @ found)
        if not np.isfinite(left):
            return np.full(n, np.nan)
        found = found + more
    return found[:n]
