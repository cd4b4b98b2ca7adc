"""SQUAREM with a mistake: norms over the whole matrix, so that one step length serves every sample of the batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import implicitkit as ik


@ik.register_solver("broken_squarem", solves="fixed_point")
class BrokenSquarem(ik.Method):
    """Squared extrapolation with one step length for the whole batch (wrong on purpose)."""

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        once = f(z)
        r = once - z
        v = f(once) - once - r
        alpha = -(r.norm() / v.norm()).clamp_min(1)  # should be one number a sample: dim=1, keepdim=True
        return z - 2 * alpha * r + alpha**2 * v, state
