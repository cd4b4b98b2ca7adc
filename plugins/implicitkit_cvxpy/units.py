r"""Programs in units in which their data are of ordinary size, so that tolerances mean the same whatever the user's units.

Cones are cones, and a multiplier has the units of the objective: with ``t, s > 0``

    P' = t P,    q' = t q / s,    A' = A,    b' = b / s        x = s x',    y = s y' / t

is the same program.  Each sample has its own, powers of two, so that nothing is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit_cvxpy.backends import Data

__all__ = ["in_units"]

_ORDINARY = 2.0**10  # sizes from its inverse to this are left as they are


def in_units(data: Data) -> tuple[Data, Tensor | None]:
    """The programs in units of their own, and the units of ``w``, ``(batch, n + m)``; ``None``: they are ordinary.

    Numbers of ordinary size stay so, however small or large others are: a bound far away, or a dear slack, is no unit.
    """
    P, q, b = (t.flatten(1).abs() for t in (data.P, data.q, data.b))
    linear = (P == 0).all(1, keepdim=True)
    s = _unit(torch.where(linear, 0, q), b)
    t = 1 / _unit(P, q / s)
    if bool(((s == 1) & (t == 1)).all()):
        return data, None
    curvature = t.reshape(-1, *[1] * (data.P.ndim - 1)) * data.P
    units = torch.cat([s.expand_as(data.q), (s / t).expand_as(data.b)], 1)
    return data._replace(P=curvature, q=t * data.q / s, b=data.b / s), units


def _unit(*parts: Tensor) -> Tensor:
    """A power of two near the largest of numbers that are all small, or the least of numbers that are all large; else 1,
    ``(batch, 1)``.  Zeros do not count.

    Args:
        parts: absolute values, ``(batch, k)`` each.
    """
    sizes = torch.cat(parts, 1)
    largest = sizes.amax(1, keepdim=True) if sizes.shape[1] else sizes.new_ones(len(sizes), 1)
    least = torch.where(sizes > 0, sizes, torch.inf).amin(1, keepdim=True) if sizes.shape[1] else largest
    small = (largest > 0) & (largest < 1 / _ORDINARY)
    large = least.isfinite() & (least > _ORDINARY)
    size = torch.where(small, largest, torch.where(large, least, 1.0))
    return torch.exp2(size.log2().round())
