"""A kind of problem from a plugin: complementarity, ``z >= 0, F(z) >= 0, z_i F_i(z) = 0``, and a solver for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

import implicitkit as ik

KIND = ik.extend.Kind("complementarity", ("complementarity", "root"), solver="projected_steps")


@dataclass(frozen=True, repr=False)
class Complementarity(ik.Problem):
    """The natural map ``z - max(z - F(z), 0) = 0`` (Facchinei & Pang 2003, section 1.5)."""

    map: Callable[..., Any]
    kind: ClassVar[ik.extend.Kind] = KIND

    @property
    def function(self) -> Callable[..., Any]:
        return self.map

    def flat_residual(self, kernel: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        return z - (z - kernel(z)).clamp_min(0)


ik.register_problem(Complementarity, linear_solver="lu")


@ik.register_solver("projected_steps", solves="complementarity")
@dataclass(frozen=True)
class ProjectedSteps(ik.Method):
    """``z <- z - t (z - max(z - F(z), 0))``.

    Args:
        step_size: ``t``.
    """

    step_size: float = 0.5

    def step(self, f: ik.extend.Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return z - self.step_size * f(z), state
