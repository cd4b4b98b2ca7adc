"""The minimiser of a quadratic model that is to be convex, by its dense matrix: anywhere, and within bounds."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import cholesky_batched
from implicitkit.solver.steps.hessian_factors import HessianFactors

_SINGULAR = 1e3  # units of rounding: a pivot of that size beside the largest is none
_UNEVEN = 1e-3  # of the largest, a diagonal entry from which on units may be what makes a pivot small
_SWEEPS = 15  # changes of the active bounds; a cycle of sets never ends


def by_factors(H: Tensor, g: Tensor) -> tuple[Tensor, Tensor, HessianFactors | None]:
    """``-H^{-1} g``, whether ``H`` is positive definite beyond rounding, ``(batch,)``, and its factors where all are.

    Of unknowns with units of their own a small pivot says nothing (``diag(1, 1e-24)``): where one condemns a matrix,
    ``D^{-1} H D^{-1}`` is factored in its place, ``D = diag(H)^{1/2}``, which has ones on its diagonal; among all
    diagonal scalings its condition number is within a factor ``n`` of the best (van der Sluis 1969, "Condition numbers and
    equilibration of matrices", Numerische Mathematik 14).
    """
    H = H if H.dtype in (torch.float32, torch.float64) else H.float()
    d, convex, L = _solved(H, g.to(H.dtype))
    if bool(convex.all()):
        return d.to(g.dtype), convex, HessianFactors.dense(H, L)
    size = H.diagonal(dim1=1, dim2=2)
    low, high = size.aminmax(dim=1)
    doubtful = ~convex & (low > 0) & (low < _UNEVEN * high) & torch.isfinite(high)
    if bool(doubtful.any()):
        unit = torch.where(doubtful.unsqueeze(1), size, 1).rsqrt()
        scaled, sound, _ = _solved(unit.unsqueeze(2) * H * unit.unsqueeze(1), unit * g.to(H.dtype))
        d = torch.where(doubtful.unsqueeze(1), unit * scaled, d)
        convex = torch.where(doubtful, sound, convex)
    return d.to(g.dtype), convex, None


def _solved(H: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``-H^{-1} g``, where no pivot of ``H`` is one of rounding beside the largest, ``(batch,)``, and ``L``."""
    L, convex = cholesky_batched(H)
    low, high = L.diagonal(dim1=1, dim2=2).aminmax(dim=1)
    convex = convex & ((low / high).square() > _SINGULAR * torch.finfo(L.dtype).eps)
    return -torch.cholesky_solve(g.unsqueeze(2), L).squeeze(2), convex, L


def within(H: Tensor, g: Tensor, lower: Tensor, upper: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """The minimisers of ``g'p + p'Hp / 2`` in ``lower <= p <= upper``, ``(batch, n)``, as far as the sets of active bounds
    have been found, and whether the last ``H_FF`` was positive definite, ``(batch,)``.

    By primal-dual active sets: with some unknowns at their bounds and ``H_FF p_F = -g_F - H_FB p_B`` for the others, every
    free unknown beyond a bound is put there and every one at a bound with a multiplier of the wrong sign is freed, all at
    once, until nothing changes (Bergounioux, Ito & Kunisch 1999, SIAM J. Control Optim. 37).
    """
    below, above = (lower >= 0) & (g > 0), (upper <= 0) & (g < 0)
    for _ in range(_SWEEPS):
        free = ~(below | above)
        at = torch.where(below, lower, torch.where(above, upper, 0))
        rhs = torch.where(free, g + torch.matmul(H, at.unsqueeze(2)).squeeze(2), 0)
        both, one = free.unsqueeze(1) & free.unsqueeze(2), torch.diag_embed((~free).to(H))
        p, convex, _ = by_factors(torch.where(both, H, one), rhs)
        p = torch.where(free, p, at)
        mu = -(g + torch.matmul(H, p.unsqueeze(2)).squeeze(2))
        down = (below & (mu < 0)) | (free & (p < lower))
        up = ~down & ((above & (mu > 0)) | (free & (p > upper)))
        same = ((down == below) & (up == above)).all(1)
        if bool((same | ~convex | ~active).all()):
            break
        below, above = down, up
    return p, convex
