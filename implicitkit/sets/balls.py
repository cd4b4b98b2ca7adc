"""Balls of the l1, l2 and l-infinity norms, about the origin or another centre, and their spheres.

Spheres are not convex: the nearest point is the projection where it is unique.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.clamping import held
from implicitkit.foundation.options import check_options, each, number, optional, or_tensor, positive
from implicitkit.sets.base import Projection, against, length
from implicitkit.sets.groups import ByRow
from implicitkit.sets.simplex import onto_simplex


@dataclass(frozen=True)
class Ball(Projection):
    """``radius``: positive number or tensor of the batch's shape.  ``centre``: a tensor like the point, or ``None``.

    A subclass defines :meth:`shrink`, the projection about the origin.
    """

    radius: Any = 1.0
    centre: Tensor | None = None

    def __post_init__(self) -> None:
        check_options(self, radius=each(positive()), centre=optional(or_tensor(number())))

    def project(self, v: Tensor) -> Tensor:
        radius = against(self.radius, v)
        return self.shrink(v, radius) if self.centre is None else self.centre + self.shrink(v - self.centre, radius)

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        """The projection of ``v`` onto the set about the origin."""
        raise NotImplementedError(f"{type(self).__name__} has no shrink method")


@dataclass(frozen=True)
class L1Ball(ByRow, Ball):
    """``{|x - centre|_1 <= radius}``: soft thresholding at the ``tau`` of the simplex (Duchi et al. 2008)."""

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        size = v.abs()
        outside = ~(size.sum(-1, keepdim=True) <= radius)  # of a radius that is NaN too
        return torch.where(outside, v.sign() * onto_simplex(size, radius), v)


@dataclass(frozen=True)
class L2Ball(ByRow, Ball):
    """``{|x - centre|_2 <= radius}``: ``v radius / |v|`` outside."""

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        norm = length(v)
        outside = ~(norm <= radius)  # of a radius that is NaN too
        return torch.where(outside, radius * (v / torch.where(outside, norm, 1)), v)


@dataclass(frozen=True)
class LinfBall(Ball):
    """``{|x - centre|_inf <= radius}``: clipping."""

    separable: ClassVar[bool] = True

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        return v.maximum(-radius).minimum(radius)

    def ends(self, v: Tensor) -> tuple[Any, Any]:
        """The bounds that the set is made of, for numbers like those of ``v``."""
        radius = against(self.radius, v)
        return (-radius, radius) if self.centre is None else (self.centre - radius, self.centre + radius)

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z - slope)`` of a tensor, or of each leaf of a pytree, without its cancellation: ``slope``, but at least
        ``z - centre - radius`` and at most ``z - centre + radius``."""
        return trees.tree_map(self._natural, z, slope)

    def _natural(self, z: Tensor, slope: Tensor) -> Tensor:
        off, radius = z if self.centre is None else z - self.centre, against(self.radius, z)
        return held(slope, off - radius, off + radius)


@dataclass(frozen=True)
class L1Sphere(Ball):
    """``{|x - centre|_1 = radius}``: each number keeps its sign (zeros count as positive), the magnitudes are projected
    onto the simplex (Duchi et al. 2008, section 4).

        ik.project.l1_sphere(2.0)(torch.tensor([0.5, -0.5]))  # [1.0, -1.0]
    """

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        sign = torch.where(v < 0, -1, 1).to(v.dtype)
        return sign * onto_simplex(sign * v, radius)

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z - slope)`` of the face that ``z`` lies in, whatever the length of ``slope``, of a tensor, or of each
        leaf of a pytree: numbers keep the signs that they have."""
        return trees.tree_map(self._natural, z, slope)

    def _natural(self, z: Tensor, slope: Tensor) -> Tensor:
        off, radius = z if self.centre is None else z - self.centre, against(self.radius, z)
        sign = torch.where(torch.where(off == 0, -slope, off) < 0, -1, 1).to(z.dtype)
        return off - sign * onto_simplex(sign * (off - slope), radius)


@dataclass(frozen=True)
class L2Sphere(Ball):
    """``{|x - centre|_2 = radius}``: ``v radius / |v|``; of the centre itself the first unit vector, derivative zero.

    ik.project.l2_sphere()(torch.tensor([3.0, 4.0]))  # [0.6, 0.8]
    """

    def shrink(self, v: Tensor, radius: Tensor) -> Tensor:
        return radius * _direction(v)

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z) + slope - (u'slope) u``, ``u = (z - centre) / |z - centre|``, of a tensor, or of each leaf of a pytree:
        zero on the sphere where no slope is left along it.  ``z - P(z - slope)`` says so for short slopes only: one that is
        longer than the radius leads past the centre."""
        return trees.tree_map(self._natural, z, slope)

    def _natural(self, z: Tensor, slope: Tensor) -> Tensor:
        off, radius = z if self.centre is None else z - self.centre, against(self.radius, z)
        u = _direction(off)
        return (off - radius * u) + (slope - (u * slope).sum(-1, keepdim=True) * u)


def _direction(v: Tensor) -> Tensor:
    """``v / |v|`` along the last dimension, of zero the first unit vector."""
    norm = length(v)
    zero = norm == 0
    first = torch.zeros_like(v)
    first[..., 0] = 1
    return torch.where(zero, first, v / torch.where(zero, 1, norm))
