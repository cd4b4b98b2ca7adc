"""How deep inside solves an evaluation is: what watches a function does not watch the solves inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_solves: ContextVar[int] = ContextVar("solves", default=0)


def depth() -> int:
    """Inside how many solves this is, and linear solves of their derivatives."""
    return _solves.get()


def nested(solve: F) -> F:
    """``solve``, which is one deeper."""

    @functools.wraps(solve)
    def entry(*args: Any, **kwargs: Any) -> Any:
        token = _solves.set(_solves.get() + 1)
        try:
            return solve(*args, **kwargs)
        finally:
            _solves.reset(token)

    return entry  # type: ignore[return-value]
