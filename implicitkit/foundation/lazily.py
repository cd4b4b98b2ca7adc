"""Attributes that are found when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class lazily(Generic[T]):
    """``functools.cached_property`` of objects that one thread has: no lock is taken, which takes Python 3.11 longer than
    most of these answers."""

    def __init__(self, ask: Callable[[Any], T]) -> None:
        self.ask, self.name, self.__doc__ = ask, ask.__name__, ask.__doc__

    def __get__(self, x: Any, kind: Any = None) -> T:
        x.__dict__[self.name] = found = self.ask(x)
        return found
