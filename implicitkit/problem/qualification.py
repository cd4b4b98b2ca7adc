r"""Are there multipliers at all?

At a minimum whose active constraints have dependent gradients (a cusp, ``h(z)^2 = 0``) there need be no ``lam`` with
``df + J'lam = 0``, only one with ``\kappa df + J'lam = 0``, ``\kappa >= 0`` (Fritz John).  A method then comes near the
minimum with multipliers that grow without end, and no point meets the optimality conditions.  The sign of it is

    max_i |lam_i| max(|dg_i(z)|, |dg_i(z')|)  >  30 |df(z)|,

``z'`` a point beside, where a gradient that vanishes at the minimum does not.

Grown far enough, they meet the conditions all the same, by rounding: ``J'lam`` takes any value where ``J`` is a rounding
error.  It then changes by more than all of ``df``, which it is to balance, where half of the digits of ``z`` change:

    |J(z')'lam - J(z)'lam|  >  |df(z)|,        |z' - z| = eps^{1/2} |z|.

Source: Mangasarian & Fromovitz (1967), J. Math. Anal. Appl. 17, 37-47; Hock & Schittkowski (1981), problems 13 and 221.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, seeded

__all__ = ["NO_MULTIPLIERS", "balances_by_rounding", "lacks_multipliers"]

_GROWN = 30.0  # times the gradient of the objective
_BESIDE = 0.1  # of 1 + |z|
NO_MULTIPLIERS = (
    "The constraints nearly hold there, and their multipliers have grown without end: at the minimum the gradients of the "
    "active constraints seem to be dependent (a cusp, or h(z)^2 = 0 in the place of h(z) = 0), so that no multipliers exist "
    "(a Fritz John point) and the solution has no derivative by them. State the constraints otherwise."
)


def lacks_multipliers(kernel: Callable[[Tensor], Tensor], w: Tensor, size: int) -> Tensor:
    """Where multipliers have grown beyond all that the gradients can ask for, ``(batch,)``.

    Args:
        kernel: ``(batch, size + m) -> (batch, 1 + m)``, objective and constraints. w: points and multipliers.
    """
    z, lam = w[:, :size], w[:, size:]
    way = _BESIDE * (1 + torch.linalg.vector_norm(z, dim=1, keepdim=True))
    beside = z + way * seeded.normal(*z.shape, seed=0xF1).to(z) / size**0.5
    gradients = []
    for point in (z, beside):
        out, pullback = autodiff.vjp(kernel, torch.cat([point, lam], 1))
        rows = torch.eye(out.shape[1], dtype=w.dtype, device=w.device).unsqueeze(1).expand(-1, len(w), -1)
        gradients.append(torch.stack([pullback(row)[0][:, :size] for row in rows], 1).norm(dim=2).nan_to_num())
    here, there = gradients
    force = (lam.abs() * torch.maximum(here, there)[:, 1:]).amax(1)
    return force > _GROWN * here[:, 0]


def balances_by_rounding(kernel: Callable[[Tensor], Tensor], w: Tensor, size: int, which: Tensor) -> Tensor:
    """Where the multipliers balance the objective's gradient in the last digits of ``z`` only, of the samples ``which``,
    ``(batch,)``.  Asked where they are large: two evaluations.

    Args:
        kernel: ``(batch, size + m) -> (batch, 1 + m)``, objective and constraints. w: points and multipliers.
    """
    z, lam = w[:, :size], w[:, size:]
    eps = torch.finfo(w.dtype).eps
    which = which & (lam.abs() > eps**-0.25).any(1)
    if not bool(which.any()):
        return which
    way = seeded.normal(*z.shape, seed=0xF2).to(z)
    way = way * (eps**0.5 * (torch.linalg.vector_norm(z, dim=1) / torch.linalg.vector_norm(way, dim=1))).unsqueeze(1)
    held = torch.cat([torch.zeros_like(lam[:, :1]), lam], 1)
    forces = []
    for point in (z, z + way):
        out, pullback = autodiff.vjp(kernel, torch.cat([point, lam], 1))
        forces.append(pullback(held)[0][:, :size])
        if point is z:
            slope = pullback(torch.eye(1, out.shape[1], dtype=w.dtype, device=w.device).expand_as(out))[0][:, :size]
    turned = torch.linalg.vector_norm(forces[1] - forces[0], dim=1)
    return which & (turned > torch.linalg.vector_norm(slope, dim=1))
