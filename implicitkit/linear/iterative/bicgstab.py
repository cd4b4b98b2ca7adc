r"""Stabilised biconjugate gradients, for general blocks in little memory.

    alpha = rho / (s, A p),   h = r - alpha A p,   omega = (A h, h) / (A h, A h),
    x <- x + alpha p + omega h,   r <- h - omega A h,   p <- r + (rho new / rho)(alpha / omega)(p - omega A p)

with ``rho = (s, r)`` and the shadow residual ``s`` fixed at the first ``r``.

Source: van der Vorst (1992), SIAM J. Sci. Stat. Comput. 13(2); Saad, *Iterative Methods for Sparse Linear Systems*
(2nd ed., SIAM 2003), algorithm 7.7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.iterative.cycles import (
    Correction,
    Task,
    column,
    in_working_precision,
    norms,
    restarted,
    right_preconditioned,
)
from implicitkit.linear.iterative.dropping import Fewer, narrowed
from implicitkit.linear.iterative.preconditioners import PreconditionedSolver


@register_linear_solver("bicgstab")
@dataclass(frozen=True)
class BiCGStab(PreconditionedSolver):
    """BiCGStab, each sample with its own scalars; two products a step, seven vectors of memory.

    The best iterate of a cycle is kept, since residuals are not monotone.  A breakdown (``rho`` or ``omega`` near zero)
    restarts the sample from there with a new shadow residual; a restart without progress is reported.

    Source: van der Vorst (1992), SIAM J. Sci. Stat. Comput. 13.

    Args:
        preconditioner: ``"jacobi"``, ``"block_jacobi"``, ``"ilu"``, ``"amg"`` (:class:`PreconditionedSolver`).

    Raises:
        ValueError: an unknown preconditioner.
    """

    @in_working_precision
    @right_preconditioned
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        tiny = torch.finfo(b.dtype).tiny
        eps = torch.finfo(b.dtype).eps

        def cycle(task: Task) -> Correction:
            r, norm, target, live, budget = task
            x, shadow, p = torch.zeros_like(r), r, r
            best, best_norm = x, norm
            rho = (shadow * r).sum(dim=1)
            shadow_norm = norm
            steps = torch.zeros_like(budget)
            live, fewer = live & (budget > 1), Fewer(A)
            while left := int(torch.count_nonzero(live)):
                index = fewer.drop(live, left, lambda: (best, steps))  # noqa: B023
                if index is not None:
                    x, r, p, shadow, best = narrowed(index, x, r, p, shadow, best)
                    best_norm, rho, shadow_norm = narrowed(index, best_norm, rho, shadow_norm)
                    steps, live, target, budget = narrowed(index, steps, live, target, budget)
                Ap = fewer.A.mv(p)
                pairing = (shadow * Ap).sum(dim=1)
                alpha = column(rho / pairing)
                half = torch.addcmul(r, alpha, Ap, value=-1)
                Ah = fewer.A.mv(half)
                omega = column((Ah * half).sum(dim=1) / (Ah * Ah).sum(dim=1).clamp_min(tiny))
                keep = column(live)
                x = torch.where(keep, torch.addcmul(torch.addcmul(x, alpha, p), omega, half), x)
                r = torch.where(keep, torch.addcmul(half, omega, Ah, value=-1), r)
                rho_next = (shadow * r).sum(dim=1)
                ratio = column(rho_next / rho) * (alpha / omega)
                p = torch.where(keep, torch.addcmul(r, ratio, torch.addcmul(p, omega, Ap, value=-1)), p)
                rho = rho_next
                steps = steps + 2 * live.long()
                now = norms(r)
                better = live & (now < best_norm)
                best = torch.where(column(better), x, best)
                best_norm = torch.where(better, now, best_norm)
                sound = (rho.abs() > eps * eps * shadow_norm * now) & (ratio.squeeze(1).abs() < torch.inf)
                live = live & sound & (now > target) & (steps + 1 < budget)
            best, steps = fewer.whole((best, steps))
            return Correction(best, torch.maximum(steps, torch.ones_like(steps)))

        return restarted(
            cycle,
            A,
            b,
            rtol=rtol,
            atol=atol,
            max_steps=max_steps,
            stalled='stagnated or broke down; use linear_solver="gmres", or "lsmr" if the matrix is singular',
        )
