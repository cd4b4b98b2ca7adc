r"""Rotations of space as matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.manifold.base import Manifold, expect
from implicitkit.manifold.exponential import cosine_part, hat, rotation_vector, sine_part

__all__ = ["SO3", "quaternion_of", "rotation"]


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
        """Of ``R^T R`` from the identity, and of the determinant from 1."""
        gram = z.mT @ z - torch.eye(3, dtype=z.dtype, device=z.device)
        return gram.abs().amax((-1, -2)) + (torch.linalg.det(z) - 1).abs()


def rotation(phi: Tensor) -> Tensor:
    """``Exp`` of rotation vectors, ``(..., 3) -> (..., 3, 3)``."""
    s = phi.square().sum(-1)[..., None, None]
    K = hat(phi)
    return torch.eye(3, dtype=phi.dtype, device=phi.device) + sine_part(s) * K + cosine_part(s) * (K @ K)


def quaternion_of(R: Tensor) -> Tensor:
    """A unit quaternion of rotation matrices, ``(..., 3, 3) -> (..., 4)``, by the largest of its four numbers
    (Shepperd 1978,
    "Quaternion from rotation matrix")."""
    (a, b, c), (d, e, f), (g, h, i) = (row.unbind(-1) for row in R.unbind(-2))
    squares = torch.stack([1 + a + e + i, 1 + a - e - i, 1 - a + e - i, 1 - a - e + i], -1)  # four times those numbers
    products = torch.stack(
        [
            torch.stack([squares[..., 0], h - f, c - g, d - b], -1),
            torch.stack([h - f, squares[..., 1], d + b, c + g], -1),
            torch.stack([c - g, d + b, squares[..., 2], h + f], -1),
            torch.stack([d - b, c + g, h + f, squares[..., 3]], -1),
        ],
        -2,
    )
    candidates = 0.5 * products / squares.clamp_min(0.5).sqrt().unsqueeze(-1)
    best = squares.argmax(-1)[..., None, None].expand(*squares.shape[:-1], 1, 4)
    return candidates.gather(-2, best).squeeze(-2)
