r"""Sparse matrices with a few numbers that all unknowns share, ``J = A + U S V``, and their factors, by a border.

    E = [ A    U ]      E [x]  =  [b]    =>    J x = b,   s = S V x;        A  (n, n),   U  (n, k),   V  (k, n),
        [ V   -S ]        [s]     [0]                                       S = diag(+-1)

``E`` is sparse where ``J`` is full; no factors of ``A`` itself are needed, which may be singular although ``J`` is not.
Of a symmetric ``J`` the border is symmetric, ``U = V'``, and ``E`` has as many negative eigenvalues as ``J`` and ``-S``
together (Haynsworth 1968, Linear Algebra Appl. 1).

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), section 2.1.4 (Sherman-Morrison-Woodbury); Duff, Erisman &
Reid, *Direct Methods for Sparse Matrices* (2nd ed., 2017), section 15.4 (low-rank parts kept apart).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation.operators import MatVec
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.sparsity.compression import Coloured, known_entries
from implicitkit.sparsity.low_rank import Bordered, Entries


class LowRankBlocks:
    """``batch`` matrices ``(n, n)``, or their transposed, with the interface of :class:`SparseBlocks`.

    Args:
        extended: the matrices ``E``. signs: the diagonals of ``S``, ``(batch, k)``.
        found: pattern and entries that they are made of; of those made from others ``None``.
    """

    def __init__(self, extended: SparseBlocks, signs: Tensor, found: tuple[Bordered, Entries] | None = None) -> None:
        self.extended, self.signs, self.found = extended, signs, found
        self.border = signs.shape[1]
        self.n = extended.ready.shape[0] - self.border

    @property
    def T(self) -> LowRankBlocks:
        """The transposed matrices; they share the factors."""
        return LowRankBlocks(self.extended.T, self.signs)

    @property
    def batch(self) -> int:
        """How many matrices."""
        return self.extended.batch

    @property
    def factor(self) -> Any:
        """LU factors of every ``E``."""
        return self.extended.factor

    @property
    def regular(self) -> bool:
        """Have they been factored, and none is singular?"""
        return self.extended.regular

    def factored(self, factorise: Callable[[sp.csc_matrix], Any]) -> LowRankBlocks:
        """These matrices, every ``E`` factored by ``factorise``."""
        return LowRankBlocks(self.extended.factored(factorise), self.signs)

    @property
    def diagonal(self) -> Tensor:
        """``(batch, n)``."""
        return torch.from_numpy(np.stack([A.diagonal() + (U * V.T).sum(1) for A, U, V in self._parts()]))

    @property
    def columns(self) -> Tensor:
        """The norms of the columns, ``(batch, n)``."""
        norms = []
        for A, U, V in self._parts():
            squares = np.asarray(A.multiply(A).sum(0)).reshape(-1) + 2 * ((A.T @ U) * V.T).sum(1)
            norms.append(np.sqrt(np.maximum(squares + (V * (U.T @ U @ V)).sum(0), 0)))
        return torch.from_numpy(np.stack(norms))

    def _parts(self) -> Iterator[tuple[sp.csc_matrix, np.ndarray, np.ndarray]]:
        """``A``, ``U S`` and ``V`` of every matrix."""
        whole, n = self.extended.ready.stacked(self.extended.values), self.n
        size = whole.shape[0] // self.batch
        for i, sign in enumerate(self.signs.numpy()):
            E = whole[i * size : (i + 1) * size, i * size : (i + 1) * size]
            E = sp.csc_matrix(E.T if self.extended.transposed else E)
            yield E[:n, :n], E[:n, n:].toarray() * sign, E[n:, :n].toarray()

    def shifted(self, shift: Tensor, scale: Tensor) -> LowRankBlocks:
        """``shift I + scale J``, each ``(batch,)``: the rows above the border, ``shift I + scale A`` and ``scale U``; or
        ``diag(shift) + scale J``, ``shift`` ``(batch, n)``."""
        other = self.extended.shifted(shift if shift.ndim == 1 else self._longer(shift), scale)
        below = self.extended.values[:, self.extended.ready.pattern.indptr[self.n] :]  # may be none
        other.values[:, other.values.shape[1] - below.shape[1] :] = below
        return LowRankBlocks(other, self.signs)

    def solve(self, b: Tensor) -> Tensor:
        """``J x = b``, ``(batch, n)`` or ``(batch, n, k)``; NaN for a singular matrix."""
        return self.extended.solve(self._longer(b))[:, : self.n]

    def product(self, x: Tensor) -> Tensor:
        """``J x``, ``(batch, n)`` or ``(batch, n, k)``, by the matrices themselves."""
        signs = self.signs.to(x)
        signs = signs if x.ndim == 2 else signs.unsqueeze(2)
        return self._twice(self.extended.product, x, signs)

    def products(self, dtype: torch.dtype) -> tuple[MatVec, MatVec]:
        """``v -> J v`` and ``w -> J' w``, as those of :class:`SparseBlocks`."""
        forth, back = self.extended.products(dtype)
        signs = self.signs.to(dtype)
        return lambda v: self._twice(forth, v, signs), lambda w: self._twice(back, w, signs)

    def some(self, samples: Tensor) -> LowRankBlocks:
        """The matrices of these samples ``(k,)``."""
        return LowRankBlocks(self.extended.some(samples), self.signs[samples])

    def size(self, x: Tensor) -> Tensor:
        """``|A| |x| + |U| |V| |x|``, shaped as ``x``."""
        return self._twice(self.extended.size, x.abs(), x.new_ones(()))

    def _twice(self, times: Callable[[Tensor], Tensor], x: Tensor, signs: Tensor) -> Tensor:
        longer = self._longer(x)
        longer[:, self.n :] = signs * times(longer)[:, self.n :]
        return times(longer)[:, : self.n]

    def _longer(self, b: Tensor) -> Tensor:
        return torch.cat([b, b.new_zeros(len(b), self.border, *b.shape[2:])], 1)


def low_rank_blocks(ready: Bordered, entries: Entries, symmetric: bool) -> LowRankBlocks:
    """From the entries of ``A + U V``; ``symmetric``: it is.

    Then the border is that of :func:`symmetric_border`.
    """
    batch, _, k = entries.U.shape
    U, V, signs = entries.U, entries.V, np.ones((batch, k))
    if symmetric:
        V, signs = symmetric_border(entries)
        U = V.transpose(0, 2, 1)
    pattern, places = ready.analysed(_extended, k)
    values = np.empty((batch, pattern.pattern.nnz))
    values[:, places] = np.concatenate([entries.A, U.reshape(batch, -1), V.reshape(batch, -1), -signs], 1)
    return LowRankBlocks(SparseBlocks(pattern, values), torch.from_numpy(signs), (ready, entries))


def symmetric_border(entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    """``V`` ``(batch, k, n)`` and ``S`` ``(batch, k)`` of symmetric matrices ``A + V' diag(S) V``, ``S`` of ones with signs.

    Of ``A + U V``: ``U = V' M`` with ``M = V U`` since the rows of ``V`` are orthonormal, and with ``M = P diag(m) P'`` this
    ``V`` is ``sqrt(|m|) P' V`` and ``S = sign(m)``.
    """
    M = entries.V @ np.where(np.isfinite(entries.U), entries.U, 0.0)  # such a sample has no factors; the others have
    m, P = np.linalg.eigh(0.5 * (M + M.transpose(0, 2, 1)))
    V = np.sqrt(np.abs(m))[:, :, None] * (P.transpose(0, 2, 1) @ entries.V)
    return V, np.where(m < 0, -1.0, 1.0)


def _extended(A: sp.csr_matrix, k: int) -> tuple[Coloured, np.ndarray]:
    """The pattern of ``E``, and where in it the entries of ``A``, ``U``, ``V`` and the corner stand."""
    n = A.shape[0]
    rows = np.repeat(np.arange(n), np.diff(A.indptr))
    inside = np.arange(A.nnz) + k * rows
    columns = (A.indptr[1:, None] + k * np.arange(n)[:, None] + np.arange(k)).reshape(-1)
    below = A.nnz + k * n + (np.arange(k)[:, None] * (n + 1) + np.arange(n)).reshape(-1)
    corner = A.nnz + k * n + np.arange(k) * (n + 1) + n
    places = np.concatenate([inside, columns, below, corner])
    indices = np.empty(len(places), dtype=np.int32)
    indices[places] = np.concatenate(
        [A.indices, np.tile(n + np.arange(k), n), np.tile(np.arange(n), k), n + np.arange(k)]
    )
    pointer = np.concatenate([A.indptr + k * np.arange(n + 1), A.nnz + k * n + (n + 1) * np.arange(1, k + 1)])
    pattern = sp.csr_matrix((np.ones(len(places), dtype=bool), indices, pointer.astype(np.int32)), shape=(n + k, n + k))
    return known_entries(pattern), places
