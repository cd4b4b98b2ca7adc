r"""Rigid motions of space as matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.manifold.base import Manifold, expect
from implicitkit.manifold.exponential import cosine_part, cubic_part, inverse_part, rotation_vector
from implicitkit.manifold.so3 import SO3, of_hat, quaternion_of, rotation

__all__ = ["SE3"]


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
        """Of the rotation from SO3, and of the last row from ``0, 0, 0, 1``."""
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
