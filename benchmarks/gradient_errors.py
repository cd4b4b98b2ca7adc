"""How exact gradients of a DEQ are: what ``bench_deq_rows.py`` compares layers at.

Of ``z = tanh(z W + x U + b)`` the equilibrium is found by Newton's method in float64, the adjoint by factors, and

    |g - g_exact| / |g_exact|

is taken over all parameters together.  A tolerance is met by one sample after the other, or by all once the slowest has met
it, on residuals of this norm or of that one: with the same tolerance one layer's gradients can be ten times as exact as
another's, and what that costs is part of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from bench_deq import TanhCell
from torch import Tensor

__all__ = ["equal_tolerance", "exact_gradient", "relative_error"]

_NEWTON, _CHUNK = 3, 32  # steps from a point that an iteration has found; samples whose matrices are held at once
_GRID = 4  # tolerances in a decade


def exact_gradient(cell: TanhCell, x: Tensor, z: Tensor, pull: Callable[[Tensor], Tensor]) -> Tensor:
    """The derivative by all parameters, ``(parameters,)`` in float64.

    Args:
        x, z: inputs and equilibria as found, ``(batch, n)``.
        pull: the derivative of the loss by ``z``, given ``z`` in float64.
    """
    W, U, b = (t.detach().double() for t in (cell.W, cell.U, cell.b))
    x, z, eye = x.double(), z.detach().double(), torch.eye(len(W), dtype=torch.float64)

    def matrices(rows: Tensor) -> Tensor:
        return eye - (1 - rows.square()).unsqueeze(2) * W.mT

    for _ in range(_NEWTON):
        f = torch.tanh(z @ W + x @ U + b)
        pairs = zip(f.split(_CHUNK), (f - z).split(_CHUNK), strict=True)
        z = z + torch.cat([torch.linalg.solve(matrices(rows), left.unsqueeze(2)).squeeze(2) for rows, left in pairs])
    pairs = zip(z.split(_CHUNK), pull(z).split(_CHUNK), strict=True)
    u = torch.cat([torch.linalg.solve(matrices(rows).mT, g.unsqueeze(2)).squeeze(2) for rows, g in pairs])
    u = u * (1 - z.square())
    return torch.cat([(z.mT @ u).flatten(), (x.mT @ u).flatten(), u.sum(0)])


def relative_error(cell: TanhCell, exact: Tensor) -> float:
    """Of what the parameters' ``grad`` holds."""
    found = torch.cat([p.grad.flatten() for p in (cell.W, cell.U, cell.b)]).double()  # type: ignore[union-attr]
    return float((found - exact).norm() / exact.norm())


def equal_tolerance(error_at: Callable[[float], float], start: float, goal: float) -> float | None:
    """The loosest tolerance, in quarters of a decade around ``start``, at which an error is at most ``goal``; ``None``: none
    within two decades.  Errors are taken to fall with tolerances."""
    low, high = -2 * _GRID, 2 * _GRID  # powers of 10^(1/4): good there, and bad

    def good(k: int) -> bool:
        return error_at(start * 10 ** (k / _GRID)) <= goal

    if not good(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return float(start * 10 ** (low / _GRID))
