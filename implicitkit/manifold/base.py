"""What a manifold is to a solver."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.autocast import uncast
from implicitkit.foundation.options import Configured


class Manifold(Configured):
    """A set of tensors that near each of its points looks like vectors; all leading dimensions are a batch of points.

    A subclass defines three methods on one tensor, and for priors and checks two more:

        class Circle(ik.manifold.Manifold):                  # unit vectors of the plane, (..., 2)
            def zero(self, z):
                return torch.zeros_like(z[..., :1])
            def retract(self, z, delta):                     # along the tangent, and back to the circle
                moved = z + delta * torch.stack([-z[..., 1], z[..., 0]], -1)
                return moved / moved.norm(dim=-1, keepdim=True)
            def distance(self, z):
                return z.norm(dim=-1) - 1

    It must be smooth at ``delta = 0``, of full rank there, and written in differentiable operations.  Units: ``delta`` has
    those of ``z``; angles are in radians.

    Source: Absil, Mahony & Sepulchre (2008), *Optimization Algorithms on Matrix Manifolds*, definition 4.1.1.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Autocast does not reach the manifold: points that are rounded lie on none."""
        super().__init_subclass__(**options)
        for name in ("retract", "distance", "local", "project"):
            if name in cls.__dict__:
                setattr(cls, name, uncast(cls.__dict__[name]))

    def zero(self, z: Any) -> Any:
        """The tangent vector zero at ``z``: what ``delta`` looks like.

        Raises:
            ValueError: ``z`` has not the shape of a point.
        """
        raise NotImplementedError(f"{type(self).__name__} has no zero method")

    def retract(self, z: Any, delta: Any) -> Any:
        """The point that ``delta`` leads to from ``z``; ``z`` itself for ``delta = 0``."""
        raise NotImplementedError(f"{type(self).__name__} has no retract method")

    def distance(self, z: Tensor) -> Tensor:
        """How far ``z`` is from the manifold: any tensor that is zero on it."""
        return z.new_zeros(())

    def local(self, z: Any, y: Any) -> Any:
        """The ``delta`` with ``retract(z, delta) = y``; as a residual, the difference of two points (a prior)."""
        raise NotImplementedError(f"{type(self).__name__} has no local method")

    def project(self, z: Any) -> Any:
        """The nearest point of the manifold, or one near."""
        raise NotImplementedError(f"{type(self).__name__} has no project method")

    def check(self, z: Any) -> None:
        """Raise unless ``z`` is a point (its numbers only where somebody may look at them).

        Raises:
            ValueError: it is none.
        """
        self.zero(z)
        if compat.is_wrapped(z):
            return
        off = float(self.distance(z.detach()).abs().max()) if z.numel() else 0.0
        if not off <= torch.finfo(z.dtype).eps ** 0.4:
            raise ValueError(
                f"z0 is not on {type(self).__name__}: it is off by {off:.1e}; pass "
                f"ik.manifold.{type(self).__name__}().project(z0)"
            )


def expect(z: Any, manifold: Manifold, *shape: int) -> None:
    """Raise unless a tensor ends in these dimensions.

    Raises:
        ValueError: it does not.
    """
    if not isinstance(z, Tensor) or z.shape[-len(shape) :] != shape or not z.is_floating_point():
        got = f"{z.dtype} of shape {tuple(z.shape)}" if isinstance(z, Tensor) else type(z).__name__
        raise ValueError(
            f"points of {type(manifold).__name__} are real tensors of shape (..., {', '.join(map(str, shape))}); got {got}"
        )
