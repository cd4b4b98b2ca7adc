"""Hyperplanes and halfspaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from implicitkit.foundation.options import check_options, finite, or_tensor, tensor
from implicitkit.sets.base import Projection, against

__all__ = ["Halfspace", "Hyperplane"]


@dataclass(frozen=True)
class Hyperplane(Projection):
    """``{a'x = b}``: ``v - a (a'v - b) / |a|^2``.  ``a``: ``(n,)`` or ``(*batch, n)``; ``b``: number or batch's shape."""

    a: Tensor
    b: Any = 0.0

    def __post_init__(self) -> None:
        check_options(self, a=tensor(), b=or_tensor(finite()))

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
