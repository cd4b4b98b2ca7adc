"""Numbers found by a loop on plain tensors, below every transform (``implicitkit.extend.constants``).

A projection that is the root of an equation is found here by iteration, as a constant, and given its derivatives
afterwards by a few steps of the chord method with a frozen slope:  ``u <- u - F(u, v) / F_u``.  Each step makes one more
derivative of ``u(v)`` exact (the error ``e_k`` obeys ``e_{k+1} = O(|v - v_0| e_k)``), so that :data:`ORDER` steps give
every derivative up to that order, in every mode, out of elementary operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.extend import constants

ORDER = 3
"""Derivatives of projections that are exact."""


def increasing_root(function: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor) -> Tensor:
    """Where a function that rises through zero between ``low`` and ``high`` does so, entry by entry, as well as rounding
    allows.

    Newton's steps, and bisection where such a step leaves the interval (by more than rounding; the first that does goes to
    its end), is not half as long as the step before or goes downhill, unless it is short: at last steps are as long as
    rounding makes them, and the first that is not shorter is the last.  No entry knows of the others, not even of NaN.

    Args:
        function: the value and the slope at a point.
    """
    eps = torch.finfo(low.dtype).eps
    x, last, moving = 0.5 * (low + high), torch.full_like(low, torch.inf), torch.ones_like(low, dtype=torch.bool)
    confined = ~moving
    for _ in range(200):
        value, slope = function(x)
        low, high = torch.where(value < 0, x, low), torch.where(value < 0, high, x)
        step, size = torch.where(slope > 0, -value / slope, torch.nan), 1 + x.abs()
        near = eps**0.75 * size
        leaves = (x + step < low - near) | (x + step > high + near)
        step = torch.where(leaves & ~confined, torch.minimum(torch.maximum(x + step, low), high) - x, step)
        short, shorter = step.abs() <= near, step.abs() <= 0.5 * last
        good, confined = short | (shorter & ~(leaves & confined)), confined | leaves
        step = torch.where(good, step, 0.5 * (low + high) - x) * moving
        x, last = x + step, step.abs()
        moving &= ~(short & ~shorter) & (last > eps * size)
        if not bool(moving.any()):
            break
    return x


def project_on_ray(
    v: Tensor, rays: Callable[..., tuple[Tensor, Tensor, Tensor]], low: Tensor, high: Tensor, *parameters: Tensor
) -> Tensor:
    """Projection of ``v``, ``(..., 3)``, onto that ray ``p(rho)`` of the boundary of a cone where ``<v, n(rho)> = 0``.

    ``n`` is normal to ``p`` and to the ray of the polar that belongs to it, in the sense in which ``<v, n>`` rises through
    zero.  That equation is met by the computed ``rho`` for a point no further from ``v`` than rounding, and the projection
    moves no further than its point.

    Args:
        rays: ``p``, ``n`` and the derivative of ``n``, each ``(..., 3)``, from ``rho`` and the ``parameters``.
        low, high, parameters: ``(...)``.
    """

    def root(packed: Tensor) -> Tensor:
        point, (low, high, *rest) = packed[..., :3], packed[..., 3:].unbind(-1)

        def function(rho: Tensor) -> tuple[Tensor, Tensor]:
            _, n, turn = rays(rho, *rest)
            return (point * n).sum(-1), (point * turn).sum(-1)

        rho = increasing_root(function, low, high)
        return torch.stack([rho, function(rho)[1]], -1)

    packed = torch.cat([v, torch.stack([low, high, *parameters], -1)], -1)
    rho, slope = constants(root, packed).unbind(-1)
    for _ in range(ORDER):
        rho = rho - (v * rays(rho, *parameters)[1]).sum(-1) / slope
    p = rays(rho, *parameters)[0]
    return p * ((v * p).sum(-1) / (p * p).sum(-1)).unsqueeze(-1)


def in_its_own_unit(v: Tensor) -> tuple[Tensor, Tensor]:
    """``v`` in float64 divided by a power of two, and that power ``(..., 1)``: the largest entry is between 1 and 2."""
    unit = v.detach().double().abs().amax(-1, keepdim=True).log2().floor().exp2()
    unit = torch.where(unit == 0, 1.0, unit)
    return v.double() / unit, unit
