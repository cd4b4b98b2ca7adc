r"""Total variation in one dimension: ``argmin_x |x - v|^2 / 2 + \lambda \sum_i |x_{i+1} - x_i|``, exactly.

The minimiser is constant on segments.  On one whose neighbours lie ``s_l``, ``s_r`` (``+1``: it steps up to the right,
``-1``: down, 0: an end of the signal), stationarity gives

    x = mean(v) + \lambda (s_r - s_l) / length

The segments are found by halving: ``x_i >= \theta`` holds where ``b_i = 1`` in the minimiser over ``b \in {0, 1}^n`` of
``\sum (\theta - v_i) b_i + \lambda \sum |b_{i+1} - b_i|`` (Hochbaum 2001; Chambolle & Darbon 2009), so that with
``\theta`` the value above a segment either stays whole or splits.  The binary problem is a recursion
``d_{i+1} = c_{i+1} + clip(d_i, -\lambda, \lambda)``, and clipped shifts are closed under composition: a scan of
``log2(n)`` passes over all samples and segments at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation.constants import constants


def denoise(v: Tensor, threshold: Tensor) -> Tensor:
    r"""The minimiser along the last dimension.

    Args:
        v: ``(*batch, n)``. threshold: ``\lambda >= 0``, ``(*batch, 1)``.
    """
    first, last, turn = constants(_segments, v, threshold)
    return _level(v, threshold, first, last, turn)


def _level(v: Tensor, threshold: Tensor, first: Tensor, last: Tensor, turn: Tensor) -> Tensor:
    """``mean(v) + threshold * turn / length`` over ``first..last``, for each entry."""
    middle = v.detach().mean(-1, keepdim=True)  # sums of what is left over lose fewer digits
    total = torch.cat([torch.zeros_like(v[..., :1]), (v - middle).cumsum(-1)], -1)
    length = (last - first + 1).to(v.dtype)
    return middle + (total.gather(-1, last + 1) - total.gather(-1, first) + threshold * turn) / length


def _segments(v: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each entry the first and last one of its segment, and ``s_r - s_l``."""
    jump = torch.zeros_like(torch.cat([v, v[..., :1]], -1))  # before each entry, and after the last: +1 up, -1 down
    while True:
        starts = jump[..., :-1] != 0
        starts[..., 0] = True
        ends = torch.cat([starts[..., 1:], torch.ones_like(starts[..., :1])], -1)
        place = torch.arange(v.shape[-1], device=v.device).expand_as(v)
        first = torch.where(starts, place, -1).cummax(-1).values
        last = torch.where(ends, place, v.shape[-1]).flip(-1).cummin(-1).values.flip(-1)
        before, after = jump[..., :-1].gather(-1, first), jump[..., 1:].gather(-1, last)
        level = _level(v, threshold, first, last, after - before)
        cost = level - v + threshold * (torch.where(starts, before, 0) - torch.where(ends, after, 0))
        b = _binary(cost, threshold, starts, ends)
        change = torch.where(starts[..., 1:], 0, b[..., 1:].to(v.dtype) - b[..., :-1].to(v.dtype))
        if not bool(change.any()):
            return first, last, after - before
        jump[..., 1:-1] += change


def _binary(cost: Tensor, threshold: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    r"""The minimiser over ``b`` of ``\sum cost b + threshold \sum |b_{i+1} - b_i|``, each segment by itself."""
    room = torch.where(starts, 0, threshold)  # d = cost + clip(d before, -room, room)
    _, d, _ = _scan(_clipped, (cost, cost - room, cost + room))  # constant functions at a start: low = high
    low, high = torch.where(ends, d < 0, d < -threshold), torch.where(ends, d < 0, d < threshold)
    # b of an entry, if the next is 0 or 1; the last one of a segment does not ask
    of_zero, _ = _scan(_chosen, (low.flip(-1), high.flip(-1)))
    return of_zero.flip(-1)


def _clipped(f: tuple[Tensor, ...], g: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``g(f(x))`` for functions ``min(max(x + shift, low), high)``."""
    shift, low, high = g
    return f[0] + shift, (f[1] + shift).maximum(low).minimum(high), (f[2] + shift).maximum(low).minimum(high)


def _chosen(f: tuple[Tensor, ...], g: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``g(f(x))`` for functions of a bit, given by their two values."""
    return torch.where(f[0], g[1], g[0]), torch.where(f[1], g[1], g[0])


def _scan(then: Callable[..., tuple[Tensor, ...]], parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """All the compositions of the first, the first two, ... functions along the last dimension (Hillis & Steele 1986)."""
    shift = 1
    while shift < parts[0].shape[-1]:
        joined = then(tuple(p[..., :-shift] for p in parts), tuple(p[..., shift:] for p in parts))
        parts = tuple(torch.cat([p[..., :shift], j], -1) for p, j in zip(parts, joined, strict=True))
        shift *= 2
    return parts
