"""Step lengths of the minimisers, sample by sample, and what they measure progress by."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.region import at_work_only, taken_where

_ARMIJO = 1e-4
_NOISE = 10  # differences of values below so many units of rounding say nothing ...
EXPECTED = 1e3  # ... if the slope promised no more than so many times that
_NEAR = 1 / 256  # of the way, where the objective changes as its slope says, and what it says beside that is rounding
_AGREES = 0.1  # of what the slope promised: a smaller decrease, where the slopes themselves fall, may be rounding


class Searched(NamedTuple):
    """The outcome of a search: the points, the lengths ``(batch,)``, and where it succeeded ``(batch,)``.

    Where it did not, the point is the old one; a step that moves nothing is none.  ``spent``: where its trials were used up,
    whatever came of it (``None``: of no sample).
    """

    z: Tensor
    t: Tensor
    found: Tensor
    spent: Tensor | None = None


def decrease(f: Evaluations, z: Tensor, value: Tensor, g: Tensor, trial: Tensor) -> Tensor:
    """``f(z) - f(trial)``, ``(batch,)``, to more digits than the values have; ``-inf`` where the trial is not finite.

    Where the difference is lost in rounding, and the slope promised little more, it comes from the gradients at both ends,
    ``-(g + g_trial)' (trial - z) / 2`` (the trapezoidal rule, its error of third order in the step).

    Args:
        z, value, g: a point, the objective and its gradient there. trial: another point.
    """
    new = f.value(trial)
    difference = value - new
    noise, doubt = rounding(torch.maximum(value.abs(), new.abs()))
    moved = trial - z
    slope = (g * moved).sum(1).abs()
    lost = (difference.abs() <= noise) & (slope <= EXPECTED * noise)
    doubtful = (difference.abs() <= doubt) & (slope <= doubt)
    open_ = ~(difference >= _AGREES * slope) & torch.isfinite(new)
    if bool(((lost | doubtful | open_) & f.active).any()):
        g_new = f(trial)
        flatter = g_new.square().sum(1) <= g.square().sum(1)
        by_slopes = -0.5 * ((g + g_new) * moved).sum(1)
        lost = lost | (doubtful & flatter)
        open_ = open_ & flatter & (by_slopes > 0) & ~lost & f.active
        if bool(open_.any()):
            noise = unresolved(f, z, value, g, moved)
            lost = lost | (open_ & (difference.abs() <= noise) & (slope <= EXPECTED * noise))
        difference = torch.where(lost, by_slopes, difference)
    return torch.where(torch.isfinite(new) & torch.isfinite(difference), difference, -torch.inf)


def rounding(value: Tensor) -> tuple[Tensor, Tensor]:
    """Below what difference values say nothing, and below what they may say nothing: where an objective is what is left of
    large terms, its rounding is thousands to millions of times that of its value."""
    eps = torch.finfo(value.dtype).eps
    return _NOISE * eps * value.abs(), eps**0.5 * value.abs()


def unresolved(f: Evaluations, z: Tensor, value: Tensor, g: Tensor, moved: Tensor) -> Tensor:
    """Below what differences of the objective around ``z`` say nothing, ``(batch,)``, where it is what is left of terms that
    cancel, of any size: ten times what the value at 1/256 of the way has beside ``(g + g_near)'moved / 512``.

    Of a smooth objective that is of third order, far below what the slope promises for the whole way; rounding errors are
    as large near as far.  One evaluation; zero in half precision, where so short a way is none.
    """
    if torch.finfo(z.dtype).eps > _NEAR**2:
        return torch.zeros_like(value)
    near = torch.add(z, moved, alpha=_NEAR)
    by_slopes = 0.5 * _NEAR * ((g + f(near)) * moved).sum(1)
    return torch.nan_to_num(_NOISE * (f.value(near) - value - by_slopes).abs(), nan=0.0, posinf=0.0)


def backtrack(f: Evaluations, z: Tensor, d: Tensor, halvings: int, share: float = _ARMIJO) -> Searched:
    """The first of ``t = 1, 1/2, 1/4, ...`` with ``f(z + t d) <= f(z) + share t g'd`` (Armijo 1966), sample by sample."""
    g, value, d = f(z), f.value(z), at_work_only(f, d)
    slope = (g * d).sum(1)
    t = torch.ones_like(slope)
    for _ in range(halvings + 1):
        trial = torch.addcmul(z, t.unsqueeze(1), d)
        found = decrease(f, z, value, g, trial) >= -share * t * slope
        if bool((found | ~f.active).all()):
            break
        t = torch.where(found, t, 0.5 * t)
    return _settled(z, trial, t, found)


def wolfe(
    f: Evaluations,
    z: Tensor,
    d: Tensor,
    slope: Tensor,
    t: Tensor,
    trials: int,
    curvature: float = 0.9,
    strong: bool = False,
) -> Searched:
    """A length with ``f(z + t d) <= f(z) + 1e-4 t g'd`` and ``g(z + t d)'d >= curvature g'd`` (weak Wolfe conditions), with
    ``strong`` also ``g(z + t d)'d <= -curvature g'd``.

    Bracketing as in Lewis & Overton (2013, algorithm 4.6), with the secant of the slopes, kept away from the ends, in place
    of bisection and doubling.  Where values no longer resolve the decrease, Hager & Zhang's approximate test on slopes
    (2005, eq. 4.1) takes over, so that the gradient reaches its tolerance and not only the square root of it;
    what they resolve is measured (:func:`unresolved`) where slopes and values disagree.  If the trials are used up,
    the longest step that met the first condition is taken, and where none was too long the sample is ``f.falling``.

    Args:
        z, d: point and descent direction ``(batch, n)``. slope: ``g'd < 0``. t: first lengths. trials: evaluations at most.
        curvature, strong: how flat the line must be at the end.
    """
    here, d = _End(z, f.value(z), f(z), slope), at_work_only(f, d)
    low, high = torch.zeros_like(t), torch.full_like(t, torch.inf)
    low_slope, high_slope = slope, torch.zeros_like(slope)
    for _ in range(trials):
        trial = torch.addcmul(z, t.unsqueeze(1), d)
        new, g_new = f.value(trial), f(trial)
        new_slope = (g_new * d).sum(1)
        long = ~(new <= torch.addcmul(here.value, t, slope, value=_ARMIJO))
        if bool((long & f.active).any()):
            long = long & ~_falls_by_slopes(f, here, _End(trial, new, g_new, new_slope), t * slope)
        if strong:
            long = long | (new_slope > -curvature * slope)
        found = (new_slope >= curvature * slope) & ~long
        searching = f.active & ~found
        if not bool(searching.any()):
            return _settled(z, trial, t, found)
        long = searching & long
        short = searching & ~long
        high, high_slope = torch.where(long, t, high), torch.where(long, new_slope, high_slope)
        low, low_slope = torch.where(short, t, low), torch.where(short, new_slope, low_slope)
        t = torch.where(searching, _next(low, high, low_slope, high_slope, slope), t)
    falling = searching & torch.isinf(high) & (low > 0)
    f.falling = falling if bool(falling.any()) else None
    z_low = torch.addcmul(z, low.unsqueeze(1), d)
    end, t = torch.where(found.unsqueeze(1), trial, z_low), torch.where(found, t, low)
    return _settled(z, end, t, found | (low > 0))._replace(spent=searching & ~falling)


class _End(NamedTuple):
    """A point on the line of a search, with the objective, its gradient and the slope there."""

    z: Tensor
    value: Tensor
    g: Tensor
    slope: Tensor


def _falls_by_slopes(f: Evaluations, here: _End, there: _End, promised: Tensor) -> Tensor:
    """Where the slopes say that the objective falls enough, and values do not resolve as much, ``(batch,)``; ``promised``:
    by how much it should change, ``t g'd``."""
    noise, doubt = rounding(here.value)
    falls = there.slope <= (2 * _ARMIJO - 1) * here.slope
    flatter = there.g.square().sum(1) <= here.g.square().sum(1)
    small = (there.value <= here.value + noise) & (-promised <= EXPECTED * noise)
    small = small | ((there.value <= here.value + doubt) & (-promised <= doubt) & flatter)
    fallen = there.value <= here.value + _ARMIJO * promised
    open_ = f.active & falls & flatter & ~(fallen | small) & torch.isfinite(there.value)
    if bool(open_.any()):
        left = unresolved(f, here.z, here.value, here.g, there.z - here.z)
        small = small | (open_ & (there.value <= here.value + left) & (-promised <= EXPECTED * left))
    return small & falls


def _next(low: Tensor, high: Tensor, low_slope: Tensor, high_slope: Tensor, slope: Tensor) -> Tensor:
    """Inside a bracket the secant of the slopes, or the middle; without one, an extrapolation by the secant."""
    width = high - low
    inside = low + width * (low_slope / (low_slope - high_slope)).clamp(0.1, 0.9)
    inside = torch.where((high_slope > 0) & torch.isfinite(inside), inside, 0.5 * (low + high))
    further = low * (slope / (slope - low_slope)).nan_to_num(2, 2, 2).clamp(2, 10)
    return torch.where(torch.isinf(high), further, inside)


def _settled(z: Tensor, trial: Tensor, t: Tensor, found: Tensor) -> Searched:
    found = found & (trial != z).any(1)  # the next search from the same point would be the same
    if bool(found.all()):
        return Searched(trial, t, found)
    return Searched(taken_where(found, trial, z), torch.where(found, t, 0), found)
