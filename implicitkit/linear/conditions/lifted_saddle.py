r"""Optimality conditions whose Hessian is sparse but for a few numbers that all unknowns share, by as many unknowns more.

    minimise  d'(A + V'S V) d / 2 + q'd          =          minimise  d'A d / 2 + s'S s / 2 + q'd   and   s = V d

A factor model of risk, ``F F' + D``, is ``k`` returns of factors and a diagonal.  The conditions of the second form,

    [ A   0   J'  -V' ]
    [ 0   S   0    I  ]          A  (n, n),   S = diag(+-1)  (k, k),   J  (m, n),   V  (k, n),
    [ J   0   0    0  ]
    [ -V  I   0    0  ]

are sparse where those of the first are full, and ``A + V'S V`` is positive definite on the null space of ``J`` exactly if
``diag(A, S)`` is on that of both constraints: inertia says the same of either.

Source: Mitra, Ellison & Scowcroft (2007), "Quadratic programming for portfolio planning", J. Asset Management 8, part II
(factor models by additional variables); the elimination of ``s`` is Woodbury's formula (Golub & Van Loan 2013, 2.1.4).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.conditions.active_factors import Saddle
from implicitkit.linear.conditions.sparse_saddle import Layout, SaddleMatrix
from implicitkit.linear.factors.arrowhead import ArrowheadMatrix
from implicitkit.linear.factors.low_rank_blocks import symmetric_border
from implicitkit.sparsity.low_rank import Bordered, Entries


class Lifts(NamedTuple):
    """The matrices of all samples, of one pattern, their entries ``(batch, nnz)``, and ``k``."""

    matrices: list[SaddleMatrix]
    entries: np.ndarray
    more: int


def lifted_saddles(ready: Bordered, entries: Entries, J: np.ndarray) -> tuple[Lifts, bool]:
    """The matrices, and are they those of the last time?

    Args:
        entries: of the Hessians. J: ``(batch, m, n)``, all entries of which count.
    """
    last: _Lifts = ready.analysed(_Lifts)
    before = last.last
    found = last.of(ready, entries, J)
    return found, before is not None and found is before[2]


def _lifted(A: sp.csr_matrix, rows: np.ndarray, diagonal: np.ndarray, m: int) -> sp.csc_matrix:
    """``[[diag(A, 0) + diagonal, C'], [C, 0]]`` with ``C = [rows, (0, I)']``, all of these entries there."""
    (count, n), size = rows.shape, len(diagonal) + len(rows)
    k = len(diagonal) - n
    i, j = np.repeat(np.arange(count), n), np.tile(np.arange(n), count)
    A = A.tocoo()
    unit, everywhere = np.arange(k), np.arange(size)
    down = np.concatenate([n + k + i, n + k + m + unit])
    across = np.concatenate([j, n + unit])
    values = np.concatenate([rows.reshape(-1), np.ones(k)])
    ends = np.concatenate([diagonal, np.zeros(count)])
    entries = np.concatenate([A.data, values, values, ends])
    place = np.concatenate([A.row, down, across, everywhere]), np.concatenate([A.col, across, down, everywhere])
    found = sp.csc_matrix((entries, place), shape=(size, size))
    found.sort_indices()
    return found


class LiftedMatrix:
    """``[[A + V'S V, J'], [J, 0]]`` to multiply with, by the matrix of the second form: ``(H d + J'y, J d)`` is what that
    makes of ``(d, 0, y, -S V d)``, without what is beside.  Its absolute value is that of its parts.

    Args:
        K: the matrix of the second form. n, m: unknowns and rows of the first.
    """

    def __init__(self, K: sp.csc_matrix | ArrowheadMatrix, n: int, m: int) -> None:
        self.K, self.n, self.m = K, n, m
        self.k = (K.shape[0] - n - m) // 2
        self.signs = K.diagonal()[n : n + self.k]

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        n, m, none = self.n, self.m, np.zeros(self.k)
        beside = (self.K @ np.concatenate([x[:n], none, x[n:], none]))[n + self.k + m :]
        y = self.K @ np.concatenate([x[:n], none, x[n:], self.signs * beside])
        return np.concatenate([y[:n], y[n + self.k : n + self.k + m]])

    def __abs__(self) -> LiftedMatrix:
        return LiftedMatrix(abs(self.K), self.n, self.m)


class LiftedFactors:
    """Factors of the second form as those of the first, in what is free: on the right of what is beside there are zeros.

    Args:
        saddle: of the second form. n, m: unknowns and rows of the first. k: unknowns and rows beside.
    """

    def __init__(self, saddle: Saddle, n: int, m: int, k: int) -> None:
        self.saddle, self.n, self.m, self.k = saddle, n, m, k

    @property
    def regular(self) -> bool:
        """Is it far from singular?"""
        return self.saddle.regular

    def once(self, b: np.ndarray) -> np.ndarray:
        """``x`` with ``K x = b``, refined once."""
        n, none = self.n, np.zeros(self.k)
        x = self.saddle.once(np.concatenate([b[:n], none, b[n:], none]))
        return np.concatenate([x[:n], x[n + self.k : n + self.k + self.m]])


class _Lifts:
    """The last ones of a pattern: a Hessian that is the same from solve to solve has the same entries, object by object
    (:meth:`Bordered.values`).

    Args:
        pattern: not looked at (:meth:`Bordered.analysed`).
    """

    def __init__(self, pattern: object) -> None:
        self.last: tuple[Entries, np.ndarray, Lifts] | None = None

    def of(self, ready: Bordered, entries: Entries, J: np.ndarray) -> Lifts:
        """The matrices of these (:func:`lifted_saddles`)."""
        last = self.last
        if last is not None and last[0] is entries and np.array_equal(last[1], J):
            return last[2]
        V, signs = symmetric_border(entries)
        (batch, k, n), m = V.shape, J.shape[1]
        matrices = [
            _lifted(
                ready.matrix(entries.A[i]), np.concatenate([J[i], -V[i]]), np.concatenate([np.zeros(n), signs[i]]), m
            )
            for i in range(batch)
        ]
        layout = last[2].matrices[0].layout if last is not None and last[2].matrices else None
        if layout is None or not layout.fits(matrices[0]):  # how many numbers are shared may depend on the point
            layout = Layout(matrices[0]) if matrices else None
        found = Lifts([SaddleMatrix(K, n + k, layout) for K in matrices], np.stack([K.data for K in matrices]), k)
        self.last = entries, J.copy(), found
        return found
