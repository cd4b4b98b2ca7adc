"""Sets given by linear conditions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.sets.base import Projection, against

__all__ = ["Affine", "Box", "Halfspace", "Hyperplane", "Polyhedron"]


@dataclass(frozen=True)
class Box(Projection):
    """``{lower <= x <= upper}``; numbers, tensors that broadcast against the point, or ``None``."""

    lower: Any = None
    upper: Any = None
    separable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lower is None and self.upper is None:
            raise ValueError("Box needs lower, upper or both")
        numbers = [b for b in (self.lower, self.upper) if isinstance(b, (int, float))]
        if len(numbers) == 2 and not numbers[0] <= numbers[1]:
            raise ValueError(f"Box: lower must not be above upper, got {self.lower} and {self.upper}")

    def project(self, v: Tensor) -> Tensor:
        if self.lower is not None:
            v = v.maximum(torch.as_tensor(self.lower, dtype=v.dtype, device=v.device))
        if self.upper is not None:
            v = v.minimum(torch.as_tensor(self.upper, dtype=v.dtype, device=v.device))
        return v


@dataclass(frozen=True)
class Hyperplane(Projection):
    """``{a'x = b}``: ``v - a (a'v - b) / |a|^2``.  ``a``: ``(n,)`` or ``(*batch, n)``; ``b``: number or batch's shape."""

    a: Tensor
    b: Any = 0.0

    def _excess(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """``a`` and ``(a'v - b) / |a|^2``."""
        a = self.a.to(v)
        return a, ((a * v).sum(-1, keepdim=True) - against(self.b, v)) / a.square().sum(-1, keepdim=True)

    def project(self, v: Tensor) -> Tensor:
        a, excess = self._excess(v)
        return v - a * excess


@dataclass(frozen=True)
class Halfspace(Hyperplane):
    """``{a'x <= b}``: ``v - a max(a'v - b, 0) / |a|^2``."""

    def project(self, v: Tensor) -> Tensor:
        a, excess = self._excess(v)
        return v - a * excess.clamp_min(0)


@dataclass(frozen=True)
class Polyhedron(Projection):
    """``{Ax = b, Gx <= h}``, by a quadratic program.  ``A`` ``(*batch, p, n)``, ``b``, ``G`` ``(*batch, m, n)``, ``h``;
    either pair may be ``None``.

    Raises:
        ConvergenceError: the polyhedron is empty.
    """

    A: Tensor | None = None
    b: Tensor | None = None
    G: Tensor | None = None
    h: Tensor | None = None

    def __post_init__(self) -> None:
        if self.A is None and self.G is None:
            raise ValueError(f"{type(self).__name__} needs A and b, or G and h")

    def project(self, v: Tensor) -> Tensor:
        from implicitkit.problem.quadratic_program import QuadraticProgram
        from implicitkit.solving import solve

        eye = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
        A, b, G, h = (None if part is None else part.to(v) for part in (self.A, self.b, self.G, self.h))
        return solve(QuadraticProgram(eye, -v, A, b, G, h)).value


@dataclass(frozen=True)
class Affine(Polyhedron):
    """``{Ax = b}``: ``v - A^+ (Av - b)``; dependent rows are allowed."""

    def __init__(self, A: Tensor, b: Tensor) -> None:
        for name, value in (("A", A), ("b", b), ("G", None), ("h", None)):
            object.__setattr__(self, name, value)
        self.__post_init__()
