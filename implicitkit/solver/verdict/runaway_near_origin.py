r"""Is a residual that is small near the origin, whatever the units of ``z``, the beginning of a zero at infinity?"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.dense import lstsq_batched
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.backward_error import healthy_share, is_healthy, row_scales
from implicitkit.solver.verdict.differences import in_working_precision
from implicitkit.solver.verdict.newton_correction import BEHIND, DENSE, LEFT
from implicitkit.solver.verdict.rounding_level import NOISE, exceeds_rounding, rounding
from implicitkit.solver.verdict.underflow import has_underflowed

_HIGH = 0.37  # what a step leaves of a zero of any order, less than 1 / e
_WITHIN = 0.1  # steps beyond which F is as large again behind such a zero: each of this share of z or less
_OUTWARD, _BESIDE_ZERO = 1e-5, 1e-3  # of z_j, by which a correction leads it outwards, if it is so much of the largest
AWAY, STANDS = 1, 2  # what is found of a residual that vanishes in the units of F only
_OUT = (1.7, 2.3, 11.3)  # times as far out, nothing is left of what fades ...
_FAR_MORE = 1e4  # ... and half as far so many times as much
_ROUGHLY = (0.1, 20)  # of a correction by products: what it may leave of F, and how many they may be ...
_SURELY = (1e-8, 400)  # ... before a point is refused, since every equation and every unknown is asked
_FORMED = 1 << 20  # numbers in the Jacobians of the batch, up to which factors are surer


def vanishes(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """Where ``F``, however small, is the beginning of a zero at infinity (``erfc(z)``, ``exp(-100 z)``), in whatever units
    ``z`` has, :data:`AWAY`; where it is no beginning of a zero at all, :data:`STANDS`; elsewhere 0, ``(batch,)``.

    Near a zero each ``F_i`` is far smaller than its change with ``z``, unless ``z`` is near zero itself (one evaluation).
    Else the Newton correction decides: it leads to a zero, and takes ``F`` down, or towards the origin; on the way to
    infinity it leads outwards, and leaves a third (``erfc``, ``exp(-z)``) or more of ``F``.  So it does before a zero of
    order 10 and more, but behind that ``F`` is as large again.  Where it leads nowhere, ``F`` stands still and is small by
    its units alone (``1e-7 (z^3 - 8)`` at 0).  An ``F_i`` that is zero to the last bit and does not change may have
    underflowed (:func:`~implicitkit.solver.verdict.underflow.has_underflowed`), and of one that is all rounding the
    correction says nothing (``1 - tanh(z)`` at 19): nothing is left of it further out, and far more nearer to the origin.
    """
    F = in_working_precision(f.residual(z))
    scale = row_scales(f, z, which, healthy_share(F), 0.0, careful=False)
    still = which.unsqueeze(1) & (F == 0) & (scale > 0)
    if bool(still.any()):
        scale = torch.where(still & ~exceeds_rounding(f, z, F, still), 0, scale)
    suspect = which & ~is_healthy(F, scale)
    tiny = torch.finfo(F.dtype).tiny
    flat = which.unsqueeze(1) & (F.abs() <= tiny) & (scale <= tiny)
    cut = has_underflowed(f, z, flat)[0] if bool(flat.any()) else torch.zeros_like(which)
    suspect = suspect & ~cut
    if not bool(suspect.any()):
        return torch.where(cut, AWAY, 0)
    A = f.linearize(z)
    d, rows = _correction(A, F, *_ROUGHLY)
    fades = _fades(f, z, F, d, suspect)
    suspect, stands, sound, after = _leads_nowhere(f, z, F, scale, d, suspect)
    if z.shape[1] > DENSE and bool(suspect.any()):
        d, rows = _correction(A, F, *_SURELY)
        suspect, stands, sound, after = _leads_nowhere(f, z, F, scale, d, suspect)
    if bool(suspect.any()):  # as a whole, in units of J where there is one: a row may happen to show none of its own
        noise, least = NOISE * rounding(f, z, suspect), torch.minimum(F.abs(), after.nan_to_num(torch.inf).abs())
        whole = torch.linalg.vector_norm(least / rows, dim=1) <= torch.linalg.vector_norm(noise / rows, dim=1)
        suspect = suspect & ~(whole | (sound | (least <= noise)).all(1))
    return torch.where(suspect & ~fades, torch.where(stands, STANDS, AWAY), torch.where(cut | fades, AWAY, 0))


def _fades(f: Evaluations, z: Tensor, F: Tensor, d: Tensor, suspect: Tensor) -> Tensor:
    """Where next to nothing but not nothing is left of ``F``, no more where the unknowns that ``d`` leads outwards are
    further out, and far more where they are half as far, ``(batch,)``; one to four evaluations."""
    outwards = _outwards(z, d)
    found = suspect & outwards.any(1) & (F != 0).any(1)
    at = lambda times: in_working_precision(f.residual(torch.where(outwards, times * z, z))).abs()  # noqa: E731
    for times in _OUT if bool(found.any()) else ():
        found = found & (at(times) <= F.abs()).all(1)  # false for NaN
        if not bool(found.any()):
            return found
    return found & (at(0.5) > _FAR_MORE * F.abs()).any(1) if bool(found.any()) else found


def _outwards(z: Tensor, d: Tensor) -> Tensor:
    """Which unknowns a correction ``d`` leads outwards, ``(batch, n)``."""
    point = in_working_precision(z)
    away = (point + d).abs() - point.abs() > _OUTWARD * point.abs()
    return away & (point.abs() > _BESIDE_ZERO * point.abs().amax(1, keepdim=True))


def _correction(A: Operator, F: Tensor, rtol: float, products: int) -> tuple[Tensor, Tensor]:
    """``d`` of ``J d = -F``, in the sense of least squares, and the size of the rows of ``J`` where it is formed, else 1;
    ``(batch, n)`` each.  By factors of few unknowns, and of more for an ``rtol`` to which products may be too many."""
    n = F.shape[1]
    if n <= DENSE or (rtol <= _SURELY[0] and n * F.numel() <= _FORMED):
        J = torch.nan_to_num(in_working_precision(A.dense()), posinf=0.0, neginf=0.0)
        rows = J.abs().amax(2)
        rows = torch.where(rows > 0, rows, 1)
        d = lstsq_batched(J / rows.unsqueeze(2), -F / rows)[0]
    else:
        rows = torch.ones_like(F)
        d = in_working_precision(GMRES().solve(A, -F.to(A.like.dtype), rtol=rtol, atol=0.0, max_steps=products).x)
    return torch.nan_to_num(d, posinf=0.0, neginf=0.0), rows


def _leads_nowhere(
    f: Evaluations, z: Tensor, F: Tensor, scale: Tensor, d: Tensor, suspect: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which of the samples that are ``suspect`` the correction ``d`` leads to no zero, and of all of them where there is
    none, ``(batch,)``; which ``F_i`` it takes down, and ``F`` behind it, ``(batch, n)``."""
    point = in_working_precision(z)
    away = _outwards(z, d).any(1)
    stands = (d == 0).all(1)
    suspect = suspect & (away | stands)
    after = in_working_precision(f.residual((point + d).to(z.dtype)))
    sound = (after.abs() <= LEFT * F.abs()) | (F.abs() <= healthy_share(F) * scale)
    suspect = suspect & ~sound.all(1)
    high = suspect & away & (after.abs() <= _HIGH * F.abs()).all(1)
    high = high & (d.abs().amax(1) <= _WITHIN * point.abs().amax(1))
    for steps in BEHIND if bool(high.any()) else ():
        behind = in_working_precision(f.residual((point + steps * d).to(z.dtype)))
        suspect = suspect & ~(high & (behind.abs() >= F.abs()).all(1))
    return suspect, stands, sound, after
