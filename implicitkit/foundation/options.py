"""Options of configured objects, declared: what each may be, said once and checked in one place.

    @dataclass(frozen=True)
    class Anderson(Method):
        memory: int = 8
        damping: float = 1.0

        def __post_init__(self) -> None:
            check_options(self, memory=at_least(1), damping=between(0, 2))

A value of the wrong type is a ``TypeError``, one out of range a ``ValueError``; both name the option and what was given.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

__all__ = [
    "Requirement",
    "above",
    "at_least",
    "between",
    "check_call",
    "check_options",
    "finite",
    "not_negative",
    "one_of",
    "optional",
    "positive",
]


@dataclass(frozen=True, eq=False)
class Requirement:
    """What an option may be.

    Attributes:
        holds: is a value of the right type allowed? text: "must be positive". kind: ``"integer"``, ``"number"`` or
            ``"choice"``. absent: is ``None`` allowed?
    """

    holds: Callable[[Any], bool]
    text: str
    kind: str = "number"
    absent: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise unless the option ``name`` may be ``value``."""
        if value is None and self.absent:
            return
        if type(value) not in _PLAIN[self.kind] and not _TYPES[self.kind](value):
            also = " or None" if self.absent else ""
            article = "an" if self.kind == "integer" else "a"
            raise TypeError(f"{name} must be {article} {self.kind}{also}, got {value!r}")
        if not self.holds(value):
            raise ValueError(f"{name} {self.text}, got {value!r}{self._hint(value)}")

    def _hint(self, value: Any) -> str:
        near = difflib.get_close_matches(str(value), self.text.split("'")[1::2], 1) if self.kind == "choice" else []
        return f". Did you mean {near[0]!r}?" if near else ""


def check_options(owner: Any, **requirements: Requirement) -> None:
    """Raise unless every option of ``owner`` is what is required.

    Raises:
        TypeError: a value of the wrong type. ValueError: one that is not allowed.
    """
    for name, requirement in requirements.items():
        requirement.check(name, getattr(owner, name))


def check_call(form: str, function: Any) -> None:
    """Raise unless ``function`` can be called as ``form`` says, ``"prox(z, step)"``.

    Raises:
        TypeError: it is a class, or takes fewer or more arguments.
    """
    name, _, rest = form.partition("(")
    if inspect.isclass(function):
        raise TypeError(
            f"{name} is called as {form}, and got the class {function.__name__}: make an object of it first"
        )
    if not inspect.isroutine(function):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some routines of C do not tell
        return
    try:
        signature.bind(*rest.split(","))
    except TypeError as error:
        raise TypeError(f"{name} is called as {form}, which the function given does not take: {error}") from None


@functools.cache
def at_least(bound: int) -> Requirement:
    """An integer, ``bound`` or more."""
    text = "cannot be negative" if bound == 0 else f"must be at least {bound}"
    return Requirement(lambda value: value >= bound, text, "integer")


@functools.cache
def positive() -> Requirement:
    """A number above zero."""
    return Requirement(lambda value: value > 0, "must be positive")


@functools.cache
def not_negative() -> Requirement:
    """A number, zero or more."""
    return Requirement(lambda value: value >= 0, "cannot be negative")


@functools.cache
def above(bound: float) -> Requirement:
    """A number larger than ``bound``."""
    return Requirement(lambda value: value > bound, f"must be larger than {bound:g}")


@functools.cache
def between(low: float, high: float, *, closed: bool = False) -> Requirement:
    """A number in ``(low, high)``; with ``closed``, in ``(low, high]``."""
    text = f"must be in ({low:g}, {high:g}{']' if closed else ')'}"
    return Requirement(lambda value: low < value <= high if closed else low < value < high, text)


@functools.cache
def finite() -> Requirement:
    """A finite number."""
    return Requirement(lambda value: math.isfinite(value), "must be finite")


@functools.cache
def one_of(*choices: str) -> Requirement:
    """One of some words."""
    quoted = [repr(choice) for choice in choices]
    text = f"must be {quoted[0]} or {quoted[1]}" if len(quoted) == 2 else f"must be one of {', '.join(quoted)}"
    return Requirement(lambda value: value in choices, text, "choice")


@functools.cache
def optional(requirement: Requirement) -> Requirement:
    """The same, or ``None``."""
    return replace(requirement, absent=True)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


_PLAIN: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (float, int), "choice": ()}  # the everyday ones
_TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
    "number": _is_number,
    "choice": lambda value: True,
}
