r"""Conjugate gradients, for symmetric definite blocks.

    alpha = r's / p'Ap,   x <- x + alpha p,   r <- r - alpha A p,   p <- s + (r's new / r's old) p,   s = M^{-1} r

Source: Hestenes & Stiefel (1952); Saad, *Iterative Methods for Sparse Linear Systems* (2nd ed., SIAM 2003),
algorithms 6.18 and, with a preconditioner ``M``, 9.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import MatVec, Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.iterative.cycles import Correction, Task, column, in_working_precision, restarted
from implicitkit.linear.iterative.dropping import Fewer, narrowed
from implicitkit.linear.iterative.preconditioners import PreconditionedSolver


@register_linear_solver("cg")
@dataclass(frozen=True)
class CG(PreconditionedSolver):
    """Conjugate gradients, each sample with its own step lengths; one product a step.

    For a negative definite block (``J - I`` of a contraction) the same formulas solve ``-A x = -b``.  Two directions whose
    curvatures ``p'Ap`` differ in sign prove that a block is not definite; the sample stops there and says so.  A
    preconditioner must be symmetric and positive definite (``"jacobi"``, ``"amg"``, a Cholesky factor): ``r's <= 0`` ends
    a sample too.

    Source: Hestenes & Stiefel (1952); Nocedal & Wright (2006), algorithm 5.2.

    Args:
        preconditioner: ``"jacobi"``, ``"block_jacobi"`` or ``"amg"`` (:class:`PreconditionedSolver`).

    Raises:
        ValueError: another preconditioner.
    """

    needs: ClassVar[tuple[str, ...]] = ("symmetric",)

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        M = self.preconditioner_of(A)
        inverse: MatVec = (lambda v: v) if M is None else M.solve

        def cycle(task: Task) -> Correction:
            r, _, target, live, budget = task
            fewer = Fewer(A, may=M is None)
            x, p, goal = torch.zeros_like(r), inverse(r), target * target
            rs = (r * p).sum(dim=1)
            steps = torch.zeros_like(budget)
            failed = torch.zeros_like(live)
            side = rs.new_zeros(())  # of zero on which A lies: the sign of the first curvature
            while left := int(torch.count_nonzero(live)):
                index = fewer.drop(live, left, lambda: (x, steps, failed))  # noqa: B023
                if index is not None:
                    x, p, r, rs, goal = narrowed(index, x, p, r, rs, goal)
                    steps, budget, failed, live, side = narrowed(index, steps, budget, failed, live, side)
                Ap = fewer.A.mv(p)
                curvature = (p * Ap).sum(dim=1)
                side = curvature.sign() if side.ndim == 0 else side
                definite = (curvature * side > 0) & (rs > 0)
                steps = steps + live
                failed = failed | (live & ~definite)
                live = live & definite
                alpha, keep = column(rs / curvature), column(live)
                x = torch.where(keep, torch.addcmul(x, alpha, p), x)
                r = torch.where(keep, torch.addcmul(r, alpha, Ap, value=-1), r)
                s = inverse(r)
                rs_next = (r * s).sum(dim=1)
                p = torch.where(keep, torch.addcmul(s, column(rs_next / rs), p), p)
                rs = rs_next
                live = live & ((r * r).sum(dim=1) > goal) & (steps < budget)
            return Correction(*fewer.whole((x, steps, failed)))

        return restarted(
            cycle,
            A,
            b,
            rtol=rtol,
            atol=atol,
            max_steps=max_steps,
            failed=f"the matrix{'' if M is None else ' or the preconditioner'} is not definite (or not finite); "
            'use linear_solver="gmres"',
            stalled='stagnated: the matrix is nearly singular or not symmetric; use linear_solver="gmres"',
        )
