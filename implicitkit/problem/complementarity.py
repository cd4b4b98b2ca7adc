r"""What all problems with inequalities share: the positive part and its smoothing, and what a degenerate solution means.

A complementarity ``lam >= 0``, ``s >= 0``, ``lam s = 0`` holds if and only if ``lam = max(lam - s, 0)``.  Relaxed to
``lam s = kappa`` (the central path) it becomes ``lam = plus(lam - s, kappa)`` with

    plus(v, kappa) = (v + sqrt(v^2 + 4 kappa)) / 2,         plus'(v, kappa) = (1 + v / sqrt(v^2 + 4 kappa)) / 2

and of inequalities with two sides, ``lower <= Gz <= h``,

    lam - plus(lam + Gz - h, kappa) + plus(lower - Gz - lam, kappa) = 0

Source: Chen & Mangasarian (1996), "A class of smoothing functions for nonlinear and mixed complementarity problems",
Comput. Optim. Appl. 5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation.errors import DegenerateWarning, warn

DEGENERATE = ("lstsq", "raise", "smooth")
"""What the derivative of a degenerate solution may be: of least norm, an error, that of a relaxed program."""

KAPPA = 1e-3
"""Complementarity of the relaxed problem, unless something else is asked for."""
_KEPT = 1e-2  # of kappa: how closely a relaxed program keeps it ...
_SLACK = 8.0  # ... or times what rounding leaves of a slack


def check_degenerate(policy: str) -> None:
    """Raise ``ValueError`` unless ``policy`` is one of :data:`DEGENERATE`."""
    if policy not in DEGENERATE:
        raise ValueError(f"degenerate must be one of {', '.join(map(repr, DEGENERATE))}, got {policy!r}")


def plus(v: Tensor, kappa: float = 0.0) -> Tensor:
    """``max(v, 0)``, or its smoothing; for negative ``v`` as ``2 kappa / (sqrt(v^2 + 4 kappa) - v)``, which does not
    cancel."""
    if kappa == 0:
        return v.clamp_min(0)
    root = torch.sqrt(v * v + 4 * kappa)
    return torch.where(v > 0, 0.5 * (v + root), 2 * kappa / (root + v.abs()))


def plus_slope(v: Tensor, kappa: float = 0.0) -> Tensor:
    """The derivative of :func:`plus`; 1 at the kink, as autograd has it for ``clamp_min``."""
    if kappa == 0:
        return (v >= 0).to(v)
    root = torch.sqrt(v * v + 4 * kappa)
    return torch.where(v > 0, 0.5 * (1 + v / root), 2 * kappa / (root * (root + v.abs())))


def lesser(a: Tensor, b: Tensor, kappa: float) -> Tensor:
    """``a - plus(a - b, kappa)``, hence ``min(a, b)`` for ``kappa = 0``; where one is huge the other keeps its digits."""
    gap = a - b
    least = torch.where(gap.isnan(), gap, torch.where(gap >= 0, b, a))  # NaN of either is NaN
    return least - torch.where(gap >= 0, plus(-gap, kappa), plus(gap, kappa)) if kappa else least


def warn_zero_gradient(what: str) -> None:
    """Say that the gradient with respect to ``what`` is zero: it enters a linear program through the objective alone."""
    warn(
        f"the gradient with respect to {what} is zero wherever it exists, and nothing is learnt from it: the solution of a "
        "linear program stays at its vertex under small changes of the objective alone. Add a small quadratic term to the "
        'objective, or use degenerate="smooth"',
        DegenerateWarning,
    )


Ends = dict[str, Tensor]
"""``h`` and ``lower``, each ``(batch, m)``, or one of them."""


def natural(lam: Tensor, v: Tensor, ends: Ends, kappa: float) -> Tensor:
    """The left-hand side of two sides, ``(batch, m)``, for ``v = lam + Gz``."""
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
