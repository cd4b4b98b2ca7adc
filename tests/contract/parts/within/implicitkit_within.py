"""A constraint from a plugin: ``lower <= g(z) <= upper``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import implicitkit as ik


@dataclass(frozen=True)
class Within(ik.extend.Constraint):
    """``lower <= g(z, *args) <= upper`` as ``g - upper <= 0`` and ``lower - g <= 0``."""

    lower: float = 0.0
    upper: float = 1.0
    one_sided: ClassVar[bool] = True

    def values(self, z: Any, *args: Any) -> torch.Tensor:
        g = self.function(z, *args)
        return torch.stack([g - self.upper, self.lower - g], -1)
