r"""Explicit steps through a trajectory: Dormand & Prince 1980, J. Comput. Appl. Math. 6, 19-26, table 2: RK5(4)7M.

The error of a step is measured, sample by sample, in units of the largest values that each number of the state has had so
far, ``w_i`` (at least a millionth of the mean of all), by the root mean square ``|v| = (mean (v_i / w_i)^2)^{1/2}``; a step
is taken where that of every sample is at most ``accuracy (max(|y|, |y_new|) + 10^{-3})``.  So neither the units of the state
decide, nor what share of it is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceError
from implicitkit.foundation.numbers import largest
from implicitkit.problem.collocation import unasked

Slope = Callable[[Tensor, Tensor], Tensor]

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
_ZERO = 1e-3  # of the units, that is as good as zero
_EDGE = 3.25  # h |lambda| at which the method stops being stable (Hairer & Wanner 1996, section IV.2)
_JUMPS = 3  # steps as short as the clock tells, in a row, that are taken whatever their error
_STIFF, _CALM = 15, 6  # steps there until an equation is called stiff, and elsewhere in a row until that is forgotten


def stages(f: Slope, t: Tensor, y: Tensor, first: Tensor, h: float | Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One step: the state after it, the sixth stage, which is at the same time, and the seven slopes, of which the last is
    that at the step's end."""
    with unasked():
        times = (t + h * t.new_tensor(_C)).unbind()
    slopes, states = [first], [y]
    for row, now in zip(_A, times, strict=True):
        states.append(_along(y, h, row, slopes))
        slopes.append(f(now, states[-1]))
    return states[-1], states[-2], slopes


def _along(y: Tensor, h: float | Tensor, row: Sequence[float], slopes: Sequence[Tensor]) -> Tensor:
    """``y + h sum_j a_j k_j``; no mode of a solve around this one looks at each term."""
    with unasked():
        if not isinstance(h, float):
            return y + h * sum(a * k for a, k in zip(row, slopes, strict=True) if a)
        for a, k in zip(row, slopes, strict=True):
            y = torch.add(y, k, alpha=h * a) if a else y
        return y


def follow(f: Slope, edges: Tensor, y0: Tensor) -> Tensor:
    """The states at given edges ``(N + 1,)``, ``(N + 1, batch, n)``: no control flow."""
    states, slope = [y0], f(edges[0], y0)
    for t, h in zip(edges[:-1].unbind(), edges.diff().unbind(), strict=True):
        new, _, slopes = stages(f, t, states[-1], slope, h)
        states.append(new)
        slope = slopes[-1]
    return torch.stack(states)


class TooManySteps(ConvergenceError):
    """A trajectory that was not followed to its end; ``path``: how far, edges and states."""

    def __init__(self, message: str, path: tuple[Tensor, Tensor]) -> None:
        super().__init__(message)
        self.path = path


class March:
    """A trajectory from ``y0 (batch, n)`` through the times ``t``, all samples by the same steps.

    A sample whose steps shrink to nothing has no solution from there on, or ``f`` is not smooth there: it stays where it is,
    its later states are NaN, and the others go on.

    Attributes:
        now, y: how far it has come. lost: ``(batch,)``. stiff: stability has ruled the last steps, not accuracy.
        units: ``w``, ``(batch, n)``. cornered: steps have come down to what the clock can tell.
    """

    def __init__(self, f: Slope, t: Tensor, y0: Tensor, accuracy: float) -> None:
        self.f, self.t, self.accuracy = f, t, accuracy
        self.now, self.y, self.slope = t[0], y0, f(t[0], y0)
        self.lost = ~(torch.isfinite(y0).all(1) & torch.isfinite(self.slope).all(1))
        self._some_lost = self._is_any(self.lost)
        self.units = self._units(y0.abs())
        self._edges, self._states = [self.now], [y0]
        self._at_edge = self._calm = 0
        self._forced, self._may_hand_over, self.cornered = 0, False, False

    @property
    def stiff(self) -> bool:
        return self._at_edge >= _STIFF or self.cornered

    @property
    def path(self) -> tuple[Tensor, Tensor]:
        """The edges ``(N + 1,)`` so far, and the states there."""
        return torch.stack(self._edges), torch.stack(self._states)

    def run(self, until_stiff: bool = False) -> None:
        """Go on to the last time, or until the equation is called stiff.

        Raises:
            ConvergenceError: too many steps.
        """
        h, self._may_hand_over = self._first(), until_stiff
        for goal in self.t[1:]:
            while float(goal) != float(self.now):
                if len(self._edges) > STEPS:
                    raise TooManySteps(
                        f"it took {STEPS} steps to reach t = {float(self.now):.3g}: the equation is stiff there "
                        "(integrator='scipy.Radau' meets that, not under torch.vmap: pass the samples with batch_dims=1), "
                        "or the time long beside its changes: ask in several parts",
                        self.path,
                    )
                h = self._step(h, goal)
                if until_stiff and self.stiff:
                    return

    def _first(self) -> float:
        """A first step in which the state changes by a hundredth."""
        size = lambda v: v.square().mean(1).sqrt()  # noqa: E731
        change = size((self.t[1] - self.t[0]) * self.slope) / size(self.y).clamp_min(torch.finfo(self.y.dtype).tiny)
        change = largest(torch.where(self.lost, 0, change))
        return float(self.t[1] - self.t[0]) * min(1.0, max(1e-6, 0.01 / change if change > 0 else 0.01))

    def _step(self, h: float, goal: Tensor) -> float:
        """Try a step of length ``h`` towards ``goal``; the length of the next."""
        now, end = float(self.now), float(goal)
        last = abs(h) >= 0.999 * abs(end - now)
        step = end - now if last else h
        new, before, slopes = stages(self.f, self.now, self.y, self.slope, step)
        with unasked():
            return self._judged(h, step, goal if last else None, new, before, slopes)

    def _judged(
        self, h: float, step: float, goal: Tensor | None, new: Tensor, before: Tensor, slopes: list[Tensor]
    ) -> float:
        """Take the step, which ends at ``goal`` if it is given, unless its error is too large."""
        units = self._units(torch.maximum(self.units, new.abs()))
        error = _along(torch.zeros_like(new), step, _ERROR, slopes)
        vectors = torch.stack((error, self.y, new, slopes[-1] - slopes[-2], new - before))
        weights = torch.where(units == 0, torch.inf, units)
        error, old, after, bent, moved = (vectors / weights).square().mean(2).sqrt().unbind()
        ratios = error / (self.accuracy * (torch.maximum(old, after) + _ZERO))
        ratio = largest(torch.where(self.lost, 0, ratios) if self._some_lost else ratios)
        if not ratio <= 1:
            shorter = step * (0.1 if ratio != ratio or ratio == math.inf else max(0.2, 0.9 * ratio**-0.2))
            farthest = max(abs(float(self.now)), abs(float(self.now) + step))
            if abs(shorter) > 4 * torch.finfo(self.now.dtype).eps * farthest:
                return shorter
            self._forced += 1
            if ratio == math.inf or ratio != ratio or self._forced > _JUMPS:  # else a jump of f, which such steps cross
                if self._may_hand_over and not bool((self.lost | ~torch.isfinite(ratios)).all()):
                    self.cornered = True
                    return step
                self.lost = self.lost | ~(ratios <= 1)
                self._some_lost = True
        else:
            self._forced = 0
        if self._may_hand_over:
            moves = (abs(step) * bent / moved).nan_to_num(0.0)
            self._watch(largest(torch.where(self.lost, 0, moves)))
        self._go(self.now + step if goal is None else goal, new, slopes[-1], units)
        if self._some_lost and bool(compat.batches_in_front(self.lost)[0].all()):
            return float(self.t[-1]) - float(self.now)
        grown = step * min(5.0, 0.9 * max(ratio, 1e-8) ** -0.2) if ratio <= 1 else step
        return grown if goal is None or abs(grown) > abs(h) else h

    def _go(self, now: Tensor, new: Tensor, slope: Tensor, units: Tensor) -> None:
        self.now = now
        if self._some_lost:
            lost = self.lost.unsqueeze(1)
            new, slope, units = (
                torch.where(lost, old, value)
                for old, value in ((self.y, new), (self.slope, slope), (self.units, units))
            )
        self.y, self.slope, self.units = new, slope, units
        self._edges.append(now)
        self._states.append(torch.where(lost, torch.nan, new) if self._some_lost else new)

    @staticmethod
    def _is_any(lost: Tensor) -> bool:
        return bool(compat.batches_in_front(lost)[0].any())

    def _watch(self, moves: float) -> None:
        """Count steps at the edge of the region of stability: there ``|f(y_7) - f(y_6)| / |y_7 - y_6|`` is ``|lambda|``."""
        if moves > _EDGE:
            self._at_edge, self._calm = self._at_edge + 1, 0
        else:
            self._calm += 1
            self._at_edge = 0 if self._calm >= _CALM else self._at_edge

    def _units(self, peaks: Tensor) -> Tensor:
        floor = max(1e-6, 10 * torch.finfo(peaks.dtype).eps / self.accuracy)
        return torch.maximum(peaks, floor * peaks.square().mean(1, keepdim=True).sqrt())
