"""Constraints of a minimisation: ``Equality(h)`` is ``h(z, *args) = 0``, ``Inequality(g)`` is ``g(z, *args) <= 0``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

__all__ = ["Constraint", "Equality", "Inequality"]


@dataclass(frozen=True)
class Constraint:
    """A function of ``(z, *args)`` of any shape (a pytree of real tensors; with ``batch_dims``, each leaf has the batch
    in front), one condition for each number in it.

    Args:
        function: a function or ``nn.Module``.

    Raises:
        TypeError: ``function`` is not callable.
    """

    function: Callable[..., Any]
    one_sided: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(
                f"{type(self).__name__} needs a callable (z, *args) -> tensor, got {type(self.function).__name__}"
            )


class Equality(Constraint):
    """``h(z, *args) = 0``.  Its multipliers ``y`` enter the Lagrangian as ``+ y'h``."""


class Inequality(Constraint):
    """``g(z, *args) <= 0``.  Its multipliers ``lam >= 0`` enter the Lagrangian as ``+ lam'g``."""

    one_sided: ClassVar[bool] = True
