r"""Sparse symmetric indefinite systems of optimality conditions, factored with their inertia.

    K = [ H   C^T ]        H  (n, n), symmetric,   C  (m, n),   E  (m, m), diagonal, nonnegative
        [ C   -E  ]

``K`` is scaled to rows of size one, and regularised to ``K + diag(rho, -delta)``; then pivots may be taken from the
diagonal in any order that keeps it sparse (Vanderbei 1995, SIAM J. Optim. 5(1): quasi-definite matrices),
``P K P' = L D L'``, and the signs of ``D`` are those of the eigenvalues (Sylvester).  ``H`` is positive definite on the null
space of ``C`` exactly if ``m`` of them are negative (Gould 1985, Math. Prog. 32).  Refinement with ``K`` itself removes what
``rho`` and ``delta`` have put in (Friedlander & Orban 2012, Math. Prog. Comp. 4).

Where many rows of ``H`` are zero (the states of a control problem: a thousand unknowns that the constraints determine), the
pivots are as small as ``rho``, and ``L`` grows by as much: the signs are then those of another matrix, and refinement does
not get there.  Both are seen.  The signs are taken from factors with larger ``rho`` and ``delta``, with which ``L`` grows
less, until these outweigh what rounding puts in, ``eps |L| |U|`` (Higham 2002, theorem 9.3); and solutions are those of
``K`` itself, by pivots of any row.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.factors.arrowhead import Arrowhead, ArrowheadMatrix
from implicitkit.linear.factors.banded import SymmetricBand, SymmetricSquare
from implicitkit.linear.factors.last_matrix import LastMatrix, numbers_in
from implicitkit.linear.factors.ordering import Ordering, superlu
from implicitkit.sparsity.same_pattern import with_entries

_REGULARISED = 1e-9  # delta, and rho by the sum of each row of |H|, after scaling
_LEAST = 1e-3  # rows of H count as no smaller than this
_DOMINANT = 0.5 + 1e-9  # of the sum of a row of |H|: a diagonal that is more than all else
_SWEEPS = 8  # of refinement, at most
ENOUGH = 1e-15  # backward error to which systems are solved
_HARD = 1e-12  # backward error at which refinement may rest
_STRONGER, _STRONGEST = 10.0, 1e-6  # what is put on the diagonal in their place, and the most
_LARGER = 100.0  # times the solution by the regularised factors: what is larger is that of a singular matrix
_AMPLIFIED = 1e6  # of a right-hand side of size one: more is the inverse of what regularises
_DOUBTFUL = 1e8  # up to here it is not where refinement, which removes what regularises, leaves it as large
_LEFT = 1e-6  # a part of the solution that refinement may leave where nobody looks
_OUT_OF_REACH = 0.1  # of what is left: all that one more sweep moves, where the rest is in the null space of the matrix
Symmetric = TypeVar("Symmetric", sp.csc_matrix, ArrowheadMatrix)
_SINGULAR = 1e12  # the same without what regularises: more is the inverse of rounding


class Layout:
    """What matrices of one symmetric pattern share: row and column of every entry, which are on the diagonal, and the order
    of elimination.

    Args:
        K: one of them. band: where its entries stand in a band, or a square, if they are to be positive definite.
    """

    def __init__(self, K: sp.csc_matrix, band: SymmetricBand | SymmetricSquare | None = None) -> None:
        self.band = band
        self.rows = K.indices.astype(np.intp)  # what NumPy indexes with
        self.columns = np.repeat(np.arange(K.shape[0]), np.diff(K.indptr))
        self.diagonal = np.flatnonzero(self.rows == self.columns)
        self.ordering, self._pointer, self._last = Ordering(), K.indptr, LastMatrix()
        self._among: tuple[int, np.ndarray] | None = None
        self._arrowhead: tuple[int, Arrowhead | None] | None = None

    def fits(self, K: sp.csc_matrix) -> bool:
        """Is it that of ``K``, too?"""
        return np.array_equal(self.rows, K.indices) and np.array_equal(self._pointer, K.indptr)

    def among(self, n: int) -> np.ndarray:
        """Which entries stand among the first ``n`` rows and columns, ``(nnz,)`` bool."""
        if self._among is None or self._among[0] != n:
            self._among = n, (self.rows < n) & (self.columns < n)
        return self._among[1]

    def saddle(self, K: sp.csc_matrix, n: int) -> SparseSaddle:
        """``K`` with its factors: those of the matrix before if that was the same."""
        found: SparseSaddle = self._last.factors(
            K, lambda: SparseSaddle(K, n, layout=self), lambda saddle: saddle.numbers
        )
        return found

    def arrowhead(self, n: int) -> Arrowhead | None:
        """Where the entries stand if the first ``n`` rows and columns are a diagonal, and the others full."""
        if self.band is not None:
            return None
        if self._arrowhead is None or self._arrowhead[0] != n:
            size = int(self.columns[-1]) + 1
            self._arrowhead = n, Arrowhead.of(self.rows, self.columns, n, size)
        return self._arrowhead[1]


class SaddleMatrix:
    """A matrix ``K`` of conditions, in the forms that systems with parts of it ask for, each made once.

    Args:
        K: ``(n + m, n + m)``, with its whole diagonal. n: unknowns in front. layout: of its pattern, where others have it.
    """

    def __init__(self, K: sp.csc_matrix, n: int, layout: Layout | None = None) -> None:
        self.K, self.n, self.layout = K, n, Layout(K) if layout is None else layout

    @functools.cached_property
    def finite(self) -> bool:
        """Is every entry finite?"""
        return bool(np.isfinite(self.K.data).all())

    @functools.cached_property
    def matrix(self) -> sp.csc_matrix | ArrowheadMatrix:
        """``K`` in the form in which it is multiplied with fastest."""
        place = self.layout.arrowhead(self.n)
        return self.K if place is None else place.matrix(self.K.data)

    @functools.cached_property
    def moduli(self) -> sp.csc_matrix | ArrowheadMatrix:
        """``|K|``."""
        return abs(self.matrix)

    @functools.cached_property
    def scale(self) -> np.ndarray:
        """By what its rows and columns are multiplied to have the size one."""
        return equilibrated(self.matrix)

    @functools.cached_property
    def scaled(self) -> sp.csc_matrix | ArrowheadMatrix:
        """``diag(scale) K diag(scale)``."""
        return both_sides(self.matrix, self.scale)


class SparseSaddle:
    """``K``, factored by SuperLU with diagonal pivots, or where there is a band by Cholesky's method, or by its Schur
    complement where ``H`` is diagonal and the rows of ``C`` are full (:mod:`implicitkit.linear.factors.arrowhead`).

    Args:
        K: ``(n + m, n + m)``, symmetric in pattern and values, every entry of the diagonal there; or an arrowhead. n:
            unknowns in front.
        scale: ``K`` is ``diag(scale)`` on both sides of the matrix that is meant; ``None``: it is to be scaled.
        layout: of its pattern, where others have it, too. regularised: ``delta``, and ``rho`` by the rows of ``|H|``.
    """

    def __init__(
        self,
        K: sp.csc_matrix | ArrowheadMatrix,
        n: int,
        scale: np.ndarray | None = None,
        layout: Layout | None = None,
        regularised: float = _REGULARISED,
    ) -> None:
        self.lu: Any = None
        self.hard = False  # is it by other pivots that a solution was found?
        self._sweeps = 1  # of refinement, where nobody looks at what is left
        self.scale = np.ones(K.shape[0])
        if not all(np.isfinite(part).all() for part in _parts(K)):
            return
        self.layout, self.regularised = Layout(K) if layout is None else layout, regularised
        place = None if isinstance(K, ArrowheadMatrix) else self.layout.arrowhead(n)
        K = K if place is None else place.matrix(K.data)
        self.scale = equilibrated(K) if scale is None else scale
        self.K = both_sides(K, self.scale) if scale is None else K
        signs = np.full(K.shape[0], -1.0)
        signs[:n] = np.maximum(_rows_of_hessian(self.K, n), _LEAST)
        self.signs, self.rows = signs, len(signs) - n
        self.lu = _factor(self.K, regularised * signs, self.layout)

    @property
    def numbers(self) -> int:
        """In the factors and in the matrix, at most."""
        if self.lu is None:
            return len(self.scale)
        if isinstance(self.K, ArrowheadMatrix):
            return 3 * sum(part.size for part in self.K)
        return int(self.K.nnz) + numbers_in(self.lu)

    @functools.cached_property
    def negative(self) -> int:
        """How many eigenvalues of the regularised matrix are negative; -1 where it could not be factored with diagonal
        pivots, or is a band that is not positive definite."""
        if self.lu is None:
            return -1
        if self._is_quasi_definite():
            return self.rows
        count, lu, regularised = _negative(self.lu), self.lu, self.regularised
        while count not in (-1, self.rows) and regularised < min(_rounding(lu), _STRONGEST):
            regularised *= _STRONGER
            lu = _factor(self.K, regularised * self.signs, self.layout)
            count = -1 if lu is None else _negative(lu)
        return count

    def _is_quasi_definite(self) -> bool:
        """Is ``H`` diagonally dominant (a diagonal, as of many programs)?  Then as many eigenvalues are negative as there
        are rows, whatever rounding makes of pivots, which it takes a copy of the factors to look at (Vanderbei 1995, theorem
        2.1)."""
        if isinstance(self.K, ArrowheadMatrix) or not hasattr(self.lu, "perm_r"):
            return False
        diagonal, n = self.K.data[self.layout.diagonal], len(self.signs) - self.rows
        dominant = diagonal[:n] > _DOMINANT * self.signs[:n]  # the sums of rows of |H|, or more
        return bool(dominant.all() and (diagonal[n:] <= 0).all())

    @functools.cached_property
    def _pivoted(self) -> Any:
        """Factors of ``K`` with pivots of any row; ``None`` where it is exactly singular."""
        K = self.K.compressed() if isinstance(self.K, ArrowheadMatrix) else self.K
        return superlu(K, 1.0, permc_spec="COLAMD", options={"SymmetricMode": False}, panel_size=None, relax=None)

    @functools.cached_property
    def regular(self) -> bool:
        """Is it far from singular?  Judged by a solve: where it is not, the factors are those of what regularises them, or
        of rounding.  Where it is, but refinement has far to go, :meth:`once` goes on for longer."""
        if self.lu is None:
            return False
        b = _positive(len(self.scale))
        once = self._lu.solve(b)
        amplified = float(np.abs(once).max(initial=0.0))
        if self.hard or amplified < _AMPLIFIED:
            return amplified < _SINGULAR
        if not amplified < _DOUBTFUL:
            return False
        x, norm = self._refined(self.lu, b, 1.0, ENOUGH)
        size = float(np.abs(x).max())
        if not (norm <= _HARD * size and np.abs(x - once).max() <= 0.5 * size):
            return False
        share = max(float(np.abs(x - once).max() / size), _LEFT)
        self._sweeps = max(1, math.ceil(math.log(_LEFT) / math.log(share)) - 1)
        return True

    def once(self, b: np.ndarray) -> np.ndarray:
        """``x`` with ``K x = b``, ``(n,)`` or ``(n, k)``, linear in ``b``: refined once, or as often as :attr:`regular`
        says, without a look at what is left.  What regularises leaves nothing then that a product with the operator itself,
        dear beside one with ``K``, would have to show first."""
        scale = self.scale.reshape(-1, *(1,) * (b.ndim - 1))
        rhs = b * scale
        x: np.ndarray = self._lu.solve(rhs)
        for _ in range(self._sweeps):
            x = x + self._lu.solve(rhs - self.K @ x)
        return x * scale

    @property
    def _lu(self) -> Any:
        return self._pivoted if self.hard else self.lu

    def solve(self, b: np.ndarray, enough: float = ENOUGH) -> tuple[np.ndarray, float]:
        """``x`` with ``K x = b``, refined until ``enough``, and its backward error ``|b - K x| / (|b| + |x|)``, scaled, in
        the largest entry; infinite without factors."""
        rhs = b * self.scale
        size = float(np.abs(rhs).max(initial=0.0))
        if self.lu is None or not np.isfinite(size):
            return np.zeros_like(b), np.inf
        x, norm = self._refined(self._lu, rhs, size, enough)
        hard = norm > max(enough, _HARD) * (size + float(np.abs(x).max(initial=0.0)))
        if hard and not self.hard and not self._null(rhs - self.K @ x) and self._pivoted is not None:
            other, rest = self._refined(self._pivoted, rhs, size, enough)
            if rest < norm and np.abs(other).max() <= _LARGER * np.abs(x).max():
                self.hard, x, norm = True, other, rest
        if not np.isfinite(norm):
            return np.zeros_like(b), np.inf
        with np.errstate(over="ignore"):  # on a way to infinity
            found = x * self.scale
        if not np.isfinite(found).all():
            return np.zeros_like(b), np.inf
        return found, norm / (size + float(np.abs(x).max())) if size else 0.0

    def _null(self, left: np.ndarray) -> bool:
        """Is what refinement leaves in the null space of ``K``?  With ``(K + R) s = left`` then ``K s = left - R s`` is next
        to nothing, ``R`` being what regularises: no pivots find more.  Where rounding is in the way it is about ``left``."""
        moved = np.abs(self.K @ self.lu.solve(left)).max()
        return bool(moved < _OUT_OF_REACH * np.abs(left).max())

    def _refined(self, lu: Any, rhs: np.ndarray, size: float, enough: float) -> tuple[np.ndarray, float]:
        """The scaled solution and the largest entry of its residual."""
        x = lu.solve(rhs)
        left = rhs - self.K @ x
        norm = float(np.abs(left).max(initial=0.0))
        for _ in range(_SWEEPS):
            if not norm > enough * (size + float(np.abs(x).max())):
                break
            trial = x + lu.solve(left)
            rest = rhs - self.K @ trial
            new = float(np.abs(rest).max(initial=0.0))
            if not new < norm:
                break
            slow = new > 0.5 * norm
            x, left, norm = trial, rest, new
            if slow:
                break
        return x, norm


@functools.lru_cache(maxsize=8)
def _positive(n: int) -> np.ndarray:
    """Random numbers about one, ``(n,)``, not to be written to."""
    found = np.random.default_rng(0).uniform(0.5, 1.5, n)
    found.flags.writeable = False
    return found


def equilibrated(K: Symmetric) -> np.ndarray:
    """``d`` such that the rows of ``diag(d) |K| diag(d)``, symmetric, have about the sum one (Ruiz 2001, in the 1-norm)."""
    d, size = np.ones(K.shape[0]), _size(K)
    for _ in range(3):
        rows = d * (size @ d)
        d = d / np.sqrt(np.where(rows > 0, rows, 1.0))
    return d


def both_sides(K: Symmetric, d: np.ndarray) -> Symmetric:
    """``diag(d) K diag(d)``."""
    if isinstance(K, ArrowheadMatrix):
        return K.both_sides(d)
    data = K.data * d.take(K.indices) * np.repeat(d, np.diff(K.indptr))
    return with_entries(K, data)


def _size(K: Symmetric) -> Symmetric:
    """``|K|``."""
    return abs(K) if isinstance(K, ArrowheadMatrix) else with_entries(K, np.abs(K.data))


def _parts(K: sp.csc_matrix | ArrowheadMatrix) -> tuple[np.ndarray, ...]:
    """Its numbers."""
    return tuple(K) if isinstance(K, ArrowheadMatrix) else (K.data,)


def _rows_of_hessian(K: sp.csc_matrix | ArrowheadMatrix, n: int) -> np.ndarray:
    """The sums of the rows of ``|H|``, ``(n,)``."""
    if isinstance(K, ArrowheadMatrix):
        return np.abs(K.d)
    rows: np.ndarray = _size(K) @ np.r_[np.ones(n), np.zeros(K.shape[0] - n)]
    return rows[:n]


def _factor(K: sp.csc_matrix | ArrowheadMatrix, shift: np.ndarray, layout: Layout) -> Any:
    """Factors of ``K + diag(shift)``; ``None`` where there are none."""
    if isinstance(K, ArrowheadMatrix):
        K = K.shifted(shift)
        found = K.factor()
        return layout.ordering.factor(K.compressed(), 0.0) if found is None else found
    data = K.data.copy()
    data[layout.diagonal] += shift
    if layout.band is not None:
        return layout.band.cholesky(data)
    return layout.ordering.factor(with_entries(K, data), 0.0)


def _negative(lu: Any) -> int:
    """How many pivots are negative; -1 where they are not those of the diagonal, or not finite.  Some factors say it
    themselves."""
    if not hasattr(lu, "perm_r"):
        return int(lu.negative)
    pivots = lu.U.diagonal()
    in_place = np.isfinite(pivots).all() and np.array_equal(lu.perm_r, lu.perm_c)
    return int((pivots < 0).sum()) if in_place else -1


def _rounding(lu: Any) -> float:
    """How far the matrix that was factored is from the one that was meant, in the largest row sum; zero for Cholesky's
    and a Schur complement's."""
    if not hasattr(lu, "perm_r"):
        return 0.0
    return float(np.finfo(np.float64).eps * (abs(lu.L) @ (abs(lu.U) @ np.ones(lu.shape[0]))).max(initial=0.0))
