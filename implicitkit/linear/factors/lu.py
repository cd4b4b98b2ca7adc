r"""Direct solution: form the blocks, factor them.

``P A = L U``,  ``x = U^{-1} L^{-1} P b``, and one step of iterative refinement ``x <- x + A^{-1} (b - A x)`` for the
samples whose residual misses the tolerance.

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), algorithm 3.4.1 and section 3.5.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.dense import SINGULAR
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.factors.direct import DirectSolver


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
        blocks = DenseBlocks(A.dense()) if A.exact is None else A.exact
        if A.exact is None and not blocks.factor.reason:
            A.exact = blocks
        A.singular = A.singular or blocks.factor.reason == SINGULAR
        return blocks.solve_many(b, rtol=rtol, atol=atol)
