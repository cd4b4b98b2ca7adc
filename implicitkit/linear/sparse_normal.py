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
        self.N = [(A.T @ A).tocsc() for A in self.R]
        self.columns = self._tensor(np.stack([np.sqrt(N.diagonal()) for N in self.N]))
        self.D = np.ones(self.columns.shape)

    def restrict(self, free: Tensor) -> None:
        """Only these unknowns are solved for from now on, ``(batch, n)`` bool."""
        kept = [sp.diags(row.astype(float)) for row in free.cpu().numpy()]
        self.N = [(S @ N @ S).tocsc() for S, N in zip(kept, self.N, strict=True)]

    def scale(self, D: Tensor) -> None:
        """The unknowns are measured in units of ``1 / D`` from now on."""
        self.D = self._array(D)
        inverse = [sp.diags(1 / d) for d in self.D]
        self.N = [(S @ N @ S).tocsc() for S, N in zip(inverse, self.N, strict=True)]

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
            lu = _factor((N + shift[i] * sp.identity(N.shape[0], format="csc")).tocsc())
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


def _factor(N: sp.csc_matrix) -> Any:
    try:
        return sla.splu(N, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    except RuntimeError:  # "Factor is exactly singular"
        return None
