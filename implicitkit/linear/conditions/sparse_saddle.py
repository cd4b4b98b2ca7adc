r"""Sparse symmetric indefinite systems of optimality conditions, factored with their inertia.

    K = [ H   C^T ]        H  (n, n), symmetric,   C  (m, n),   E  (m, m), diagonal, nonnegative
        [ C   -E  ]

``K`` is scaled to rows of size one, and regularised to ``K + diag(rho, -delta)``; then pivots may be taken from the
diagonal in any order that keeps it sparse (Vanderbei 1995, SIAM J. Optim. 5(1): quasi-definite matrices),
``P K P' = L D L'``, and the signs of ``D`` are those of the eigenvalues (Sylvester).  ``H`` is positive definite on the null
space of ``C`` exactly if ``m`` of them are negative (Gould 1985, Math. Prog. 32).  Refinement with ``K`` itself removes what
``rho`` and ``delta`` have put in (Friedlander & Orban 2012, Math. Prog. Comp. 4).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.factors.arrowhead import Arrowhead
from implicitkit.linear.factors.banded import SymmetricBand
from implicitkit.linear.factors.ordering import Ordering
from implicitkit.sparsity.places import with_entries

__all__ = ["ENOUGH", "Layout", "SparseSaddle", "both_sides", "equilibrated"]

_REGULARISED = 1e-9  # delta, and rho by the sum of each row of |H|, after scaling
_LEAST = 1e-3  # rows of H count as no smaller than this
_SWEEPS = 8  # of refinement, at most
ENOUGH = 1e-15  # backward error to which systems are solved
_AMPLIFIED = 1e6  # of a right-hand side of size one: more is the inverse of what regularises


class Layout:
    """What matrices of one symmetric pattern share: row and column of every entry, which are on the diagonal, and the order
    of elimination.

    Args:
        K: one of them. band: where its entries stand in a band, if they are to be positive definite and have one.
    """

    def __init__(self, K: sp.csc_matrix, band: SymmetricBand | None = None) -> None:
        self.band = band
        self.rows = K.indices.astype(np.intp)  # what NumPy indexes with
        self.columns = np.repeat(np.arange(K.shape[0]), np.diff(K.indptr))
        self.diagonal = np.flatnonzero(self.rows == self.columns)
        self.ordering = Ordering()
        self._among: tuple[int, np.ndarray] | None = None
        self._arrowhead: tuple[int, Arrowhead | None] | None = None

    def among(self, n: int) -> np.ndarray:
        """Which entries stand among the first ``n`` rows and columns, ``(nnz,)`` bool."""
        if self._among is None or self._among[0] != n:
            self._among = n, (self.rows < n) & (self.columns < n)
        return self._among[1]

    def arrowhead(self, n: int) -> Arrowhead | None:
        """Where the entries stand if the first ``n`` rows and columns are a diagonal, and the others full."""
        if self._arrowhead is None or self._arrowhead[0] != n:
            size = int(self.columns[-1]) + 1
            self._arrowhead = n, Arrowhead.of(self.rows, self.columns, n, size)
        return self._arrowhead[1]


class SparseSaddle:
    """``K``, factored by SuperLU with diagonal pivots, or where there is a band by Cholesky's method, or by its Schur
    complement where ``H`` is diagonal and the rows of ``C`` are full (:mod:`implicitkit.linear.factors.arrowhead`).

    Args:
        K: ``(n + m, n + m)``, symmetric in pattern and values, every entry of the diagonal there. n: unknowns in front.
        scale: ``K`` is ``diag(scale)`` on both sides of the matrix that is meant; ``None``: it is to be scaled.
        layout: of its pattern, where others have it, too. regularised: ``delta``, and ``rho`` by the rows of ``|H|``.
    """

    def __init__(
        self,
        K: sp.csc_matrix,
        n: int,
        scale: np.ndarray | None = None,
        layout: Layout | None = None,
        regularised: float = _REGULARISED,
    ) -> None:
        self.lu: Any = None
        self.scale = np.ones(K.shape[0])
        if not np.isfinite(K.data).all():
            return
        self.scale = equilibrated(K) if scale is None else scale
        self.K = both_sides(K, self.scale) if scale is None else K
        signs = np.full(K.shape[0], -regularised)
        rows = _size(self.K) @ np.r_[np.ones(n), np.zeros(len(signs) - n)]
        signs[:n] = regularised * np.maximum(rows[:n], _LEAST)
        self.lu = _factor(self.K, signs, n, Layout(K) if layout is None else layout)

    @functools.cached_property
    def negative(self) -> int:
        """How many eigenvalues of the regularised matrix are negative; -1 where it could not be factored with diagonal
        pivots, or is a band that is not positive definite."""
        return -1 if self.lu is None else _negative(self.lu)

    @property
    def regular(self) -> bool:
        """Is it far from singular?  Judged by a solve: where it is not, the factors are those of what regularises them."""
        b = np.random.default_rng(0).uniform(0.5, 1.5, len(self.scale))
        return self.lu is not None and bool(np.abs(self.lu.solve(b)).max(initial=0.0) < _AMPLIFIED)

    def once(self, b: np.ndarray) -> np.ndarray:
        """``x`` with ``K x = b`` as far as the regularised factors go."""
        x: np.ndarray = self.lu.solve(b * self.scale) * self.scale
        return x

    def solve(self, b: np.ndarray, enough: float = ENOUGH) -> tuple[np.ndarray, float]:
        """``x`` with ``K x = b``, refined until ``enough``, and its backward error ``|b - K x| / (|b| + |x|)``, scaled, in
        the largest entry; infinite without factors."""
        rhs = b * self.scale
        size = float(np.abs(rhs).max(initial=0.0))
        if self.lu is None or not np.isfinite(size):
            return np.zeros_like(b), np.inf
        x = self.lu.solve(rhs)
        left = rhs - self.K @ x
        norm = float(np.abs(left).max(initial=0.0))
        for _ in range(_SWEEPS):
            if not norm > enough * (size + float(np.abs(x).max())):
                break
            trial = x + self.lu.solve(left)
            rest = rhs - self.K @ trial
            new = float(np.abs(rest).max(initial=0.0))
            if not new < norm:
                break
            slow = new > 0.5 * norm
            x, left, norm = trial, rest, new
            if slow:
                break
        if not np.isfinite(norm):
            return np.zeros_like(b), np.inf
        with np.errstate(over="ignore"):  # on a way to infinity
            found = x * self.scale
        if not np.isfinite(found).all():
            return np.zeros_like(b), np.inf
        return found, norm / (size + float(np.abs(x).max())) if size else 0.0


def equilibrated(K: sp.csc_matrix) -> np.ndarray:
    """``d`` such that the rows of ``diag(d) |K| diag(d)``, symmetric, have about the sum one (Ruiz 2001, in the 1-norm)."""
    d, size = np.ones(K.shape[0]), _size(K)
    for _ in range(3):
        rows = d * (size @ d)
        d = d / np.sqrt(np.where(rows > 0, rows, 1.0))
    return d


def both_sides(K: sp.csc_matrix, d: np.ndarray) -> sp.csc_matrix:
    """``diag(d) K diag(d)``."""
    data = K.data * d.take(K.indices) * np.repeat(d, np.diff(K.indptr))
    return with_entries(K, data)


def _size(K: sp.csc_matrix) -> sp.csc_matrix:
    """``|K|``."""
    return with_entries(K, np.abs(K.data))


def _factor(K: sp.csc_matrix, shift: np.ndarray, n: int, layout: Layout) -> Any:
    """Factors of ``K + diag(shift)``; ``None`` where there are none."""
    data = K.data.copy()
    data[layout.diagonal] += shift
    if layout.band is not None:
        return layout.band.cholesky(data)
    arrowhead = layout.arrowhead(n)
    found = None if arrowhead is None else arrowhead.factor(data)
    if found is not None:
        return found
    return layout.ordering.factor(with_entries(K, data), 0.0)


def _negative(lu: Any) -> int:
    """How many pivots are negative; -1 where they are not those of the diagonal, or not finite.  Some factors say it
    themselves."""
    if not hasattr(lu, "perm_r"):
        return int(lu.negative)
    pivots = lu.U.diagonal()
    in_place = np.isfinite(pivots).all() and np.array_equal(lu.perm_r, lu.perm_c)
    return int((pivots < 0).sum()) if in_place else -1
