"""The dense blocks of an operator with their factors, to be used again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import Factor, factor_batched, mv


class DenseBlocks:
    """``batch`` matrices ``(n, n)``, or their transposed, factored at once.

    Args:
        matrix: ``(batch, n, n)``. factor: its factors, if there are any.
    """

    def __init__(self, matrix: Tensor, factor: Factor | None = None, transposed: bool = False) -> None:
        self.matrix, self.transposed, self._factor = matrix, transposed, factor

    @property
    def factor(self) -> Factor:
        """The factors, made when they are asked for first: a step of another matrix needs none."""
        if self._factor is None:
            self._factor = factor_batched(self.matrix)
        return self._factor

    @property
    def T(self) -> DenseBlocks:
        """The transposed matrices; they share the factors."""
        return DenseBlocks(self.matrix, self.factor, not self.transposed)

    @property
    def batch(self) -> int:
        """How many matrices."""
        return len(self.matrix)

    @property
    def columns(self) -> Tensor:
        """The norms of the columns, ``(batch, n)``."""
        return torch.linalg.vector_norm(self.matrix.mT if self.transposed else self.matrix, dim=1)

    def solve(self, b: Tensor) -> Tensor:
        """``A x = b``, ``(batch, n)`` or ``(batch, n, k)``; NaN for a singular matrix."""
        return self.factor.solve(b, self.transposed)

    def product(self, x: Tensor) -> Tensor:
        """``A x``, ``(batch, n)`` or ``(batch, n, k)``, by the matrices themselves."""
        return self._times(x, self.matrix)

    def size(self, x: Tensor) -> Tensor:
        """``|A| |x|``, shaped as ``x``: the size of what is added up in a product with ``A``, entry by entry."""
        return self._times(x.abs(), _each(torch.abs, self.matrix))

    def _times(self, x: Tensor, matrix: Tensor) -> Tensor:
        A = matrix.mT if self.transposed else matrix
        columns = x.to(A)
        if A.shape[0] > 1 and A.stride(0) == 0:  # one matrix, expanded
            return torch.einsum("ij,bj...->bi...", A[0], columns)
        return torch.bmm(A, columns) if x.ndim == 3 else mv(A, columns)


def _each(what: Callable[[Tensor], Tensor], matrix: Tensor) -> Tensor:
    """``what`` of every entry, once where all samples have one matrix."""
    return what(matrix[:1]).expand(matrix.shape) if matrix.stride(0) == 0 else what(matrix)
