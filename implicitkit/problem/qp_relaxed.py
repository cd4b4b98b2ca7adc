r"""The multipliers of a quadratic program's inequalities, exact and relaxed, of any problem with the parts of one.

    lam - plus(lam + Gz - h, kappa) + plus(lower - Gz - lam, kappa) = 0

which is ``lam (h - Gz) = kappa`` where ``lower`` is absent (:mod:`implicitkit.problem.complementarity`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.problem.complementarity import plus

__all__ = ["are_kept", "natural", "settled"]

_KEPT = 1e-2  # of kappa: how closely a relaxed program keeps it ...
_SLACK = 8.0  # ... or times what rounding leaves of a slack

Ends = dict[str, Tensor]
"""``h`` and ``lower``, each ``(batch, m)``, or one of them."""


def natural(lam: Tensor, v: Tensor, ends: Ends, kappa: float) -> Tensor:
    """The left-hand side above, ``(batch, m)``, for ``v = lam + Gz``."""
    if "h" in ends:
        lam = lam - plus(v - ends["h"], kappa)
    if "lower" in ends:
        lam = lam + plus(ends["lower"] - v, kappa)
    return lam


def settled(lam: Tensor, image: Tensor, ends: Ends, kappa: float) -> Tensor:
    """Small multipliers, of slacks that are larger, as these slacks ``h - image`` have them, ``(batch, m)``: a norm of all
    conditions does not see what is left of them."""
    F = natural(lam, lam + image, ends, kappa)
    inside = torch.stack([(end - image).abs() for end in ends.values()]).amin(0) > lam.abs()
    return torch.where(inside & torch.isfinite(F), lam - F, lam)


def are_kept(
    z: Tensor, lam: Tensor, times: Callable[[Tensor], Tensor], beside: Tensor, ends: Ends, kappa: float
) -> Tensor:
    """Where ``lam s = kappa`` is kept to a hundredth, or as far as rounding of ``s = h - Gz`` lets it be, ``(batch,)``.

    ``F = lam - plus(lam - s, kappa)`` makes it ``lam s = kappa + F (lam + s) - F^2``; of two sides ``s`` is the nearer.  In
    float64, since ``F`` cancels.

    Args:
        z, lam: the point, in the precision of the program. times: ``G z`` of a ``z`` in float64. beside: ``|G| |z|``,
            ``(batch, m)``.
    """
    eps, ends = torch.finfo(lam.dtype).eps, {name: end.double() for name, end in ends.items()}
    lam, image = lam.double(), times(z.double())
    F = natural(lam, lam + image, ends, kappa)
    s = torch.stack([(end - image).abs() for end in ends.values()]).amin(0)
    reach = beside + torch.stack([end.abs() for end in ends.values()]).amin(0)
    kept = F.abs() * (lam.abs() + s) <= _KEPT * kappa + _SLACK * eps * lam.abs() * reach
    return (kept | ~torch.isfinite(s)).all(1)
