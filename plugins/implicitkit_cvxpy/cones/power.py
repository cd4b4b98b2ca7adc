r"""The power cone ``K_a = {(x, y, z): x^a y^(1-a) >= |z|, x, y >= 0}``.

A point outside of ``K_a`` and of its polar, with ``z != 0``, projects to ``(x(r), y(r), sign(z) r)``, where

    x(r) = (x + sqrt(x^2 + 4 a r (|z| - r))) / 2,     y(r) likewise with 1 - a,     x(r)^a y(r)^(1-a) = r,   0 < r < |z|.

Source: Hien (2015), "Differential properties of Euclidean projection onto power cone", Math. Meth. Oper. Res. 82,
proposition 2.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.extend import constants
from implicitkit_cvxpy.cones.numeric import ORDER, increasing_root


def project_power(v: Tensor, alpha: Tensor) -> Tensor:
    """Projection of each triple of the last dimension, ``(..., 3)``, with exponents ``alpha`` broadcast to ``(...)``."""
    x, y, z = v.detach().unbind(-1)
    alpha = alpha.to(v).expand(x.shape)
    size = z.abs()
    inside = (x >= 0) & (y >= 0) & (x.clamp_min(0) ** alpha * y.clamp_min(0) ** (1 - alpha) >= size)
    mx, my = (-x / alpha).clamp_min(0), (-y / (1 - alpha)).clamp_min(0)
    polar = (x <= 0) & (y <= 0) & (mx**alpha * my ** (1 - alpha) >= size) & ~inside
    face = (size == 0) & ~inside & ~polar
    curved = ~(inside | polar | face)
    safe = torch.where(curved.unsqueeze(-1), v, v.new_tensor([0.0, 0.0, 1.0]))
    found = constants(_radius, torch.cat([safe, alpha.unsqueeze(-1)], -1))
    r, slope = found[..., 0], found[..., 1]
    for _ in range(ORDER):
        r = r - _mismatch(r, safe, alpha) / slope
    on_curve = torch.stack([*_legs(r, safe, alpha), torch.sign(safe[..., 2].detach()) * r], -1)
    on_face = torch.cat([v[..., :2].clamp_min(0), torch.zeros_like(v[..., 2:])], -1)
    out = torch.where(curved.unsqueeze(-1), on_curve, torch.zeros_like(v))
    out = torch.where(face.unsqueeze(-1), on_face, out)
    return torch.where(inside.unsqueeze(-1), v, out)


def _leg(x: Tensor, product: Tensor) -> Tensor:
    """The positive root ``w`` of ``w^2 - x w = product``, without cancellation."""
    root = (x * x + 4 * product).sqrt()
    positive = x >= 0
    return torch.where(positive, (x + root) * 0.5, 2 * product / torch.where(positive, torch.ones_like(x), root - x))


def _legs(r: Tensor, v: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    x, y, z = v.unbind(-1)
    spread = r * (torch.sign(z.detach()) * z - r)
    return _leg(x, alpha * spread), _leg(y, (1 - alpha) * spread)


def _mismatch(r: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    x, y = _legs(r, v, alpha)
    return alpha * x.log() + (1 - alpha) * y.log() - r.log()


def _radius(packed: Tensor) -> Tensor:
    """``r`` and the derivative of :func:`_mismatch` there, ``(..., 2)``."""
    v, alpha = packed[..., :3], packed[..., 3]
    size = v[..., 2].abs()
    r = increasing_root(lambda r: (-_mismatch(r, v, alpha), -_slope(r, v, alpha)), torch.zeros_like(size), size)
    return torch.stack([r, _slope(r, v, alpha)], -1)


def _slope(r: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    x, y = _legs(r, v, alpha)
    bend = v[..., 2].abs() - 2 * r
    # w^2 - x w = k r (|z| - r)  =>  dw/dr = k (|z| - 2 r) / (2 w - x)
    dx = alpha * bend / (2 * x - v[..., 0])
    dy = (1 - alpha) * bend / (2 * y - v[..., 1])
    return alpha * dx / x + (1 - alpha) * dy / y - 1 / r
