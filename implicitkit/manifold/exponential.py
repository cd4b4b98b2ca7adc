r"""Exponentials and logarithms of rotations, smooth to every order at the identity.

With ``s = |\phi|^2``: ``sin \theta / \theta``, ``(1 - cos \theta) / \theta^2`` and ``(\theta - sin \theta) /
\theta^3`` are entire functions of ``s``, taken from their series for ``s < 1`` (ten terms: exact in float64).

Source: Solà, Deray & Atchuthan (2018), arXiv 1812.01537, appendices A and D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["cosine", "cosine_part", "cubic_part", "hat", "inverse_part", "rotation_vector", "sine_part"]

_TERMS = 10
_SMALL = 1e-2  # of (|v| / w)^2, below which the logarithm is taken from its series


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """``sum_k c_k x^k`` of ten coefficients, by pairs (Estrin): half the operations of Horner's rule, forward and back."""
    c = x.new_tensor(coefficients).view(-1, 2)
    second = x * x
    fourth = second * second
    powers = torch.stack([torch.ones_like(x), second, fourth, second * fourth, fourth * fourth], -1)
    return ((c[:, 0] + x.unsqueeze(-1) * c[:, 1]) * powers).sum(-1)


def _entire(s: Tensor, first: int, closed: Callable[[Tensor], Tensor]) -> Tensor:
    """``sum_k (-s)^k / (2 k + first)!``, by ``closed`` of ``sqrt(s)`` from 1 on."""
    small = s < 1
    total = _polynomial(torch.where(small, s, 0), [(-1) ** k / math.factorial(2 * k + first) for k in range(_TERMS)])
    return torch.where(small, total, closed(torch.where(small, 1, s).sqrt()))


def cosine(s: Tensor) -> Tensor:
    r"""``cos \theta`` of ``s = \theta^2``."""
    return _entire(s, 0, torch.cos)


def sine_part(s: Tensor) -> Tensor:
    r"""``sin \theta / \theta``."""
    return _entire(s, 1, lambda t: t.sin() / t)


def cosine_part(s: Tensor) -> Tensor:
    r"""``(1 - cos \theta) / \theta^2``."""
    return _entire(s, 2, lambda t: 2 * (t / 2).sin().square() / t.square())


def cubic_part(s: Tensor) -> Tensor:
    r"""``(\theta - sin \theta) / \theta^3``."""
    return _entire(s, 3, lambda t: (t - t.sin()) / t**3)


_INVERSE = (
    1 / 12, 1 / 720, 1 / 30240, 1 / 1209600, 1 / 47900160, 691 / 1307674368000, 1 / 74724249600,
    3617 / 10670622842880000, 43867 / 5109094217170944000, 174611 / 802857662698291200000,
)  # fmt: skip
"""``|B_2k| / (2 k)!``, Bernoulli's numbers: the series of ``(1 - x/2 cot(x/2)) / x^2`` in ``x^2``."""


def inverse_part(s: Tensor) -> Tensor:
    r"""``(1 - (\theta / 2) cot(\theta / 2)) / \theta^2``."""
    small = s < 1
    total = _polynomial(torch.where(small, s, 0), _INVERSE)
    t = torch.where(small, 1, s).sqrt()
    return torch.where(small, total, (1 - 0.5 * t / torch.tan(0.5 * t)) / t.square())


def hat(v: Tensor) -> Tensor:
    """The matrix of ``w -> v x w``, ``(..., 3) -> (..., 3, 3)``."""
    basis = v.new_tensor([[0, 0, 0, 0, 0, -1, 0, 1, 0], [0, 0, 1, 0, 0, 0, -1, 0, 0], [0, -1, 0, 1, 0, 0, 0, 0, 0]])
    return (v @ basis).unflatten(-1, (3, 3))


def rotation_vector(q: Tensor) -> Tensor:
    """The rotation vector of a unit quaternion ``(w, x, y, z)``, of length at most pi, ``(..., 4) -> (..., 3)``."""
    q = torch.where(q[..., :1] < 0, -q, q)
    w, v = q[..., :1], q[..., 1:]
    m = v.square().sum(-1, keepdim=True)
    small = m < _SMALL * w.square()
    safe = torch.where(small, w, 1)
    u = torch.where(small, m, 0) / safe.square()
    series = _polynomial(u, [(-1) ** k / (2 * k + 1) for k in range(_TERMS)])
    n = torch.where(small, 1, m).sqrt()
    return v * torch.where(small, 2 * series / safe, 2 * torch.atan2(n, w) / n)
