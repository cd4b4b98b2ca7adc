r"""The exponential cone ``K = cl {(x, y, z): y exp(x / y) <= z, y > 0}``.

A point outside of ``K`` and its polar, with ``x > 0`` or ``y > 0``, is ``v = a p(rho) + c d(rho)`` with ``a, c > 0``
and the orthogonal rays ``p = (rho, 1, e^rho)`` of ``K`` and ``d = (e^rho, (1 - rho) e^rho, -1)`` of the polar; then
``Pi(v) = a p``.
Eliminating ``a`` and ``c`` leaves one increasing function of ``rho``, solved by bisection and Newton steps.

Source: Friberg (2023), "Projection onto the exponential cone: a univariate root-finding problem", Optim. Methods Softw.
38(3), section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from implicitkit.extend import constants
from implicitkit_cvxpy.cones.numeric import ORDER, increasing_root

_LIMIT = 80.0  # of |rho|


def project_exponential(v: Tensor) -> Tensor:
    """Projection of each triple of the last dimension onto ``K``, ``(..., 3)``."""
    r, s, t = v.detach().unbind(-1)
    tiny = torch.finfo(v.dtype).tiny
    inside = (s > 0) & (s * ((r / s.clamp_min(tiny)).clamp(max=700.0)).exp() <= t) | ((s == 0) & (r <= 0) & (t >= 0))
    polar = (r > 0) & (r * ((s / r.clamp_min(tiny)).clamp(max=700.0)).exp() <= -math.e * t) | (
        (r == 0) & (s <= 0) & (t <= 0)
    )
    face = (r <= 0) & (s <= 0) & ~polar & ~inside
    curved = ~(inside | polar | face)
    safe = torch.where(curved.unsqueeze(-1), v, v.new_tensor([1.0, 0.0, 0.0]))
    u = constants(_coordinates, safe)
    inverse = constants(_inverse_jacobian, u)
    for _ in range(ORDER):
        u = u - (inverse @ (_point(u) - safe).unsqueeze(-1)).squeeze(-1)
    rho, a = u[..., 0], u[..., 1]
    on_curve = torch.stack([a * rho, a, a * rho.exp()], -1)
    on_face = torch.stack([v[..., 0], torch.zeros_like(v[..., 0]), v[..., 2].clamp_min(0)], -1)
    out = torch.where(curved.unsqueeze(-1), on_curve, torch.zeros_like(v))
    out = torch.where(face.unsqueeze(-1), on_face, out)
    return torch.where(inside.unsqueeze(-1), v, out)


def _point(u: Tensor) -> Tensor:
    rho, a, c = u.unbind(-1)
    e = rho.exp()
    return torch.stack([a * rho + c * e, a + c * (1 - rho) * e, a * e - c], -1)


def _inverse_jacobian(u: Tensor) -> Tensor:
    """Of :func:`_point`, by cross products."""
    rho, a, c = u.unbind(-1)
    e, zero, one = rho.exp(), torch.zeros_like(rho), torch.ones_like(rho)
    p = torch.stack([rho, one, e], -1)
    d = torch.stack([e, (1 - rho) * e, -one], -1)
    g = a.unsqueeze(-1) * torch.stack([one, zero, e], -1) + c.unsqueeze(-1) * torch.stack([e, -rho * e, zero], -1)
    # Cramer's rule
    rows = torch.stack([torch.linalg.cross(p, d), torch.linalg.cross(d, g), torch.linalg.cross(g, p)], -2)
    determinant = (g * rows[..., 0, :]).sum(-1)
    return rows / determinant[..., None, None]


def _coordinates(v: Tensor) -> Tensor:
    """``(rho, a, c)`` of points in the curved region."""
    r, s, t = v.unbind(-1)
    infinity = torch.full_like(r, _LIMIT)
    low = torch.where(r > 0, 1 - s / r.clamp_min(1e-300), -infinity)  # a > 0
    low = torch.maximum(low, torch.where(s < 0, r / s.clamp_max(-1e-300), -infinity))  # c > 0
    high = torch.where(s > 0, r / s.clamp_min(1e-300), infinity)
    high = torch.minimum(high, torch.where(r < 0, 1 - s / r.clamp_max(-1e-300), infinity))
    low, high = low.clamp(-_LIMIT, _LIMIT), high.clamp(-_LIMIT, _LIMIT)

    def function(rho: Tensor) -> tuple[Tensor, Tensor]:
        e, quadratic = rho.exp(), rho * rho - rho + 1
        upper, lower = (rho - 1) * r + s, r - rho * s
        value = (upper * e - lower / e) / quadratic
        slope = ((r + upper) * e + (s + lower) / e - (2 * rho - 1) * value) / quadratic
        return value - t, slope

    rho = increasing_root(function, low, high)
    quadratic = rho * rho - rho + 1
    a = ((rho - 1) * r + s) / quadratic
    c = (r - rho * s) * (-rho).exp() / quadratic
    return torch.stack([rho, a, c], -1)
