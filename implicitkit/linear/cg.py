r"""Conjugate gradients, for symmetric positive definite blocks.

    alpha = r'r / p'Ap,   x <- x + alpha p,   r <- r - alpha A p,   p <- r + (r'r new / r'r old) p

Source: Hestenes & Stiefel (1952); Saad, *Iterative Methods for Sparse Linear Systems* (2nd ed., SIAM 2003),
algorithm 6.18.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.cycles import Correction, column, in_working_precision, restarted

__all__ = ["CG"]


@register_linear_solver("cg")
@dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients, each sample with its own step lengths; one product a step.

    A direction of curvature ``p'Ap <= 0`` proves that the block is not positive definite; the sample stops there and
    says so (a negative definite matrix too: change the sign of the problem, or use ``gmres``).

    Source: Hestenes & Stiefel (1952); Nocedal & Wright (2006), algorithm 5.2.
    """

    needs: ClassVar[tuple[str, ...]] = ("symmetric",)

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        def cycle(r: Tensor, norm: Tensor, target: Tensor, live: Tensor, budget: Tensor) -> Correction:
            x, p = torch.zeros_like(r), r
            rr, goal = (r * r).sum(dim=1), target * target
            steps = torch.zeros_like(budget)
            failed = torch.zeros_like(live)
            while bool(live.any()):
                Ap = A.mv(p)
                curvature = (p * Ap).sum(dim=1)
                positive = curvature > 0
                steps = steps + live
                failed = failed | (live & ~positive)
                live = live & positive
                alpha, keep = column(rr / curvature), column(live)
                x = torch.where(keep, torch.addcmul(x, alpha, p), x)
                r = torch.where(keep, torch.addcmul(r, alpha, Ap, value=-1), r)
                rr_next = (r * r).sum(dim=1)
                p = torch.where(keep, torch.addcmul(r, column(rr_next / rr), p), p)
                rr = rr_next
                live = live & (rr > goal) & (steps < budget)
            return Correction(x, steps, failed)

        return restarted(
            cycle,
            A,
            b,
            rtol=rtol,
            atol=atol,
            max_steps=max_steps,
            failed='the matrix is not positive definite (or not finite); use linear_solver="gmres"',
            stalled='stagnated: the matrix is nearly singular or not symmetric; use linear_solver="gmres"',
        )
