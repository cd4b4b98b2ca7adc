r"""Rotations of space as unit quaternions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.manifold.base import Manifold, expect
from implicitkit.manifold.exponential import cosine, rotation_vector, sine_part

__all__ = ["UnitQuaternion"]


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
        return _product(z, torch.cat([cosine(s), 0.5 * delta * sine_part(s)], -1))

    def local(self, z: Tensor, y: Tensor) -> Tensor:
        return rotation_vector(_product(torch.cat([z[..., :1], -z[..., 1:]], -1), y))

    def project(self, z: Tensor) -> Tensor:
        """``q / |q|``."""
        return z / torch.linalg.vector_norm(z, dim=-1, keepdim=True)

    def distance(self, z: Tensor) -> Tensor:
        """``|q| - 1``."""
        return torch.linalg.vector_norm(z, dim=-1) - 1


def _product(p: Tensor, q: Tensor) -> Tensor:
    """Hamilton's product."""
    a, u = p[..., :1], p[..., 1:]
    b, v = q[..., :1], q[..., 1:]
    real = a * b - (u * v).sum(-1, keepdim=True)
    return torch.cat([real, a * v + b * u + torch.linalg.cross(u, v, dim=-1)], -1)
