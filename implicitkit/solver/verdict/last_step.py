r"""Has a solve come to rest, as its last step tells, or does its residual vanish on the way (``z + exp(-z^2)`` at 5)?"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.subset import ask
from implicitkit.solver.verdict.differences import SOUND, in_working_precision
from implicitkit.solver.verdict.rounding_level import is_rough

_STEEPEST = 1e5  # d log |F| / d log |z| of functions on their way to zero at infinity, at most: 745 p of exp(-z^p)
_LOCAL = 10.0  # times |z|: a longer step says nothing of F near z
_MOST = 7.0  # of log |F_i| in one step that counts
_FAR, _HARDLY = 1e-3, 0.02  # a step that is longer than such a share of z, and of which F changes by such a share ...
_LEAP, _OF_A_LEAP = 0.1, 0.5  # ... or these
_GAINS = 0.5  # of |F|, what a step leaves at most that is worth another one ...
_UNIT = 0.01  # of eps reach: a unit in the last place of where a solve began
_ROUGH = 10.0  # of those: where a residual may be nothing but rounding errors
_COUNTS = 1e-14  # ... if z may be wrong by so much of the largest


Sizes = tuple[Tensor, Tensor] | None
"""``|z|`` of each sample, ``(batch,)``, where a step ended and where it began, if they are known."""


def by_the_last_step(
    iteration: bool, z: Tensor, F: Tensor, point: Tensor, before: Tensor, claims: Tensor, sizes: Sizes = None
) -> Tensor:
    """Where the last step, from ``point`` with its residual ``before``, says that a zero is near, ``(batch,)``; of an
    ``iteration``, that none need be (:func:`strode`), and of the samples that have claims alone."""
    return strode(z, F, point, before, claims, sizes) if iteration else fell_steeply(z, F, point, before)


def fell_steeply(z: Tensor, F: Tensor, point: Tensor, before: Tensor) -> Tensor:
    """Where the last step, from ``point`` with its residual ``before``, says that a zero is near, ``(batch,)``.

    Every ``F_i`` fell by more, for the way that each ``z_j`` went outwards, than it can on the way to infinity:
    ``|z_j| - |point_j| <= |z_j| log(|before_i| / |F_i|) / 1e5``.  Of ``exp(-k z^p)`` the quotient is ``p k |z|^p``, and
    beyond ``745 p`` that underflows.  And ``|F|`` is far smaller than its change along that step (no longer than ten times
    ``z``), carried on over a way as long as ``z``: else it may be small by its units alone.
    """
    size, start = z.abs(), point.abs()
    across = ((z < 0) != (point < 0)) & (size > 0.01 * start)
    outwards = torch.where(across, size + start, size - start)
    near = (outwards <= _MOST / _STEEPEST * size).all(1)  # of no step that went further out than that is more asked
    if not bool(near.any()):
        return near
    F, before = in_working_precision(F), in_working_precision(before)
    norm, last = (torch.linalg.vector_norm(t, dim=1) for t in (F, before))
    fall = torch.where(F == 0, _MOST, torch.log((before / F).abs()).clamp(0, _MOST)).amin(1, keepdim=True) / _STEEPEST
    step, largest = (z - point).abs().amax(1), size.amax(1)
    healthy = (norm * step <= SOUND * last * largest) & (step <= _LOCAL * largest)
    fell = (F.abs() < before.abs()).all(1)
    return (outwards <= fall * size).all(1) & fell & (norm < last) & healthy


def strode(z: Tensor, F: Tensor, point: Tensor, before: Tensor, claims: Tensor, sizes: Sizes = None) -> Tensor:
    """Where the last step led outwards, was long, and ``F`` hardly changed along it, ``(batch,)``, among the ``claims``.

    That is ``|F - before| <= 0.02 |z - point|``; or half of it, where the step was longer than a tenth of ``z``.  Near a
    fixed point ``F = map(z) - z`` changes by ``(J - 1)`` times the step; by less all the way out, or where that is nearly
    singular: the point has to be looked at.  Of a step no longer than the tolerance nothing else is asked.
    """
    z, point = in_working_precision(z), in_working_precision(point)
    norm = lambda t: torch.linalg.vector_norm(t, dim=1)  # noqa: E731
    size, step = norm(z) if sizes is None else sizes[0], norm(z - point)
    share = step / size
    far = (share > _FAR).logical_and_(claims)
    if not int(far.count_nonzero()):
        return far
    far.logical_and_(size > (norm(point) if sizes is None else sizes[1]))
    F, before = in_working_precision(F), in_working_precision(before)
    least = torch.where(share > _LEAP, _OF_A_LEAP, _HARDLY)
    return far.logical_and_(norm(F - before) <= least * step)


def gets_on(
    z: Tensor, norm: Tensor, came_from: tuple[Tensor, Tensor], last: Tensor, rtol: float, F: Tensor | None
) -> Tensor:
    """Where the last step, from a point with its ``|F| = last``, left half of it or less, and some ``z_j`` may still be
    wrong by ``rtol`` of itself, ``(batch,)``: it leaves the share ``|F| / last`` of itself to be gone, of equations ``F`` in
    several units the largest share of any.  ``came_from``: the point, and ``F`` there."""
    point, before = came_from
    z, share = in_working_precision(z), norm / last
    fell, size, step = share <= _GAINS, z.abs(), (z - in_working_precision(point)).abs()
    if F is not None:
        share = (F / before).abs().nan_to_num(0.0).amax(1).clamp_max(1).maximum(share)
    left = share.unsqueeze(1) * step
    misses = (left > rtol * size) & (left > _COUNTS * size.amax(1, keepdim=True))
    return misses.any(1) & (norm > 0) & fell


def falls_on(
    f: Evaluations, z: Tensor, norm: Tensor, loose: Tensor, reach: Tensor | None, known: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Which samples of a fixed point that are ``loose`` ``(batch,)``, small by ``atol`` alone, have more than rounding
    errors left; and what is known of these: 1 there are none, -1 there are.

    Below ten units in the last place of ``|z0| + |F(z0)| = reach / 100`` a residual may be nothing else: asked once, by two
    evaluations.
    """
    assert reach is not None
    eps = _UNIT * f.eps * reach
    known = torch.zeros_like(norm) if known is None else known
    tiny = loose & (norm <= _ROUGH * eps) & (known == 0)
    if bool(tiny.any()):
        known = torch.where(tiny, 1 - 2.0 * ask(f, is_rough, z, tiny, eps), known)
    return loose & (known >= 0), known
