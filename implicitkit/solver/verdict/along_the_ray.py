r"""Does a residual say how long ``z`` is?

``sin(z_0 + z_1) + (z_0 - z_1)^2 + z_1`` falls along ``-(1, 1)`` for ever, on waves.  At 1e10 its gradient is 1e-11 of what
cancels in it, and so are the corrections of Newton's method of ``z``; at 1e16 rounding hides it.  But all along the ray from
the origin to ``z`` it is of this size: how long ``z`` is, nothing in ``F`` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.rounding_level import (
    NOISE,
    change,
    healthy_share,
    in_working_precision,
    is_rounding,
    rounding,
    uneven,
)

_LOOSE = 100.0  # times |F(z)|: what is left of F where z is as long as it is by chance ...
_BEFORE = (0.5, 0.99)  # ... of z, and near it: far from a peak all may vanish
_LIKE = 10.0  # times |F(z)|, or what rounding leaves of it: F of the same size
_IN = tuple(10.0 ** -(2**k) for k in range(1, 9))  # of z, where F is of the same size too
_RAY = (1e-2, 1e-8, 1e-32)  # of z, where of a ray of zeros rounding errors are left; waves are more at one of these


def has_no_length(f: Evaluations, z: Tensor, F: Tensor, which: Tensor) -> Tensor:
    """Where ``|F| <= 100 |F(z)|`` on the ray from the origin to ``z``, and no zeros go on along it to there, ``(batch,)``;
    one to four evaluations, and up to 46 where all that is left of ``F`` may be rounding."""
    size = _LOOSE * torch.linalg.vector_norm(F, dim=1)
    for share in _BEFORE:
        there = torch.linalg.vector_norm(in_working_precision(f.residual(share * z)), dim=1)
        which = which & (there <= size)  # false for NaN
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


def stays(f: Evaluations, z: Tensor, F: Tensor, which: Tensor) -> Tensor:
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
