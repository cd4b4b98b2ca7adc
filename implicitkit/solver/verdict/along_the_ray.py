r"""What is ``F`` along the ray from the origin through ``z``?

Where it is as small all along, it does not say how long ``z`` is, and ``z`` is no solution.
``sin(z_0 + z_1) + (z_0 - z_1)^2 + z_1`` falls along ``-(1, 1)`` for ever, on waves.  At 1e10 its gradient is 1e-11 of what
cancels in it, and Newton's corrections of ``z``; but it is of this size all along the ray.  ``z_1 s / (z_2 + s)`` fits a
straight line ``(z_1 / z_2) s`` in the end: out there residuals hardly change with the length of ``z``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.backward_error import healthy_share
from implicitkit.solver.verdict.differences import change, in_working_precision, uneven
from implicitkit.solver.verdict.rounding_level import NOISE, is_rounding, rounding

_LOOSE = 100.0  # times |F(z)|: what is left of F where z is as long as it is by chance ...
_MOST = 0.5  # of |F|: an equation that is most of it
_BEFORE = (0.5, 0.99)  # ... of z, and near it: far from a peak all may vanish
_LIKE = 10.0  # times |F(z)|, or what rounding leaves of it: F of the same size
_IN = tuple(10.0 ** -(2**k) for k in range(1, 9))  # of z, where F is of the same size too
_RAY = (1e-2, 1e-8, 1e-32)  # of z, where of a ray of zeros rounding errors are left; waves are more at one of these
_FIT_OUT = (1.1, 2.0, 16.0, 256.0, 4096.0)  # times z, where a fit with a limit is no worse than at z ...
_FIT_IN = (16.0, 1e3, 1e6, 1e9, 1e12)  # ... and parts of z, at one of which it is another one
_OTHER = 16.0  # times what equal values may differ by: values that are not equal
_MAP_OUT = (16.0, 256.0)  # times a point, from where a map brings it back to half as far at least ...
_LARGE = 0.1  # ... in every component of this share of the largest


def has_no_length(f: Evaluations, z: Tensor, F: Tensor, which: Tensor) -> Tensor:
    """Where ``|F| <= 100 |F(z)|`` on the ray from the origin to ``z``, and no zeros go on along it to there, ``(batch,)``;
    one to four evaluations, and up to 46 where all that is left of ``F`` may be rounding.  An equation that is most of ``F``
    there, and next to nothing at ``z``, says how long ``z`` is, however large the rounding errors of the others."""
    size = _LOOSE * torch.linalg.vector_norm(F, dim=1)
    for share in _BEFORE:
        rows = in_working_precision(f.residual(share * z)).abs()
        there = torch.linalg.vector_norm(rows, dim=1)
        which = which & (there <= size)  # false for NaN
        which = which & ~((rows > _MOST * there.unsqueeze(1)) & (F.abs() <= f.eps**0.5 * rows)).any(1)
        if not bool(which.any()):
            return which
    near = torch.finfo(z.dtype).tiny ** 0.75 * z
    there = in_working_precision(f.residual(near))
    beside = change(f, near, there, uneven(near)[-1], f.eps**0.5)
    which = which & ~(there.abs() <= healthy_share(F) * beside).all(1)
    # of a function of differences alone, say, that are rounded
    zeros = which & (torch.linalg.vector_norm(there, dim=1) <= _LIKE * torch.linalg.vector_norm(F, dim=1))
    for share in _RAY:
        if not bool(zeros.any()):
            break
        zeros = zeros & is_rounding(f, share * z, in_working_precision(f.residual(share * z)), zeros)
    return which & ~zeros


def is_rounding_all_along(f: Evaluations, z: Tensor, F: Tensor, which: Tensor) -> Tensor:
    """Where each ``F_i`` is rounding, and of that size all the way in to the origin, ``(batch,)``; up to 22 evaluations."""
    if not bool(which.any()):
        return which
    noise = rounding(f, z, which)
    noise = torch.maximum(noise, 2 * f.eps * z.abs()) if f.kind.iteration else noise
    which = which & (F.abs() <= NOISE * noise).all(1)
    size = torch.maximum(F.abs(), noise)
    for share in _IN:
        if not bool(which.any()):
            break
        which = which & (in_working_precision(f.residual(share * z)).abs() <= _LIKE * size).all(1)
    return which


def has_a_limit(f: Evaluations, J: Tensor, r: Tensor, z: Tensor, which: Tensor) -> Tensor:
    r"""Where a fit is no worse further out along the ray through ``z``, and another one further in, ``(batch,)``.

    ``|r(c z)| <= |r(z)| + eps^(2/3) (|r| + max_k |J_k z_k|)`` for ``c`` from 1.1 to 4096: out of a minimum one of them is
    more, as far as any residual depends on the length of ``z``.  Where none does on all the way to the origin
    (``z_1 / z_2``), every point of the ray is a fit as good; and where no ``J_k z_k`` is left, it ends on a plateau.  Five
    evaluations, and up to five more where these agree.

    Args:
        f: the problem's. J: ``dr/dz``, ``(batch, m, n)``. r: ``(batch, m)``. z: ``(batch, n)``. which: the samples in
            question, ``(batch,)``.
    """
    norm, terms = torch.linalg.vector_norm(r, dim=1), (torch.linalg.vector_norm(J, dim=1) * z.abs()).amax(1)
    same = f.eps ** (2 / 3) * (norm + terms)

    def at(times: float, less: Tensor | float = 0.0) -> Tensor:
        there = f.problem.flat_residuals(f.kernel, times * z).detach().to(r)
        return torch.linalg.vector_norm(there - less, dim=1).nan_to_num(torch.inf, torch.inf)

    still, moved = which & (terms > _OTHER * same), torch.zeros_like(which)
    for times in _FIT_OUT:
        if bool(still.any()):
            still = still & (at(times) <= norm + same)
    for part in _FIT_IN:
        if bool((still & ~moved).any()):
            moved = moved | (at(1 / part, less=r) > _OTHER * same)
    return still & moved


def is_led_back(f: Evaluations, z: Tensor) -> Tensor:
    """Where a map brings every large component of ``16 z`` and ``256 z`` back to half of that or less, ``(batch,)``: there
    is no way to infinity along which ``f(z) = z`` holds better and better."""
    size = z.abs()
    small = size < _LARGE * size.amax(1, keepdim=True)
    held = torch.isfinite(torch.linalg.vector_norm(z, dim=1))  # else the tolerance is no number either
    for times in _MAP_OUT:
        back = f.residual(times * z) * z.sign()  # how much further out the map leads
        held = held & ((back <= -0.5 * times * size) & torch.isfinite(back) | small).all(1)
    return held
