r"""The rounding level: what do rounding errors leave of each ``F_i`` at ``z``, and is a change of ``F`` more than that?

It is measured, by how far ``F`` is from its linear model two units in the last place of ``z`` away.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import directions, doubling, in_working_precision, uneven

ROUNDING = 100  # units of it that a difference of objectives must exceed
NOISE = 10.0  # times what rounding leaves: a residual below is nothing else
_BENT = 0.1  # of F, by which a residual may bend over a few units in the last place
_FLAT = 100.0  # times what two moves leave that cancel to first order, at most, of one of them ...
_ROUGH = 3.0  # ... and of four times as long ones
_OWN = 1e-2  # of an unknown: a longer way is none by units in the last place of its own
_FITS = 0.1  # of what a derivative says of a change, by which that may differ
_UNIT = 0.7  # what z counts for where it vanishes; a power of two would move it between numbers that need no rounding


def rounding(f: Evaluations, z: Tensor, which: Tensor, began: Tensor | None = None, careful: bool = False) -> Tensor:
    """What rounding leaves of each ``F_i``, ``(batch, n)``: how far ``F`` is from its linear model two units in the last
    place away (of ``z``; of 0.7 where ``z`` vanishes beside it).  Zero where ``F_i`` is too large for that: a jump is no
    rounding error.  Where ``z`` vanishes, a program has that of what its conditions are made of, gradient and constraints:
    these have kinks in the units of ``z``.  ``began``: as in :func:`row_scales`.  ``careful``: of steep slopes, too.
    Of sets that are projected onto by a program, at least what that leaves of ``z - P(v)``: ``eps max |v|``.

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
        noise = torch.where(tiny.unsqueeze(1), _left(_smooth(f), z, which & tiny, _UNIT, began), noise)
    return _of_projections(f, z, noise) if getattr(f.problem.prox, "by_program", False) else noise


def _of_projections(f: Evaluations, z: Tensor, noise: Tensor) -> Tensor:
    """``noise``, ``(batch, n)``, and what a program that projects ``v = z - g`` leaves: it does not change with ``z`` as
    long as the same conditions bind, so that no difference shows it."""
    size = f.problem.size
    v = in_working_precision(z[:, :size] - f.smooth(z)[:, :size])
    least = torch.finfo(z.dtype).eps * v.abs().amax(1, keepdim=True).nan_to_num(0.0, 0.0)
    return torch.cat([noise[:, :size].maximum(least), noise[:, size:]], 1)


def _of_slopes(f: Evaluations, z: Tensor, which: Tensor, began: Tensor | None) -> Tensor:
    """What rounding leaves of the conditions of a program whose slopes are steep, ``(batch, n)``: ``z - P(z - g)`` is at a
    bound two units in the last place away, if not at ``z``.  Where rounding is all that ``g_i`` is, so is its condition
    within the bounds."""
    F, g = in_working_precision(f.residual(z)), in_working_precision(f.smooth(z))
    noise = torch.where(which.unsqueeze(1), _left(_smooth(f), z, which, 0.0, began), 0)
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


def _smooth(f: Evaluations) -> Any:
    """What a program's conditions are made of, gradient and constraints, as a residual."""
    return SimpleNamespace(eps=f.eps, residual=f.smooth)


def _left(f: Any, z: Tensor, which: Tensor, least: float, began: Tensor | None) -> Tensor:
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
        if bool((left > 0).any()):
            left = torch.where(_is_resolved(f, z, F, direction), 0, left)
        further = torch.stack([h * slope, -h * back])
        still = (moved == 0) & (F != 0) & (F.abs() <= further.abs().amin(0))
        if bool((still & which.unsqueeze(1)).any()):  # 1 + erf(z) at -6 changes by units in the last place of one
            left = torch.where(still, _least_change(f, z, F, h / 4 * direction, further), left)
        noise = torch.maximum(noise, torch.nan_to_num(left, nan=0.0, posinf=0.0))
        scale = torch.maximum(scale, torch.nan_to_num(torch.minimum(slope.abs(), back.abs()), nan=0.0))
    return torch.where(F.abs() <= h * scale, noise, 0)


def _is_resolved(f: Any, z: Tensor, F: Tensor, direction: Tensor) -> Tensor:
    """Where ``F_i`` changes as its derivative says over a way on which no ``z_j`` changes but those next to zero, ``(batch,
    n)``: these have units of their own (moles a litre), and are added to nothing larger."""
    near = (z.abs() < f.eps**0.5 * direction.abs()).any()
    if not bool(near) or not hasattr(f, "linearize"):
        return torch.zeros_like(F, dtype=torch.bool)
    d = (z + f.eps**1.75 * direction) - z  # as far as numbers allow
    change = in_working_precision(f.residual(z + d)) - F
    try:
        said = in_working_precision(f.linearize(z).mv(d))
    except Exception:  # a function that no solver has differentiated may have no derivative
        return torch.zeros_like(F, dtype=torch.bool)
    return (change != 0) & ((change - said).abs() <= _FITS * said.abs())


def _least_change(f: Any, z: Tensor, F: Tensor, move: Tensor, further: Tensor) -> Tensor:
    """The smallest change of each ``F_i`` that is one, to both sides and (``further``, ``(2, batch, n)``) four times as far;
    or how far ``F_i`` is from a straight line there, if that is more: ``(1 + z_0 - l) (1 + z_1)`` changes by units in the
    last place of each factor; ``(batch, n)``."""
    near = torch.stack([in_working_precision(f.residual(z + k * move)) - F for k in (1, -1)])
    changes = torch.cat([near, further]).abs()
    least = torch.where(changes > 0, changes, torch.inf).amin(0).nan_to_num(posinf=0.0)
    return torch.maximum(least, (near - further / 4).abs().amin(0))


def _rough(f: Any, z: Tensor, F: Tensor, move: Tensor) -> Tensor:
    """``|F(z + w) + F(z - w) - 2 F|``, ``(batch, n)``, where it does not grow with ``w``: rounding errors do not, a
    kink grows as ``w``, and what is smooth as ``w^2``."""
    there, back, far, farther = (in_working_precision(f.residual(z + k * move)) - F for k in (1, -1, 4, -4))
    near = (there + back).abs()
    flat = (there.abs() <= _FLAT * near) & (back.abs() <= _FLAT * near)
    return torch.where(flat & ((far + farther).abs() <= _ROUGH * near), near, 0)


def exceeds_rounding(
    f: Evaluations, z: Tensor, F: Tensor, asked: Tensor, seen: tuple[Tensor, Tensor] | None = None
) -> Tensor:
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
