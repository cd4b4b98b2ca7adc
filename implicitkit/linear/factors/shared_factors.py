"""Factors of samples of which several have one matrix: a linear equation for many right-hand sides."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import torch
from torch import Tensor

from implicitkit.linear.factors.analysis import Analysis
from implicitkit.linear.factors.sparse_factors import SparseFactor

__all__ = ["SharedFactor", "factors"]

_WORTH = 2  # samples a matrix, on average, from which telling them apart has paid


def factors(analysis: Analysis, values: np.ndarray) -> SparseFactor | SharedFactor:
    """Of every sample's matrix, ``values`` ``(batch, nnz)``; one for all samples whose entries are the same, bit by bit."""
    which = np.arange(len(values))
    if values.strides[0] == 0:  # known to be one
        which = np.zeros_like(which)
    elif _may_repeat(values):
        seen: dict[Hashable, int] = {}
        which = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in values])
    analysis.ordering.alike = len(values) / max(1, which.max(initial=0) + 1)
    if analysis.ordering.alike < _WORTH:
        return SparseFactor(analysis, values)
    first = np.unique(which, return_index=True)[1]
    return SharedFactor(lambda: SparseFactor(analysis, values[first]), which)


def _may_repeat(values: np.ndarray) -> bool:
    """Is there, among a few samples, one that has the first entries of another?  A look before all is read."""
    if len(values) == 1:
        return False
    few = values[:: max(1, len(values) // 16), :64]
    return len(np.unique(few, axis=0)) < len(few)


class SharedFactor:
    """:class:`SparseFactor` of ``batch`` samples with fewer matrices.

    Args:
        make: the factors of the matrices. which: of each sample, ``(batch,)``, numbered by their first occurrence.
    """

    def __init__(self, make: Callable[[], SparseFactor], which: np.ndarray) -> None:
        self.inner, self.which = make(), which
        self.ok, self.reason = self.inner.ok[torch.from_numpy(which)], self.inner.reason
        order = np.argsort(which, kind="stable")
        counts = np.bincount(which)
        self.column = np.empty(len(which), dtype=np.int64)  # of a sample among those of its matrix
        self.column[order] = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)

    def solve(self, b: Tensor, transpose: bool = False) -> Tensor:
        """As :meth:`SparseFactor.solve`: the right-hand sides of all samples with one matrix at once."""
        columns = b.unsqueeze(2) if b.ndim == 2 else b
        which, column = (torch.from_numpy(t).to(b.device) for t in (self.which, self.column))
        n, k = columns.shape[1:]
        together = columns.new_zeros(self.inner.batch, int(self.column.max()) + 1, n, k)
        together[which, column] = columns
        x = self.inner.solve(together.permute(0, 2, 1, 3).reshape(self.inner.batch, n, -1), transpose)
        x = x.reshape(self.inner.batch, n, -1, k)[which, :, column]
        return x.squeeze(2) if b.ndim == 2 else x
