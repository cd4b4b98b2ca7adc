r"""The first change of sign of an event along a trajectory.

Places on a trajectory are numbers ``u``: ``k + x`` is in step ``k``, at the fraction ``x`` of it.  The event is looked at in
many of them; where it comes nearer to zero and turns back without having passed it, its extreme value is looked for, by
parabolas through three points and golden sections in turn (Brent 1973, *Algorithms for Minimization without Derivatives*,
chapter 5), since two changes may lie on both sides of that; the interval of the first change is then divided, time and
again.  All of it without control flow where ``torch.vmap`` maps over trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.problem.trajectory.explicit_steps import Between, Followed, Slope

_POINTS, _EACH = 256, 8  # looked at in all, and in every step, at least
_TURNS = 12  # points by which an extreme value is looked for, every other ...
_GOLDEN = 0.381966  # ... at this share of the longer side
_ASIDE = 0.02  # of an interval, by which such a point is moved off another
_PARTS, _ROUNDS = 16, 4  # into which the interval of a change is divided, time and again
_JUMP = 0.5  # of the event's change over that interval, left after the last division, where it has no zero there


class Crossing(NamedTuple):
    """``time`` ``()`` and place ``u`` ``()``; whether there is a change of sign, and whether the event passes through zero
    there (it may jump, or have a pole); and its values at both ends of the trajectory."""

    time: Tensor
    place: Tensor
    found: Tensor
    passes: Tensor
    begin: Tensor
    end: Tensor


def first_crossing(event: Callable[[Tensor, Tensor], Tensor], edges: Tensor, between: Between) -> Crossing:
    """The first change of sign of ``event(t, y)``.

    Args:
        event: of a time ``()`` and a packed state ``(1, n)``. edges: of the steps, ``(N + 1,)``. between: the states, ``(P,
            1, n)``, in steps ``(P,)`` at their fractions ``(P,)``.

    Raises:
        ValueError: the event does not return one number. TypeError: it returns one that has no sign, a truth value.
    """
    steps = len(edges) - 1

    def time_at(u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        step = u.detach().long().clamp_max(steps - 1)
        x, begin = u - step, edges.gather(0, step)
        return step, x, begin + x * (edges.gather(0, step + 1) - begin)

    def at(u: Tensor) -> Tensor:
        step, x, time = time_at(u)
        return torch.func.vmap(event)(time, between(step, x))

    each = max(_EACH, -(-_POINTS // steps))
    u = torch.arange(steps * each + 1, dtype=edges.dtype, device=edges.device) / each
    g = at(u)
    if g.shape != u.shape:
        raise ValueError(f"event must return one number, got shape {tuple(g.shape[1:])}")
    if not g.is_floating_point():
        raise TypeError(
            f"event must return a real number, whose sign changes at the event, got {g.dtype}: y - 0.5, not y < 0.5"
        )
    begin, end = g[0], g[-1]
    u, g = _with_turns(at, u, g)
    changes = _changes(g)
    first, a, b = _first(g, changes)
    low, high, whole = u.gather(0, first), u.gather(0, first + 1), (b - a).abs()
    for _ in range(_ROUNDS):
        parts = low + (high - low) * torch.linspace(0, 1, _PARTS + 1, dtype=u.dtype, device=u.device)
        values = at(parts)
        first, a, b = _first(values, _changes(values))
        low, high = parts.gather(0, first), parts.gather(0, first + 1)
    fraction = a / (a - b)
    place = low + (high - low) * torch.where((fraction >= 0) & (fraction <= 1), fraction, 0.5)  # else no change, or NaN
    passes = ((b - a).abs() <= _JUMP * whole).squeeze(0)
    return Crossing(time_at(place)[2].squeeze(0), place.squeeze(0), changes.any(), passes, begin, end)


def _with_turns(at: Callable[[Tensor], Tensor], u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """The points and values, and beside them those where the event has turned back before zero, or behind it."""
    side = g.sign()
    alike = (side[:-2] == side[1:-1]) & (side[1:-1] == side[2:])
    turns = alike & (g[1:-1].abs() <= torch.minimum(g[:-2].abs(), g[2:].abs()))
    some, batches = compat.batches_in_front(turns)
    if not batches:
        if not bool(some.any()):
            return u, g
        which = some.nonzero().squeeze(1) + 1
    else:  # all of them, at the same places
        which = torch.arange(1, len(u) - 1, device=u.device)
    sign = side[which]
    a, m, b = u[which - 1], u[which], u[which + 1]
    fa, fm, fb = (sign * g[which + i] for i in (-1, 0, 1))  # positive, but for what is looked for
    for turn in range(_TURNS):
        x = _vertex(a, m, b, fa, fm, fb)
        if turn % 2:  # as where it bends more on one side
            x = torch.where(b - m > m - a, m + _GOLDEN * (b - m), m - _GOLDEN * (m - a))
        f = sign * at(x)
        better = f < fm
        shrinks_left = (x < m) == (f < fm)  # the new interval ends at, or else begins at, the outer of the two points
        inner, other = torch.where(better, x, m), torch.where(better, m, x)
        f_inner, f_other = torch.where(better, f, fm), torch.where(better, fm, f)
        a, fa = torch.where(shrinks_left, a, other), torch.where(shrinks_left, fa, f_other)
        b, fb = torch.where(shrinks_left, other, b), torch.where(shrinks_left, f_other, fb)
        m, fm = inner, f_inner
    m, fm = (torch.where(turns[which - 1], t, old[which]) for t, old in ((m, u), (sign * fm, g)))
    u, order = torch.cat((u, m)).sort()
    return u, torch.cat((g, fm)).gather(0, order)


def _vertex(a: Tensor, m: Tensor, b: Tensor, fa: Tensor, fm: Tensor, fb: Tensor) -> Tensor:
    """Where the parabola through three points is least, inside ``(a, b)`` and not at ``m``."""
    left, right = (m - a) * (fm - fb), (m - b) * (fm - fa)
    x = m - 0.5 * ((m - a) * left - (m - b) * right) / (left - right)
    aside = _ASIDE * (b - a)
    further = torch.where(b - m > m - a, m + aside, m - aside)
    x = torch.where(torch.isfinite(x) & ((x - m).abs() > 0.1 * aside), x, further)
    return torch.minimum(torch.maximum(x, a + 0.1 * (m - a)), b - 0.1 * (b - m))


def _changes(g: Tensor) -> Tensor:
    return (g[:-1].sign() * g[1:].sign() < 0) | ((g[1:] == 0) & (g[:-1] != 0))


def _first(g: Tensor, changes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the first change begins, ``(1,)``, and the values at both its ends."""
    first = changes.to(g.dtype).argmax().unsqueeze(0)
    return first, g.gather(0, first), g.gather(0, first + 1)


def time_of(at: Crossing, edges: Tensor) -> tuple[Tensor, str]:
    """The time of an event, nearly; NaN where there is none, and why."""
    good = at.found & at.passes
    time = torch.where(good, at.time, torch.nan)  # a solve from NaN fails
    if compat.batches_in_front(good)[1] or bool(good):
        return time, ""
    if bool(at.found):
        return time, (
            f"The event changes its sign at t = {float(at.time):.6g}, but does not pass through zero there: it jumps, "
            "or has a pole. Give one that is continuous (y - c, not sign(y - c))."
        )
    return time, (
        f"The event does not change its sign between t = {float(edges[0]):.6g} and {float(edges[-1]):.6g}, wherever it "
        f"was looked at: it is {float(at.begin):.3g} and {float(at.end):.3g} there."
    )


class Lookout:
    """Looks for the first change of sign while a trajectory is followed.

    Attributes:
        event: of a time ``()`` and a packed state ``(1, n)``. seen: what has been found.
    """

    def __init__(self, event: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.event, self._begun = event, 0
        self.seen: Crossing | None = None

    def __call__(self, found: Followed) -> bool:
        """Has it changed its sign in the steps that are new?"""
        begin = max(self._begun - 1, 0)  # a turn may be where two looks meet
        self._begun = len(found.edges) - 1
        part = found.beyond(begin)
        assert part.interpolant is not None
        at = first_crossing(self.event, part.edges, part.interpolant)
        if bool(at.found):
            self.seen = at._replace(place=at.place + begin)
        return self.seen is not None

    def nearer(self, found: Followed, slope: Slope) -> Followed:
        """What ends where the event was, by steps that were less accurate, with its end where it is by these: a Newton step,
        and the other edges stay.  (Those of the equations move with the end, away from kinks that they are beside.)"""
        t, y = found.edges[-1], found.states[-1]
        way, longest = slope(t, y), found.edges[-1] - found.edges[-2]
        h = torch.finfo(t.dtype).eps ** (1 / 3) * longest
        rate = (self.event(t + h, y + h * way) - self.event(t - h, y - h * way)) / (2 * h)
        by = (-self.event(t, y) / rate).reshape(())
        by = torch.where(by.abs() < 0.5 * longest.abs(), by, 0)  # of NaN, too
        edges, states = (
            torch.cat((v[:-1], end.unsqueeze(0))) for v, end in ((found.edges, t + by), (found.states, y + by * way))
        )
        return found._replace(edges=edges, states=states)
