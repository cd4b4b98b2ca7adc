"""Constraints of a minimisation: ``Equality(h)`` is ``h(z, *args) = 0``, ``Inequality(g)`` is ``g(z, *args) <= 0``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Constraint:
    """A function of ``(z, *args)`` of any shape (a pytree of real tensors; with ``batch_dims``, each leaf has the batch
    in front), one condition for each number in it.

    A class of constraints says what its values mean, ``one_sided = False`` (zero) or ``True`` (at most zero), and may
    compute them from the function by :meth:`values`.

    Args:
        function: a function or ``nn.Module``.

    Raises:
        TypeError: ``function`` is not callable, or the class does not say what its values mean.
    """

    function: Callable[..., Any]
    one_sided: ClassVar[bool]

    def __post_init__(self) -> None:
        if not isinstance(getattr(type(self), "one_sided", None), bool):
            raise TypeError(
                f"{type(self).__name__} does not say what its values mean: use ik.Equality (h = 0) or ik.Inequality "
                "(g <= 0), or define one_sided = False or True in the class"
            )
        if not callable(self.function) or isinstance(self.function, type):
            raise TypeError(
                f"{type(self).__name__} needs a callable (z, *args) -> tensor, got {type(self.function).__name__}"
            )

    def values(self, z: Any, *args: Any) -> Any:
        """What has to be zero, or at most zero: the function's values, unless a class of constraints defines others."""
        return self.function(z, *args)


class Equality(Constraint):
    """``h(z, *args) = 0``.  Its multipliers ``y`` enter the Lagrangian as ``+ y'h``."""

    one_sided: ClassVar[bool] = False


class Inequality(Constraint):
    """``g(z, *args) <= 0``.  Its multipliers ``lam >= 0`` enter the Lagrangian as ``+ lam'g``."""

    one_sided: ClassVar[bool] = True
