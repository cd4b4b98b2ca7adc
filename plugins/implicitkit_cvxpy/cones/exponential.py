r"""The exponential cone ``K = cl {(x, y, z): y exp(x / y) <= z, y > 0}``.

A point outside of ``K`` and its polar, with ``x > 0`` or ``y > 0``, is ``v = a p(rho) + c d(rho)`` with ``a, c > 0``
and the orthogonal rays ``p = (rho, 1, e^rho)`` of ``K`` and ``d = (e^rho, (1 - rho) e^rho, -1)`` of the polar; then
``Pi(v) = a p``, and ``rho`` is the root of ``<v, p x d> = 0`` between the numbers that ``a, c > 0`` and ``|z| <= 2`` allow.

Source: Friberg (2023), "Projection onto the exponential cone: a univariate root-finding problem", Optim. Methods Softw.
38(3), section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from implicitkit_cvxpy.cones.numeric import in_its_own_unit, project_on_ray

_LIMIT = 700.0  # of |rho|: beyond it e^-|rho| is nothing, and the cone is {x <= 0, y >= 0, z >= 0}


def project_exponential(v: Tensor) -> Tensor:
    """Projection of each triple of the last dimension onto ``K``, ``(..., 3)``."""
    w, unit = in_its_own_unit(v)
    r, s, t = w.detach().unbind(-1)
    tiny = torch.finfo(w.dtype).tiny
    inside = (s >= 0) & (s * (r / s.clamp_min(tiny)).exp() <= t)
    polar = (r >= 0) & (r * (s / r.clamp_min(tiny)).exp() <= -math.e * t)
    flat = (_LIMIT * torch.maximum(r, s) <= -torch.minimum(r, s)) & ~polar
    curved = (~(inside | polar | flat)).unsqueeze(-1)
    safe = torch.where(curved, w, w.new_tensor([1.0, 0.0, 0.0]))
    on_curve = project_on_ray(safe, _rays, *_bracket(safe.detach()))
    kept = inside.unsqueeze(-1) | (flat.unsqueeze(-1) & torch.stack([r <= 0, s > 0, t >= 0], -1))
    return (torch.where(curved, on_curve, torch.where(kept, w, 0.0)) * unit).to(v.dtype)


def _rays(rho: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``p``, ``p x d`` and its derivative, divided by ``e^rho``, ``e^2rho`` and ``e^2rho`` where ``rho > 0``."""
    negative = rho.detach() < 0
    e, f = torch.where(negative, rho, 0.0).exp(), torch.where(negative, 0.0, -rho).exp()  # e / f = e^rho
    ee, ff, ef, q = e * e, f * f, e * f, rho * rho - rho + 1
    n = [(rho - 1) * ee - ff, ee + rho * ff, -q * ef]
    turn = torch.where(
        negative.unsqueeze(-1),
        torch.stack([(2 * rho - 1) * ee, 2 * ee + 1, -(q + 2 * rho - 1) * ef], -1),
        torch.stack([1 + 2 * ff, (1 - 2 * rho) * ff, (q - 2 * rho + 1) * ef], -1),
    )
    return torch.stack([rho * f, f, e], -1), torch.stack(n, -1), turn


def _bracket(v: Tensor) -> tuple[Tensor, Tensor]:
    """Between which numbers ``rho`` is, for points in the curved region with entries up to 2."""
    r, s, _ = v.unbind(-1)
    infinity = torch.full_like(r, torch.inf)
    above, right = s > 0, r > 0
    r_or_1, s_or_1 = torch.where(right, r, 1.0), torch.where(above, s, 1.0)
    apex, edge = torch.where(right, 1 - s / r_or_1, -infinity), torch.where(above, r / s_or_1, infinity)  # a = 0, c = 0
    low = torch.maximum(apex, torch.where(above, edge.clamp_max(0) - 1 - 2 * (9 / s_or_1).log(), -infinity))
    high = torch.minimum(edge, torch.where(right, apex.clamp_min(1) + 1 + 2 * (9 / r_or_1).log(), infinity))
    return low, high
