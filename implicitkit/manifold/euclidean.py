"""Vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from implicitkit.foundation import trees
from implicitkit.manifold.base import Manifold

__all__ = ["Euclidean"]


@dataclass(frozen=True)
class Euclidean(Manifold):
    """All tensors of a shape, or pytrees of them: ``retract(z, delta) = z + delta``."""

    def zero(self, z: Any) -> Any:
        return trees.tree_map(torch.zeros_like, z)

    def retract(self, z: Any, delta: Any) -> Any:
        return trees.tree_map(torch.add, z, delta)

    def local(self, z: Any, y: Any) -> Any:
        return trees.tree_map(torch.sub, y, z)

    def project(self, z: Any) -> Any:
        return z

    def check(self, z: Any) -> None:
        return None
