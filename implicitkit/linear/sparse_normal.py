r"""Sparse normal equations ``(R'R + \mu D^2) p = -g``, sample by sample, by SuperLU with diagonal pivots.

The matrix is symmetric and, for ``\mu > 0``, definite: the minimum degree ordering of its own pattern, no pivoting.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from implicitkit.linear.sparse_factors import SYMMETRIC
from implicitkit.sparsity.compression import Coloured

__all__ = ["SparseNormal"]

_SWEEPS = 5


class SparseNormal:
    """``R'R`` of every sample.

    Args:
        ready: the pattern of ``R``, ``(m, n)``. values: its entries, ``(batch, nnz)``. like: a tensor ``(batch, n)``.

    Attributes:
        columns: the norms of the columns of ``R``, ``(batch, n)``.
    """

    def __init__(self, ready: Coloured, values: np.ndarray, like: Tensor) -> None:
        self.like = like
        self.R = [ready.matrix(v) for v in values]
        self.N = [_with_diagonal(A) for A in self.R]
        self.columns = self._tensor(np.stack([np.sqrt(N.diagonal()) for N in self.N]))
        self.D = np.ones(self.columns.shape)

    def restrict(self, free: Tensor) -> None:
        """Only these unknowns are solved for from now on, ``(batch, n)`` bool."""
        for N, row in zip(self.N, free.cpu().numpy(), strict=True):
            _both_sides(N, row.astype(float))

    def scale(self, D: Tensor) -> None:
        """The unknowns are measured in units of ``1 / D`` from now on."""
        self.D = self._array(D)
        for N, d in zip(self.N, self.D, strict=True):
            _both_sides(N, 1 / d)

    def largest(self) -> Tensor:
        """The largest eigenvalue of ``D^-1 R'R D^-1``, about, by a few steps of the power method; ``(batch,)``."""
        sizes = np.zeros(len(self.N))
        for i, N in enumerate(self.N):
            v = np.ones(N.shape[0])
            for _ in range(_SWEEPS):
                v = N @ v
                sizes[i] = np.linalg.norm(v)
                v = v / (sizes[i] or 1.0)
        return self._tensor(sizes)

    def solve(self, mu: Tensor, g: Tensor) -> Tensor:
        """``p`` with ``(R'R + mu D^2) p = -g``; NaN where SuperLU meets a pivot that is zero."""
        rhs, shift = -self._array(g) / self.D, self._array(mu)
        p = np.full(rhs.shape, np.nan)
        for i, N in enumerate(self.N):
            if not (np.isfinite(N.data).all() and np.isfinite(rhs[i]).all() and np.isfinite(shift[i])):
                continue
            shifted = N.copy()
            shifted.data[_columns_of(N) == N.indices] += shift[i]
            lu = _factor(shifted)
            if lu is not None:
                p[i] = lu.solve(rhs[i]) / self.D[i]
        return self._tensor(p)

    def times(self, p: Tensor) -> Tensor:
        """``R p``, ``(batch, m)``."""
        rows = self._array(p)
        return self._tensor(np.stack([R @ v for R, v in zip(self.R, rows, strict=True)]))

    def _array(self, t: Tensor) -> np.ndarray:
        array: np.ndarray = t.detach().to(device="cpu", dtype=torch.float64).numpy()
        return array

    def _tensor(self, a: np.ndarray) -> Tensor:
        return torch.from_numpy(a).to(self.like)


def _with_diagonal(R: sp.csr_matrix) -> sp.csc_matrix:
    """``R'R`` in which every entry of the diagonal is there, be it zero."""
    N = (R.T @ R).tocsc()
    N.sort_indices()
    hollow = np.flatnonzero(np.bincount(N.indices[N.indices == _columns_of(N)], minlength=N.shape[0]) == 0)
    if len(hollow):
        values, rows = np.append(N.data, np.zeros(len(hollow))), np.append(N.indices, hollow)
        N = sp.csc_matrix((values, (rows, np.append(_columns_of(N), hollow))), shape=N.shape)
    return N


def _columns_of(N: sp.csc_matrix) -> np.ndarray:
    """The column of every entry."""
    return np.repeat(np.arange(N.shape[1], dtype=N.indices.dtype), np.diff(N.indptr))


def _both_sides(N: sp.csc_matrix, d: np.ndarray) -> None:
    """``N <- diag(d) N diag(d)``."""
    N.data *= d[N.indices] * d[_columns_of(N)]


def _factor(N: sp.csc_matrix) -> Any:
    try:
        return sla.splu(N, diag_pivot_thresh=0.0, **SYMMETRIC)
    except RuntimeError:  # "Factor is exactly singular"
        return None
