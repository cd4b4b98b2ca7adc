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

from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.cycles import column, in_working_precision, norms, tolerance
from implicitkit.linear.dense import RHS_NOT_FINITE, factor_batched
from implicitkit.operators import Operator

__all__ = ["LU"]


@register_linear_solver("lu")
@dataclass(frozen=True)
class LU(LinearSolver):
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

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        if A.size > self.max_size:
            raise ValueError(
                f'linear_solver="lu" forms a {A.size} x {A.size} matrix per sample, above max_size={self.max_size}: '
                f'use linear_solver="gmres", which only needs products, or LU(max_size={A.size})'
            )
        matrix = A.dense()
        target = tolerance(b, rtol, atol)
        factor = factor_batched(matrix)
        zero = column(norms(b) == 0)
        x = torch.where(zero & column(factor.ok), torch.zeros_like(b), factor.solve(b))
        residual = b - torch.bmm(x.unsqueeze(1), matrix.mT).squeeze(1)
        norm = norms(residual)
        steps = (~zero).squeeze(1).long()
        missed = factor.ok & (norm > target)
        if bool(missed.any()):
            refined = x + factor.solve(residual)
            refined_norm = norms(b - torch.bmm(refined.unsqueeze(1), matrix.mT).squeeze(1))
            better = missed & (refined_norm < norm)
            x, norm = torch.where(column(better), refined, x), torch.where(better, refined_norm, norm)
            steps = steps + missed.long()
        rounding = 4 * A.size * torch.finfo(matrix.dtype).eps * torch.linalg.matrix_norm(matrix) * norms(x)
        converged = factor.ok & (norm <= torch.maximum(target, rounding))
        reason = ""
        if not bool(converged.all()):
            reason = factor.reason
            if not reason:
                finite = bool(norm.isfinite().all())
                reason = "the matrix is too ill-conditioned for the tolerance" if finite else RHS_NOT_FINITE
        return LinearSolution(x, norm, steps, converged, reason)
