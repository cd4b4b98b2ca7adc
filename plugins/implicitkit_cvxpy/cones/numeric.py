"""Numbers found by a loop on plain tensors, below every transform (``implicitkit.extend.constants``).

A projection that is the root of an equation is found here by iteration, as a constant, and given its derivatives
afterwards by a few steps of the chord method with a frozen Jacobian ``J``: ``u <- u - J^{-1} F(u, v)``.  Each step makes
one more derivative of ``u(v)`` exact (the error ``e_k`` obeys ``e_{k+1} = O(|v - v_0| e_k)``), so that :data:`ORDER` steps
give every derivative up to that order, in every mode, out of elementary operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ORDER = 3
"""Derivatives of projections that are exact."""


def increasing_root(function: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor) -> Tensor:
    """Where an increasing function is zero between ``low`` and ``high``, entry by entry, as well as rounding allows.

    Newton's steps, and bisection where such a step leaves the interval or is not half as long as the step before, unless it
    is short: at the end steps are as long as rounding makes them, and the first that is not shorter is the last.  No entry
    knows of the others, not even of NaN among them.

    Args:
        function: the value and the slope at a point.
    """
    eps, ends = torch.finfo(low.dtype).eps, (low, high)
    x, last, moving = 0.5 * (low + high), high - low, torch.ones_like(low, dtype=torch.bool)
    for _ in range(200):
        value, slope = function(x)
        low, high = torch.where(value < 0, x, low), torch.where(value < 0, high, x)
        step = -value / slope
        short = step.abs() <= eps**0.75 * torch.minimum(x - ends[0], ends[1] - x)
        shorter = step.abs() <= 0.5 * last
        good = short | ((x + step > low) & (x + step < high) & shorter)
        step = torch.where(good, step, 0.5 * (low + high) - x) * moving
        x, last = x + step, step.abs()
        moving &= ~(short & ~shorter) & (last > eps * x.abs())
        if not bool(moving.any()):
            break
    return x
