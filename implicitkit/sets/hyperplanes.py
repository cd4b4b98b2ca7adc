"""Hyperplanes, halfspaces, and sections of boxes by a hyperplane (the feasible set of the continuous knapsack problem)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.clamping import check_order
from implicitkit.foundation.constants import constants
from implicitkit.foundation.options import check_options, finite, number, optional, or_tensor, tensor
from implicitkit.sets.base import Projection, against, check_values, unit


@dataclass(frozen=True)
class Hyperplane(Projection):
    """``{a'x = b}``: ``v - a (a'v - b) / |a|^2``.  ``a``: ``(n,)`` or ``(*batch, n)``; ``b``: number or batch's shape.

    A normal ``a`` of zeros asks nothing, where ``b`` allows that.

    Raises:
        ValueError: (from the call) ``a`` is zero and ``b`` is not: the set is empty.
    """

    a: Tensor
    b: Any = 0.0
    sign: ClassVar[str] = "="

    def __post_init__(self) -> None:
        check_options(self, a=tensor(), b=or_tensor(finite()))

    def project(self, v: Tensor) -> Tensor:
        size = unit(self.a.to(v))
        a, b = self.a.to(v) / size, against(self.b, v) / size  # in units in which the largest of a is one
        square = a.square().sum(-1, keepdim=True)
        check_values(self._check_not_empty, *torch.broadcast_tensors(square, b))
        asks = square != 0  # of NaN too
        excess = ((a * v).sum(-1, keepdim=True) - b) / torch.where(asks, square, 1)
        return torch.where(asks, v - a * self._beyond(excess), v)

    def _beyond(self, excess: Tensor) -> Tensor:
        """What is to be taken off."""
        return excess

    def _check_not_empty(self, square: Tensor, b: Tensor) -> None:
        empty = (square == 0) & (self._beyond(-b) != 0)
        if bool(empty.any()):
            raise ValueError(
                f"{type(self).__name__}: {int(empty.sum())} of {empty.numel()} sets are empty: the normal a is zero, and "
                f"0 {self.sign} {float(b[empty][0]):.6g} does not hold"
            )


@dataclass(frozen=True)
class Halfspace(Hyperplane):
    """``{a'x <= b}``: ``v - a max(a'v - b, 0) / |a|^2``; else as :class:`Hyperplane`."""

    sign: ClassVar[str] = "<="

    def _beyond(self, excess: Tensor) -> Tensor:
        return excess.clamp_min(0)


@dataclass(frozen=True)
class BoxSection(Projection):
    r"""``{lower <= x <= upper, w'x = total}``: ``x = clip(v - \tau w, lower, upper)`` with ``\tau`` from the breakpoints of
    ``w'x``, which falls with ``\tau`` (Kiwiel 2008, "Breakpoint searching algorithms for the continuous quadratic knapsack
    problem").  With ``F`` the coordinates strictly inside, ``dx/dv = I_F - w_F w_F' / |w_F|^2``.

        keep = ik.project.box_section(0.0, 1.0, total=3.0)  # numbers between 0 and 1 that add up to 3
        keep(torch.tensor([2.0, 0.9, 0.3, 0.2, -1.0]))  # [1.0, 1.0, 0.55, 0.45, 0.0]

    A sort and ``log2(2n)`` passes: ``O(n log n)``, memory ``O(n)``.

    Args:
        lower, upper: numbers or tensors that broadcast against the point; infinite where there is no bound.
        total: number, or tensor of the batch's shape.
        weights: ``w``, ``(n,)`` or ``(*batch, n)``, of any signs; ``None``: ones.

    Raises:
        ValueError: lower above upper, or (from the call) no point of the box has that total.
    """

    lower: Any
    upper: Any
    total: Any = 1.0
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        value = or_tensor(number())
        check_options(self, lower=value, upper=value, total=or_tensor(finite()), weights=optional(tensor()))
        check_order(type(self).__name__, self.lower, self.upper)

    def project(self, v: Tensor) -> Tensor:
        total = against(self.total, v)
        parts = (v, self.lower, self.upper, 1.0 if self.weights is None else self.weights)
        v, low, high, w = torch.broadcast_tensors(*(torch.as_tensor(p, dtype=v.dtype, device=v.device) for p in parts))
        tau = constants(_search, v, low, high, w, total.expand(*v.shape[:-1], 1))
        free, at_low, _ = _sides(v.detach(), low.detach(), high.detach(), w.detach(), tau)
        held = torch.where(at_low, low, high)
        w_free = torch.where(free, w, 0)
        square = w_free.square().sum(-1, keepdim=True)
        # w'x = total over the free coordinates; zeros in place of bounds that are not in force (they may be infinite)
        excess = (w * torch.where(free, v, torch.where(free, 0, held))).sum(-1, keepdim=True) - total
        return torch.where(free, v, held) - w_free * (excess / torch.where(square > 0, square, 1))


def _sides(v: Tensor, low: Tensor, high: Tensor, w: Tensor, tau: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which coordinates of ``v - tau w`` are strictly inside, below (or at) ``low``, above ``high``."""
    x = v - tau * w
    below, above = x <= low, x >= high
    return ~(below | above), below, above & ~below


def _search(v: Tensor, low: Tensor, high: Tensor, w: Tensor, total: Tensor) -> Tensor:
    """A ``tau`` inside the piece of ``w' clip(v - tau w)`` that takes the value ``total``, ``(*batch, 1)``."""
    smallest = torch.where(w > 0, w * low, torch.where(w < 0, w * high, 0)).sum(-1, keepdim=True)
    largest = torch.where(w > 0, w * high, torch.where(w < 0, w * low, 0)).sum(-1, keepdim=True)
    room = 1e3 * torch.finfo(v.dtype).eps * (1 + total.abs())
    empty = (total < smallest - room) | (total > largest + room) | (low > high).any(-1, keepdim=True)
    if bool(empty.any()):
        raise ValueError(
            f"BoxSection: {int(empty.sum())} of {empty.numel()} sets are empty: w'x lies between "
            f"{float(smallest[empty][0]):.6g} and {float(largest[empty][0]):.6g} on the box, total is "
            f"{float(total[empty][0]):.6g}"
        )
    moving = w != 0
    ends = torch.cat([torch.where(moving, (v - b) / torch.where(moving, w, 1), torch.inf) for b in (low, high)], -1)
    ends = ends.nan_to_num(torch.inf, torch.inf, -torch.inf).sort(-1).values
    count = ends.shape[-1]
    below = torch.full_like(total, -1, dtype=torch.int64)  # the last breakpoint where w'x >= total ...
    above = torch.full_like(below, count)  # ... and the first where it is less
    for _ in range((count + 1).bit_length()):
        middle = (below + above) // 2
        at = ends.gather(-1, middle.clamp(0, count - 1))
        value = (w * torch.minimum(torch.maximum(v - at.nan_to_num() * w, low), high)).sum(-1, keepdim=True)
        left = torch.where(torch.isinf(at), at < 0, value >= total) & (middle >= 0) & (middle < count)
        open_ = above - below > 1
        below, above = torch.where(open_ & left, middle, below), torch.where(open_ & ~left, middle, above)
    first = torch.where(below >= 0, ends.gather(-1, below.clamp(0, count - 1)), -torch.inf)
    last = torch.where(above < count, ends.gather(-1, above.clamp(0, count - 1)), torch.inf)
    outside = 1 + torch.where(torch.isinf(first), torch.where(torch.isinf(last), 0, last), first).abs()
    first = torch.where(torch.isinf(first), torch.where(torch.isinf(last), 0, last) - outside, first)
    last = torch.where(torch.isinf(last), first + outside, last)
    return 0.5 * (first + last)
