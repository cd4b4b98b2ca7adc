r"""Is a point where gradient and curvature vanish an inflection, ``z^3`` at zero, and hence no minimum?

A minimiser is known to a tolerance alone, and near an inflection ``z*`` the gradient ``f''' (z - z*)^2 / 2`` is below it
before ``z`` is there.  With ``g`` and ``c`` the slope and the curvature along a direction, the slope vanishes ``g / c``
away, and beside a minimum the objective rises from there on; beside an inflection that is ``(z - z*) / 2``, and it falls on
one side, however far behind.  A well may be narrow, and its wall lower than its bottom: of that the curvature does not
vanish nearby, at ``c / f'''``, which is ``z - z*`` of an inflection.

Nor is one a minimum that rises along every straight line and falls along a curve, as ``(y - x^2) (y - 3 x^2)`` at zero does
(Peano): where all that is steep is at its lowest, for each step along what is flat.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solver.verdict.rounding_level import ROUNDING

_FLAT = 1e-3  # of the largest curvature: less may vanish ...
_FLAT_LOW = 2e-2  # ... in lower precisions
_FLAT_ALL = 0.1  # of that a way off, likewise
_ALIKE = 2.0  # times the least curvature: that along the slope is as good
_OFF = 0.3  # of max(|z|, 1): that way ...
_FAR = 1e3  # ... and beyond this of its root too: z - sin z has inflections at 1e6
_BEGINS = 30.0  # times the way to where the slope vanishes: from there the objective is followed ...
_BLIND = 0.03  # ... or, where none is left, from this share of max(|z|, 1) ...
_LENGTHS = (1.0, 3.0, 9.0)  # ... so many times as far ...
_TWICE = 2  # ... of which so many in a row must show the fall
_NEAR = 10.0  # times the way to where the slope vanishes: no nearer need be where the curvature does
_STARTS = 2  # of a search for a way down where all curvature vanishes, each of ...
_DOWN = (1.0, 0.5, 0.25)  # ... these steps on a sphere about the point, in its radii
_BENT = (0.1, 0.3)  # of max(|z|, 1): steps along what is flat, at each of which a curve must have fallen ...
_STEEP = 1e-3  # ... where so much of the change of the gradient is across it

_Function = Callable[[Tensor], Tensor]


def inflected(
    value: _Function,
    gradient: _Function,
    z: Tensor,
    g: Tensor,
    which: Tensor,
    lanczos: tuple[Tensor, Tensor, Tensor],
    steps: int,
    h: Tensor,
) -> tuple[Tensor, Tensor]:
    """Which of the samples ``which`` are inflections, ``(batch,)``, and along what, ``(batch, n)``.

    Args:
        value: the objective, ``(batch,)``. gradient: ``(batch, n)``, of what may move. z: ``(batch, n)``. g: the
            gradient there. which: ``(batch,)``. lanczos: the least curvature, its direction and the largest in size.
            steps: of Lanczos, that showed these. h: a step for differences, ``(batch, 1)``.
    """
    lowest, direction, largest = lanczos
    size = z.abs().amax(1, keepdim=True).clamp_min(1)
    if z.shape[1] > 1:
        length = torch.linalg.vector_norm(g, dim=1, keepdim=True)
        steepest = torch.where(length > 0, -g / length, direction)
    else:
        steepest = torch.ones_like(z)

    share = _FLAT if z.dtype == torch.float64 else _FLAT_LOW
    small = which & (lowest.abs() <= share * largest)
    # few Ritz values need not show what is flat, and the vector of two that are alike may be a difference along which the
    # objective hardly falls; what is left of the slope lies where it vanishes last
    if z.shape[1] > 1 and (z.shape[1] > steps or bool(small.any())):
        along = ((gradient(z + h * steepest) - g) * steepest).sum(1) / h.squeeze(1)
        flatter = which & (along.abs() <= _ALIKE * lowest.abs())
        lowest, direction = torch.where(flatter, along, lowest), torch.where(flatter.unsqueeze(1), steepest, direction)

    ways = [_OFF * size] + ([_OFF * size.sqrt()] if bool((size > _FAR).any()) else [])

    def off(d: Tensor) -> tuple[Tensor, Tensor]:  # curvature a way off, and that way
        found = [torch.linalg.vector_norm(gradient(z + way * d) - g, dim=1) / way.squeeze(1) for way in ways]
        curvature, at = torch.stack(found).max(0)
        return curvature, torch.cat(ways, 1).gather(1, at.unsqueeze(1)).squeeze(1)

    beside, way = off(steepest)
    known = torch.linalg.vector_norm(direction, dim=1) > 0.5  # a value of an exhausted space has none
    every = which & (largest <= _FLAT_ALL * beside)
    one = which & ~every & known & (lowest.abs() <= share * largest)
    d = torch.where(every.unsqueeze(1), steepest, direction)
    if bool(one.any()):
        beside, way = (torch.where(one, t, u) for t, u in zip(off(direction), (beside, way), strict=True))
        one = one & (lowest.abs() <= _FLAT_ALL * beside)
    found = every | one
    if not bool(found.any()):
        return found, direction
    falls = _falls(value, gradient, z, g, found, (d, beside, way), h)
    for seed in range(_STARTS if z.shape[1] > 1 else 0):  # nothing else says which way may be down
        others = every & ~falls & torch.isfinite(beside)
        if not bool(others.any()):
            break
        e = _down(gradient, z, g, ways[0], seed)
        falls_there = _falls(value, gradient, z, g, others, (e, *off(e)), h)
        falls, d = falls | falls_there, torch.where(falls_there.unsqueeze(1), e, d)
    others = one & ~falls if z.shape[1] > 1 else falls & ~falls
    if bool(others.any()):
        bends, e = _falls_bent(value, gradient, z, g, others, direction)
        falls, d = falls | bends, torch.where(bends.unsqueeze(1), e, d)
    return falls, d


def _falls_bent(
    value: _Function, gradient: _Function, z: Tensor, g: Tensor, which: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """Where the objective falls along a curve with the tangent ``d``, ``(batch,)``, and the direction to a point of it.

    From ``z + t d`` a step leads across, ``-(r'r / r'H r) r`` with the change of the gradient ``r`` orthogonal to ``d``: to
    the minimum, if one eigenvalue of ``H`` is all that counts.  A fall counts that is no rounding beside what a way across
    as long as ``z`` costs: of a fit that is nearly perfect the last digits fall wherever one goes.  One gradient, and three
    evaluations a step where there is anything across.
    """
    size, level = z.abs().amax(1, keepdim=True).clamp_min(1), value(z)
    chord, h = d, torch.finfo(z.dtype).eps ** 0.5 * size
    for share in _BENT:
        there = z + share * size * d
        moved = gradient(there)
        r = moved - g
        r = r - (r * d).sum(1, keepdim=True) * d
        length = torch.linalg.vector_norm(r, dim=1, keepdim=True)
        which = which & (length > _STEEP * torch.linalg.vector_norm(moved - g, dim=1, keepdim=True)).squeeze(1)
        if not bool(which.any()):
            break
        unit = torch.where(length > 0, r / length, 0)
        stiff = ((gradient(there + h * unit) - moved) * unit).sum(1, keepdim=True) / h
        end = there - torch.where(stiff > 0, r / stiff, 0)
        fall = level - value(end)
        rounding = ROUNDING * torch.finfo(z.dtype).eps * (level.abs() + (stiff * size.square()).squeeze(1).abs())
        which = which & (fall > rounding) & torch.isfinite(fall)
        chord = torch.nn.functional.normalize(end - z, dim=1) if share == _BENT[0] else chord
        if not bool(which.any()):
            break
    return which, chord


def _down(gradient: _Function, z: Tensor, g: Tensor, way: Tensor, seed: int) -> Tensor:
    """The direction of a low point on the sphere of radius ``way`` about ``z``: steps downhill, back onto it."""
    unit = functools.partial(torch.nn.functional.normalize, dim=1)
    e = unit(seeded.normal(z.shape[1], seed=seed).to(z).expand_as(z))
    for step in _DOWN:
        e = unit(e - step * unit(gradient(z + way * e) - g))
    return e


def _falls(
    value: _Function,
    gradient: _Function,
    z: Tensor,
    g: Tensor,
    which: Tensor,
    line: tuple[Tensor, Tensor, Tensor],
    h: Tensor,
) -> Tensor:
    """Where the objective falls along a line on one side of ``z`` as it does beside an inflection, ``(batch,)``.

    Args:
        line: its direction, and the curvature a way off, and that way.
    """
    d, beside, way = line
    size = z.abs().amax(1).clamp_min(1)
    slope, curvature = ((t * d).sum(1).abs() for t in (g, (gradient(z + h * d) - g) / h))
    level, runs = value(z), torch.zeros(2, len(z), dtype=torch.int64, device=z.device)
    noise = ROUNDING * torch.finfo(z.dtype).eps * level.abs()
    third = 2 * beside / way
    begin = torch.maximum(_BEGINS * 2 * slope / curvature, (24 * noise / third) ** (1 / 3))
    begin = torch.where(torch.isfinite(begin) & (begin > 0), begin, _BLIND * size)
    begin = torch.maximum(begin, torch.finfo(z.dtype).eps ** (1 / 3) * size.sqrt())
    for left, length in zip(reversed(range(len(_LENGTHS))), _LENGTHS, strict=True):
        t = length * begin
        for side, sign in enumerate((1.0, -1.0)):
            fall = level - value(z + (sign * t).unsqueeze(1) * d)
            third = 6 * fall / t**3
            near = (curvature.square() <= _NEAR * slope * third) | (curvature <= _NEAR * h.squeeze(1) * third)
            falls = (fall > noise) & torch.isfinite(fall) & near
            runs[side] = torch.where(falls | (runs[side] >= _TWICE), runs[side] + 1, 0)
        if bool(((runs >= _TWICE).any(0) | (runs.amax(0) + left < _TWICE) | ~which).all()):
            break  # it is known of each, or they are too few that are left
    return which & (runs >= _TWICE).any(0)
