"""The dense blocks of an operator with their factors, to be used again."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.in_parts import absolute_product
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.factors.dense import Factor, factor_batched, is_one, mm, mv
from implicitkit.linear.factors.direct import MANY, refined
from implicitkit.linear.iterative.cycles import tolerance


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
    def values(self) -> Tensor:
        """The matrices as they are, or transposed, ``(batch, n, n)``."""
        return self.matrix.mT if self.transposed else self.matrix

    @property
    def columns(self) -> Tensor:
        """The norms of the columns, ``(batch, n)``."""
        return torch.linalg.vector_norm(self.values, dim=1)

    def solve(self, b: Tensor) -> Tensor:
        """``A x = b``, ``(batch, n)`` or ``(batch, n, k)``; NaN for a singular matrix."""
        return self.factor.solve(b, self.transposed)

    def solve_many(self, b: Tensor, *, rtol: float, atol: float) -> LinearSolution:
        """``A x = b`` for ``b (k, batch, n)``, refined and judged by the matrices themselves; where the factors are those of
        a scaled matrix, each equation in its own units."""
        factor, matrix = self.factor, self.values
        rows, units = factor.scales(self.transposed)
        matrix = matrix if rows is None else matrix / rows
        columns = b.permute(1, 2, 0) if rows is None else b.permute(1, 2, 0) / rows
        target = tolerance(columns.permute(2, 0, 1).flatten(0, 1), rtol, atol).unflatten(0, b.shape[:2]).T

        def rounding(x: Tensor) -> Tensor:
            size = torch.linalg.matrix_norm(matrix if units is None else matrix / units.mT).unsqueeze(1)
            length = torch.linalg.vector_norm(x if units is None else x * units, dim=1)
            return 4 * len(matrix[0]) * torch.finfo(matrix.dtype).eps * size * length

        inverse = self.solve if rows is None else lambda r: self.solve(r * rows)
        product = lambda x: mm(matrix, x)  # noqa: E731
        common = columns, target, rounding, factor.ok, factor.reason
        many = len(b) > MANY
        found = refined(inverse, product, *common, sweeps=1, at_rounding=many, by_combinations=many)
        if rows is None:
            return found
        left = mm(matrix, found.x.unflatten(0, b.shape[:2]).permute(1, 2, 0)) - columns
        return found._replace(residual_norm=torch.linalg.vector_norm(left * rows, dim=1).T.reshape(-1))

    def product(self, x: Tensor) -> Tensor:
        """``A x``, ``(batch, n)`` or ``(batch, n, k)``, by the matrices themselves."""
        A = self.values
        columns = x.to(A)
        if is_one(A):
            return torch.einsum("ij,bj...->bi...", A[0], columns)
        return mm(A, columns) if x.ndim == 3 else mv(A, columns)

    def size(self, x: Tensor) -> Tensor:
        """``|A| |x|``, shaped as ``x``: the size of what is added up in a product with ``A``, entry by entry."""
        A = self.values
        columns = x.to(A)
        if is_one(A):
            return torch.einsum("ij,bj...->bi...", A[0].abs(), columns.abs())
        return absolute_product(A, columns) if x.ndim == 3 else absolute_product(A, columns.unsqueeze(2)).squeeze(2)
