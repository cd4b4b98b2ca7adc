r"""Explicit steps through a trajectory: Dormand & Prince 1980, J. Comput. Appl. Math. 6, 19-26, table 2: RK5(4)7M.

The error of a step is measured, sample by sample, in units of the largest values that each number of the state has had so
far, ``w_i`` (at least a millionth of the mean of all), by the root mean square ``|v| = (mean (v_i / w_i)^2)^{1/2}``; a step
is taken where that of every sample is at most ``accuracy (max(|y|, |y_new|) + 10^{-3})``.  So neither the units of the state
decide, nor what share of it is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.foundation.numbers import largest, numbers

Slope = Callable[[Tensor, Tensor], Tensor]
Between = Callable[[Tensor, Tensor], Tensor]
Look = Callable[["Followed"], bool]

STEPS = 20_000

_A = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
_C = (1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0)
_ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
#: of the stages that have a slope, the last row the quadrature of the step; and their times, as fractions of it
ROWS, NODES = _A, (0.0, *_C[:-1])
#: of the state in the middle of a step, of order four: Shampine 1986, Math. Comp. 46, 135-150
_MIDDLE = (
    6025192743 / 60171106304,
    0.0,
    51252292925 / 130801643196,
    -2691868925 / 90256659456,
    187940372067 / 3189068634112,
    -1776094331 / 39487288512,
    11237099 / 470086768,
)
_SHORT = 0.1  # of a step: a last one is not shorter than that
_LOOKS = 8  # steps after which it is first looked whether to go on; then after twice as many, and so on
_FINEST = 10  # times eps: errors of a step are not told from rounding below
_ZERO = 1e-3  # of the units, that is as good as zero
_EDGE = 3.25  # h |lambda| at which the method stops being stable (Hairer & Wanner 1996, section IV.2)
_JUMPS = 3  # steps as short as the clock tells, in a row, that are taken whatever their error
_STIFF, _CALM = 15, 6  # steps there until an equation is called stiff, and elsewhere in a row until that is forgotten
_COARSE, _LONG = 10.0, 1.25  # h |lambda| that is not taken of what moves: times accuracy^{1/5}, and at least
_OVERLONG, _WIDE = 60, 50  # such steps until an equation of so many numbers is called stiff, if as many are to come


class Followed(NamedTuple):
    """What an integrator has found.

    Attributes:
        edges: of the steps, ``(N + 1,)``. states: there, ``(N + 1, batch, n)``.
        interpolant: the states in steps ``(P,)`` at their fractions ``(P,)``, ``(P, batch, n)``; ``None``: it says nothing.
        stiff: it took an implicit method for the steps. explicit: the states are those that :func:`stages` leads to from
            each to the next. growth: of small errors, at most, its logarithm: ``\\sum h |df/dy|`` along the way.
            stages: points of an implicit step that is as long as one of these and as accurate.
    """

    edges: Tensor
    states: Tensor
    interpolant: Between | None = None
    stiff: bool = False
    explicit: bool = False
    growth: float = 0.0
    stages: int = 3

    def beyond(self, step: int) -> Followed:
        """What was followed from a step on."""
        between, n = self.interpolant, step
        later = None if between is None else lambda step, x: between(step + n, x)
        return self._replace(edges=self.edges[n:], states=self.states[n:], interpolant=later)

    def on(self, edges: Tensor, f: Slope, between: Between) -> Followed:
        """The trajectory by other steps from the same begin to the same end, of a right-hand side ``f`` of a time and
        ``(batch, n)``: explicit ones are followed, others begin with what is known in ``between``."""
        if edges is self.edges:
            return self
        old, states, sign = self.edges, self.states, 1 if bool(edges[-1] > edges[0]) else -1

        def place(time: Tensor) -> tuple[Tensor, Tensor]:
            where = (torch.searchsorted(sign * old, sign * time, right=True) - 1).clamp(0, len(old) - 2)
            return where, (time - old[where]) / (old[where + 1] - old[where])

        step, x = place(edges)
        if self.explicit:
            passes = torch.isfinite(states[step]) & torch.isfinite(states[step + (x > 0)])
            new = torch.where(passes, follow(f, edges, states[0]), torch.nan)
            return self._replace(edges=edges, states=new, interpolant=None)
        inside = lambda step, x: between(*place(edges[step] + x * (edges[step + 1] - edges[step])))  # noqa: E731
        return self._replace(edges=edges, states=between(step, x), interpolant=inside)

    def until(self, place: Tensor, end: Tensor, between: Between) -> Followed:
        """What was followed up to the time ``end``, which is at ``place``: that step ends there, or the one before if it
        would be short.  ``between``: where there is nothing of its own."""
        edges = self.edges
        last = int(place.clamp_max(len(edges) - 2))
        kept = last if last and float(place) - last < _SHORT else last + 1
        shorter = torch.cat((edges[:kept], end.reshape(1)))
        fraction = (place - last).reshape(1)

        def inside(step: Tensor, x: Tensor) -> Tensor:
            time = shorter[step] + x * (shorter[step + 1] - shorter[step])
            over = (step == kept - 1) & ((time - edges[last]) * (end - edges[0]) >= 0)
            where = torch.where(over, last, step)
            return between(where, (time - edges[where]) / (edges[where + 1] - edges[where]))

        states = torch.cat((self.states[:kept], between(torch.full_like(fraction, last, dtype=torch.int64), fraction)))
        return self._replace(edges=shorter, states=states, interpolant=inside)


def stages(f: Slope, t: Tensor, y: Tensor, first: Tensor, h: float | Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """One step, or some side by side, at ``t (N,)`` from ``y (..., N, n)`` by ``h (N, 1)``: the states of the stages, of
    which the last is that at the step's end and the one before it at the same time, and six slopes: the seventh is that at
    the end."""
    if isinstance(h, float):
        times: Sequence[Tensor] = [t + h * c for c in _C]
    else:
        times = (t.unsqueeze(-1) + h * t.new_tensor(_C)).unbind(-1)
    slopes, states = [first], [y]
    for row, now in zip(_A, times, strict=True):
        states.append(_along(y, h, row, slopes))
        if len(slopes) < len(_A):
            slopes.append(f(now, states[-1]))
    return states, slopes


def _along(y: Tensor, h: float | Tensor, row: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    """``y + h sum_j a_j k_j``."""
    if not isinstance(h, float):
        return y + h * sum(a * k for a, k in zip(row, slopes, strict=True) if a)
    for a, k in zip(row, slopes, strict=True):
        y = torch.add(y, k, alpha=h * a) if a else y
    return y


def follow(f: Slope, edges: Tensor, y0: Tensor) -> Tensor:
    """The states at given edges ``(N + 1,)``, ``(N + 1, batch, n)``: no control flow."""
    states, slope = [y0], f(edges[0], y0)
    for t, after, h in zip(edges[:-1].unbind(), edges[1:].unbind(), edges.diff().unbind(), strict=True):
        states.append(stages(f, t, states[-1], slope, h.unsqueeze(-1))[0][-1])
        slope = f(after, states[-1])
    return torch.stack(states)


def cubic(edges: Tensor, states: Tensor, slopes: Tensor) -> Between:
    """Interpolation of values and slopes ``(N + 1, batch, n)`` at the edges."""

    def between(step: Tensor, x: Tensor) -> Tensor:
        h = (edges.gather(0, step + 1) - edges.gather(0, step))[:, None, None]
        a, b, da, db = (_rows(v, i) for v in (states, slopes) for i in (step, step + 1))
        x = x[:, None, None]
        return (
            (1 + 2 * x) * (1 - x) ** 2 * a + x**2 * (3 - 2 * x) * b + h * (x * (1 - x) ** 2 * da - x**2 * (1 - x) * db)
        )

    return between


def quartic(edges: Tensor, states: Tensor, slopes: Sequence[Tensor], middles: Sequence[Tensor]) -> Between:
    """Polynomials of degree four through the states at the edges and in the middle of the steps, with these slopes."""
    by_three, known = cubic(edges, states, torch.stack(list(slopes))), torch.stack(list(middles))
    every = torch.arange(len(known), device=edges.device)
    off = known - by_three(every, torch.full_like(edges[1:], 0.5))

    def between(step: Tensor, x: Tensor) -> Tensor:
        bump = (4 * x * (1 - x)).square()[:, None, None]
        return by_three(step, x) + bump * _rows(off, step)

    return between


def _rows(v: Tensor, which: Tensor) -> Tensor:
    return v.gather(0, which[:, None, None].expand(-1, *v.shape[1:]))


class TooManySteps(ConvergenceError):
    """A trajectory that was not followed to its end; ``path``: how far."""

    def __init__(self, message: str, path: Followed) -> None:
        super().__init__(message)
        self.path = path


class March:
    """A trajectory from ``y0 (batch, n)`` through the times ``t``, all samples by the same steps.

    A sample whose steps shrink to nothing has no solution from there on, or ``f`` is not smooth there: it stays where it is,
    its later states are NaN, and the others go on.

    Attributes:
        now, y: how far it has come. lost: ``(batch,)``. stiff: stability has ruled the last steps, not accuracy; or what
        is damped has ruled them that moves in none of them, just inside of the region of stability: there errors are as
        large as what is allowed while that follows something slow, and what is made of them, derivatives, too.
        units: ``w``, ``(batch, n)``. cornered: steps have come down to what the clock can tell.
    """

    def __init__(self, f: Slope, t: Tensor, y0: Tensor, accuracy: float, look: Look | None = None) -> None:
        self.f, self.t, self.look = f, t, look
        self.accuracy = max(accuracy, _FINEST * torch.finfo(y0.dtype).eps)
        self.now, self.y, self.slope = t[0], y0, f(t[0], y0)
        self.lost = ~(torch.isfinite(y0).all(1) & torch.isfinite(self.slope).all(1))
        self._some_lost = self._is_any(self.lost)
        self.units = self._units(y0.abs())
        self._some_zero = True
        self._edges, self._states, self._slopes = [self.now], [y0], [self.slope]
        self._middles: list[Tensor] = []
        self.growth, self._due = 0.0, _LOOKS
        self._at_edge = self._calm = self._overlong = self._fine = 0
        self._forced, self._may_hand_over, self.cornered = 0, False, False

    @property
    def stiff(self) -> bool:
        return self._at_edge >= _STIFF or self.cornered or self._rests

    @property
    def _rests(self) -> bool:
        """Have the last steps been too long for what they meet, and will as many be?  More, where implicit ones are dear."""
        many = _OVERLONG * max(1.0, self.y.shape[1] / _WIDE)
        if self._overlong < many:
            return False
        length = float(self._edges[-1]) - float(self._edges[-2])
        return (float(self.t[-1]) - float(self.now)) / length >= many

    @property
    def path(self) -> tuple[Tensor, Tensor]:
        """The edges ``(N + 1,)`` so far, and the states there."""
        return torch.stack(self._edges), torch.stack(self._states)

    @property
    def followed(self) -> Followed:
        """The path so far, and where it is looked at in between."""
        edges, states = self.path
        known = edges, states, self._slopes, self._middles
        between = quartic(*known) if self._middles else None
        return Followed(edges, states, between, explicit=True, growth=self.growth)

    def run(self, until_stiff: bool = False) -> None:
        """Go on to the last time, or until the equation is called stiff, or whoever looks on has seen enough.

        Raises:
            ConvergenceError: too many steps.
        """
        h, self._may_hand_over = self._first(), until_stiff
        for goal in self.t[1:]:
            while float(goal) != float(self.now):
                if len(self._edges) > STEPS:
                    raise TooManySteps(
                        f"it took {STEPS} steps to reach t = {float(self.now):.3g}: the equation is stiff there "
                        "(integrator='scipy.Radau' meets that), or the trajectory slides along a switch of rhs (dry "
                        "friction: make it steep, torch.tanh(x / width)), or the time is long beside its changes: ask in "
                        "several parts",
                        self.followed,
                    )
                h = self._step(h, goal)
                if (until_stiff and self.stiff) or self._has_seen_enough():
                    return

    def _has_seen_enough(self) -> bool:
        if self.look is None or len(self._edges) <= self._due:
            return False
        self._due *= 2
        return self.look(self.followed)

    def _first(self) -> float:
        """A first step in which the state changes by a hundredth."""
        size = _size(self.y).clamp_min(torch.finfo(self.y.dtype).tiny)
        change = largest(torch.where(self.lost, 0, _size((self.t[1] - self.t[0]) * self.slope) / size))
        return float(self.t[1] - self.t[0]) * min(1.0, max(1e-6, 0.01 / change if change > 0 else 0.01))

    def _step(self, h: float, goal: Tensor) -> float:
        """Try a step of length ``h`` towards ``goal``; the length of the next."""
        now, end = float(self.now), float(goal)
        last = abs(h) >= 0.999 * abs(end - now)
        step = end - now if last else h
        states, slopes = stages(self.f, self.now, self.y, self.slope, step)
        new, before = states[-1], states[-2]
        slopes.append(self.f(self.now + step, new))
        return self._judged(h, step, goal if last else None, new, before, slopes)

    def _judged(
        self, h: float, step: float, goal: Tensor | None, new: Tensor, before: Tensor, slopes: list[Tensor]
    ) -> float:
        """Take the step, which ends at ``goal`` if it is given, unless its error is too large."""
        units = self._units(torch.maximum(self.units, new.abs()))
        error = _along(torch.zeros_like(new), step, _ERROR, slopes)
        vectors = torch.stack((error, self.y, new, slopes[-1] - slopes[-2], new - before))
        sizes, ratio, moves = self._measured(vectors, units, step)
        if not ratio <= 1:
            shorter = step * (0.1 if ratio != ratio or ratio == math.inf else max(0.2, 0.9 * ratio**-0.2))
            farthest = max(abs(float(self.now)), abs(float(self.now) + step))
            if abs(shorter) > 4 * torch.finfo(self.now.dtype).eps * farthest:
                return shorter
            self._forced += 1
            if self._some_zero:  # what leaves zero at a kink is as small as its error: in units of what it is to be
                later = self.accuracy * (self.t[-1] - self.t[0]).abs() * slopes[-1].abs()
                units = torch.where(self.units == 0, torch.fmax(units, later), units)
                sizes, ratio, moves = self._measured(vectors, units, step)
            if ratio == math.inf or ratio != ratio or self._forced > _JUMPS:  # else a jump of f, which such steps cross
                ratios = self._ratios(*sizes[:3])
                if self._may_hand_over and self._is_any(~self.lost & torch.isfinite(ratios)):
                    self.cornered = True
                    return step
                self.lost = self.lost | ~(ratios <= 1)
                self._some_lost = True
                moves = self._largest(sizes, step)[1]
        else:
            self._forced = 0
        self._watch(moves)
        if self.look is not None:
            self._middles.append(_along(self.y, step, _MIDDLE, slopes))
        self._go(self.now + step if goal is None else goal, new, slopes[-1], units)
        if self._some_lost and bool(compat.batches_in_front(self.lost)[0].all()):
            return float(self.t[-1]) - float(self.now)
        grown = step * min(5.0, 0.9 * max(ratio, 1e-8) ** -0.2) if ratio <= 1 else step
        return grown if goal is None or abs(grown) > abs(h) else h

    def _measured(self, vectors: Tensor, units: Tensor, step: float) -> tuple[Tensor, float, float]:
        """The sizes of vectors in these units, and :meth:`_largest`."""
        sizes = _size(vectors / (torch.where(units == 0, torch.inf, units) if self._some_zero else units))
        return sizes, *self._largest(sizes, step)

    def _largest(self, sizes: Tensor, step: float) -> tuple[float, float]:
        """The largest error, in units of what is allowed, and ``h |lambda|`` of samples that are not lost, in one read."""
        shown = torch.where(self.lost, 0, sizes) if self._some_lost else sizes
        read = numbers(compat.batches_in_front(shown)[0])
        error, old, after, bent, moved = (read[..., i, :] for i in range(5))
        with np.errstate(all="ignore"):
            ratios = error / (self.accuracy * (np.maximum(old, after) + _ZERO))
            moves = np.fmax(abs(step) * bent / moved, 0)  # of what does not move: 0
        return float(ratios.max()), float(moves.max())

    def _ratios(self, error: Tensor, old: Tensor, after: Tensor) -> Tensor:
        return error / (self.accuracy * (torch.maximum(old, after) + _ZERO))

    def _go(self, now: Tensor, new: Tensor, slope: Tensor, units: Tensor) -> None:
        self.now = now
        if self._some_lost:
            lost = self.lost.unsqueeze(1)
            new, slope, units = (
                torch.where(lost, old, value)
                for old, value in ((self.y, new), (self.slope, slope), (self.units, units))
            )
        self.y, self.slope, self.units = new, slope, units
        self._some_zero = self._some_zero and self._is_any(units == 0)  # they never fall
        self._edges.append(now)
        self._states.append(torch.where(lost, torch.nan, new) if self._some_lost else new)
        self._slopes.append(slope)

    @staticmethod
    def _is_any(which: Tensor) -> bool:
        return bool(compat.batches_in_front(which)[0].any())

    def _watch(self, moves: float) -> None:
        """Count steps at the edge of the region of stability: there ``|f(y_7) - f(y_6)| / |y_7 - y_6|`` is ``|lambda|``;
        and those that are too long to be accurate for what it belongs to."""
        self.growth += min(moves, _EDGE)  # more is a jump
        if moves > max(_LONG, _COARSE * self.accuracy**0.2):
            self._overlong, self._fine = self._overlong + 1, 0
        else:
            self._fine += 1
            self._overlong = 0 if self._fine >= _CALM else self._overlong
        if moves > _EDGE:
            self._at_edge, self._calm = self._at_edge + 1, 0
        else:
            self._calm += 1
            self._at_edge = 0 if self._calm >= _CALM else self._at_edge

    def _units(self, peaks: Tensor) -> Tensor:
        floor = max(1e-6, _FINEST * torch.finfo(peaks.dtype).eps / self.accuracy)
        return torch.maximum(peaks, floor * _size(peaks).unsqueeze(1))


def _size(v: Tensor) -> Tensor:
    """The root of the mean square of the numbers of each sample, ``(..., n) -> (...)``."""
    size: Tensor = torch.linalg.vector_norm(v, dim=-1) * max(v.shape[-1], 1) ** -0.5
    return size
