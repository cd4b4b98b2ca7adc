"""The blocks of an operator as sparse matrices of one pattern, with their factors.

Samples of the batch may share one matrix and its factors: a linear equation for many right-hand sides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.foundation.operators import MatVec
from implicitkit.linear.factors.analysis import Analysis, analyse
from implicitkit.linear.factors.sparse_factors import SparseFactor
from implicitkit.sparsity.compression import Coloured, known_entries

_WORTH = 2  # samples a matrix, on average, from which telling them apart has paid


class SparseBlocks:
    """``batch`` matrices ``(n, n)``, or their transposed, factored when a system is first solved.

    Args:
        ready: the pattern. values: ``(batch, nnz)``, in its order.
    """

    def __init__(self, ready: Coloured, values: np.ndarray) -> None:
        self.ready, self.values, self.transposed = ready, values, False
        self._factors: list[Any] = []  # as solved_by() takes them; shared with the transposed

    @property
    def T(self) -> SparseBlocks:
        """The transposed matrices; they share the factors."""
        other = SparseBlocks(self.ready, self.values)
        other.transposed, other._factors = not self.transposed, self._factors
        return other

    @property
    def batch(self) -> int:
        """How many matrices."""
        return len(self.values)

    @property
    def is_one(self) -> bool:
        """Are they known to be one matrix, for all samples?"""
        return self.batch > 1 and self.values.strides[0] == 0

    @property
    def factor(self) -> SparseFactor | SharedFactor:
        """LU factors of every matrix."""
        if not self._factors:
            self._factors.append(factors(self.ready.analysed(analyse), self.values))
        found: SparseFactor | SharedFactor = self._factors[0]
        return found

    def solved_by(self, factor: Any) -> SparseBlocks:
        """These matrices with factors that have been made elsewhere: ``solve(b, transpose)``, ``ok`` and ``reason`` as
        :class:`~implicitkit.linear.factors.sparse_factors.SparseFactor` has them."""
        other = SparseBlocks(self.ready, self.values)
        other.transposed = self.transposed
        other._factors.append(factor)
        return other

    def factored(self, factorise: Callable[[sp.csc_matrix], Any]) -> SparseBlocks:
        """These matrices, factored by ``factorise``, which returns an object with ``solve(b, trans)`` or ``None``."""
        other = SparseBlocks(self.ready, self.values)
        other.transposed = self.transposed
        other._factors.append(SparseFactor(self.ready.analysed(analyse), self.values, factorise))
        return other

    def by_diagonal(self) -> SparseBlocks:
        """These, with factors only if pivots from the diagonal do: what needs others may fill, and be singular after all."""
        analysis = self.ready.analysed(analyse)
        if self._factors or analysis.band is not None or not analysis.symmetric:
            return self
        other = SparseBlocks(self.ready, self.values)
        other.transposed = self.transposed
        other._factors.append(SparseFactor(analysis, self.values, anywhere=False))
        if bool(other.factor.ok.all()):
            self._factors.append(other.factor)
        return other

    @property
    def diagonal(self) -> Tensor:
        """``(batch, n)``, zero where the pattern has no entry."""
        here, places = self.ready.analysed(_on_diagonal)
        found = np.zeros((1 if self.is_one else self.batch, self.ready.shape[0]))
        found[:, here] = self.values[: len(found), places]
        return torch.from_numpy(found).expand(self.batch, -1)

    @property
    def columns(self) -> Tensor:
        """The norms of the columns, ``(batch, n)``."""
        squares = self.ready.stacked(np.square(self.values[:1] if self.is_one else self.values))
        sums = squares.sum(1) if self.transposed else squares.sum(0)
        norms = torch.from_numpy(np.sqrt(np.asarray(sums).reshape(-1, self.ready.shape[0])))
        return norms.expand(self.batch, -1)

    def shifted(self, shift: Tensor, scale: Tensor) -> SparseBlocks:
        """``shift I + scale A``, each ``(batch,)``; or ``diag(shift) + scale A``, ``shift`` ``(batch, n)``."""
        ready, old, diagonal = self.ready.analysed(_with_diagonal)
        a, b = array(shift).reshape(self.batch, -1), array(scale)[:, None]
        values = np.zeros((self.batch, ready.pattern.nnz))
        values[:, old] = b * self.values
        values[:, diagonal] += a
        other = SparseBlocks(ready, values)
        other.transposed = self.transposed
        return other

    @property
    def found(self) -> tuple[Coloured, np.ndarray]:
        """Pattern and entries that they are made of."""
        return self.ready, self.values

    @property
    def extended(self) -> SparseBlocks:
        """The matrices that are factored: these."""
        return self

    @property
    def border(self) -> int:
        """Rows of :attr:`extended` beyond those of the matrices: none."""
        return 0

    @property
    def regular(self) -> bool:
        """Have they been factored, and none is singular?"""
        return bool(self._factors) and bool(self.factor.ok.all())

    def solve(self, b: Tensor) -> Tensor:
        """``A x = b``, ``(batch, n)`` or ``(batch, n, k)``; NaN for a singular matrix."""
        return self.factor.solve(b, self.transposed)

    def product(self, x: Tensor) -> Tensor:
        """``A x``, ``(batch, n)`` or ``(batch, n, k)``, by the matrices themselves."""
        return self._times(x, self.values)

    def products(self, dtype: torch.dtype) -> tuple[MatVec, MatVec]:
        """``v -> A v`` and ``w -> A' w`` of plain vectors ``(batch, n)``: the entries are laid out once."""
        one = self.batch == 1 or self.is_one
        A = self.ready.matrix(self.values[0]) if one else self.ready.stacked(self.values)
        if dtype == torch.float32:
            A = A.astype(np.float32)
        A = A.T if self.transposed else A

        def by(M: Any) -> MatVec:
            def product(v: Tensor) -> Tensor:
                given = v.detach().numpy()
                found = (M @ given.T).T if one else (M @ given.reshape(-1)).reshape(given.shape)
                return torch.from_numpy(found)

            return product

        return by(A), by(A.T)

    def some(self, samples: Tensor) -> SparseBlocks:
        """The matrices of these samples ``(k,)``."""
        shape = (len(samples), self.values.shape[1])
        values = np.broadcast_to(self.values[0], shape) if self.is_one else self.values[samples.numpy()]
        other = SparseBlocks(self.ready, values)
        other.transposed = self.transposed
        return other

    def size(self, x: Tensor) -> Tensor:
        """``|A| |x|``, shaped as ``x``: the size of what is added up in a product with ``A``, entry by entry."""
        sizes = np.broadcast_to(np.abs(self.values[:1]), self.values.shape) if self.is_one else np.abs(self.values)
        return self._times(x.abs(), sizes)

    def _times(self, x: Tensor, values: np.ndarray) -> Tensor:
        given = array(x)
        if self.is_one:
            A = self.ready.matrix(values[0])
            columns = np.moveaxis(given, 0, 1).reshape(given.shape[1], -1)
            found = ((A.T if self.transposed else A) @ columns).reshape(given.shape[1], len(values), *given.shape[2:])
            return torch.from_numpy(np.moveaxis(found, 1, 0)).to(x)
        A = self.ready.stacked(values)
        flat = given.reshape(len(values) * given.shape[1], *given.shape[2:])
        return torch.from_numpy(((A.T if self.transposed else A) @ flat).reshape(given.shape)).to(x)


def blocks_of(rows: Tensor, columns: Tensor, values: Tensor, n: int) -> SparseBlocks:
    """Matrices ``(n, n)`` from their entries, which are added where they share a place.

    Args:
        rows, columns: ``(k,)``, the same for all. values: ``(batch, k)``.
    """
    keys = rows.cpu().numpy() * np.int64(n) + columns.cpu().numpy()
    places, inverse = np.unique(keys, return_inverse=True)
    pointer = np.searchsorted(places, np.arange(n + 1) * np.int64(n))
    pattern = sp.csr_matrix((np.ones(len(places), dtype=bool), places % n, pointer), shape=(n, n))
    entries = array(values)
    summed = np.stack([np.bincount(inverse, row, minlength=len(places)) for row in entries])
    return SparseBlocks(known_entries(pattern), summed)


def _on_diagonal(pattern: sp.csr_matrix) -> tuple[np.ndarray, np.ndarray]:
    """Which diagonal entries the pattern has, and their places among its entries."""
    rows = np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr))
    places = np.flatnonzero(rows == pattern.indices)
    return rows[places], places


def _with_diagonal(pattern: sp.csr_matrix) -> tuple[Coloured, np.ndarray, np.ndarray]:
    """The pattern with its diagonal (not for finding entries), and where in it the old entries and the diagonal stand."""
    n = pattern.shape[0]
    full = sp.csr_matrix(pattern + sp.identity(n, dtype=bool, format="csr")).astype(bool)
    full.sort_indices()
    rows = np.repeat(np.arange(n, dtype=np.int64), np.diff(full.indptr))
    keys = rows * n + full.indices
    old = np.repeat(np.arange(n, dtype=np.int64), np.diff(pattern.indptr)) * n + pattern.indices
    diagonal = np.arange(n, dtype=np.int64) * (n + 1)
    return known_entries(full), np.searchsorted(keys, old), np.searchsorted(keys, diagonal)


def factors(analysis: Analysis, values: np.ndarray) -> SparseFactor | SharedFactor:
    """Factors of every sample's matrix, ``values`` ``(batch, nnz)``; one for all samples whose entries are the same, bit by
    bit."""
    which = np.arange(len(values))
    if values.strides[0] == 0:  # known to be one
        which = np.zeros_like(which)
    elif _may_repeat(values):
        seen: dict[Hashable, int] = {}
        which = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in values])
    analysis.ordering.alike = len(values) / max(1, which.max(initial=0) + 1)
    if analysis.ordering.alike < _WORTH:
        return SparseFactor(analysis, values)
    first = np.unique(which, return_index=True)[1]
    return SharedFactor(lambda: SparseFactor(analysis, values[first]), which)


def _may_repeat(values: np.ndarray) -> bool:
    """Is there, among a few samples, one that has the first entries of another?  A look before all is read."""
    if len(values) == 1:
        return False
    few = values[:: max(1, len(values) // 16), :64]
    return len(np.unique(few, axis=0)) < len(few)


class SharedFactor:
    """:class:`SparseFactor` of ``batch`` samples with fewer matrices.

    Args:
        make: the factors of the matrices. which: of each sample, ``(batch,)``, numbered by their first occurrence.
    """

    def __init__(self, make: Callable[[], SparseFactor], which: np.ndarray) -> None:
        self.inner, self.which = make(), which
        self.ok, self.reason = self.inner.ok[torch.from_numpy(which)], self.inner.reason
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which)
        self.column = np.empty(len(which), dtype=np.int64)  # of a sample among those of its matrix
        self.column[order] = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)

    def solve(self, b: Tensor, transpose: bool = False) -> Tensor:
        """``x`` as :meth:`SparseFactor.solve` has it: the right-hand sides of all samples with one matrix are solved at
        once."""
        columns = b.unsqueeze(2) if b.ndim == 2 else b
        which, column = (torch.from_numpy(t).to(b.device) for t in (self.which, self.column))
        n, k = columns.shape[1:]
        together = columns.new_zeros(self.inner.batch, int(self.column.max()) + 1, n, k)
        together[which, column] = columns
        x = self.inner.solve(together.permute(0, 2, 1, 3).reshape(self.inner.batch, n, -1), transpose)
        x = x.reshape(self.inner.batch, n, -1, k)[which, :, column]
        return x.squeeze(2) if b.ndim == 2 else x
