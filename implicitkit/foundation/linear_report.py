"""How the linear solve inside a derivative went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

__all__ = ["LinearReport"]


@dataclass(frozen=True)
class LinearReport:
    """Figures of the linear solve inside a derivative, each of the batch's shape (with a leading dimension for every
    further direction solved at once).  ``transposed``: reverse mode."""

    converged: Tensor
    residual_norm: Tensor
    steps: Tensor
    transposed: bool = True

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(
            "solution.backward has the figures of a derivative's linear solve and is no method: a derivative begins at the "
            "value, solution.value.sum().backward()"
        )

    def __repr__(self) -> str:
        return f"LinearReport({self.summary() if self.steps.numel() else 'an empty batch'})"

    def summary(self) -> str:
        """How it went, in a few words."""
        good, total = int(self.converged.sum()), self.converged.numel()
        state = "converged" if good == total else f"{good}/{total} converged"
        return f"{state}, steps={int(self.steps.max())}, residual={self.residual_norm.max():.2e}"
