"""What is known of a class, for as long as somebody else holds it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def by_class(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """``function``, called once for each class.  What it returns must not lead to that: a class made in a function
    leads to all that its methods read there, and a cache that holds it keeps tensors alive."""
    known: dict[int, tuple[T, weakref.ref[Any]]] = {}

    @functools.wraps(function)
    def of(kind: Any) -> T:
        found = known.get(id(kind)) or learned(kind)
        return found[0]

    def learned(kind: Any) -> tuple[T, weakref.ref[Any]]:
        key = id(kind)  # it is forgotten before another class can be where this one was
        found = known[key] = function(kind), weakref.ref(kind, lambda _: known.pop(key, None))
        return found

    return of
