r"""Block substitution: a block triangular system, one diagonal block after another.

With ``A`` block lower triangular (the Jacobian of a composition, its components in topological order),

    A x = b:      x_i = A_ii^{-1} (b_i - sum_{j<i} A_ij x_j),          i = 1, 2, ...
    A^T u = b:    u_i = A_ii^{-T} (b_i - sum_{k>i} A_ki^T u_k),        i = K, K-1, ...

so that the products of a block are evaluated only while that block is solved, and each coupling once.  A Krylov method
on all of ``A`` would evaluate every block in every step.

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), section 3.1.4 (block substitution).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import check_options, part
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import get_linear_solver, register_linear_solver
from implicitkit.linear.iterative.cycles import norms


@register_linear_solver("blocks")
@dataclass(frozen=True)
class BlockSubstitution(LinearSolver):
    """Substitution by blocks, for compositions; a system without known blocks is one block.

    Each block is solved to ``|r_i| <= atol / sqrt(K) + rtol |b_i|``, ``b_i`` its right-hand side after substitution:
    convergence is judged per block, as when layers are differentiated one after another.  A block whose right-hand side
    is zero costs nothing.  ``steps`` is the sum over the blocks.

    Source: Golub & Van Loan (2013), *Matrix Computations*, section 3.1.

    Args:
        inner: the linear solver for the diagonal blocks, a registered name or a configured object.

    Raises:
        ValueError: ``inner`` is ``"blocks"`` itself.
    """

    inner: Any = "auto"

    def __post_init__(self) -> None:
        check_options(self, inner=part("linear solver", LinearSolver))
        if self.inner == "blocks" or isinstance(self.inner, BlockSubstitution):
            raise ValueError('inner is the linear solver of single blocks and cannot be "blocks" itself')
        if self.inner != "auto":
            get_linear_solver(self.inner)

    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        inner, blocks = get_linear_solver(self.inner), A.structure
        if blocks is None:
            return inner.solve(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
        count = len(blocks)
        steps = torch.zeros(b.shape[0], dtype=torch.int64, device=b.device)
        square = b.new_zeros(b.shape[0], dtype=torch.promote_types(b.dtype, torch.float32))
        converged = torch.ones_like(steps, dtype=torch.bool)
        rhs = [blocks.take(i, b) for i in range(count)]
        parts, reasons = list(rhs), []
        for i in range(count):
            r = rhs[i]
            if not blocks.solved(i) or not bool(r.any()):
                parts[i] = torch.zeros_like(r)
                continue
            if blocks.explicit(i):
                parts[i] = -r
                converged = converged & norms(r).isfinite()
            else:
                answer = inner.solve(blocks.diagonal(i), r, rtol=rtol, atol=atol / count**0.5, max_steps=max_steps)
                parts[i] = answer.x
                steps = steps + answer.steps
                square = square + answer.residual_norm.to(square.dtype).square()
                converged = converged & answer.converged
                if not bool(answer.converged.all()):
                    reasons.append(f"block {blocks.name(i)}: {answer.reason}" if answer.reason else blocks.name(i))
            for j, change in blocks.couple(i, parts[i]).items():
                rhs[j] = rhs[j] - change
        return LinearSolution(blocks.join(parts), square.sqrt(), steps, converged, "; ".join(reasons))
