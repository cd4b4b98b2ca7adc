r"""Good Broyden on the linear system, with a low-rank estimate ``B = -I + U V^T`` of the inverse.

With ``F(x) = A x - b`` and ``s = -B F(x)``, one product gives ``F(x + s)``; with ``d = -B F(x + s)`` the secant update
and the next step are

    B <- B + d (s^T B) / (s^T (s - d)),    s <- d |s|^2 / (s^T (s - d)),

since ``B y = s - d`` for ``y = F(x + s) - F(x)``.  ``B = -I`` is the inverse of ``J - I`` for ``J = 0``.

Source: Broyden (1965), Math. Comp. 19, method 1; Kelley, *Iterative Methods for Linear and Nonlinear Equations* (SIAM
1995), section 7.3; as the backward solver of equilibrium models: Bai, Kolter & Koltun (2019), arXiv 1909.01377.  On a
nonsingular linear system it ends in at most ``2 n`` steps: Gay (1979), SIAM J. Numer. Anal. 16(4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from implicitkit.foundation.inverse_estimate import through
from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import above, at_least, check_options, one_of
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.iterative.cycles import column, default_steps, in_working_precision, norms, tolerance
from implicitkit.linear.iterative.dropping import Fewer, narrowed


@register_linear_solver("broyden")
@dataclass(frozen=True)
class BroydenLinear(LinearSolver):
    """Limited-memory good Broyden, each sample with its own estimate; one product a step; the best iterate is returned.

    Source: Broyden (1965), Math. Comp. 19.

    Args:
        memory: rank of the estimate; memory use ``2 * memory * batch * n``.
        when_full: ``"ring"`` overwrites the oldest pair, ``"stop"`` keeps the estimate as it is.
        divergence: growth of the residual at which a sample is stopped.

    Raises:
        ValueError: an option out of range.
    """

    memory: int = 50
    when_full: Literal["ring", "stop"] = "ring"
    divergence: float = 1e8

    def __post_init__(self) -> None:
        check_options(self, memory=at_least(1), when_full=one_of("ring", "stop"), divergence=above(1))

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        limit = default_steps(A.size) if max_steps is None else max_steps
        eps = torch.finfo(b.dtype).eps
        aim, start = tolerance(b, rtol, atol), norms(b)
        target, fewer, finite = aim, Fewer(A), start.isfinite()
        best, best_norm = torch.zeros_like(b), start
        steps = torch.zeros(b.shape[0], dtype=torch.int64, device=b.device)
        live = (start > target) & (start < torch.inf)
        stopped = torch.zeros_like(live)
        capacity = max(min(self.memory, limit), 1)
        U = b.new_zeros(b.shape[0], capacity, b.shape[1])
        V = torch.zeros_like(U)
        x, s = torch.zeros_like(b), 0 - b  # F(0) = -b, so s = -B F = -b
        zero = b.new_zeros(())
        s = s.where(column(live), zero)
        for k in range(limit):
            left = int(torch.count_nonzero(live))
            if not left:
                break
            index = fewer.drop(live, left, lambda: (best, best_norm, steps, stopped))  # noqa: B023
            if index is not None:
                x, s, b, U, V, best, best_norm = narrowed(index, x, s, b, U, V, best, best_norm)
                start, target, steps, live, stopped = narrowed(index, start, target, steps, live, stopped)
            keep = column(live)
            x = torch.where(keep, x + s, x)
            F = fewer.A.mv(x) - b
            norm = norms(F)
            steps = steps + live
            better = live & (norm < best_norm)
            best, best_norm = torch.where(column(better), x, best), torch.where(better, norm, best_norm)
            stopped = stopped | (live & ~(norm <= self.divergence * start))
            live = live & (norm > target) & ~stopped
            F = F.where(column(live), zero)
            rank = min(k, capacity)
            Uk, Vk = U[:, :rank], V[:, :rank]
            d = F - through(F, Vk, Uk)
            ss, sd = (s * s).sum(dim=1), (s * d).sum(dim=1)
            denominator = ss - sd
            usable = live & (denominator.abs() > eps * ss)
            stopped = stopped | (live & ~usable)
            live = live & usable
            scaled = torch.where(column(usable), d / column(denominator), zero)
            if k < capacity or self.when_full == "ring":
                row = through(s, Uk, Vk) - s
                U[:, k % capacity], V[:, k % capacity] = scaled, row.where(column(usable), zero)
            s = scaled * column(ss)
        best, best_norm, steps, stopped = fewer.whole((best, best_norm, steps, stopped))
        converged = best_norm <= aim
        reason = ""
        if not bool(converged.all()):
            reason = f"not converged after {limit} products with the matrix"
            if bool(stopped.any()):
                reason = 'diverged or broke down; use linear_solver="gmres", or "lsmr" if the matrix is singular'
            if not bool(finite.all()):
                reason = "the right-hand side is not finite"
        return LinearSolution(best, best_norm, steps, converged, reason)
