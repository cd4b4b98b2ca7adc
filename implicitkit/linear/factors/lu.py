r"""Direct solution: form the blocks, factor them.

``P A = L U``,  ``x = U^{-1} L^{-1} P b``, and one step of iterative refinement ``x <- x + A^{-1} (b - A x)`` for the
samples whose residual misses the tolerance.

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), algorithm 3.4.1 and section 3.5.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.dense import factor_batched
from implicitkit.linear.factors.direct import MANY, DirectSolver, refined
from implicitkit.linear.iterative.cycles import tolerance


@register_linear_solver("lu")
@dataclass(frozen=True)
class LU(DirectSolver):
    """LU with partial pivoting of the dense ``(batch, n, n)`` matrix; right for small and ill-conditioned systems.

    A sample has converged when its residual meets the tolerance, or is of the size that rounding leaves in any direct
    solution: ``|b - A x| <= 4 n eps |A|_F |x|`` (Higham 2002, theorem 7.1: the normwise backward error).  ``steps`` counts
    solves with the factors (1, or 2 with refinement).  A singular block is not converged, its ``x`` is
    NaN, and the reason says so.

    Args:
        max_size: the largest ``n`` for which the matrix is formed.

    Raises:
        ValueError: ``n > max_size``.
    """

    matrix_free: ClassVar[bool] = False
    max_size: int = 4096

    def __post_init__(self) -> None:
        check_options(self, max_size=at_least(1))

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        if A.size > self.max_size:
            raise ValueError(
                f'linear_solver="lu" forms a {A.size} x {A.size} matrix per sample, above max_size={self.max_size}: '
                f'use linear_solver="gmres", which only needs products, or LU(max_size={A.size})'
            )
        matrix = A.dense()
        factor = factor_batched(matrix)
        rows = factor.row_scale  # of equations in different units each is judged in its own
        matrix = matrix if rows is None else matrix / rows
        columns = b.permute(1, 2, 0) if rows is None else b.permute(1, 2, 0) / rows
        target = tolerance(columns.permute(2, 0, 1).flatten(0, 1), rtol, atol).unflatten(0, b.shape[:2]).T

        def rounding(x: Tensor) -> Tensor:
            units = factor.column_scale
            size = torch.linalg.matrix_norm(matrix if units is None else matrix / units).unsqueeze(1)
            length = torch.linalg.vector_norm(x if units is None else x * units.mT, dim=1)
            return 4 * A.size * torch.finfo(matrix.dtype).eps * size * length

        inverse = factor.solve if rows is None else lambda r: factor.solve(r * rows)
        product = lambda x: torch.bmm(matrix, x)  # noqa: E731
        common = columns, target, rounding, factor.ok, factor.reason
        many = len(b) > MANY
        found = refined(inverse, product, *common, sweeps=1, at_rounding=many, by_combinations=many)
        if rows is None:
            return found
        left = torch.bmm(matrix, found.x.unflatten(0, b.shape[:2]).permute(1, 2, 0)) - columns
        return found._replace(residual_norm=torch.linalg.vector_norm(left * rows, dim=1).T.reshape(-1))
