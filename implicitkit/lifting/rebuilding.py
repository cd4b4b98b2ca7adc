"""Tuples, partials, methods, properties: what they are made of, and the same made of other parts."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any

LONGEST = 4096  # entries of a container that is followed


def parts_of(x: Any) -> Sequence[Any]:
    """What it is made of; of a long tuple the first entries only."""
    if isinstance(x, tuple):
        return (*x[:LONGEST], x.__dict__) if hasattr(x, "__dict__") else x[:LONGEST]
    if isinstance(x, functools.partial):
        return (x.func, *x.args, *x.keywords.values())
    if isinstance(x, types.MethodType):
        return (x.__func__, x.__self__)
    return (x.fget,) if isinstance(x, property) else (x.__func__,)


def rebuilt(x: Any, parts: Any) -> Any:
    """A copy of ``x`` made of other parts, in the order of :func:`parts_of`."""
    if isinstance(x, tuple):
        copy: Any = tuple.__new__(type(x), (*parts[: min(len(x), LONGEST)], *x[LONGEST:]))
        if hasattr(x, "__dict__"):
            copy.__dict__ = parts[-1]
        return copy
    if isinstance(x, functools.partial):
        given = 1 + len(x.args)
        return functools.partial(*parts[:given], **dict(zip(x.keywords, parts[given:], strict=True)))
    if isinstance(x, property):
        return property(parts[0], x.fset, x.fdel, x.__doc__)
    return type(x)(*parts)
