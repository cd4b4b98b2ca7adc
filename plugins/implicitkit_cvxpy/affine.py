"""Affine maps of the parameters, in operations that every transform of torch knows.

``data = M (p, 1)`` with ``M`` sparse.  DPP makes nearly every row of ``M`` a single entry, and most matrices of a program
are a parameter as it stands: then the map is a view of it, or a few put together; else one gather.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_RUNS = 8  # pieces that a map may be put together from before a gather is better


class Vector:
    """The parameters of a batch, ``p = (parts..., 1, 0)``.

    Args:
        parts: each ``(batch, k_i)``, float64. offsets: where each begins, and the end of the last. batch, device: of all.
    """

    def __init__(self, parts: list[Tensor], offsets: Any, batch: int, device: Any) -> None:
        self.parts, self.offsets, self.batch, self.device = parts, offsets, batch, device
        self._whole: Tensor | None = None

    def whole(self) -> Tensor:
        """``p`` as one tensor, ``(batch, k + 2)``."""
        if self._whole is None:
            ends = torch.tensor([1.0, 0.0], dtype=torch.float64, device=self.device).expand(self.batch, 2)
            self._whole = torch.cat([*self.parts, ends], 1)
        return self._whole


class AffineMap:
    """Parameters ``(batch, k)`` to data ``(batch, *shape)``: ``M p`` with ``p`` as in :class:`Vector`.

    Args:
        matrix: SciPy sparse array ``M`` ``(prod(shape), k + 1)``. shape: of one sample's result.
        offsets: where the parts of ``p`` begin.

    Attributes:
        empty: the result is zero whatever the parameters.
    """

    def __init__(self, matrix: Any, shape: tuple[int, ...], offsets: Any) -> None:
        matrix = matrix.tocoo()
        matrix.sum_duplicates()
        row, column, value = matrix.row.astype(np.int64), matrix.col.astype(np.int64), matrix.data.astype(np.float64)
        row, column, value = row[value != 0], column[value != 0], value[value != 0]
        rows, width = matrix.shape
        self.shape, self.size = tuple(shape), int(rows)
        self.empty = len(value) == 0
        single = bool(np.bincount(row, minlength=rows).max(initial=0) <= 1)
        if single:  # absent rows read the zero behind the one
            index, coefficient = np.full(rows, width, dtype=np.int64), np.zeros(rows)
            index[row], coefficient[row] = column, value
            self.pieces = _pieces(index, coefficient, width - 1, offsets)
        else:
            index, coefficient, self.pieces = column, value, None
        self._row = None if single else torch.from_numpy(row)
        self._index, self._coefficient = torch.from_numpy(index), torch.from_numpy(coefficient)

    def _to(self, device: Any) -> None:
        self._index, self._coefficient = self._index.to(device), self._coefficient.to(device)
        self._row = None if self._row is None else self._row.to(device)
        if self.pieces is not None:
            self.pieces = [v.to(device) if isinstance(v, Tensor) else v for v in self.pieces]

    def __call__(self, p: Vector) -> Tensor:
        """The data for every sample."""
        shape = (p.batch, *self.shape)
        if self.empty:
            return torch.zeros(shape, dtype=torch.float64, device=p.device)
        if self._index.device != p.device:
            self._to(p.device)
        if self.pieces is not None:
            found = [
                piece.expand(p.batch, -1) if isinstance(piece, Tensor) else _scaled(p.parts[piece[0]], *piece[1:])
                for piece in self.pieces
            ]
            return (found[0] if len(found) == 1 else torch.cat(found, 1)).reshape(shape)
        terms = p.whole().index_select(1, self._index) * self._coefficient
        if self._row is not None:
            terms = terms.new_zeros(p.batch, self.size).index_add(1, self._row, terms)
        return terms.reshape(shape)


def _scaled(part: Tensor, start: int, stop: int, coefficient: float) -> Tensor:
    piece = part if (start, stop) == (0, part.shape[1]) else part[:, start:stop]
    return piece if coefficient == 1.0 else -piece if coefficient == -1.0 else piece * coefficient


def _pieces(index: Any, coefficient: Any, one: int, offsets: Any) -> list[Any] | None:
    """The map as consecutive pieces, if they are few: constants as tensors, ``(part, start, stop, coefficient)`` else."""
    if not len(index):
        return None
    part = np.searchsorted(offsets, index, side="right") - 1
    part[index >= one] = -1
    following = (np.diff(index) == 1) & (np.diff(coefficient) == 0)
    breaks = np.flatnonzero((np.diff(part) != 0) | ((part[1:] >= 0) & ~following)) + 1
    if len(breaks) >= _RUNS:
        return None
    pieces: list[Any] = []
    for rows in np.split(np.arange(len(index)), breaks):
        first, owner = rows[0], int(part[rows[0]])
        if owner < 0:
            pieces.append(torch.from_numpy(np.where(index[rows] == one, coefficient[rows], 0.0)))
        else:
            start = int(index[first] - offsets[owner])
            pieces.append((owner, start, start + len(rows), float(coefficient[first])))
    return pieces
