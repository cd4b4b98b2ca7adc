"""What a plain step of a fixed-point iteration costs beside one that mixes in the last ones, and when it is worth more.

An evaluation of a map of a few operations costs as much as a few calls of torch, and to mix costs tens of them.  So a plain
step that leaves ``rho`` of a residual may be worth more than a mixing that leaves less: what counts is the logarithm of what
is left, for what it costs.  Everything is counted in numbers (:mod:`implicitkit.linear.price`), measured as those are.
"""

from __future__ import annotations

import math

from torch import Tensor

from implicitkit.linear.price import CALL
from implicitkit.solver.costs import cost_of
from implicitkit.solver.evaluations import Evaluations

__all__ = ["gains", "is_cheap", "steps_needed"]

_PERIOD = 3  # of mixing, unless it is said
_PLAIN_CALLS, _PLAIN_PASSES = 2.0, 0.5  # what surrounds a plain step
_CALLS, _PASSES, _CACHED, _BEYOND = 11.0, 1.2, 2.0**17, 2.0  # what mixing in one step of three adds to every one
_SLOWEST, _FADES = (
    0.8,
    0.25,
)  # of a residual a step leaves so much at most, and gains so many times what it did at first


def is_cheap(f: Evaluations, period: int = _PERIOD) -> bool:
    """Do an evaluation and a plain step cost no more than mixing in one step of ``period`` adds to each?  No, where that is
    not known."""
    cost, numbers = cost_of(f), float(f.batch * f.size)
    if cost is None:
        return False
    mixing = _CALLS * CALL + _PASSES * numbers * (1 + _BEYOND * min(numbers / _CACHED, 1.0))
    return cost + _PLAIN_CALLS * CALL + _PLAIN_PASSES * numbers <= mixing * _PERIOD / period


def gains(f: Evaluations, before: Tensor, steps: int, pace: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Where plain steps gain enough to go on, ``(batch,)``; the logarithm of what each of the last ``steps`` left of
    ``before``; and what they must leave at most, by what the first ones did (``pace``; ``None``: these are)."""
    gain = (f.norm / before).log().div_(steps)
    pace = gain.mul(_FADES).clamp_max_(math.log(_SLOWEST)) if pace is None else pace
    return gain <= pace, gain, pace


def steps_needed(f: Evaluations, gain: Tensor, near: float = 1.0) -> Tensor:
    """How many more until residuals are at so many times the tolerance, if each leaves as much as the last ones,
    ``(batch,)``."""
    return (near * f.tolerance / f.norm).log() / gain
