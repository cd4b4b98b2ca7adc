r"""What does the Newton correction ``J d = -F`` say: is a zero near ``z``?

Near a zero it is small beside ``z`` and determined (:mod:`~implicitkit.solver.verdict.condition`), or takes the residual
down.  On the way to infinity it never does: from ``exp(-z)`` it leads to ``exp(-z - 1) = exp(-z) / e``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.dense import lstsq_batched, solve_batched
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.condition import (
    crosses_zero,
    falls_along_a_valley,
    in_units,
    is_lower,
    is_solved_by,
    moved_by_rounding,
    without_unknowns,
    zeros_go_on,
)
from implicitkit.solver.verdict.differences import SOUND, in_working_precision, own_units, row_norm, size_nearby
from implicitkit.solver.verdict.rounding_level import is_rounding

DENSE = 64  # unknowns up to which a correction is found by factors
_SOUND_LOW, _SOUND_EPS = 5e-3, 8  # like SOUND, in lower precisions: this, or so many eps if that is more
_BESIDE = 0.03  # of z: how far around the point of a line that is nearest to the origin F is looked at ...
_SHORT = 0.01  # ... and what is left of the way there if that is the origin: a ray of zeros need not reach it
_FALLS = 0.1  # of F: a correction that is not small beside z has to leave no more than this
LEFT = 0.347  # what a step leaves of F at most: of a zero of order 9; of exp(-z^p), below 2e-5, 0.35 to 1 / e
_SURE = 1e-2  # what a step leaves of F where nothing more need be asked
_ALONG = 1e-2  # of the way: a step along a curve of zeros
_ACROSS = (2, 3)  # Newton steps that lead across a zero
BEHIND = (4, 16, 64)  # ... and steps beyond which F is as large again behind one of high order
_HALF = 0.5  # of a map's residual: what a correction by products leaves at most (one by factors: _SURE), ...
_DRIFTS = 1e-5  # ... where that is so much of its changes, which waves alone may make, ...
_ROUNDED = 8.0  # ... and not so many eps of z
_STEPS = 20  # products of a correction that is not found by factors ...
_PRODUCTS = 200  # ... and at most, where these were not enough


def is_small(d: Tensor, z: Tensor, eps: float) -> Tensor:
    """Is the correction ``d`` small beside ``z``, ``(batch,)``?"""
    sound = SOUND if z.dtype == torch.float64 else max(_SOUND_LOW, _SOUND_EPS * eps)
    return (d.abs() <= sound * torch.maximum(z.abs(), 0.1 * z.abs().amax(1, keepdim=True))).all(1)


class Look(NamedTuple):
    """What is known of points that may be on their way to infinity."""

    f: Evaluations
    z: Tensor  # (batch, n)
    F: Tensor  # there
    scale: Tensor  # by how much each F_i changes when z moves by a hundredth, times a hundred
    loose: Tensor  # samples whose F is as small all along their ray, (batch,): trusted where a correction takes F down


def by_factors(at: Look, J: Tensor, r: Tensor, off: Tensor, lines: bool = True) -> Tensor:
    """Where the correction ``J d = -r`` (in the sense of least squares) says that a zero of ``F`` is near, ``(batch,)``.

    Equations are scaled to equal size and unknowns by their own (of a fit, to equal columns of ``J``).  Where ``J`` then is
    singular to half the digits (a fit: to rounding), the correction may also be that of lower rank, but the zeros (or fits
    as good) must go on along its null space to the point nearest to the origin: a line of them, no way to infinity.
    Without ``lines`` a singular ``J`` is refused; a square one is not, whatever its condition, where the correction is small
    and determined.  Unknowns that are ``off``, on which an objective does not depend where it is, stay as they are.
    """
    f, z, F, scale, _ = at
    point, square, eps = in_working_precision(z), r is F, torch.finfo(F.dtype).eps
    unit = own_units(point)
    finite = torch.isfinite(J).flatten(1).all(1) & torch.isfinite(r).all(1)
    matrix, unit, rows = in_units(torch.where(finite[:, None, None], J, 0), point, unit, square)
    b = torch.where(finite[:, None], -r / rows, 0)
    if bool(off.any()):
        matrix, b = without_unknowns(matrix, b, off)
    d, regular, _ = solve_batched(matrix, b) if square else lstsq_batched(matrix, b)
    # what is added up in each equation, where a change of z along some direction may cancel
    terms = torch.maximum(scale, rows * matrix.abs().sum(2)) if square else scale
    near = regular & near_a_zero(at, unit * d, terms)
    small = regular & is_small(unit * d, z, f.eps)
    determined = lambda: is_small(moved_by_rounding(matrix, unit, point), z, f.eps)  # noqa: E731
    if square and bool((near & small).all() and determined().all()):
        return finite  # no null space, and no line, has anything to add
    rcond = eps**0.5 if square else None
    low = lstsq_batched(matrix, b, rcond=rcond)[0]
    along = lstsq_batched(matrix, (matrix @ (point / unit).unsqueeze(2)).squeeze(2), rcond=rcond)[0]
    ray = torch.linalg.vector_norm(along, dim=1) <= eps**0.25 * torch.linalg.vector_norm(point / unit, dim=1)
    back = along + low + torch.where(ray, _SHORT, 0).unsqueeze(1) * (point / unit - along)
    if f.kind.returns_program:  # multipliers that constraints leave open may stay as they are
        back[:, f.problem.size :] = (point / unit + low)[:, f.problem.size :]
    origin = (unit * back).to(z.dtype)
    full = torch.linalg.vector_norm(along - point / unit, dim=1) <= eps**0.25 * torch.linalg.vector_norm(along, dim=1)
    if square:
        line = ~(regular & full)  # of full rank the corrections are the same, and say all there is to say
        if bool(line.any()):
            there, beside = in_working_precision(f.residual(origin)), unit * back.abs().clamp_min(_BESIDE)
            size = torch.minimum(scale, size_nearby(f, origin, there, beside, line.unsqueeze(1) & (scale > 0)))
            straight = (there.abs() <= 3 * eps**0.5 * size).all(1)
            line = zeros_go_on(f, z, (matrix, unit, rows), low + _ALONG * (along - point / unit), scale, line, straight)
        # a valley that goes down is no line of minima, however little of F is left in it
        line = line & ~is_lower(f, z, origin, line & ~full) if f.kind.minimisation else line
        units = 2 * eps * point.abs() / rows if f.kind.iteration else None
        solvable = is_solved_by(matrix, low, b, point / unit, units)
    else:
        there = in_working_precision(f.problem.flat_residuals(f.kernel, origin).detach())
        line, solvable = row_norm(there) <= 1.01 * row_norm(r) + eps**0.5 * rows.squeeze(1), finite
    line = line if lines else line & full
    open_, sure = small & ~(full | line), full | line
    if square and bool(open_.any()):
        known = determined()
        known = known | crosses_zero(f, z, matrix, unit, rows, _SOUND_LOW) if bool((open_ & ~known).any()) else known
        sure = sure | (open_ & known)
    near = (near & sure) | (solvable & line & near_a_zero(at, unit * low, terms))
    if square:  # a zero to the last bit where F is not zero all around: one of high multiplicity, say
        near = near | ((F == 0) & (scale > 0)).all(1)
    if f.kind.minimisation and square:
        near = near & ~falls_along_a_valley(f, z, J, near & finite)
    return finite & near


def by_products(A: Operator, z: Tensor, F: Tensor, scale: Tensor | None, which: Tensor) -> tuple[Tensor, Tensor]:
    """The correction ``J d = -F`` to a tenth, ``(batch, n)``, and where it was found, ``(batch,)``; of the samples ``which``
    by more products where few do not: where positions hand on from one to the next, it takes as many as there are.

    Each equation is divided by its change beside ``z``, its ``scale`` (or by what is left of it, if that is more), and
    ``z_j`` counts in units of itself.  Those of a map (``None``) have one unit.
    """
    A.near = None  # far from the inverse of a stiff equation
    b, unit = -F.to(A.like.dtype), torch.ones_like(A.like)
    if scale is not None:
        unit = own_units(z).to(A.like.dtype)
        size = torch.maximum(scale, F.abs())
        rows = torch.where(size > 0, 1 / size, 0).nan_to_num(posinf=0.0).to(A.like.dtype)
        b, A = rows * b, _scaled(A, rows, unit)
    found = GMRES().solve(A, b, rtol=0.1, atol=0.0, max_steps=_STEPS)
    left = which & ~found.converged
    if not bool(left.any()):
        return unit * found.x, found.converged
    later = GMRES().solve(A, torch.where(left.unsqueeze(1), b, 0), rtol=0.1, atol=0.0, max_steps=_PRODUCTS)
    return unit * torch.where(left.unsqueeze(1), later.x, found.x), torch.where(left, later.converged, found.converged)


def _scaled(A: Operator, rows: Tensor, columns: Tensor) -> Operator:
    """``diag(rows) A diag(columns)``."""
    return A.derived(
        lambda v: rows * A.mv(columns * v),
        lambda w: columns * A.rmv(rows * w),
        lambda: rows.unsqueeze(2) * A.dense() * columns.unsqueeze(1),
    )


def near_a_zero(at: Look, d: Tensor, terms: Tensor) -> Tensor:
    """Where the correction ``d`` is small beside ``z``, or takes the residual down (each ``F_i`` relative to its change
    when ``z`` moves); ``(batch,)``.  ``terms``: of what size each ``F_i`` is the sum."""
    f, z, F, scale, loose = at
    largest = z.abs().amax(1, keepdim=True)
    small = is_small(d, z, f.eps)
    weight = scale.clamp_min(torch.finfo(scale.dtype).tiny)
    norm = lambda t: torch.linalg.vector_norm(in_working_precision(t) / weight, dim=1)  # noqa: E731
    behind = in_working_precision(f.residual(z + torch.nan_to_num(d).to(z.dtype)))
    before, after = norm(F), norm(behind)
    # a gradient goes down as the square of its residuals, of which exp(-z) leaves 1 / e
    falls = _FALLS * LEFT if f.kind.of_residuals else _FALLS
    outwards = ((z + d).abs() > z.abs()).any(1)

    def across(open_: Tensor) -> Tensor:  # a zero: F is as large again behind it, or it lies towards the origin
        if not bool((open_ & outwards).any()):
            return open_
        found = ~outwards
        for k in (*_ACROSS, *BEHIND):
            found = found | (norm(f.residual(z + k * torch.nan_to_num(d).to(z.dtype))) >= before)
            if bool((found | ~open_).all()):
                break
        return open_ & found

    if not f.kind.iteration:
        # erfc(24) = 1e-252 has a small correction, but it leaves a third; and far out a hundredth can be a period (but
        # where F is far below its changes, a zero is near: on the way to infinity it is 1e-8 of them and more)
        standing = (F.abs() > f.eps**0.6 * terms).any(1) & (not f.kind.of_residuals)
        standing = small & (loose | standing) & ~(after <= _SURE * before)
        odd = standing & ~(across(standing) & (after <= LEFT * before))
        small = small & (~odd | is_rounding(f, z, F, odd))
    else:  # a map that drifts, z + 2 + sin(z), has small corrections everywhere, which leave all of F
        eps, share = f.eps, _SURE if z.shape[1] <= DENSE else _HALF
        gone = after <= torch.where(loose, min(share, LEFT), share) * before
        gone = gone | (behind.abs() <= _ROUNDED * eps * largest).all(1)
        drifts = small & (loose | (F.abs() > _DRIFTS * scale).any(1)) & ~gone
        drifts = drifts & (F.abs() <= eps**0.5 * largest).all(1)  # else it is the tolerance's
        # waves that are shorter than the steps of the test look like rounding
        tiny = (F.abs() <= eps**0.75 * largest).all(1)
        small = small & (~drifts | (tiny & is_rounding(f, z, F, drifts & tiny)))
    return small | across(~small & (after <= falls * before) & (d.abs() <= 0.5 * largest).all(1))
