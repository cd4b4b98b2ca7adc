"""Looking at the iterates of a solve on its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

__all__ = ["Visit"]


class Visit:
    """A callback that keeps the iterates after some steps, and passes every step on."""

    def __init__(self, at: tuple[int, ...], kept: list[Any], then: Callable[[int, Any, Tensor], Any] | None) -> None:
        self.at, self.kept, self.then = at, kept, then

    def __call__(self, step: int, z: Any, residual_norm: Tensor) -> Any:
        if step in self.at:
            self.kept.append(z)
        return None if self.then is None else self.then(step, z, residual_norm)
