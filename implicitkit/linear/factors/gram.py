r"""``R'R`` of a sparse matrix some of whose rows are long, or which is sparse but for a few numbers that all unknowns share.

    R'R = N + W' S W,      N  (n, n) sparse and positive semidefinite,   W  (k, n),   S = diag(+-1),

    - rows of ``R`` with many entries (a mean that is to be met): ``N`` is made of the others, ``W`` are these, ``S = 1``;
    - ``R = A + U V`` (:mod:`implicitkit.sparsity.low_rank`): ``N = A'A``, and what is left is

          [V; U'A]' M [V; U'A],   M = [ U'U  I ] = P diag(m) P':      W = sqrt(|m|) P' [V; U'A],   S = sign(m).
                                      [  I   0 ]

One long row would fill all of ``R'R``.  Systems with ``N + \mu I + W' S W`` are solved with a border of ``k`` rows and
columns (:mod:`implicitkit.linear.conditions.sparse_saddle`), which needs no factors of ``N + \mu I`` alone, be it next to
singular.

Source: Andersen (1996), "A modified Schur-complement method for handling dense columns in interior-point methods", ACM TOMS
22(3); Björck, *Numerical Methods for Least Squares Problems* (1996), section 6.7 (updating by dense rows).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import scipy.linalg as la
import scipy.sparse as sp

from implicitkit.foundation.kept import Kept
from implicitkit.linear.conditions.sparse_saddle import Layout, SparseSaddle
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.banded import SymmetricBand
from implicitkit.linear.factors.gram_entries import long_rows, squares
from implicitkit.linear.factors.last_matrix import LastMatrix, numbers_in
from implicitkit.linear.factors.ordering import Ordering
from implicitkit.sparsity.compression import Coloured, below_each_other
from implicitkit.sparsity.last_entries import LastEntries
from implicitkit.sparsity.same_pattern import stand_at, with_entries

_REGULARISED = 1e-14  # of what is positive definite but for rounding


class Orders:
    """How matrices of one pattern are eliminated, once that has been found: alone, and with a border."""

    def __init__(self, pattern: object = None) -> None:
        self.alone = Ordering()
        self.bordered: dict[int, Layout] = {}
        self.last = LastMatrix()
        self._places: tuple[np.ndarray, np.ndarray] | None = None  # where the entries of the first stand
        self._band: SymmetricBand | None = None  # as these do

    @property
    def fill(self) -> int:
        """Entries of the factors that were made first; 0 before."""
        return max(self.alone.fill, *(layout.ordering.fill for layout in self.bordered.values()), 0)

    def band(self, N: sp.csc_matrix) -> SymmetricBand | None:
        """Where the entries of ``N`` stand in a narrow band, if they do, and where those of the first did."""
        if self._places is None:
            self._places = N.indices, N.indptr
            known = analyse(sp.csr_matrix(N.T).astype(bool))  # by rows and by columns it is the same
            self._band = None if known.band is None else SymmetricBand(known)
        return self._band if self._band is not None and stand_at(N, *self._places) else None

    def layout(self, K: sp.csc_matrix, border: int) -> Layout:
        """The layout of ``K``, with a border of so many rows."""
        if border not in self.bordered:
            self.bordered[border] = Layout(K)
        return self.bordered[border]


class Gram:
    """``N + W' S W``.

    Args:
        N: every entry of the diagonal there. W: ``(k, n)``. signs: the diagonal of ``S``. known: the column of every entry
            of ``N``, and the places of the diagonal.
    """

    def __init__(
        self, N: sp.csc_matrix, W: np.ndarray, signs: np.ndarray, known: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        self.N, self.W, self.signs = N, W, signs
        columns = _columns_of(N) if known is None else known[0]
        self._columns, self._places = columns, np.flatnonzero(columns == N.indices) if known is None else known[1]
        self.known = self._columns, self._places

    def diagonal(self) -> np.ndarray:
        """``(n,)``."""
        found: np.ndarray = self.N.data[self._places]
        return np.maximum(found + self.signs @ np.square(self.W) if len(self.W) else found, 0.0)

    @property
    def finite(self) -> bool:
        """Is every entry?"""
        return bool(np.isfinite(self.N.data).all() and np.isfinite(self.W).all())

    def both_sides(self, d: np.ndarray) -> None:
        """Turn this into ``diag(d) (N + W' S W) diag(d)``."""
        self.N.data *= d[self.N.indices] * d[self._columns]
        self.W = self.W * d

    def times(self, v: np.ndarray) -> np.ndarray:
        """The product with ``(n,)`` or ``(n, k)``."""
        found: np.ndarray = self.N @ v
        return found + self.W.T @ ((self.W @ v).T * self.signs).T if len(self.W) else found

    def size(self, v: np.ndarray) -> np.ndarray:
        """``|N| |v| + |W|' |W| |v|``."""
        v, W = np.abs(v), np.abs(self.W)
        found: np.ndarray = with_entries(self.N, np.abs(self.N.data)) @ v
        return found + W.T @ (W @ v) if len(W) else found

    def most(self) -> float:
        """No less than its norm."""
        return float(np.linalg.norm(self.N.data) + np.square(self.W).sum())

    def factor(self, shift: float, orders: Orders) -> Any:
        """Factors of it and ``shift I``, with ``solve(b)``, ``(n,)`` or ``(n, k)``; ``None`` where a pivot is zero."""
        shifted = with_entries(self.N, self.N.data.copy())
        shifted.data[self._places] += shift
        if not len(self.W):
            return orders.last.factors(shifted, lambda: self._factor(shifted, shift, orders), numbers_in)
        W = _full(self.W)
        K = sp.bmat([[shifted, W.T], [W, sp.diags_array(-self.signs)]], format="csc")
        K.sort_indices()
        layout = orders.layout(K, len(self.W))
        saddle = SparseSaddle(K, len(self.W.T), layout=layout, regularised=_REGULARISED)
        return None if saddle.lu is None else _Bordered(saddle, len(self.W))

    def _factor(self, shifted: sp.csc_matrix, shift: float, orders: Orders) -> Any:
        """Factors of ``N + shift I``."""
        band, full = orders.band(shifted), None
        if band is not None:
            full = band.cholesky(shifted.data)
        elif orders.alone.fills(shifted.shape[0]):
            full = _Cholesky.of(shifted, self.N.diagonal() > 0, shift)
        return orders.alone.factor(shifted, 0.0) if full is None else full


def product_of_all(grams: Sequence[Gram]) -> Callable[[np.ndarray], np.ndarray]:
    """The products ``(batch, n)`` with ``(batch, n)``: in one call of SciPy's where all ``N`` have one pattern."""
    first = grams[0].N
    if any(gram.N.indices is not first.indices for gram in grams):
        return lambda v: np.stack([gram.times(x) for gram, x in zip(grams, v, strict=True)])
    whole = below_each_other(first, np.stack([gram.N.data for gram in grams]))

    def times(v: np.ndarray) -> np.ndarray:
        found: np.ndarray = (whole @ v.reshape(-1)).reshape(v.shape)
        for gram, x, out in zip(grams, v, found, strict=True) if len(grams[0].W) else ():
            out += gram.W.T @ (gram.signs * (gram.W @ x))
        return found

    return times


class _Cholesky:
    """Dense Cholesky factors, for a matrix whose sparse ones would be hardly sparse.  Unknowns of which it has nothing but
    ``shift`` are left out."""

    def __init__(self, factor: Any, kept: np.ndarray, shift: float) -> None:
        self.factors, self.kept, self.shift = factor, kept, shift

    @classmethod
    def of(cls, shifted: sp.csc_matrix, there: np.ndarray, shift: float) -> _Cholesky | None:
        """The factors of ``shifted``, ``None`` where it is not positive definite; ``there``: which unknowns it has more
        of."""
        kept = np.flatnonzero(there)
        if not shift and len(kept) < len(there):
            return None
        matrix = (shifted if len(kept) == len(there) else shifted[kept][:, kept]).toarray(order="F")
        factor, info = la.lapack.dpotrf(matrix, overwrite_a=True, clean=False)
        return cls(factor, kept, shift) if info == 0 else None

    def solve(self, b: np.ndarray) -> np.ndarray:
        """``(n,)`` or ``(n, k)``."""
        x = b / self.shift if self.shift else np.zeros_like(b)
        x[self.kept] = la.lapack.dpotrs(self.factors, b[self.kept])[0]
        return x


class _Bordered:
    """The front of systems with a border."""

    def __init__(self, saddle: SparseSaddle, border: int) -> None:
        self.saddle, self.border = saddle, border

    def solve(self, b: np.ndarray) -> np.ndarray:
        """``(n,)`` or ``(n, k)``."""
        columns = b.reshape(len(b), -1)
        rhs = np.concatenate([columns, np.zeros((self.border, columns.shape[1]))])
        return np.stack([self.saddle.solve(c)[0][: len(b)] for c in rhs.T], 1).reshape(b.shape)


def of_sparse(ready: Coloured, values: np.ndarray) -> list[Gram]:
    """``R'R`` of each of the sparse matrices of one pattern with these entries, ``(batch, nnz)``; their long rows apart.  Of
    entries that are kept (:mod:`~implicitkit.sparsity.last_entries`) it is, too."""
    last: _LastGrams = ready.analysed(_LastGrams)
    grams = last.of(values)
    if grams is None:
        grams = _of_sparse(ready, values)
        if values is ready.analysed(LastEntries).entries:
            last.keep(values, grams)
    return [Gram(with_entries(g.N, g.N.data.copy()), g.W, g.signs, g.known) for g in grams]


def _nothing() -> None:
    return None


class _LastGrams:
    """``R'R`` of the entries of ``R`` that are kept."""

    def __init__(self, pattern: object = None) -> None:
        self._kept = Kept()

    def of(self, values: np.ndarray) -> list[Gram] | None:
        """``R'R``, if these entries are the very same."""
        entries, found = self._kept.value or (_nothing, None)
        return found if entries() is values else None

    def keep(self, values: np.ndarray, grams: list[Gram]) -> None:
        """Not to be written to any more; both at once, since another thread may ask in between."""
        self._kept.put((weakref.ref(values), grams), sum(gram.N.nnz + gram.W.size for gram in grams))


def _of_sparse(ready: Coloured, values: np.ndarray) -> list[Gram]:
    rows, found = ready.analysed(long_rows), ready.analysed(squares)
    signs, keep = np.ones(len(rows)), np.ones(ready.shape[0], dtype=bool)
    keep[rows] = False
    whole = [ready.matrix(v) for v in values] if len(rows) or found is None else []
    W = [R[rows].toarray() for R in whole] if len(rows) else [np.zeros((0, ready.shape[1]))] * len(values)
    if found is None:
        return [Gram(_with_diagonal(R[keep] if len(rows) else R), w, signs) for R, w in zip(whole, W, strict=True)]
    known = found.columns, found.diagonal
    return [
        Gram(with_entries(found.N, data), w, signs, known) for data, w in zip(found.entries(values), W, strict=True)
    ]


def of_low_rank(A: sp.csr_matrix, U: np.ndarray, V: np.ndarray) -> Gram:
    """``R'R`` of ``R = A + U V``."""
    k = len(V)
    eye = np.eye(k)
    UU = U.T @ U
    m, P = np.linalg.eigh(np.block([[np.where(np.isfinite(UU), UU, 0.0), eye], [eye, np.zeros((k, k))]]))
    W = np.sqrt(np.abs(m))[:, None] * (P.T @ np.concatenate([V, (A.T @ U).T]))
    return Gram(_with_diagonal(A), W, np.where(m < 0, -1.0, 1.0))


def _full(W: np.ndarray) -> sp.csr_matrix:
    """Sparse, its zeros kept: the same pattern whatever the values are."""
    k, n = W.shape
    indices = np.tile(np.arange(n, dtype=np.int32), k)
    return sp.csr_matrix((W.reshape(-1), indices, np.arange(k + 1, dtype=np.int32) * n), shape=W.shape)


def _with_diagonal(R: sp.csr_matrix) -> sp.csc_matrix:
    """``R'R`` in which every entry of the diagonal is there, be it zero."""
    N = (R.T @ R).tocsc()
    N.sort_indices()
    there = N.indices[N.indices == _columns_of(N)]
    if len(there) < N.shape[0]:
        hollow = np.setdiff1d(np.arange(N.shape[0]), there)
        values, rows = np.append(N.data, np.zeros(len(hollow))), np.append(N.indices, hollow)
        N = sp.csc_matrix((values, (rows, np.append(_columns_of(N), hollow))), shape=N.shape)
    return N


def _columns_of(N: sp.csc_matrix) -> np.ndarray:
    """The column of every entry."""
    return np.repeat(np.arange(N.shape[1], dtype=N.indices.dtype), np.diff(N.indptr))
