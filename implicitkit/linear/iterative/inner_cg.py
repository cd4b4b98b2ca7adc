r"""Conjugate gradients within another method, and how it is seen that they are allowed.

Arnoldi's Hessenberg matrix ``H = V' A V`` is tridiagonal and symmetric where ``A`` is symmetric on the Krylov space, and
its eigenvalues, the Ritz values, lie between those of ``A``: two of different sign prove that ``A`` is not definite.  Both
are seen without a product.  What they say of the rest of the space is a guess, judged as ever by the true residual.

Source: Lanczos (1950), J. Res. Nat. Bur. Standards 45; Hestenes & Stiefel (1952) for the method, whose residuals tell those
of the least: Cullum & Greenbaum (1996), SIAM J. Matrix Anal. 17(2), theorem 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.iterative.cycles import Task, column
from implicitkit.linear.iterative.dropping import Fewer, narrowed

_OFTEN = 8  # every so many steps it is asked whether the directions are conjugate still
_ASKEW = 0.1  # of a curvature p'Ap, what (r - p)'Ap is where they are not; 0 but for rounding where they are


def seems_definite(Ht: Tensor) -> Tensor:
    """Which blocks are symmetric and definite on their Krylov space, ``(batch,)``; ``Ht``: ``(batch, k, k + 1)``, the
    transpose of ``H``."""
    k = Ht.shape[1]
    if k < 3:
        return Ht.new_zeros(len(Ht), dtype=torch.bool)  # every matrix of two rows is nearly tridiagonal
    H = Ht[:, :, :k]
    noise = torch.finfo(H.dtype).eps ** 0.5 * H.abs().amax((1, 2))
    symmetric = (H - H.mT).abs().amax((1, 2)) <= noise
    known = torch.where(symmetric.view(-1, 1, 1), H, torch.eye(k, dtype=H.dtype, device=H.device))
    ritz = torch.linalg.eigvalsh(known)
    return symmetric & (ritz[:, 0] * ritz[:, -1] > 0)


def conjugate(
    A: Operator, task: Task, at: tuple[int, ...], ask: Callable[[Tensor, Tensor], bool]
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Conjugate gradients from the residual ``r`` of the task; of negative definite blocks the same formulas solve
    ``-A x = -r``.

    Args:
        at: numbers of products after which ``ask(left, done)`` says whether to end: ``left`` ``(batch, j + 1)`` is what
            minimal residuals would leave of ``r`` after 0 to ``j`` products.

    Returns:
        a correction, what it leaves of ``r``, products used, and whether no curvature ``p'Ap`` was met that is zero or of
        the other sign, or far from ``r'Ap``, which it equals where ``A`` is symmetric; where one is they end.
    """
    r, _, target, live, budget = task
    x, p, rs = torch.zeros_like(r), r, torch.linalg.vecdot(r, r)
    squares, goal, steps, open_ = [rs], target.square(), torch.zeros_like(budget), live
    fewer = Fewer(A)
    left = int(torch.count_nonzero(open_))
    side = rs.new_zeros(())  # of zero on which A lies: the sign of the first curvature
    for k in range(1, int(budget.max()) + 1):
        Ap = fewer.A.mv(p)
        curvature = torch.linalg.vecdot(p, Ap)
        side = curvature.sign() if k == 1 else side
        steps = steps + open_
        sound = curvature * side > 0
        if k % _OFTEN == 0:
            sound = sound & (torch.linalg.vecdot(r - p, Ap).abs() <= _ASKEW * curvature.abs())
        if bool((open_ & ~sound).any()):
            x, r, steps = fewer.whole((x, r, steps))
            return x, r, steps, False
        alpha = column(rs / curvature)
        x_next, r_next = torch.addcmul(x, alpha, p), torch.addcmul(r, alpha, Ap, value=-1)
        if left < len(open_):  # samples that are solved stay
            x_next, r_next = torch.where(column(open_), x_next, x), torch.where(column(open_), r_next, r)
        x, r = x_next, r_next
        after = torch.linalg.vecdot(r, r)
        onward = torch.addcmul(r, column(after / rs), p)  # of samples that are solved 0 / 0
        p = torch.where(column(open_), onward, p) if left < len(open_) else onward
        rs = after
        open_ = open_ & (rs > goal) & (steps < budget)
        squares.append(fewer.spread(rs, 1.0))
        left = int(torch.count_nonzero(open_))
        if not left:
            break
        if k in at and ask(left_by_minimal_residuals(squares) / column(squares[0].sqrt()), fewer.spread(~open_, True)):
            break
        index = fewer.drop(open_, left, lambda: (x, r, steps))  # noqa: B023
        if index is not None:
            x, r, p, rs, goal = narrowed(index, x, r, p, rs, goal)
            steps, budget, open_, side = narrowed(index, steps, budget, open_, side)
    x, r, steps = fewer.whole((x, r, steps))
    return x, r, steps, True


def left_by_minimal_residuals(squares: list[Tensor]) -> Tensor:
    """What GMRES leaves where conjugate gradients leave residuals of these squares, ``(batch,)`` each: ``1 / |r_k|^2 =
    sum_{i <= k} 1 / |r_i^{CG}|^2``; ``(batch, k + 1)``.  Theirs need not fall."""
    return (1 / torch.stack(squares, 1)).cumsum(1).rsqrt()
