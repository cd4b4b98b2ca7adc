r"""What a residual is made of near a point: the size of what cancels, and what rounding leaves.

Every question is answered by evaluating ``F`` beside ``z``, along ``w_k = s_k (|z| + c max |z|)`` for a few sign vectors
``s_k``: of a scale one digit is enough, and a difference of ``F`` asks less of the user's function than its derivative.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solver.evaluations import Evaluations

FLOOR = 1e-6  # components this much smaller than the largest count as if they were so large
_SHARE = 1e-16  # ... where it is asked what cancels: unknowns may have units of their own
_BENT = 0.1  # of F, by which a residual may bend over a few units in the last place
_FEW = 3  # sign vectors, along which it is asked first
_MANY = 8  # unknowns, from which it may be asked along more
_RULER = (0, 1, 4, 9, 15, 22, 32, 34)  # Golomb's, of which no two distances are equal: shares of unknowns so few
_CHANCE = 4.0  # times 2^-k: two equal signs in k vectors, of which the first is that of z, and twice as many
_STEP, _CANCELLED = 1.5, 100.0  # times what it may be, an F_i that a step more serves, and one of which terms cancel
_HEALTHY = 1e-6  # of its change with z: |F| near a zero; on the way to infinity exp(-z^p) is 1 / (745 p) of it and more
_HEALTHY_LOW = 3e-4  # ... in lower precisions, 1 / (103 p)
NOISE = 10.0  # times what rounding leaves: a residual below is nothing else
_FLAT = 100.0  # times that, at most, F changes where z moves by two units in the last place of one
_DOUBLES = 1.9  # of a change, how much it grows at least where the way is twice as long
_OUT = (16.0, 256.0)  # times a point, from where a map that is held brings it back to half as far at least ...
_LARGE = 0.1  # ... in every component of this share of the largest
_ROUGH = 3.0  # times what two moves leave that cancel to first order, at most, of four times as long ones
_OWN = 1e-2  # of an unknown: a longer way is none by units in the last place of its own
_UNIT = 0.7  # what z counts for where it vanishes; a power of two would move it between numbers that need no rounding


def in_working_precision(t: Tensor) -> Tensor:
    """float16 and bfloat16 as float32."""
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def row_scales(
    f: Evaluations,
    z: Tensor,
    which: Tensor,
    good: float | Tensor,
    atol: float | Tensor,
    careful: bool,
    began: Tensor | None = None,
    both_sides: bool = False,
) -> Tensor:
    """The size of what cancels in each ``F_i`` near ``z``, ``max_k |(J w_k)_i|``, ``(batch, n)``.

    Stops as soon as ``|F_i| <= atol + good scale_i`` for all samples ``which``: one evaluation then.  A ``careful`` one
    looks to both sides along ``w_k`` and takes the smaller change, since of a jump one side may see nothing, and nearer:
    what changes by as much over a sixteenth of the way is no scale either.

    Two terms of an ``F_i`` (``(z_{i+1} - z_i) / h``) cancel along every second ``w_k``, so of thousands of equations some
    see nothing in three of them: of more than 8, as long as no more than four times as many are refused as would be by
    chance (of those refused at first; of all, where the look is ``careful``), it is asked along ``3 + 2 log_2 n`` (all of
    them miss one of ``n`` with probability ``1 / (4 n)``).  Not where that will not do, and a step
    more costs less: some ``F_i`` is too large by more than a half, and none a hundred times too large, as where all that was
    seen of it had cancelled (of a sum of random signs a hundredth of what it is mostly: once in a million in three vectors);
    unless the look is ``careful``, after which there is no step.  Of 3 to 8, along one more, in which
    each ``z_j`` moves by another share of itself, and neither first nor second differences stay as they are.

    ``began``: ``|z|`` at the start, ``(batch, n)``.  No ``z_j`` moves by more than by itself and that for the sake of others
    that are larger by sixteen orders of magnitude: its units are others.  ``both_sides``: of natural maps too, which beyond
    a bound change as ``z`` does, whatever their slopes: the smaller change counts.
    """
    F = in_working_precision(f.residual(z))
    scale, h, first = torch.zeros_like(F), f.eps**0.5, 0
    for asked, direction in enumerate(_ways(z, began), 1):
        size = change(f, z, F, direction, h)
        if careful or both_sides:
            size = torch.minimum(size, change(f, z, F, direction, -h))
        if careful:
            size = torch.where(change(f, z, F, direction, h / 16) > 4 * size, 0, size)
        scale = torch.maximum(scale, size)
        most = atol + good * scale
        refused = int(((F.abs() > most) & which.unsqueeze(1)).count_nonzero())
        first = F.numel() if careful else min(F.numel(), 2 * refused) if asked == 1 else first
        if not refused or (asked >= _FEW and refused > 1 + _CHANCE * first * 2.0**-asked):
            break
        if asked >= _FEW and not careful and _takes_a_step(F.abs()[which], (most + torch.zeros_like(F))[which]):
            break
    return scale


def _takes_a_step(size: Tensor, most: Tensor) -> bool:
    """Is some ``F_i`` so much too large that a step is to be taken, and none so much that its terms have cancelled?"""
    return bool((size > _STEP * most).any()) and not bool((size > _CANCELLED * most).any())


def _ways(z: Tensor, began: Tensor | None) -> Iterator[Tensor]:
    """:func:`directions`, the first three, and as many more as leave none of ``n`` pairs of equal signs, almost surely; of
    few unknowns one that leaves no pair."""
    yield from directions(z, share=_SHARE, most=_FEW, began=began)
    n = z.shape[1]
    if n > _MANY:
        yield from directions(z, share=_SHARE, most=_FEW + 2 * math.ceil(math.log2(n)), began=began)[_FEW:]
    elif n > 2:
        marks = torch.tensor(_RULER[:n], device=z.device).to(z)
        yield directions(z, share=_SHARE, most=1, began=began)[0] * (2 * marks / marks[-1] - 1)


def steepness(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """How much ``F`` changes with ``z`` as a whole, ``|J w_2|``, ``(batch,)``; one evaluation."""
    F, h = in_working_precision(f.residual(z)), f.eps**0.5
    return torch.linalg.vector_norm(change(f, z, F, directions(z, most=2)[-1], h), dim=1)


def is_healthy(F: Tensor, scale: Tensor) -> Tensor:
    """Where every ``F_i`` is far smaller than its change with ``z``, as near a zero, ``(batch,)``."""
    return (F.abs() <= healthy_share(F) * scale).all(1)


def healthy_share(F: Tensor) -> float:
    """How much ``|F_i|`` may be near a zero, of its change with ``z``."""
    return _HEALTHY if F.dtype == torch.float64 else _HEALTHY_LOW


def rounding(f: Evaluations, z: Tensor, which: Tensor, began: Tensor | None = None, careful: bool = False) -> Tensor:
    """What rounding leaves of each ``F_i``, ``(batch, n)``: how far ``F`` is from its linear model two units in the last
    place away (of ``z``; of 0.7 where ``z`` vanishes beside it).  Zero where ``F_i`` is too large for that: a jump is no
    rounding error.  Where ``z`` vanishes, a program has that of what its conditions are made of, gradient and constraints:
    these have kinks in the units of ``z``.  ``began``: as in :func:`row_scales`.  ``careful``: of steep slopes, too.

    Two evaluations where each ``F_i`` of the samples ``which`` is far larger than its change over that way; else up to 14.
    """
    if not f.kind.returns_program:
        return _left(f, z, which, _UNIT, began)
    tiny = z.abs().amax(1) < f.eps**0.5 * _UNIT
    noise = _left(f, z, which & ~tiny, 0.0, began)
    if careful:
        left = which & ~tiny & (in_working_precision(f.residual(z)).abs() > NOISE * noise).any(1)
        noise = torch.maximum(noise, _of_slopes(f, z, left, began)) if bool(left.any()) else noise
    if bool((tiny & which).any()):
        noise = torch.where(tiny.unsqueeze(1), _left(_Smooth(f), z, which & tiny, _UNIT, began), noise)
    return noise


def _of_slopes(f: Evaluations, z: Tensor, which: Tensor, began: Tensor | None) -> Tensor:
    """What rounding leaves of the conditions of a program whose slopes are steep, ``(batch, n)``: ``z - P(z - g)`` is at a
    bound two units in the last place away, if not at ``z``.  Where rounding is all that ``g_i`` is, so is its condition
    within the bounds."""
    F, g = in_working_precision(f.residual(z)), in_working_precision(f.smooth(z))
    noise = torch.where(which.unsqueeze(1), _left(_Smooth(f), z, which, 0.0, began), 0)
    open_, limits = (F - g).abs() <= 4 * torch.finfo(z.dtype).eps * z.abs(), f.limits(z)
    if limits is not None:
        inside = (z[:, : f.problem.size] >= limits[0]) & (z[:, : f.problem.size] <= limits[1])
        open_[:, : f.problem.size] |= inside
    return torch.where(open_ & (g.abs() <= NOISE * noise), torch.maximum(noise, F.abs()), 0)


def is_rounding(f: Evaluations, z: Tensor, F: Tensor, which: Tensor) -> Tensor:
    """Where ``F`` is nothing but rounding errors, ``(batch,)``; asked if any of ``which``."""
    return (F.abs() <= NOISE * rounding(f, z, which)).all(1) if bool(which.any()) else which


def is_rough(f: Evaluations, z: Tensor, which: Tensor, step: Tensor) -> Tensor:
    """Where ``F`` bends within twice a ``step`` ``(batch,)`` by a tenth of itself, as rounding errors do, ``(batch,)``; two
    evaluations."""
    F, d = f.residual(z), (which * step).unsqueeze(1).to(z) * seeded.normal(z.shape[1], seed=0).to(z)
    bend = f.residual(z + 2 * d) - 2 * f.residual(z + d) + F
    return torch.linalg.vector_norm(bend, dim=1) > _BENT * torch.linalg.vector_norm(F, dim=1)


class _Residual(Protocol):
    eps: float

    def residual(self, z: Tensor, /) -> Tensor:
        """``F(z)``, ``(batch, n)``."""


class _Smooth:
    """What a program's conditions are made of, as a residual."""

    def __init__(self, f: Evaluations) -> None:
        self.f, self.eps = f, f.eps

    def residual(self, z: Tensor) -> Tensor:
        return self.f.smooth(z)


def _left(f: _Residual, z: Tensor, which: Tensor, least: float, began: Tensor | None) -> Tensor:
    """:func:`rounding` of a function; zero where it is not asked of any sample."""
    if not bool(which.any()):
        return torch.zeros_like(in_working_precision(z))
    F = in_working_precision(f.residual(z))
    eps = f.eps
    h = eps**0.5
    noise, scale = torch.zeros_like(F), torch.zeros_like(F)
    own = directions(z, most=2, began=began)
    lifted_ones = directions(z, least=least, most=2, began=began)
    changes = [in_working_precision(f.residual(z + 2 * eps * direction)) - F for direction in lifted_ones]
    largest = torch.stack(changes).abs().amax(0)
    smooth = (((F.abs() > 4 * NOISE * largest) & (largest > 0)) | (F == 0)).all(1)
    if bool((smooth | ~which).all()):
        return noise
    for direction, mine, moved in zip(lifted_ones, own, changes, strict=True):
        slope, back = ((in_working_precision(f.residual(z + s * direction)) - F) / s for s in (h, -h))
        left = (moved - eps * (slope + back)).abs()  # the slope of both sides: F is no straight line for h
        lifted = direction.abs().amax(1, keepdim=True) > 2 * mine.abs().amax(1, keepdim=True)
        lifted = lifted | ((2 * eps * mine.abs() > max(_OWN, 8 * eps) * z.abs()) & (z != 0)).any(1, keepdim=True)
        if bool(lifted.any()):  # of other units than z, or than the rest of it: then what is left is smooth
            left = torch.where(lifted, torch.minimum(left, _rough(f, z, F, 2 * eps * direction)), left)
        left = torch.where((moved - h * slope).abs() <= 0.5 * moved.abs(), 0, left)  # as far away as near: a jump
        further = torch.stack([h * slope, h * back]).abs()
        still = (moved == 0) & (F != 0) & (F.abs() <= further.amin(0))
        if bool((still & which.unsqueeze(1)).any()):  # 1 + erf(z) at -6 changes by units in the last place of one
            left = torch.where(still, _least_change(f, z, F, h / 4 * direction, further), left)
        noise = torch.maximum(noise, torch.nan_to_num(left, nan=0.0, posinf=0.0))
        scale = torch.maximum(scale, torch.nan_to_num(torch.minimum(slope.abs(), back.abs()), nan=0.0))
    return torch.where(F.abs() <= h * scale, noise, 0)


def _least_change(f: _Residual, z: Tensor, F: Tensor, move: Tensor, further: Tensor) -> Tensor:
    """The smallest change of each ``F_i`` that is one, of those to both sides and some that are known, ``(batch, n)``."""
    near = torch.stack([in_working_precision(f.residual(z + k * move)) - F for k in (1, -1)]).abs()
    changes = torch.cat([near, further])
    return torch.where(changes > 0, changes, torch.inf).amin(0).nan_to_num(posinf=0.0)


def _rough(f: _Residual, z: Tensor, F: Tensor, move: Tensor) -> Tensor:
    """``|F(z + w) + F(z - w) - 2 F|``, ``(batch, n)``, where it does not grow with ``w``: rounding errors do not, a
    kink grows as ``w``, and what is smooth as ``w^2``."""
    there, back, far, farther = (in_working_precision(f.residual(z + k * move)) - F for k in (1, -1, 4, -4))
    near = (there + back).abs()
    flat = (there.abs() <= _FLAT * near) & (back.abs() <= _FLAT * near)
    return torch.where(flat & ((far + farther).abs() <= _ROUGH * near), near, 0)


def change(f: Evaluations, z: Tensor, F: Tensor, direction: Tensor, h: float) -> Tensor:
    """``|F(z + h w) - F(z)| / |h|``, ``(batch, n)``; zero where that is not finite."""
    change = in_working_precision(f.residual(z + h * direction)) - F
    return torch.nan_to_num(change.abs() / abs(h), nan=0.0, posinf=0.0)


def grows(f: Evaluations, z: Tensor, F: Tensor, asked: Tensor, seen: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Where what ``F_i`` changes by beside ``z`` is no rounding error, of the equations ``asked``, ``(batch, n)``.

    It then doubles with the way, ``|F_i(z + 2 h w) - F_i| >= 1.9 |F_i(z + h w) - F_i| > 0``, and again from ``2 h`` to
    ``4 h``, for some ``h`` on one side at least; or, at a jump, is of one sign before and of the other behind.  Rounding
    (``sqrt(1 + z^2) - z`` at 1e8) is of the same size all around.  ``seen``: one such look (:func:`doubling`) that somebody
    has taken already.
    """
    eps, found = f.eps, torch.zeros_like(asked) if seen is None else asked & seen[0]
    for h in (eps**0.25, eps**0.5, 1e-2):  # the first one shows most
        for direction in uneven(z):
            sides = []
            for sign in (1, -1):
                if bool((found | ~asked).all()):
                    return found
                doubles, side = doubling(f, z, F, sign * h * direction)
                found = found | (asked & doubles)
                sides.append(side)
            there, back = sides
            crosses = (there * back < 0).all(0) & ((there > 0).all(0) | (there < 0).all(0))
            found = found | (asked & crosses)
    return found


def doubling(f: Evaluations, z: Tensor, F: Tensor, move: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``F_i`` changes by twice as much when ``z`` moves twice as far, and again, ``(batch, n)``; and how it changes
    when ``z`` moves once, twice and four times as far as ``move``, ``(3, batch, n)``."""
    side = torch.stack([in_working_precision(f.residual(z + k * move)) - F for k in (1, 2, 4)])
    return ((side[1:].abs() >= _DOUBLES * side[:-1].abs()) & (side[:-1] != 0)).all(0), side


def uneven(z: Tensor) -> list[Tensor]:
    """Two ways to move, ``(batch, n)`` each: along ``z``, and each ``z_j`` by another share of itself, in either direction;
    along half of those by whole ``z_j``, with other signs, two terms cancel."""
    n = z.shape[1]
    if n <= 2:
        return directions(z, most=2)
    own = directions(z, most=1)[0]
    return [own, own * (2 * seeded.uniform(1, n, seed=n) - 1).to(own)]


def directions(
    z: Tensor, least: float = 0.0, most: int = 3, share: float = FLOOR, began: Tensor | None = None
) -> list[Tensor]:
    """``s_k (|z| + c max |z|)``, ``(batch, n)`` each, ``most`` of them: along ``z``, and with other signs; of size ``least``
    where ``z`` vanishes beside that.  ``share``: ``c``.  ``began``: more than ``c max |z|`` is not asked of it, where it is
    not zero."""
    n = z.shape[1]
    lift = share * z.abs().amax(1, keepdim=True)
    size = z.abs() + (lift if began is None else torch.where(began > 0, torch.minimum(began, lift), lift))
    if least:
        tiny = size.amax(1, keepdim=True) < torch.finfo(z.dtype).eps ** 0.5 * least
        size = torch.where(tiny, least, size)
    own = torch.where(z < 0, -size, size)
    if n == 1:
        return [own, -own][:most]
    flips = torch.tensor([[1, -1], [-1, 1]], device="cpu") if n == 2 else seeded.signs(max(2, most - 1), n, seed=n)
    return [own, *(own * flip.to(own) for flip in flips[: most - 1])]


def is_held(f: Evaluations, z: Tensor) -> Tensor:
    """Where a map brings every large component of ``16 z`` and ``256 z`` back to half of that or less, ``(batch,)``: there
    is no way to infinity along which ``f(z) = z`` holds better and better."""
    size = z.abs()
    small = size < _LARGE * size.amax(1, keepdim=True)
    held = torch.isfinite(torch.linalg.vector_norm(z, dim=1))  # else the tolerance is no number either
    for times in _OUT:
        back = f.residual(times * z) * z.sign()  # how much further out the map leads
        held = held & ((back <= -0.5 * times * size) & torch.isfinite(back) | small).all(1)
    return held
