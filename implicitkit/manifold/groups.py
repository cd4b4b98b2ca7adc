r"""Rotations of space, as matrices and as unit quaternions, and rigid motions.

Exponentials and logarithms are smooth to every order at the identity.

With ``s = |\phi|^2``: ``sin \theta / \theta``, ``(1 - cos \theta) / \theta^2`` and ``(\theta - sin \theta) /
\theta^3`` are entire functions of ``s``, taken from their series for ``s < 1`` (ten terms: exact in float64).

Source: Solà, Deray & Atchuthan (2018), arXiv 1812.01537, appendices A and D.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.manifold.base import Manifold, expect

_TERMS = 10
_SMALL = 1e-2  # of (|v| / w)^2, below which the logarithm is taken from its series
_INVERSE = (
    1 / 12, 1 / 720, 1 / 30240, 1 / 1209600, 1 / 47900160, 691 / 1307674368000, 1 / 74724249600,
    3617 / 10670622842880000, 43867 / 5109094217170944000, 174611 / 802857662698291200000,
)  # fmt: skip
_DIAGONAL = ((1, 1, 1), (1, -1, -1), (-1, 1, -1), (-1, -1, 1))  # of R in 4 w^2 - 1, 4 x^2 - 1, ...


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


@dataclass(frozen=True)
class SO3(Manifold):
    r"""Rotation matrices ``R`` ``(..., 3, 3)``; ``retract(R, \phi) = R Exp(\phi)``, ``\phi`` a rotation vector ``(..., 3)``.

    ``Exp(\phi) = I + (sin \theta / \theta) [\phi] + ((1 - cos \theta) / \theta^2) [\phi]^2`` with ``\theta = |\phi|``
    (Rodrigues); ``local(R, S)`` is the rotation vector of ``R^T S``, of length at most pi.

        ik.least_squares(lambda R, a, b: a @ R.mT - b, torch.eye(3), (a, b), manifold=ik.manifold.SO3())
    """

    def zero(self, z: Tensor) -> Tensor:
        expect(z, self, 3, 3)
        return torch.zeros_like(z[..., 0])

    def retract(self, z: Tensor, delta: Tensor) -> Tensor:
        return z @ rotation(delta)

    def local(self, z: Tensor, y: Tensor) -> Tensor:
        return rotation_vector(quaternion_of(z.mT @ y))

    def project(self, z: Tensor) -> Tensor:
        """The nearest rotation in the Frobenius norm (the singular values replaced by ``1, 1, +-1``)."""
        U, _, Vh = torch.linalg.svd(z)
        sign = torch.ones_like(z[..., 0])
        sign[..., 2] = torch.linalg.det(U @ Vh)
        return (U * sign.unsqueeze(-2)) @ Vh

    def distance(self, z: Tensor) -> Tensor:
        """How far ``R^T R`` is from the identity, and the determinant from 1, added up."""
        gram = z.mT @ z - torch.eye(3, dtype=z.dtype, device=z.device)
        return gram.abs().amax((-1, -2)) + (torch.linalg.det(z) - 1).abs()


def rotation(phi: Tensor) -> Tensor:
    """``Exp`` of rotation vectors, ``(..., 3) -> (..., 3, 3)``."""
    return of_hat(phi, sine_part, cosine_part)


def of_hat(phi: Tensor, first: Callable[[Tensor], Any], second: Callable[[Tensor], Tensor]) -> Tensor:
    r"""``I + a(s) [\phi] + b(s) [\phi]^2`` with ``s = |\phi|^2``, ``(..., 3) -> (..., 3, 3)``."""
    s = phi.square().sum(-1)[..., None, None]
    K = hat(phi)
    return torch.eye(3, dtype=phi.dtype, device=phi.device) + first(s) * K + second(s) * (K @ K)


_PAIRS = {(0, 1): (7, -5), (0, 2): (2, -6), (0, 3): (3, -1), (1, 2): (3, 1), (1, 3): (2, 6), (2, 3): (7, 5)}
"""``4 q_i q_j`` for ``i < j``: the sum or difference of two entries of ``R``, by their places in the rows."""


def _product(i: int, j: int) -> list[int]:
    """The weights of the nine entries of ``R`` in ``4 q_i q_j``."""
    row = [0] * 9
    if i == j:
        row[0], row[4], row[8] = _DIAGONAL[i]
        return row
    first, second = _PAIRS[min(i, j), max(i, j)]
    row[first], row[abs(second)] = 1, 1 if second > 0 else -1
    return row


_PRODUCTS = [_product(i, j) for i in range(4) for j in range(4)]
_CONSTANT = [int(i == j) for i in range(4) for j in range(4)]


def quaternion_of(R: Tensor) -> Tensor:
    """A unit quaternion of rotation matrices, ``(..., 3, 3) -> (..., 4)``, by the largest of its four numbers
    (Shepperd 1978,
    "Quaternion from rotation matrix")."""
    # all products of two of those numbers, four times, are linear in R
    products = (R.flatten(-2) @ R.new_tensor(_PRODUCTS).mT + R.new_tensor(_CONSTANT)).unflatten(-1, (4, 4))
    squares = products.diagonal(dim1=-2, dim2=-1)
    candidates = 0.5 * products / squares.clamp_min(0.5).sqrt().unsqueeze(-1)
    best = squares.argmax(-1)[..., None, None].expand(*squares.shape[:-1], 1, 4)
    return candidates.gather(-2, best).squeeze(-2)


@dataclass(frozen=True)
class SE3(Manifold):
    r"""Rigid motions ``T = [[R, t], [0, 1]]`` ``(..., 4, 4)``; ``retract(T, (\rho, \phi)) = T Exp(\rho, \phi)``, translation
    first, ``(..., 6)``.

    ``Exp(\rho, \phi) = [[Exp(\phi), V \rho], [0, 1]]``, ``V = I + ((1 - cos \theta) / \theta^2) [\phi] + ((\theta -
    sin \theta) / \theta^3) [\phi]^2`` (Solà et al. 2018, equations 172 to 174); ``local(T, S)`` is the logarithm of
    ``T^{-1} S``.

        ik.least_squares(
            lambda T, x, y: x @ T[:3, :3].mT + T[:3, 3] - y, torch.eye(4), (x, y), manifold=ik.manifold.SE3()
        )
    """

    def zero(self, z: Tensor) -> Tensor:
        expect(z, self, 4, 4)
        return torch.zeros_like(z[..., :3, :2].flatten(-2))

    def retract(self, z: Tensor, delta: Tensor) -> Tensor:
        rho, phi = delta[..., :3], delta[..., 3:]
        return z @ _motion(rotation(phi), _left(phi) @ rho.unsqueeze(-1))

    def local(self, z: Tensor, y: Tensor) -> Tensor:
        R, S = z[..., :3, :3], y[..., :3, :3]
        phi = rotation_vector(quaternion_of(R.mT @ S))
        t = R.mT @ (y[..., :3, 3:] - z[..., :3, 3:])
        return torch.cat([(_left_inverse(phi) @ t).squeeze(-1), phi], -1)

    def project(self, z: Tensor) -> Tensor:
        """The nearest rotation beside the same translation."""
        return _motion(SO3().project(z[..., :3, :3]), z[..., :3, 3:])

    def distance(self, z: Tensor) -> Tensor:
        """How far the rotation is from SO3, and the last row from ``0, 0, 0, 1``, added up."""
        last = torch.eye(4, dtype=z.dtype, device=z.device)[3]
        return SO3().distance(z[..., :3, :3]) + (z[..., 3, :] - last).abs().amax(-1)


def _left(phi: Tensor) -> Tensor:
    """``V``, ``(..., 3) -> (..., 3, 3)``: the left Jacobian of SO3."""
    return of_hat(phi, cosine_part, cubic_part)


def _left_inverse(phi: Tensor) -> Tensor:
    """``V^{-1}`` (Solà et al. 2018, equation 146)."""
    return of_hat(phi, lambda s: -0.5, inverse_part)


def _motion(R: Tensor, t: Tensor) -> Tensor:
    """``[[R, t], [0, 1]]`` of ``(..., 3, 3)`` and ``(..., 3, 1)``."""
    last = torch.eye(4, dtype=R.dtype, device=R.device)[3:].expand(*R.shape[:-2], 1, 4)
    return torch.cat([torch.cat([R, t], -1), last], -2)


@dataclass(frozen=True)
class UnitQuaternion(Manifold):
    r"""Unit quaternions ``(w, x, y, z)`` ``(..., 4)``, Hamilton's; ``retract(q, \phi) = q Exp(\phi)``, ``\phi`` a
    rotation vector ``(..., 3)``.

    ``Exp(\phi) = (cos(\theta / 2), \phi sin(\theta / 2) / \theta)``; ``local(q, p)`` is the rotation vector of ``q^*
    p``, of length at most pi: ``p`` and ``-p`` are one rotation (Solà 2017, arXiv 1711.02508, sections 4.3 and 4.4).

        ik.least_squares(residuals, torch.tensor([1.0, 0.0, 0.0, 0.0]), manifold=ik.manifold.UnitQuaternion())
    """

    def zero(self, z: Tensor) -> Tensor:
        expect(z, self, 4)
        return torch.zeros_like(z[..., :3])

    def retract(self, z: Tensor, delta: Tensor) -> Tensor:
        s = delta.square().sum(-1, keepdim=True) / 4
        return _hamilton(z, torch.cat([cosine(s), 0.5 * delta * sine_part(s)], -1))

    def local(self, z: Tensor, y: Tensor) -> Tensor:
        return rotation_vector(_hamilton(torch.cat([z[..., :1], -z[..., 1:]], -1), y))

    def project(self, z: Tensor) -> Tensor:
        """``q / |q|``."""
        return z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)

    def distance(self, z: Tensor) -> Tensor:
        """``|q| - 1``."""
        return torch.linalg.vector_norm(z, dim=-1) - 1


def _hamilton(p: Tensor, q: Tensor) -> Tensor:
    """Hamilton's product."""
    a, u = p[..., :1], p[..., 1:]
    b, v = q[..., :1], q[..., 1:]
    real = a * b - (u * v).sum(-1, keepdim=True)
    return torch.cat([real, a * v + b * u + torch.linalg.cross(u, v, dim=-1)], -1)
