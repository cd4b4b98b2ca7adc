r"""SQUAREM: squared extrapolation of a fixed-point iteration.

With ``r = f(z) - z`` and ``v = (f(f(z)) - f(z)) - r``,

    z <- z - 2 \alpha r + \alpha^2 v,        \alpha = -max(1, |r| / |v|),

which for ``\alpha = -1`` is two plain iterations.  An extrapolation whose residual is larger than the plain one's by more
than ``slack`` is not taken.

Source: Varadhan & Roland, "Simple and globally convergent methods for accelerating the convergence of any EM algorithm",
Scandinavian Journal of Statistics 35 (2008), scheme S3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik


@ik.register_solver("squarem", solves="fixed_point")
@dataclass(frozen=True)
class Squarem(ik.Method):
    """SQUAREM, scheme S3: three evaluations a step.

    Args:
        slack: how much larger than the residual before the step the one after an extrapolation may be.

    Raises:
        ValueError: ``slack`` below 1.
    """

    slack: float = 1.0
    default_max_steps: ClassVar[int] = 500

    def __post_init__(self) -> None:
        if self.slack < 1:
            raise ValueError(f"slack must be at least 1, got {self.slack}")

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        once = f(z)  # known already: costs nothing
        r = once - z
        twice = f(once)
        v = twice - once - r
        size = torch.linalg.vector_norm(r, dim=1, keepdim=True)  # one number a sample
        curvature = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        alpha = -torch.clamp(size / curvature.clamp_min(torch.finfo(z.dtype).tiny), 1, 100)
        trial = z - 2 * alpha * r + alpha.square() * v
        residual = torch.linalg.vector_norm(f(trial) - trial, dim=1, keepdim=True)
        good = residual <= self.slack * size  # false for NaN
        return torch.where(good, trial, twice), state
