"""Spheres of the l1 and l2 norms.  They are not convex: the nearest point is the projection where it is unique."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.sets.balls import Ball
from implicitkit.sets.base import length
from implicitkit.sets.simplex import onto_simplex

__all__ = ["L1Sphere", "L2Sphere"]


@dataclass(frozen=True)
class L1Sphere(Ball):
    """``{|x - centre|_1 = radius}``: each number keeps its sign (zeros count as positive), the magnitudes are projected
    onto the simplex (Duchi et al. 2008, section 4).

        ik.project.l1_sphere(2.0)(torch.tensor([0.5, -0.5]))  # [1.0, -1.0]
    """

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        sign = torch.where(v < 0, -1, 1).to(v.dtype)
        return sign * onto_simplex(sign * v, radius)


@dataclass(frozen=True)
class L2Sphere(Ball):
    """``{|x - centre|_2 = radius}``: ``v radius / |v|``; of the centre itself the first unit vector, derivative zero.

    ik.project.l2_sphere()(torch.tensor([3.0, 4.0]))  # [0.6, 0.8]
    """

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        norm = length(v)
        zero = norm == 0
        first = torch.zeros_like(v)
        first[..., 0] = 1
        return radius * torch.where(zero, first, v / torch.where(zero, 1, norm))
