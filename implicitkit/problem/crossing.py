"""Where along a trajectory an event first changes its sign: by looking at many points, then narrowing down.

The steps of an integrator know nothing of the event, which may change its sign twice within one.  It is looked at between
them, on the cubic through states and slopes; all of that without control flow, so that it works under ``torch.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.problem.integration import hermite

__all__ = ["Crossing", "first_crossing"]

_POINTS, _EACH = 256, 8  # looked at in all, and in every step, at least: two changes between two of them are not seen
_PARTS, _ROUNDS = 16, 4  # into which the interval of a change is divided, time and again
_JUMP = 0.5  # of the event's change over that interval, left after the last division, where it has no zero there


class Crossing(NamedTuple):
    """``time`` ``()``; whether there is a change of sign, and whether the event passes through zero there (it may jump, or
    have a pole); and its values at both ends of the trajectory."""

    time: Tensor
    found: Tensor
    passes: Tensor
    begin: Tensor
    end: Tensor


def first_crossing(
    event: Callable[[Tensor, Tensor], Tensor], edges: Tensor, states: Tensor, slopes: Tensor
) -> Crossing:
    """The first change of sign of ``event(t, y)``.

    Args:
        event: of a time ``()`` and a packed state ``(1, n)``. edges: of the steps, ``(N + 1,)``. states, slopes: there,
            ``(N + 1, 1, n)``.

    Raises:
        ValueError: the event does not return one number. TypeError: it returns one that has no sign, a truth value.
    """
    each = max(_EACH, -(-_POINTS // (len(edges) - 1)))
    at = torch.linspace(0, 1, each + 1, dtype=edges.dtype, device=edges.device)[:-1]
    times = torch.cat(((edges[:-1, None] + edges.diff()[:, None] * at).flatten(), edges[-1:]))
    g = torch.func.vmap(event)(times, torch.cat((hermite(edges, states, slopes, at).flatten(0, 1), states[-1:])))
    if g.shape != times.shape:
        raise ValueError(f"event must return one number, got shape {tuple(g.shape[1:])}")
    if not g.is_floating_point():
        raise TypeError(
            f"event must return a real number, whose sign changes at the event, got {g.dtype}: y - 0.5, not y < 0.5"
        )
    changes = _changes(g)
    first, a, b = _first(g, changes)
    step = torch.cat((first, first + each)) // each
    e = edges.gather(0, step)
    s, d = (v.gather(0, step.view(2, 1, 1).expand(2, *v.shape[1:])) for v in (states, slopes))
    low, width, whole = (first % each).to(e.dtype) / each, 1 / each, (b - a).abs()
    for _ in range(_ROUNDS):
        x = low + width * torch.linspace(0, 1, _PARTS + 1, dtype=e.dtype, device=e.device)
        parts = torch.func.vmap(event)(e[0] + (e[1] - e[0]) * x, hermite(e, s, d, x).squeeze(0))
        first, a, b = _first(parts, _changes(parts))
        width = width / _PARTS
        low = low + width * first.to(low.dtype)
    x = low + width * torch.where(a == b, 0.5, a / (a - b))
    time = (e[0] + (e[1] - e[0]) * x).squeeze(0)
    return Crossing(time, changes.any(), ((b - a).abs() <= _JUMP * whole).squeeze(0), g[0], g[-1])


def _changes(g: Tensor) -> Tensor:
    return (g[:-1].sign() * g[1:].sign() < 0) | ((g[1:] == 0) & (g[:-1] != 0))


def _first(g: Tensor, changes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the first change begins, ``(1,)``, and the values at both its ends."""
    first = changes.to(g.dtype).argmax().unsqueeze(0)
    return first, g.gather(0, first), g.gather(0, first + 1)
