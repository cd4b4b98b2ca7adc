r"""Factors of optimality conditions in some unknowns and all rows, for vectors of full length.

    K = [ H   C^T ]  with the unknowns ``F`` free and the others known:      K_F = [ H_FF   C_F^T ]
        [ C   -E  ]                                                                [ C_F    -E    ]

Where most unknowns are at their bounds, what is free is a small part of ``C``: ``|F| m^2`` multiplications, not ``n m^2``.

Source: Nocedal & Wright (2006), *Numerical Optimization*, section 16.5 (active sets: what is fixed leaves the system).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from implicitkit.linear.conditions.sparse_saddle import ENOUGH, Layout, SparseSaddle
from implicitkit.linear.factors.arrowhead import ArrowheadMatrix


class PartSaddle:
    """``K_F`` of an arrowhead, factored; of what is not free a solution is zero.

    Args:
        K: the whole, ``(n + m, n + m)``. free: which unknowns and rows are, ``(n + m,)`` bool; of the other rows nothing is
            left but -1 on the diagonal. added: to that of the unknowns, ``(n,)``. scale, layout: as of
            :class:`SparseSaddle`, of the whole.
    """

    def __init__(
        self, K: ArrowheadMatrix, free: np.ndarray, added: np.ndarray, scale: np.ndarray, layout: Layout
    ) -> None:
        n, self.size = len(K.d), len(free)
        unknowns, rows = free[:n].nonzero()[0], free[n:]
        self.places = np.concatenate([unknowns, np.arange(n, self.size)])
        scale = scale[self.places]
        d, C, E = K.d[unknowns] + added[unknowns], K.C.take(unknowns, 1), K.E
        if not rows.all():
            C, E = np.where(rows[:, None], C, 0.0), np.where(rows[:, None] & rows, E, 0.0) - np.diag(~rows * 1.0)
            scale[len(unknowns) :] = np.where(rows, scale[len(unknowns) :], 1.0)
        self.saddle = SparseSaddle(ArrowheadMatrix(d, C, E), len(unknowns), scale, layout)

    @property
    def lu(self) -> Any:
        """The factors; ``None`` where there are none."""
        return self.saddle.lu

    @property
    def negative(self) -> int:
        """How many eigenvalues are negative (:attr:`SparseSaddle.negative`)."""
        return self.saddle.negative

    @property
    def regular(self) -> bool:
        """Is it far from singular?"""
        return self.saddle.regular

    def once(self, b: np.ndarray) -> np.ndarray:
        """``x`` with ``K x = b`` in what is free, refined once."""
        return self._whole(self.saddle.once(b[self.places]))

    def solve(self, b: np.ndarray, enough: float = ENOUGH) -> tuple[np.ndarray, float]:
        """``x`` with ``K x = b`` in what is free, and its backward error (:meth:`SparseSaddle.solve`)."""
        x, left = self.saddle.solve(b[self.places], enough)
        return self._whole(x), left

    def _whole(self, x: np.ndarray) -> np.ndarray:
        found = np.zeros(self.size)
        found[self.places] = x
        return found
