"""Sets given by linear conditions, by a quadratic program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.problem.quadratic_program import QuadraticProgram
from implicitkit.sets.base import Projection, check_tensors
from implicitkit.solving.verbs import solve


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
    by_program: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_tensors(self, "A", "b", "G", "h", absent=True)
        if (self.A is None) != (self.b is None) or (self.G is None) != (self.h is None) or self.A is self.G is None:
            raise ValueError(f"{type(self).__name__} needs A and b, or G and h")

    def project(self, v: Tensor) -> Tensor:
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
