r"""``R'R`` of many sparse matrices of one pattern, entry by entry.

    (R'R)_jk = \sum_i R_ij R_ik

Which products of entries are added up, and where the sums stand, depends on the pattern alone.  That is found once; then all
samples' are two selections, a product and a sum over neighbours, where SciPy's product of two matrices finds the pattern of
each anew: for one of 130 columns that takes it half a millisecond, of which a tenth is arithmetic.
"""

from __future__ import annotations

import itertools

import numpy as np
import scipy.sparse as sp

from implicitkit.sparsity.index_sets import IndexSets
from implicitkit.sparsity.same_pattern import with_entries

_LONG = 128  # entries of a row that may be kept apart ...
_FEW = 32  # ... if no more rows than this are so long
_PAIRS = 1 << 21  # products of one matrix: more take memory, and SciPy's calls are nothing beside them
_CHUNK = 1 << 16  # products at a time: what a cache holds


def long_rows(pattern: sp.csr_matrix) -> np.ndarray:
    """The rows that are kept apart: a few of very many entries."""
    found = np.flatnonzero(np.diff(pattern.indptr) > max(_LONG, 2 * int(np.sqrt(pattern.shape[1]))))
    return found if len(found) <= _FEW else found[:0]


def squares(pattern: IndexSets) -> Squares | None:
    """``R'R`` of matrices with this pattern, in compressed rows, without their long rows; ``None`` where there are too many
    products to list them."""
    counts = np.diff(pattern.indptr)
    counts[long_rows(pattern)] = 0
    return Squares(pattern, counts) if int((counts.astype(np.int64) * (counts + 1) // 2).sum()) <= _PAIRS else None


class Squares:
    """Where the entries of ``R'R`` come from.

    Args:
        pattern: ``(m, n)``, its indices sorted. counts: of the entries of each row, ``(m,)``; zero for one that is left out.

    Attributes:
        N: a matrix with the pattern of ``R'R`` and its whole diagonal. columns: of every entry. diagonal: the places of
            its own.
    """

    def __init__(self, pattern: IndexSets, counts: np.ndarray) -> None:
        n = pattern.shape[1]
        self._left, self._right = _pairs(pattern, counts)
        j, k = pattern.indices[self._left], pattern.indices[self._right]
        self._starts = np.flatnonzero(np.append(True, (np.diff(j) != 0) | (np.diff(k) != 0))[: len(j)])
        each = np.arange(0, len(self._left) + _CHUNK, _CHUNK)[:-1]  # the sums that begin next to these products
        self._parts = np.unique(np.append(np.searchsorted(self._starts, each), len(self._starts)))
        j, k = j[self._starts], k[self._starts]
        apart, hollow = np.flatnonzero(j != k), np.setdiff1d(np.arange(n), j[j == k])
        number = np.arange(1, len(j) + 1)  # of the sum, from one on: SciPy does not keep zeros apart from nothing
        numbers = np.concatenate([number, number[apart], np.full(len(hollow), len(j) + 1)])
        found = sp.csc_matrix(
            (numbers, (np.concatenate([k, j[apart], hollow]), np.concatenate([j, k[apart], hollow]))), shape=(n, n)
        )
        found.sort_indices()
        self._which = found.data.astype(found.indices.dtype) - 1
        self.N = with_entries(found, self._which)  # in place of as many numbers
        self.columns = np.repeat(np.arange(n, dtype=found.indices.dtype), np.diff(found.indptr))
        self.diagonal = np.flatnonzero(self.columns == found.indices)

    def entries(self, values: np.ndarray) -> np.ndarray:
        """The entries of ``R'R``, in the order of :attr:`N`, ``(batch, nnz)``, from those of ``R``."""
        sums = np.zeros((len(values), len(self._starts) + 1))  # a column without entries has none
        for first, last in itertools.pairwise(self._parts):
            begin, end = (len(self._left) if k == len(self._starts) else self._starts[k] for k in (first, last))
            some = max(1, _CHUNK // (end - begin))
            for sample in range(0, len(values), some):
                part = values[sample : sample + some]
                products = part.take(self._left[begin:end], axis=1)
                products *= part.take(self._right[begin:end], axis=1)
                starts = self._starts[first:last] - begin
                np.add.reduceat(products, starts, axis=1, out=sums[sample : sample + some, first:last])
        return sums.take(self._which, axis=1)


def _pairs(pattern: IndexSets, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The places of all pairs of entries in one row, the second no further left, in the order of their columns."""
    # of each entry, how many there are in its row from itself on
    after = np.repeat(np.where(counts > 0, pattern.indptr[1:], 0), np.diff(pattern.indptr))
    after = np.maximum(after - np.arange(len(after), dtype=np.int32), 0)
    left = np.repeat(np.arange(len(after), dtype=np.int32), after)
    right = left + np.arange(len(left), dtype=np.int32)
    right -= np.repeat(np.cumsum(after, dtype=np.int32) - after, after)
    for own in (1, 0):  # by the second, and then by the first
        order = _in_order(pattern.indices[(left, right)[own]], pattern.shape[1])
        left, right = left[order], right[order]
    return left, right


def _in_order(keys: np.ndarray, n: int) -> np.ndarray:
    """The order in which ``keys``, from 0 to ``n - 1``, ascend, equal ones as they stand: in linear time, as SciPy turns
    compressed rows into columns."""
    each = np.arange(len(keys) + 1, dtype=np.int32)
    found: np.ndarray = sp.csr_matrix((each[:-1], keys, each), shape=(len(keys), n)).tocsc().data
    return found
