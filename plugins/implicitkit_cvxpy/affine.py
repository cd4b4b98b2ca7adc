"""Affine maps of the parameters, in operations that every transform of torch knows.

``data = M (p, 1)`` with ``M`` sparse.  DPP makes nearly every row of ``M`` a single entry: then the map is one gather.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["AffineMap"]


class AffineMap:
    """``(batch, k + 2) -> (batch, *shape)``: entry ``i`` is ``sum_j M_ij p_j``, where ``p`` ends with a 1 and a 0.

    Args:
        matrix: SciPy sparse array ``M`` ``(prod(shape), k + 1)``. shape: of one sample's result.

    Attributes:
        empty: the result is zero whatever the parameters. constant: it does not depend on them.
    """

    def __init__(self, matrix: Any, shape: tuple[int, ...]) -> None:
        matrix = matrix.tocoo()
        matrix.sum_duplicates()
        row, column, value = matrix.row.astype(np.int64), matrix.col.astype(np.int64), matrix.data.astype(np.float64)
        row, column, value = row[value != 0], column[value != 0], value[value != 0]
        rows, width = matrix.shape
        self.shape, self.size = tuple(shape), int(rows)
        self.empty = len(value) == 0
        self.constant = bool((column == width - 1).all())
        self.single = bool(np.bincount(row, minlength=rows).max(initial=0) <= 1)
        if self.single:  # absent rows read the zero behind the one
            index, coefficient = np.full(rows, width, dtype=np.int64), np.full(rows, value[0] if len(value) else 1.0)
            index[row], coefficient[row] = column, value
        else:
            index, coefficient = column, value
        self.uniform = float(coefficient[0]) if len(coefficient) and np.ptp(coefficient) == 0 else None
        self._index, self._coefficient, self._row = map(torch.from_numpy, (index, coefficient, row))

    def __call__(self, p: Tensor) -> Tensor:
        """The data for every sample of ``p``."""
        if self.empty:
            return p.new_zeros(p.shape[0], *self.shape)
        if self._index.device != p.device:
            self._index, self._coefficient, self._row = (
                t.to(p.device) for t in (self._index, self._coefficient, self._row)
            )
        terms = p.index_select(1, self._index)
        if self.uniform is None:
            terms = terms * self._coefficient
        elif self.uniform != 1.0:
            terms = terms * self.uniform
        if not self.single:
            terms = p.new_zeros(p.shape[0], self.size).index_add(1, self._row, terms)
        return terms.reshape(p.shape[0], *self.shape)
