"""Functions that return something beside what must hold: ``has_aux=True``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from implicitkit.foundation.failing_matrices import failing_as_nan
from implicitkit.foundation.wording import kind_of
from implicitkit.problem.robust import Robust
from implicitkit.problem.wrapping import Around


class ValueOnly(Around):
    """``function(z, *args) -> (value, aux)`` as a function that returns the value."""

    def __call__(self, z: Any, *args: Any) -> Any:
        return _pair(self.function(z, *args))[0]


def auxiliary(function: Callable[..., Any], z: Any, args: tuple[Any, ...], failing: bool) -> Any:
    """``aux`` of one ordinary, differentiable evaluation ``function(z, *args) -> (value, aux)``; ``failing``: matrices of
    some samples have no factors."""
    while isinstance(function, Robust):
        function = function.function
    with failing_as_nan() if failing else contextlib.nullcontext():
        return _pair(function.function(z, *args) if isinstance(function, ValueOnly) else function(z, *args))[1]


def _pair(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) else kind_of(out)
        raise TypeError(f"with has_aux=True the function must return a pair (value, aux); it returned {got}")
    return out
