"""Damped fixed-point iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation.options import between, check_options
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method


@register_solver("picard", solves="fixed_point")
@dataclass(frozen=True)
class Picard(Method):
    r"""``z <- z + damping (f(z) - z)`` (Picard 1890; Banach 1922).

    Converges linearly, by the factor ``|1 - damping + damping \lambda|`` for the worst eigenvalue ``\lambda`` of
    ``df/dz``; for ``damping = 1`` wherever ``f`` is a contraction.

    Args:
        damping: in (0, 2); below 1 for maps that overshoot.

    Raises:
        ValueError: ``damping`` outside (0, 2).
    """

    damping: float = 1.0
    default_max_steps: ClassVar[int] = 2000
    differentiable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, damping=between(0, 2))

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        if self.damping == 1.0:
            return f(z), state
        return z.add(f.residual(z), alpha=self.damping), state
