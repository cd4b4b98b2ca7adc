"""SuperLU of many matrices with one pattern, each with the elimination order that the first of them was given.

An order that keeps the factors sparse (minimum degree of ``A + A^T``) takes a tenth of the time of a factorisation on
grids, and two thirds where a few unknowns touch most others (points and cameras): it depends on the pattern alone, and is
looked for once.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla

from implicitkit.sparsity.compression import below_each_other
from implicitkit.sparsity.same_pattern import stand_at, with_entries

#: SuperLU for symmetric patterns: minimum degree of ``A + A^T``, pivots from the diagonal, columns one by one: panels are
#: for wider rows than such an order leaves (measured on grids, chains and graphs: a fifth to a third less time).
SYMMETRIC: dict[str, Any] = {
    "permc_spec": "MMD_AT_PLUS_A",
    "panel_size": 1,
    "relax": 1,
    "options": {"SymmetricMode": True},
}

_NEARLY_FULL = 0.3  # of all entries, in both factors together, from which dense ones cost less
_DENSE = 8192  # unknowns of a matrix that may be formed for that


class Ordering:
    """Factors matrices of one symmetric pattern, preferring pivots from the diagonal.

    Args:
        pattern: not looked at: an ordering can be kept with a pattern (:meth:`Coloured.analysed`).
        last: unknowns with long rows or columns, which come last: to look for their place takes the square of ``n``.

    Attributes:
        fill: entries of the factors that were made first; 0 before. alike: samples that had one matrix, the last time.
        indefinite: they were not definite, the last time that this was asked.
    """

    def __init__(self, pattern: object = None, last: np.ndarray | None = None) -> None:
        self.last = last
        self._first: tuple[sp.csc_matrix, np.ndarray] | None = None  # a matrix, and the order it was given
        self._order: _Order | None = None  # the same, ready for use
        self.fill = 0
        self.alike = 1.0
        self.indefinite = False

    def fills(self, size: int) -> bool:
        """Is it known that factors of ``size`` unknowns are hardly sparse?  (Graphs without layers: designs of random
        entries.)  Then a dense factorisation takes a half to a ninth of the time, and about as much memory."""
        return size <= _DENSE and self.fill > _NEARLY_FULL * size**2

    def factor(self, A: sp.csc_matrix, threshold: float) -> Any:
        """Factors of ``A`` with ``solve(b, trans)``; ``None`` where it is exactly singular.

        Args:
            threshold: of the largest entry in a column, below which a pivot is not taken from the diagonal.
        """
        if self._first is None and self.last is not None:
            self._first = A, _with_last(A, self.last)
        if self._first is not None:
            if self._order is None:
                self._order = _Order(*self._first)
            if self._order.fits(A):
                lu = superlu(self._order.renumbered(A), threshold, permc_spec="NATURAL")
                if lu is None:
                    return None
                self.fill = self.fill or lu.nnz
                return Renumbered(lu, self._order.order)
        lu = superlu(A, threshold)
        if lu is not None:
            self.fill = lu.nnz
            self._first, self._order = (A, np.argsort(lu.perm_c)), None
        return lu

    def factor_together(self, A: sp.csc_matrix, values: np.ndarray, threshold: float) -> Stacked | None:
        """Factors of matrices that have the pattern of ``A``, and their entries in its order, ``(batch, nnz)``, along the
        diagonal of one: a call of SuperLU's costs as much as the factors of a hundred unknowns.  ``None`` where one of them
        is exactly singular, or an order is not known yet and cannot be found.
        """
        if self._order is None or not self._order.fits(A):
            matrix = with_entries(A, values[0])
            if self.factor(matrix, threshold) is None:
                return None
            if self._order is None and self._first is not None:
                self._order = _Order(*self._first)
        if self._order is None or not self._order.fits(A):
            return None
        moved = self._order.moved
        lu = superlu(below_each_other(moved, np.take(values, moved.data, axis=1)), threshold, permc_spec="NATURAL")
        return None if lu is None else Stacked(lu, self._order.order)


def superlu(A: sp.csc_matrix, threshold: float, **options: Any) -> Any:
    """SuperLU for a symmetric pattern; ``None`` where ``A`` is exactly singular."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sla.MatrixRankWarning)
        try:
            return sla.splu(A, diag_pivot_thresh=threshold, **(SYMMETRIC | options))
        except RuntimeError:  # "Factor is exactly singular"
            return None


def _with_last(A: sp.csc_matrix, last: np.ndarray) -> np.ndarray:
    """The order that minimum degree gives the other unknowns, and then these; it is that of a definite matrix."""
    first = np.setdiff1d(np.arange(A.shape[0]), last)
    inner = sp.csc_matrix(A[first][:, first])
    inner = sp.csc_matrix(with_entries(inner, np.ones(inner.nnz)) + (inner.nnz + 1) * sp.identity(len(first)))
    return np.concatenate([first[np.argsort(superlu(inner, 1.0).perm_c)], last])


class _Order:
    """``A -> P A P'`` for matrices of the pattern of one of them, by the places of its entries."""

    def __init__(self, A: sp.csc_matrix, order: np.ndarray) -> None:
        self.order, self.indices, self.indptr = order, A.indices, A.indptr
        numbered = sp.csc_matrix((np.arange(A.nnz, dtype=np.int64), A.indices, A.indptr), shape=A.shape)
        self.moved = numbered[order][:, order].tocsc()
        self.moved.sort_indices()

    def fits(self, A: sp.csc_matrix) -> bool:
        """Has ``A`` this pattern?"""
        return stand_at(A, self.indices, self.indptr)

    def renumbered(self, A: sp.csc_matrix) -> sp.csc_matrix:
        return with_entries(self.moved, A.data[self.moved.data])


class Stacked:
    """Factors of ``P A P'`` for every ``A`` of a batch, for right-hand sides as they stand."""

    def __init__(self, lu: Any, order: np.ndarray) -> None:
        self.lu, self.order = lu, order

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``A x = b`` or, with ``"T"``, ``A' x = b``; ``(batch, n, k)``."""
        flat = b[:, self.order].reshape(-1, b.shape[2])
        x = np.empty_like(b)
        x[:, self.order] = self.lu.solve(flat, trans).reshape(b.shape)
        return x


class Renumbered:
    """Factors of ``P A P'``, for right-hand sides as they stand; what else they have is that of ``P A P'``."""

    def __init__(self, lu: Any, order: np.ndarray) -> None:
        self.lu, self.order = lu, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lu, name)

    def solve(self, b: np.ndarray, *trans: str) -> np.ndarray:
        found = self.lu.solve(np.ascontiguousarray(b[self.order]), *trans)
        x = np.empty_like(found)
        x[self.order] = found
        return x
