r"""Direct solution with sparse factors, where the pattern of the matrix is known.

The matrix is found from a few products by its colouring (:mod:`implicitkit.sparsity`), confirmed by one more, and factored
(:mod:`implicitkit.linear.sparse_factors`); the solution is refined and judged by products with the operator itself, so
that no pattern, however wrong, can make a wrong solution look right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator, repeated
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.cycles import in_working_precision, tolerance
from implicitkit.linear.direct import refined
from implicitkit.linear.gmres import GMRES
from implicitkit.linear.lu import LU

__all__ = ["SparseLU", "solve_with"]

_ROUNDING = 64.0  # units of rounding that a direct solution may leave in |A| |x| + |b|


@register_linear_solver("sparse_lu")
@dataclass(frozen=True)
class SparseLU(LinearSolver):
    """LU of the sparse blocks: banded by LAPACK, else by SuperLU.

    The pattern is the problem's (``jac_sparsity=``), or found automatically for 128 unknowns and more.  Where there is none,
    the blocks are solved by ``lu`` up to ``dense_size`` unknowns, and by ``gmres`` above.

    A sample has converged when its residual meets the tolerance, or is what rounding leaves in any direct solution,
    ``|b - A x| <= 64 eps | |A| |x| + |b| |``.  ``steps`` counts solves with the factors.

    Args:
        dense_size: the largest ``n`` for which a dense matrix is formed in its place.
    """

    matrix_free: ClassVar[bool] = False
    factors: ClassVar[bool] = True
    dense_size: int = 4096

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        return self.solve_many(A, b.unsqueeze(0), rtol=rtol, atol=atol, max_steps=max_steps)

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        blocks = A.sparse()
        if blocks is None:
            other: LinearSolver = LU(self.dense_size) if A.size <= self.dense_size else GMRES()
            return other.solve_many(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
        return solve_with(blocks, A, b, rtol=rtol, atol=atol)


def solve_with(blocks: Any, A: Operator, b: Tensor, *, rtol: float, atol: float, sweeps: int = 4) -> LinearSolution:
    """``A x = b`` by the factors of ``blocks`` and refinement with products.

    Args:
        blocks: of ``A`` or of something near it. b: ``(k, batch, n)``. sweeps: refinements at most.
    """
    k = len(b)
    many = A if k == 1 else repeated(A, k)
    columns = b.permute(1, 2, 0)
    factor = blocks.factor

    def product(x: Tensor) -> Tensor:
        rows = many.mv(x.permute(2, 0, 1).flatten(0, 1))
        return rows.unflatten(0, (k, -1)).permute(1, 2, 0)

    def rounding(x: Tensor) -> Tensor:
        size = torch.stack([blocks.size(x[:, :, j]) for j in range(k)], 2) + columns.abs()
        return _ROUNDING * torch.finfo(b.dtype).eps * torch.linalg.vector_norm(size, dim=1)

    # a sweep costs little beside the factors: three digits more than asked, if they are to be had
    target = tolerance(b.flatten(0, 1), rtol, atol).unflatten(0, (k, -1)).T
    ok = factor.ok.to(b.device)
    return refined(blocks.solve, product, columns, target, rounding, ok, factor.reason, sweeps, 1e-3)
