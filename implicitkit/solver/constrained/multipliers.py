r"""Multipliers of a point that somebody else has found.

With ``g`` the gradient of the objective and ``J`` the Jacobian of the constraints ``c``, rows ``i`` of both by ``|J_i|``, so
that no unit of a constraint counts:

    minimise over lam   |g + J' lam|^2 + sum_i (c_i lam_i / |z|)^2,    the sum over inequalities

At a point with multipliers both terms vanish: where the active constraints are independent these are the only ones.  An
inequality that is not active has none, whatever the weight; those below zero by rounding are raised to it.

Beside bounds, another set or a term the first term is ``|z - prox(v)|^2``, ``v = z - g - J' lam``, by Gauss-Newton steps
with ``d prox/dv``, which is symmetric: ``prox`` is the gradient of a convex function (Moreau).

Source: Glad & Polak (1979), "A multiplier method with automatic limitation of penalty growth", Math. Programming 17,
140-155; Qi & Sun (1993), "A nonsmooth version of Newton's method", Math. Programming 58, 353-367, for the steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.linear.factors.dense import lstsq_batched
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

__all__ = ["with_multipliers"]

_CUT = 1e-12  # singular values below that share of the largest are none, and below ten units of rounding
_STEPS = 20  # through a proximal map, which is made of few pieces as a rule


def with_multipliers(f: Evaluations, z: Tensor) -> Tensor:
    """The state of a program at ``z`` ``(batch, n)``: ``(batch, n + m)``."""
    model = Model(f)
    if not model.count:
        return z
    at = model.local(z)
    size, length = torch.linalg.vector_norm(at.jacobian, dim=2), torch.linalg.vector_norm(z, dim=1, keepdim=True)
    size, length = (torch.where(t > 0, t, 1) for t in (size, length))
    J = at.jacobian / size.unsqueeze(2)
    weight = torch.where(model.one_sided, at.constraints / (size * length), 0)
    found = _least(J, at.slope, weight, torch.zeros_like(weight))
    if model.problem.prox is not None:
        found = _through_prox(model, z, at.slope, J, weight, found)
    found = found / size
    return model.join(z, torch.where(model.one_sided, found.clamp_min(0), found))


def _least(J: Tensor, gap: Tensor, weight: Tensor, lam: Tensor) -> Tensor:
    """The step ``d`` that minimises ``|gap + J' d|^2 + |weight (lam + d)|^2``, ``(batch, m)``."""
    A = torch.cat([J.mT, torch.diag_embed(weight)], 1)
    b = -torch.cat([gap, weight * lam], 1)
    return lstsq_batched(A, b, rcond=max(_CUT, 10 * torch.finfo(J.dtype).eps))[0]


def _through_prox(model: Model, z: Tensor, slope: Tensor, J: Tensor, weight: Tensor, lam: Tensor) -> Tensor:
    """The multipliers beside a set or a term, from ``lam`` on, ``(batch, m)``: of all steps those with the least sum."""
    best, least = lam, torch.full_like(lam[:, 0], torch.inf)
    for _ in range(_STEPS):
        v = z - slope - (J * lam.unsqueeze(2)).sum(1)
        image, pullback = autodiff.vjp(lambda y: model.proximal(y, 1.0), v)
        gap = z - image.detach()
        left = gap.square().sum(1) + (weight * lam).square().sum(1)
        better = left < least  # false for NaN
        if not bool(better.any()):
            break
        best, least = torch.where(better.unsqueeze(1), lam, best), torch.where(better, left, least)
        rows = torch.stack([pullback(row)[0].detach() for row in J.unbind(1)], 1)
        lam = lam + _least(rows, gap, weight, lam)
    return best
