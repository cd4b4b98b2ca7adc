r"""The second-order cone ``Q = {(t, x): |x|_2 <= t}``, self-dual.

With ``r = |x|`` the spectral values are ``t + r`` and ``t - r``:  ``Pi(v) = phi(t - r) e_- + phi(t + r) e_+`` with
``e_+- = (1, +- x / r) / 2`` and ``phi(a) = max(a, 0)``; ``phi(a) = (a + sqrt(a^2 + 4 mu)) / 2`` on the central path.

Source: Fukushima, Luo & Tseng (2002), "Smoothing functions for second-order-cone complementarity problems", SIAM J.
Optim. 12(2), sections 3 and 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit import extend


def project_second_order(v: Tensor, mu: float = 0.0) -> Tensor:
    """Projection of each vector of the last dimension, ``(..., d)`` with ``t`` first."""
    t, x = v[..., :1], v[..., 1:]
    square = (x * x).sum(-1, keepdim=True)
    apex = square == 0
    r = torch.where(apex, 1.0, square).sqrt()
    low = torch.where(apex, t, t - r)
    high = torch.where(apex, t, t + r)
    low, high = extend.plus(low, mu), extend.plus(high, mu)
    along = torch.where(apex, extend.plus_slope(t, mu), (high - low) / (2 * r))
    return torch.cat([(low + high) * 0.5, along * x], -1)
