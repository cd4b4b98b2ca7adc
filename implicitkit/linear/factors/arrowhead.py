r"""Symmetric arrowhead matrices, a diagonal and a few full rows, by their Schur complement.

    K = [ D   C' ]        D  (n, n), diagonal,   C  (m, n), full,   m  a few,   E  (m, m)
        [ C   E  ]

    S = E - C D^{-1} C',      K x = b:   S x_2 = b_2 - C D^{-1} b_1,   x_1 = D^{-1} (b_1 - C' x_2)

The order in which sparse factors eliminate such a matrix is this one, ``n m^2 / 2`` multiplications, column by column.  In
one product of matrices they take a third to a twentieth of the time (measured from 200 unknowns and a row to 1,000 and 400),
and no order is looked for, which where rows are full takes far longer than the factors.  ``K`` has as many negative
eigenvalues as ``D`` and ``S`` together (Haynsworth 1968, Linear Algebra Appl. 1).  Of ``S`` nothing but Cholesky's factor of
``-S`` is asked: that is what there is where ``D`` is positive and ``K`` is the matrix of a convex program.

Small pivots of ``D`` (basic unknowns of a linear program) stay with ``S``, if they are no more than ``m``, and with more
``K`` is as good as singular: then ``L B L'`` with pivots of one and two rows, whose signs are the inertia
(Bunch & Kaufman 1977, Math. Comp. 31).

Source: Nocedal & Wright (2006), *Numerical Optimization*, section 16.2 (Schur-complement method).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg as la
import scipy.sparse as sp

_FULL = 0.5  # of the entries of C that are there
_SMALL = 1e-6  # of rows of size one: a pivot of D that is smaller drowns what the others add to S


class Arrowhead:
    """Where the entries of symmetric matrices with one pattern, compressed by columns, stand in ``D``, ``C`` and ``E``.

    Args:
        rows, columns: of every entry; the whole diagonal is there. n: the size of ``D``, m: of ``E``.
    """

    def __init__(self, rows: np.ndarray, columns: np.ndarray, n: int, m: int) -> None:
        self.n, self.m = n, m
        low, left = rows >= n, columns < n
        self.diagonal = np.flatnonzero((rows == columns) & left)
        self.below, self.corner = np.flatnonzero(low & left), np.flatnonzero(low & ~left)
        self.at = (rows[self.below] - n) * n + columns[self.below]
        self.within = (rows[self.corner] - n) * m + columns[self.corner] - n

    @staticmethod
    def of(rows: np.ndarray, columns: np.ndarray, n: int, size: int) -> Arrowhead | None:
        """The arrowhead of a pattern ``(size, size)`` with ``n`` unknowns in front; ``None`` where it is none."""
        m, left = size - n, columns < n
        coupled = bool(((rows < columns) & left).any())
        if not 0 < m < n or coupled or int(left.sum()) - n < _FULL * m * n:
            return None
        return Arrowhead(rows, columns, n, m)

    def matrix(self, data: np.ndarray) -> ArrowheadMatrix:
        """The one with the entries ``data``."""
        d, C, E = data[self.diagonal], np.zeros((self.m, self.n)), np.zeros((self.m, self.m))
        C.reshape(-1)[self.at], E.reshape(-1)[self.within] = data[self.below], data[self.corner]
        return ArrowheadMatrix(d, C, E)


class ArrowheadMatrix(NamedTuple):
    """``D`` ``(n,)``, ``C`` ``(m, n)`` and ``E`` ``(m, m)``: full rows are multiplied with, cut and factored in a fifth of
    the time that they take compressed."""

    d: np.ndarray
    C: np.ndarray
    E: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """``(n + m, n + m)``."""
        size = len(self.d) + len(self.E)
        return size, size

    @property
    def data(self) -> np.ndarray:
        """Its entries, those of ``C`` once."""
        return np.concatenate([self.d, self.C.reshape(-1), self.E.reshape(-1)])

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        first, second = x[: len(self.d)], x[len(self.d) :]
        return np.concatenate([self.d * first + second @ self.C, self.C @ first + self.E @ second])

    def __abs__(self) -> ArrowheadMatrix:
        return ArrowheadMatrix(*map(np.abs, self))

    def diagonal(self) -> np.ndarray:
        """``(n + m,)``."""
        return np.concatenate([self.d, self.E.diagonal()])

    def both_sides(self, by: np.ndarray) -> ArrowheadMatrix:
        """``diag(by) K diag(by)``."""
        first, second = by[: len(self.d)], by[len(self.d) :, None]
        return ArrowheadMatrix(self.d * first * first, self.C * first * second, self.E * (second * second.T))

    def shifted(self, by: np.ndarray) -> ArrowheadMatrix:
        """``K + diag(by)``."""
        n, E = len(self.d), self.E.copy()
        E.reshape(-1)[:: len(E) + 1] += by[n:]
        return ArrowheadMatrix(self.d + by[:n], self.C, E)

    def compressed(self) -> sp.csc_matrix:
        """By columns, zeros left out."""
        d, C, E = sp.diags_array(self.d), self.C, self.E
        return sp.csc_matrix(sp.bmat([[d, C.T], [C, E]]))

    def factor(self) -> ArrowheadFactors | None:
        """``None`` where more entries of ``D`` are small than there are rows, or ``S`` is not what it is to be."""
        small = ~(np.abs(self.d) >= _SMALL)
        if not small.any():
            L, info = la.lapack.dpotrf((self.C / self.d) @ self.C.T - self.E, lower=1)
            return ArrowheadFactors(self.d, self.C, L) if info == 0 else None
        k, large = int(small.sum()), ~small
        if k > len(self.E):
            return None
        d, C = self.d[large], self.C[:, large]
        rest = np.diag(np.concatenate([self.d[small], np.zeros(len(C))]))
        rest[k:, :k] = self.C[:, small]
        rest[k:, k:] = self.E - (C / d) @ C.T
        L, pivots, info = la.lapack.dsytrf(rest, lower=1)
        return (
            PivotedFactors(d, C, L, pivots, np.concatenate([large.nonzero()[0], small.nonzero()[0]]))
            if info == 0
            else None
        )


class ArrowheadFactors:
    """``D``, ``C`` and Cholesky's factor ``L`` of ``-S``.

    Attributes:
        negative: how many eigenvalues of ``K`` are negative.
    """

    def __init__(self, d: np.ndarray, C: np.ndarray, L: np.ndarray) -> None:
        self.d, self.C, self.L = d, C, L
        self.negative = int((d < 0).sum()) + len(C)

    def solve(self, b: np.ndarray) -> np.ndarray:
        """``K x = b``, ``(n + m,)``."""
        n = len(self.d)
        first = b[:n] / self.d
        second = la.lapack.dpotrs(self.L, self.C @ first - b[n:], lower=1)[0]
        return np.concatenate([first - (self.C.T @ second) / self.d, second])


class PivotedFactors(ArrowheadFactors):
    """``L B L'`` of ``S`` and of ``k`` small pivots before it, and what is left of ``D`` and ``C``.

    Args:
        order: the unknowns of ``D``, those with small pivots at the end.
    """

    def __init__(self, d: np.ndarray, C: np.ndarray, L: np.ndarray, pivots: np.ndarray, order: np.ndarray) -> None:
        self.d, self.C, self.L, self.pivots, self.order = d, C, L, pivots, order
        two = pivots < 0  # one of two such eigenvalues is negative
        self.negative = int((d < 0).sum()) + int(two.sum()) // 2 + int((L.diagonal()[~two] < 0).sum())

    def solve(self, b: np.ndarray) -> np.ndarray:
        n, k = len(self.order), len(self.L) - len(self.C)
        first = b[self.order[: n - k]] / self.d
        rest = np.concatenate([b[self.order[n - k :]], b[n:] - self.C @ first])
        rest = la.lapack.dsytrs(self.L, self.pivots, rest, lower=1)[0]
        x = np.empty_like(b)
        x[self.order], x[n:] = np.concatenate([first - (self.C.T @ rest[k:]) / self.d, rest[:k]]), rest[k:]
        return x
