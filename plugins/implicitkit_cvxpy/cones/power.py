r"""The power cone ``K_a = {(x, y, z): x^a y^(1-a) >= |z|, x, y >= 0}``.

A point outside of ``K_a`` and of its polar, with ``z > 0``, is a combination of the orthogonal rays
``p = (e^((1-a) tau), e^(-a tau), 1)`` of ``K_a`` and ``d = (-a / p_1, -(1-a) / p_2, 1)`` of the polar; its projection is on
``p``, and ``tau`` is the root of ``<v, p x d> = 0``.  Exchanging ``x`` and ``y``, ``a`` and ``1 - a``, makes ``tau <= 0``.

Source: Hien (2015), "Differential properties of Euclidean projection onto power cone", Math. Meth. Oper. Res. 82,
propositions 2.2 (the projection) and, for the derivative at ``z = 0``, 3.1; the parameter ``tau`` is ours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit_cvxpy.cones.numeric import in_its_own_unit, project_on_ray

_TINY = 1e-60  # of |z|: what is smaller is zero


def project_power(v: Tensor, alpha: Tensor) -> Tensor:
    """Projection of each triple of the last dimension, ``(..., 3)``, with exponents ``alpha`` broadcast to ``(...)``."""
    w, unit = in_its_own_unit(v)
    x, y, z = w.detach().unbind(-1)
    sign, size, alpha = torch.where(z < 0, -1.0, 1.0).to(w), z.abs(), alpha.to(w).expand(x.shape)
    inside = (x >= 0) & (y >= 0) & (x.clamp_min(0) ** alpha * y.clamp_min(0) ** (1 - alpha) >= size)
    mx, my = (-x / alpha).clamp_min(0), (-y / (1 - alpha)).clamp_min(0)
    polar = (x <= 0) & (y <= 0) & (mx**alpha * my ** (1 - alpha) >= size) & ~inside
    face = (size < _TINY) & (alpha != 0.5) & ~inside & ~polar
    curved = (~(inside | polar | face)).unsqueeze(-1)
    on_curve = _on_curve(torch.where(curved, w, w.new_tensor([0.0, 0.0, 1.0])), sign, alpha)
    kept = torch.stack([x > 0, y > 0, torch.where(x < 0, alpha, 1 - alpha) < 0.5], -1) & face.unsqueeze(-1)
    return (torch.where(curved, on_curve, torch.where(kept | inside.unsqueeze(-1), w, 0.0)) * unit).to(v.dtype)


def _on_curve(v: Tensor, sign: Tensor, alpha: Tensor) -> Tensor:
    x, y, z = v.unbind(-1)
    z = sign * z
    z = z + (_TINY - z.detach()).clamp_min(0)
    swap = ((2 - alpha) * x + (2 * alpha - 1) * z > (1 + alpha) * y).detach()
    point = torch.stack([torch.where(swap, y, x), torch.where(swap, x, y), z], -1)
    j, k = torch.where(swap, 1 - alpha, alpha), torch.where(swap, alpha, 1 - alpha)
    p = project_on_ray(point, _rays, *_bracket(point.detach(), j, k), j, k)
    first, second, z = p.unbind(-1)
    return torch.stack([torch.where(swap, second, first), torch.where(swap, first, second), sign * z], -1)


def _rays(tau: Tensor, j: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``p``, ``d x p`` and its derivative at ``tau <= 0``, divided by ``p_2`` and ``p_2 / p_1``; ``j = a, k = 1 - a``."""
    w, g, h = tau.exp(), (k * tau).exp(), (j * tau).exp()  # p_1 / p_2, p_1, 1 / p_2
    n = [-g * (1 + k * h * h), g * w + j * h, k * w * w - j]
    turn = [-k * g - k * (1 + j) * g * h * h, (1 + k) * g * w + j * j * h, 2 * k * w * w]
    return torch.stack([w, torch.ones_like(w), h], -1), torch.stack(n, -1), torch.stack(turn, -1)


def _bracket(v: Tensor, j: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Between which numbers ``tau`` is: where ``p`` and ``d`` have positive coefficients, and where no term of
    ``<v, p x d> = 0`` outweighs all others."""
    x, y, z = v.unbind(-1)
    right, left, above, below = ((t.abs() + t) / 2 for t in (x, -x, y, -y))  # of -0 too this is +0
    part = j * z / 6
    reach = torch.maximum((above / part).log() / j, (left / part).log() / k)
    reach = torch.maximum(reach, (3 * k * z / (6 * part)).log() / 2).clamp_min(0)
    low = torch.maximum((right / z).log() / k, (below / (k * z)).log() / j)
    high = torch.minimum((j * z / left).log() / k, (z / above).log() / j)
    return torch.maximum(low, -reach), high.clamp_max(0)
