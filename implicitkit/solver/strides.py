"""Has a fixed-point iteration come to rest, or does its residual vanish on the way (``z + exp(-z^2)`` at 5)?"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.probing import fell_steeply
from implicitkit.solver.scales import in_working_precision

__all__ = ["by_the_last_step"]

# a step that is longer than such a share of z, and along which F changes by no more than such a share of it
_STRIDES = ((1e-3, 0.02), (0.1, 0.5))


def by_the_last_step(iteration: bool, z: Tensor, F: Tensor, point: Tensor, before: Tensor) -> Tensor:
    """Where the last step, from ``point`` with its residual ``before``, says that a zero is near, ``(batch,)``; of an
    ``iteration``, that none need be (:func:`strode`)."""
    return (strode if iteration else fell_steeply)(z, F, point, before)


def strode(z: Tensor, F: Tensor, point: Tensor, before: Tensor) -> Tensor:
    """Where the last step led outwards, was long, and ``F`` hardly changed along it, ``(batch,)``.

    That is ``|F - before| <= 0.02 |z - point|``, with ``before`` the residual at the ``point`` where the step began; or half
    of it, where the step was a leap, longer than a tenth of ``z``.

    ``F = map(z) - z`` may be small all the way out.  Near a fixed point it changes by ``(J - 1)`` times the step: only where
    that is nearly singular by less.  Both may be so; then the point has to be looked at, as one far out has.
    """
    z, F, point, before = (in_working_precision(t) for t in (z, F, point, before))
    size, last = (torch.linalg.vector_norm(t, dim=1) for t in (z, point))
    outwards = size > last
    if not bool(outwards.any()):
        return outwards
    step, change = (torch.linalg.vector_norm(t, dim=1) for t in (z - point, F - before))
    long = [(step > share * size) & (change <= most * step) for share, most in _STRIDES]
    return outwards & (long[0] | long[1])
