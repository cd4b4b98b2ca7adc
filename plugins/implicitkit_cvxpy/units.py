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
    """The programs in units of their own, and the units of ``w``, ``(batch, n + m)``; ``None``: they are ordinary."""
    P, q, b = (_largest(t) for t in (data.P, data.q, data.b))
    alone = torch.where((P > 0) & (q > 0), q / P, b)  # the size of x, if the constraints did not matter
    x = torch.where(b > 0, b, alone)
    between = (P > 0) & (alone < x) & (_unit(alone) == 1)  # and bounds far away would tell nothing
    s = torch.where(between, 1.0, _unit(x))
    t = 1 / _unit(torch.maximum(P, q / s))
    if bool(((s == 1) & (t == 1)).all()):
        return data, None
    curvature = t.reshape(-1, *[1] * (data.P.ndim - 1)) * data.P
    s, t = s.unsqueeze(1), t.unsqueeze(1)
    units = torch.cat([s.expand_as(data.q), (s / t).expand_as(data.b)], 1)
    return data._replace(P=curvature, q=t * data.q / s, b=data.b / s), units


def _largest(t: Tensor) -> Tensor:
    """Of each sample, in absolute value."""
    flat = t.flatten(1)
    return flat.abs().amax(1) if flat.shape[1] else flat.new_zeros(len(flat))


def _unit(size: Tensor) -> Tensor:
    """The power of two next to a size, 1 where it is ordinary or there is none."""
    ordinary = (size == 0) | ~size.isfinite() | ((size >= 1 / _ORDINARY) & (size <= _ORDINARY))
    return torch.where(ordinary, 1.0, torch.exp2(torch.where(ordinary, 1.0, size).log2().round()))
