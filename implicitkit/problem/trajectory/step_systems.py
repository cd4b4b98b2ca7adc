r"""Systems of implicit steps, ``(I - h A \otimes J) D = b``: their factors.

``A (s, s)`` are the coefficients of a Runge-Kutta method, ``J_j (m, m)`` the Jacobians at the points of a step.  Unknowns
are numbered point by point inside the numbers of the state, and these by reverse Cuthill & McKee (1969): a band of width
``w`` of ``df/dy`` is then one of ``s (w + 1)``, which LAPACK factors in half the time that a sparse matrix takes to be made
and factored.  Wide ones go to SuperLU, and what is hardly sparse to LAPACK's dense LU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

Map = Callable[[np.ndarray], np.ndarray]

WIDEST = 100  # diagonals on one side of a system's band
_DENSE = 0.2  # of a matrix has entries: it is factored as one that is full


class StepSystems:
    """Systems of some parts of steps, factored one by one when that is asked.

    Args:
        J: entries of the Jacobians, one point of one part after another along the diagonal; rows, columns: of these.
            h: lengths of the parts, ``(P,)``. A: ``(s, s)``. size: numbers of the state, ``m``. order: of these, in which
            others were narrow.

    Attributes:
        order: in which these are, ``None`` where they are wide.
    """

    def __init__(
        self,
        J: np.ndarray,
        rows: np.ndarray,
        columns: np.ndarray,
        h: np.ndarray,
        A: np.ndarray,
        size: int,
        order: np.ndarray | None = None,
    ) -> None:
        self.A, self.h, self.size = A, h, size
        first = np.searchsorted(rows, np.arange(len(h) + 1) * len(A) * size)  # entries of each part
        self.parts = [slice(*ends) for ends in itertools.pairwise(first)]
        self.point, self.equation = np.divmod(rows, size)
        self.column, self.J = columns % size, J
        self.point %= len(A)
        self.entries = len(A) * int(np.diff(first).max(initial=0)) + len(A) * size
        self.order, self.place = order, np.empty(size, dtype=np.int64)
        self.lower, self.upper = self._widths()
        if not self._narrow and self.entries <= WIDEST * len(A) * size:
            self.order = self._renumbered()
            self.lower, self.upper = self._widths()
        self.order = np.argsort(self.place) if self._narrow else None

    @property
    def _narrow(self) -> bool:
        return max(self.lower, self.upper) <= min(WIDEST, len(self.A) * self.size // 4)

    def _widths(self) -> tuple[int, int]:
        """How many diagonals there are below and above."""
        self.place[np.arange(self.size) if self.order is None else self.order] = np.arange(self.size)
        gap, s = self.place[self.equation] - self.place[self.column], len(self.A)
        return s * int(gap.max(initial=0)) + s - 1, s * int(-gap.min(initial=0)) + s - 1

    def _renumbered(self) -> np.ndarray:
        import scipy.sparse as sp
        from scipy.sparse.csgraph import reverse_cuthill_mckee

        m = self.size
        pattern = sp.csr_matrix((np.ones(len(self.J)), (self.equation, self.column)), shape=(m, m))
        order: np.ndarray = reverse_cuthill_mckee(sp.csr_matrix(pattern + pattern.T), symmetric_mode=True)
        return order.astype(np.int64)

    def factored(self, i: int) -> Map:
        """``b -> D`` of part ``i``, ``(s, m, k) -> (m, k)`` at its last point; not finite where the system is singular."""
        if self.order is not None:
            return self._banded(i, self.order)
        which, s, m = self.parts[i], len(self.A), self.size
        points, eye = np.arange(s)[:, None], np.arange(s * m)
        solve = _factors(
            np.concatenate(((-self.h[i] * self.A[:, self.point[which]] * self.J[which]).reshape(-1), np.ones(s * m))),
            np.concatenate(((points * m + self.equation[which]).reshape(-1), eye)),
            np.concatenate((np.tile(self.point[which] * m + self.column[which], s), eye)),
            s * m,
        )
        return lambda b: solve(b.reshape(s * m, -1))[-m:]

    def _banded(self, i: int, order: np.ndarray) -> Map:
        import scipy.linalg.lapack as lapack

        which, s, m = self.parts[i], len(self.A), self.size
        place, lower, upper = self.place, self.lower, self.upper
        column = place[self.column[which]] * s + self.point[which]
        height = lower + upper + place[self.equation[which]] * s - column
        band = np.zeros((2 * lower + upper + 1, s * m), order="F")
        entries = -self.h[i] * self.J[which]
        for k, row in enumerate(self.A):
            band[height + k, column] = row[self.point[which]] * entries
        band[lower + upper] += 1
        lu, pivots, bad = lapack.dgbtrf(band, lower, upper, overwrite_ab=True)
        if bad:
            return lambda b: np.full(b.shape[1:], np.nan)

        def solve(b: np.ndarray) -> np.ndarray:
            given = np.asfortranarray(b[:, order].swapaxes(0, 1).reshape(s * m, -1))
            found = lapack.dgbtrs(lu, lower, upper, given, pivots, overwrite_b=True)[0]
            last: np.ndarray = found[s - 1 :: s][place]
            return last

        return solve


def _factors(entries: np.ndarray, rows: np.ndarray, columns: np.ndarray, size: int) -> Map:
    """``b -> A^{-1} b``; not finite where ``A`` is singular."""
    import scipy.linalg.lapack
    import scipy.sparse as sp
    import scipy.sparse.linalg as sla

    matrix = sp.csc_matrix((entries, (rows, columns)), shape=(size, size))
    if matrix.nnz > _DENSE * size**2:
        full = scipy.linalg.lapack.dgetrf(matrix.toarray(order="F"), overwrite_a=True)[:2]
        return lambda b: scipy.linalg.lapack.dgetrs(*full, b)[0]
    try:
        return sla.splu(matrix).solve
    except RuntimeError:
        return lambda b: np.full_like(b, np.nan)
