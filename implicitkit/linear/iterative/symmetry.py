r"""GMRES for matrices of which nobody said that they are symmetric, and conjugate gradients where they are.

After 8, 16 and 32 products, where the rate of the last ones promises more than a basis holds, Arnoldi's matrix tells
whether ``A`` is symmetric and definite on the Krylov space
(:func:`~implicitkit.linear.iterative.inner_cg.seems_definite`); then conjugate gradients go on from what is left.  A
step of theirs orthogonalises nothing, where one of GMRES is a product and, in the mean, as many inner products and sums
as half a basis holds; and they are never begun anew, where each restart of GMRES forgets what it knew.  A curvature of
the other sign leaves the rest to GMRES; everything is judged by the true residual.

Source: Hestenes & Stiefel (1952), J. Res. Nat. Bur. Standards 49; Saad, *Iterative Methods for Sparse Linear Systems* (2nd
ed., SIAM 2003), sections 6.6 and 6.7: Arnoldi's method of a symmetric matrix is that of Lanczos, whose vectors are the
residuals of conjugate gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.iterative.cycles import Correction, Task, column, restarted
from implicitkit.linear.iterative.frugal import is_slow
from implicitkit.linear.iterative.gmres import PATIENCE, STALLED, Look, arnoldi, vectors
from implicitkit.linear.iterative.inner_cg import conjugate, seems_definite

_LOOKS = (8, 16, 32)  # products after which it is asked whether the matrix is symmetric


@dataclass(frozen=True)
class Unsaid(LinearSolver):
    """GMRES, and conjugate gradients as soon as its vectors say that the matrix is symmetric and definite.

    One product a step; memory as that of GMRES.  ``rtol`` may also be a tensor ``(batch,)``.
    """

    def solve(
        self, A: Operator, b: Tensor, *, rtol: float | Tensor, atol: float, max_steps: int | None
    ) -> LinearSolution:
        restart = vectors(b)
        definite, asked = False, False

        def cycle(task: Task) -> Correction:
            nonlocal asked, definite
            x, used, part = torch.zeros_like(task.r), torch.zeros_like(task.budget), task

            def look(Ht: Tensor, u: Tensor, done: Tensor) -> bool:
                nonlocal definite
                open_, least = task.live & ~done, u.square().cumsum(1).rsqrt()
                if bool((open_ & is_slow(least * column(task.norm), task.target, columns)).any()):
                    definite = bool((seems_definite(Ht) | ~open_).all())
                return definite

            def told() -> bool:
                return definite

            columns = min(restart, A.size, int(task.budget.max()))
            if not definite:
                x, used = _arnoldi(A, task, columns, None if asked else (_LOOKS, look))
                asked = True
                if not told():
                    return Correction(x, used)
                part = task.left(task.r - A.mv(x), used)
                if not bool(part.live.any()):
                    return Correction(x, used)
            dx, _, steps, definite = conjugate(A, part, (), _never)
            x, used = x + dx, used + steps
            if definite:
                return Correction(x, used)
            part = part.left(task.r - A.mv(x), steps)
            if bool(part.live.any()):
                dx, steps = _arnoldi(A, part, columns, None)
                x, used = x + dx, used + steps
            return Correction(x, used)

        patience = max(2, PATIENCE // restart)
        return restarted(cycle, A, b, rtol=rtol, atol=atol, max_steps=max_steps, stalled=STALLED, patience=patience)


def _never(left: Tensor, done: Tensor) -> bool:
    return False


def _arnoldi(A: Operator, task: Task, columns: int, look: Look | None) -> tuple[Tensor, Tensor]:
    """A cycle of GMRES for the samples that are live: what it adds, and the products used."""
    found = arnoldi(A, task, columns, look)
    return torch.where(column(task.live), found.dx, 0), torch.where(task.live, found.steps, 0)
