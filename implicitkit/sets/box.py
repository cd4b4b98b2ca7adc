"""Boxes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.clamping import check_order, held
from implicitkit.foundation.options import check_options, number, optional, or_tensor
from implicitkit.sets.base import Projection


@dataclass(frozen=True)
class Box(Projection):
    """``{lower <= x <= upper}``; numbers, tensors that broadcast against the point, or ``None``."""

    lower: Any = None
    upper: Any = None
    separable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lower is None and self.upper is None:
            raise ValueError("Box needs lower, upper or both")
        check_options(self, lower=optional(or_tensor(number())), upper=optional(or_tensor(number())))
        check_order(type(self).__name__, self.lower, self.upper)

    def project(self, v: Tensor) -> Tensor:
        if self.lower is not None:
            v = v.maximum(torch.as_tensor(self.lower, dtype=v.dtype, device=v.device))
        if self.upper is not None:
            v = v.minimum(torch.as_tensor(self.upper, dtype=v.dtype, device=v.device))
        return v

    def ends(self, v: Tensor) -> tuple[Any, Any]:
        """The bounds that the set is made of, for numbers like those of ``v``."""
        return self.lower, self.upper

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z - slope)`` of a tensor, or of each leaf of a pytree, without its cancellation: ``slope``, but at least
        ``z - upper`` and at most ``z - lower``."""
        return trees.tree_map(self._natural, z, slope)

    def _natural(self, z: Tensor, slope: Tensor) -> Tensor:
        most, least = (
            None if b is None else z - torch.as_tensor(b, dtype=z.dtype, device=z.device)
            for b in (self.lower, self.upper)
        )
        return held(slope, least, most)
