r"""Rows ``g z_j <= h`` of a sparse quadratic program that bound one unknown each: no rows of its systems, but bounds.

With the active set known, a bound fixes its unknown, what is left is a system in the other unknowns and rows, and the
multiplier of the bound is what stationarity leaves for it, ``lam_i = -(Pz + q + A'y + G'lam)_j / g``, over the other rows.
So the factors of the smaller system solve the whole one, too (:class:`Reduced`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.conditions.active_factors import ActiveSystem
from implicitkit.solver.qp.sparse import Active, SparsePoint


class Bounds:
    """Rows ``g z_j <= h`` of a program that bound one unknown; none where two of them leave no ``z_j``, which is for proofs.

    Attributes:
        taken: which rows they are, ``(m,)`` bool. lower, upper: the nearest ones, ``(n,)``, infinite where there is none.
    """

    def __init__(self, G: sp.csr_matrix, h: np.ndarray) -> None:
        single = np.isfinite(h) & (np.diff(G.indptr) == 1)
        rows = np.flatnonzero(single)
        places = G.indptr[rows]
        slopes = G.data[places]
        rows, places, slopes = (t[slopes != 0] for t in (rows, places, slopes))
        unknowns, limits = G.indices[places], h[rows] / slopes
        self.taken, self.slopes = np.zeros(len(h), dtype=bool), np.ones(len(h))
        self.taken[rows], self.slopes[rows] = True, slopes
        self.upper, self._above = self._nearest(1.0, rows, unknowns, limits, slopes, G.shape[1])
        self.lower, self._below = self._nearest(-1.0, rows, unknowns, limits, slopes, G.shape[1])
        if (self.lower > self.upper).any():
            self.taken[:], self.upper[:], self.lower[:] = False, np.inf, -np.inf

    @staticmethod
    def _nearest(
        side: float, rows: np.ndarray, unknowns: np.ndarray, limits: np.ndarray, slopes: np.ndarray, n: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The least of the limits above each unknown (``side`` 1; -1: the greatest below), and the row that it is from."""
        found, of = np.full(n, side * np.inf), np.full(n, -1)
        mine = np.flatnonzero(side * slopes > 0)
        order = mine[np.argsort(-side * limits[mine], kind="stable")]  # the nearest comes last
        found[unknowns[order]], of[unknowns[order]] = limits[order], rows[order]
        return found, of

    def multipliers(self, force: np.ndarray) -> np.ndarray:
        """The multipliers of all rows, ``(m,)``, from what the bounds push each unknown with, positive at an upper one."""
        lam = np.zeros(len(self.taken))
        for of, push in ((self._above, force), (self._below, -force)):
            held = (of >= 0) & (push > 0)
            lam[of[held]] = push[held] / np.abs(self.slopes[of[held]])
        return lam

    def rows(self, active: Active) -> np.ndarray:
        """The row that holds each unknown, ``(n,)``; -1 where none does."""
        return np.where(active.bounds > 0, self._above, np.where(active.bounds < 0, self._below, -1))


@dataclass(frozen=True)
class Reduced:
    """Factors of a whole program's system with a known active set, by those of its part without the rows that bound one
    unknown: ``K = [[P, A', G'], [A, 0, 0], [G, 0, 0]]`` restricted to active rows.

    Attributes:
        K: the smaller one, rows of ``A`` and some of ``G``. point: its solution. equalities: rows of ``A``. rest: for its
            other rows those of ``G``; row_of: for the unknowns at a bound theirs, else -1. rest_sign, slopes: what
            these rows are of those of ``G``, 1 or -1, and ``g``.
    """

    K: sp.csc_matrix
    point: SparsePoint
    equalities: int
    rest: np.ndarray
    rest_sign: np.ndarray
    row_of: np.ndarray
    slopes: np.ndarray

    def once(self, b: np.ndarray) -> np.ndarray:
        """``x`` with ``K x = b``, refined once; both ``(n + p + m,)``, zero in rows that are not active."""
        n, p = len(self.row_of), self.equalities
        which = np.flatnonzero(self.row_of >= 0)
        at, slopes, lam = n + p + self.row_of[which], self.slopes[which], np.zeros(len(b) - n - p)
        known = np.zeros(self.K.shape[0])
        known[which] = b[at] / slopes
        rows = np.concatenate([b[n : n + p], self.rest_sign * b[n + p + self.rest]])
        free = np.concatenate([self.row_of < 0, self.point.active.rows])
        rhs = np.where(free, np.concatenate([b[:n], rows]) - self.K @ known, 0.0)
        x = np.where(free, self.point.saddle.once(rhs), known)
        np.add.at(lam, self.rest, self.rest_sign * x[n + p :])  # both sides of a row, of which one is active
        lam[self.row_of[which]] = (b[:n] - (self.K @ x)[:n])[which] / slopes
        return np.concatenate([x[: n + p], lam])

    @property
    def regular(self) -> bool:
        """Is what is left far from singular?"""
        return self.point.saddle.regular

    def system(self, P: sp.csr_matrix, A: sp.csr_matrix, G: sp.csr_matrix) -> ActiveSystem:
        """The optimality conditions of the whole program, with these factors."""
        K = sp.csc_matrix(sp.bmat([[P, A.T, G.T], [A, None, None], [G, None, None]], format="csc"))
        active = np.zeros(G.shape[0], dtype=bool)
        active[self.row_of[self.row_of >= 0]] = True
        active[self.rest[self.point.active.rows[self.equalities :]]] = True
        free = np.concatenate([np.ones(len(self.row_of) + self.equalities, dtype=bool), active])
        sign = np.concatenate([np.ones(len(self.row_of) + self.equalities), np.where(active, -1.0, 1.0)])
        return ActiveSystem(K, self, free, sign)
