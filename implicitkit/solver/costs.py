"""What an evaluation costs, and when it costs more to leave rows out of it than to keep them, or to mix than to iterate.

Counted in numbers that it touches (:mod:`implicitkit.linear.price`), by the operations that were seen when the function was
lifted: as much as a product with its Jacobian, whose graph has two nodes for each.

An evaluation of a map of a few operations costs as much as a few calls of torch, and to mix costs tens of them.  So a plain
step that leaves ``rho`` of a residual may be worth more than a mixing that leaves less: what counts is the logarithm of what
is left, for what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from implicitkit.linear.price import CALL, cost_of_product
from implicitkit.solver.evaluations import Evaluations

_PERIOD = 3  # of mixing, unless it is said
_PLAIN_CALLS, _PLAIN_PASSES = 2.0, 0.5  # what surrounds a plain step
_CALLS, _PASSES, _CACHED, _BEYOND = 11.0, 1.2, 2.0**17, 2.0  # what mixing in one step of three adds to every one
_SLOWEST, _FADES = (
    0.8,
    0.25,
)  # of a residual a step leaves so much at most, and gains so many times what it did at first
_DROPPED = 100 * CALL  # to leave rows out costs so much, with a method that remembers steps ...
_EVALUATIONS = 4  # ... and is worth it where they cost more in so many evaluations
_SELECTED, _COPIED = 50.0, 2.0  # calls and passes over what is kept that it takes, where steps ahead are known, ...
_MOST_AHEAD = 15.0  # ... of which no more are believed in: residuals fall faster in the end
_FROM_ZERO = 0.02  # how far samples move there: its square is more than products of one matrix may differ by
_LOOK = 300 * CALL  # a look at claims, however few ...
_IN_VAIN = 0.1  # ... or such a share of what has been evaluated, where an evaluation costs nobody knows what


def cost_of(f: Evaluations) -> float | None:
    """What one evaluation costs, in numbers; ``None`` where that is not known."""
    system, work = f.system, f.system.lifted.work
    if not work.operations:
        return None
    part = system.batch / max(1, system.layout.batch)
    numbers, through = system.batch * system.size, int(3 * work.numbers * part)
    return cost_of_product(numbers, 2 * work.operations + 1, through, int(work.products * part / max(1, numbers)))


def have_one_matrix(f: Evaluations, z: Tensor) -> bool:
    """Have all samples one Jacobian, though they are no longer at one point?  They move outwards, by little shares of
    themselves: a function may have no value farther off, and where it has none here, they have not.  From zero, where that
    of an odd function changes with the square alone, by hundredths."""
    size = z.abs()
    unit = size.amax(1, keepdim=True)
    unit = torch.where(size > 0, size, torch.where(unit > 0, unit, _FROM_ZERO / f.eps**0.25))
    shares = f.eps**0.25 / len(z) * torch.arange(len(z), dtype=z.dtype, device=z.device).unsqueeze(1)
    with suppress(Exception):
        return f.linearize(z + shares * torch.where(z < 0, -unit, unit)).alike()
    return False


def dropping_pays(f: Evaluations, share: float, ahead: Callable[[], float] | None = None) -> bool:
    """Does it cost less to go on with a share of the rows than to evaluate, and mix, all in the steps that are left?  With a
    method that does not weigh that, it does.

    ``ahead``: tells how many these are; asked last (``None``: a few, of evaluations alone).
    """
    cost = cost_of(f) if f.weighs else None
    if cost is None or ahead is None:
        return cost is None or _EVALUATIONS * (1 - share) * cost >= _DROPPED
    numbers = float(f.batch * f.size)
    spared, price = (1 - share) * (cost + _mixed(numbers)), _SELECTED * CALL + _COPIED * share * numbers
    return _MOST_AHEAD * spared >= price and ahead() * spared >= price


def _mixed(numbers: float) -> float:
    """What mixing in one step of three does to the numbers of the state in each."""
    return _PASSES * numbers * (1 + _BEYOND * min(numbers / _CACHED, 1.0))


def slowest(left: Tensor, asked: Tensor, active: Tensor, steps: int) -> float:
    """Steps that the slowest of the samples at work still takes, if each leaves as much as those so far did.

    Args:
        left: what so many ``steps`` have left of a residual. asked: what shall be left of that; ``(batch,)`` all of them.
    """
    needed = torch.where(active, asked.log() / left.log(), 0)
    return steps * float(torch.where(needed >= 0, needed, torch.inf).amax())  # never, where it has risen, or for NaN


def waiting_pays(f: Evaluations, in_vain: int) -> bool:
    """Has it cost less than a look at claims that so many samples, step by step, were evaluated for nothing?"""
    cost = cost_of(f)
    if cost is None:
        return in_vain <= _IN_VAIN * f.sample_evaluations
    return in_vain * cost <= _LOOK * f.system.batch


def is_cheap(f: Evaluations, period: int = _PERIOD) -> bool:
    """Do an evaluation and a plain step cost no more than mixing in one step of ``period`` adds to each?  No, where that is
    not known."""
    cost, numbers = cost_of(f), float(f.batch * f.size)
    if cost is None:
        return False
    mixing = _CALLS * CALL + _mixed(numbers)
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
    return ((f.tolerance if near == 1 else near * f.tolerance) / f.norm).log_().div_(gain)
