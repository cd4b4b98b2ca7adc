"""From the unknowns of the canonical program back to the variables that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit_cvxpy.assembly import Assembly, SparseAssembly
from implicitkit_cvxpy.compat import CanonicalProgram

__all__ = ["Variables"]


@dataclass
class Reader:
    """One variable: ``coefficient * w[index]``, with ``index`` pointing at a zero behind ``w`` where there is nothing."""

    shape: tuple[int, ...]
    index: Tensor
    coefficient: Tensor | None
    span: tuple[int, int] | None  # the index is this range
    exp: bool


class Variables:
    """``w (batch, n + m)`` of the reduced program to a tuple of tensors."""

    def __init__(self, program: CanonicalProgram, assembly: Assembly | SparseAssembly) -> None:
        size = assembly.n + assembly.cones.size
        column = np.full(program.n + 1, size, dtype=np.int64)
        column[assembly.columns] = np.arange(assembly.n)
        row = np.full(program.cones.size + 1, size, dtype=np.int64)
        row[assembly.rows] = assembly.n + np.arange(len(assembly.rows))
        self.readers = []
        for r in program.variables:
            index: Any = (row if r.dual else column)[r.index]
            first = int(index[0]) if len(index) else 0
            straight = len(index) > 0 and bool((index == first + np.arange(len(index))).all()) and index[-1] < size
            weight = None if (r.coefficient == 1).all() else torch.from_numpy(r.coefficient.astype(np.float64))
            span = (first, first + len(index)) if straight else None
            self.readers.append(Reader(r.shape, torch.from_numpy(index), weight, span, r.exp))

    def __call__(self, w: Tensor, lead: tuple[int, ...]) -> list[Tensor]:
        """Each variable, ``lead + shape``."""
        padded = None
        out = []
        for reader in self.readers:
            if reader.span is not None:
                part = w[:, slice(*reader.span)]
            else:
                padded = torch.cat([w, w.new_zeros(w.shape[0], 1)], 1) if padded is None else padded
                part = padded.index_select(1, reader.index.to(w.device))
            if reader.coefficient is not None:
                part = part * reader.coefficient.to(w.device)
            part = part.exp() if reader.exp else part
            out.append(part.reshape(lead + reader.shape))
        return out

    def empty(self, lead: tuple[int, ...], dtype: torch.dtype, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results for a batch of no samples, on the graph of the parameters."""
        anchor = sum(v.sum() * 0 for v in values if v.numel() == 0)
        return tuple(anchor + torch.zeros(*lead, *r.shape, dtype=dtype, device=values[0].device) for r in self.readers)
