r"""Bounds as interior-point methods have them, where equalities hold unknowns on them.

A state that begins on its bound, by an equality of that one unknown, has no inside.  Without the bound it has; but the
barrier is another then than that of the unknowns beside it, and on fine grids the first barrier problems take many steps
more (a rocket that stands on its bounds, 400 intervals: 203 steps, 33 with them).  So such a bound is wider by ``sqrt(eps)
max(1, |bound|)``, at most a small share of the distance of both, as those of Wächter & Biegler (2006, Math. Prog. 106,
section 3.5) are; with ``mu`` its force vanishes, and the end is that without it.  All others are what they are: functions
may have no value, or no slope, beyond them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_PUSH = 1e-2  # how far inside its bounds the start is moved, of their size and of their distance
_WIDER = 0.5  # power of eps, of the size of a bound
_SHARE = 1e-4  # ... and of the distance between two, at most
_ON = 1e-10  # relative: what is as near to a bound is on it


class Limits(NamedTuple):
    """Bounds ``(batch, n)``, infinite where there is none; equal where an unknown is fixed."""

    lower: Tensor
    upper: Tensor

    @property
    def free(self) -> Tensor:
        """Unknowns that are not fixed."""
        return self.lower < self.upper

    @property
    def below(self) -> Tensor:
        """Where there is a lower bound."""
        return self.lower.isfinite() & self.free

    @property
    def above(self) -> Tensor:
        """Where there is an upper bound."""
        return self.upper.isfinite() & self.free

    def wider(self, without: Limits) -> Limits:
        """A little, where ``without`` has no bound."""
        lower = torch.where(self.lower != without.lower, self.lower - self._more(self.lower), self.lower)
        upper = torch.where(self.upper != without.upper, self.upper + self._more(self.upper), self.upper)
        return Limits(lower, upper)

    def _more(self, bound: Tensor) -> Tensor:
        size = torch.where(bound.isfinite(), bound, 0.0).abs().clamp_min(1)
        more = (torch.finfo(bound.dtype).eps ** _WIDER * size).minimum(_SHARE * (self.upper - self.lower))
        return torch.where(self.free & bound.isfinite(), more, 0.0)

    def pushed(self, z: Tensor) -> Tensor:
        """A start inside."""
        lower, upper = self
        width = _PUSH * (upper - lower)
        from_low = torch.minimum(_PUSH * lower.abs().clamp_min(1), width)
        from_high = torch.minimum(_PUSH * upper.abs().clamp_min(1), width)
        z = torch.where(self.below, z.maximum(lower + from_low), z)
        z = torch.where(self.above, z.minimum(upper - from_high), z)
        return torch.where(self.free, z, lower)


def held_by_equalities(
    z: Tensor, constraints: Tensor, one_sided: Tensor, limits: Limits, steep: Tensor, alone: Tensor
) -> Limits:
    """The bounds without those that an equality of one unknown puts it on: there is nothing inside of both.

    Args:
        z: ``(batch, n)``. constraints, one_sided: their values there and sides. steep, alone: ``(batch, m)``, the largest
            entry of each row of the Jacobian, and the number of its unknown if it has one only, else -1.
    """
    if not constraints.shape[1]:
        return limits
    index = alone.clamp_min(0)
    where = (alone >= 0) & ~one_sided
    aim = z.gather(1, index) - constraints / torch.where(alone >= 0, steep, 1.0)

    def without(bound: Tensor, far: float) -> Tensor:
        there = bound.gather(1, index)
        met = where & ((aim - there).abs() <= _ON * (1 + there.abs()))
        gone = torch.zeros_like(z).scatter_add(1, index, met.to(z)) > 0
        return torch.where(gone & limits.free, far, bound)

    return Limits(without(limits.lower, -torch.inf), without(limits.upper, torch.inf))
