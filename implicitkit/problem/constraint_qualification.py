r"""Are there multipliers at all?

At a minimum whose active constraints have dependent gradients (a cusp, ``h(z)^2 = 0``) there need be no ``lam`` with
``df + J'lam = 0``, only one with ``\kappa df + J'lam = 0``, ``\kappa >= 0`` (Fritz John).  A method then comes near the
minimum with multipliers that grow without end, and no point meets the optimality conditions.  The sign of it is

    max_i |lam_i| max(|dg_i(z)|, |dg_i(z')|)  >  30 |df(z)|,

``z'`` a point beside, where a gradient that vanishes at the minimum does not.

Grown far enough, they meet the conditions all the same, by rounding: ``J'lam`` takes any value where ``J`` is a rounding
error, or where the constraints ``c`` only seem to be met (``z^3 = 0`` at 1e-9).  It then changes by more than all of
``df``, which it is to balance, where half of the digits of each ``z_j`` change, and ``z`` goes three steps along that force,
of which one back would meet the constraints:

    |J(z')'lam - J(z)'lam|  >  |df(z)|,        z'_j = z_j + eps^{1/2} u_j |z_j| + 3 t v_j,    v = J'lam,  t = lam'c / |v|^2,

thrice: ``z_j^p = 0`` misses its zero by ``p`` such steps, and ``J`` more than doubles where ``z_j`` grows by ``3 / p`` of
itself.  Each ``z_j`` changes by a random share ``u_j`` of its own size: a circle of radius 1e-4 is a sound constraint
beside an unknown of 1e6.

Source: Mangasarian & Fromovitz (1967), J. Math. Anal. Appl. 17, 37-47; Hock & Schittkowski (1981), problems 13 and 221.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, seeded

_GROWN = 30.0  # times the gradient of the objective
_BESIDE = 0.1  # of 1 + |z|
_STEPS = 3.0  # away from where the constraints are met
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
    held = torch.cat([torch.zeros_like(lam[:, :1]), lam], 1)
    out, pullback = autodiff.vjp(kernel, w)
    force = pullback(held)[0][:, :size]
    slope = pullback(torch.eye(1, out.shape[1], dtype=w.dtype, device=w.device).expand_as(out))[0][:, :size]
    missing = (held * out).sum(1, keepdim=True) / force.square().sum(1, keepdim=True)
    shares = seeded.normal(*z.shape, seed=0xF2).to(z)
    beside = z + eps**0.5 * shares * z.abs() + _STEPS * torch.nan_to_num(missing * force, 0, 0, 0)
    there = autodiff.vjp(kernel, torch.cat([beside, lam], 1))[1](held)[0][:, :size]
    return which & (torch.linalg.vector_norm(there - force, dim=1) > torch.linalg.vector_norm(slope, dim=1))
