"""A solver of constrained problems from a plugin: the method of Arrow, Hurwicz & Uzawa (1958)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

import implicitkit as ik


@ik.register_solver("uzawa", solves="constrained")
@dataclass(frozen=True)
class Uzawa(ik.Method):
    """``z <- z - t dL/dz``, ``y <- y + t c(z)``, multipliers of inequalities held nonnegative.

    Args:
        step_size: ``t``.
    """

    step_size: float = 0.1
    default_max_steps: ClassVar[int] = 5000

    def step(self, f: ik.extend.Evaluations, w: Tensor, state: Any) -> tuple[Tensor, Any]:
        model = ik.extend.Model(f)
        z, y = model.split(w)
        _, c, slope = model.slope(z, lambda _: y)
        y = y + self.step_size * c
        y = y.where(~model.one_sided, y.clamp_min(0))
        return model.join(model.proximal(z - self.step_size * slope, self.step_size), y), state
