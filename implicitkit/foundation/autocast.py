"""``torch.autocast`` around a solve: the user's function is cast, as it would be anywhere, what a solver computes is not.

Autocast computes matrix products and convolutions of ``float32`` in its own dtype.  It leaves ``float64`` alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.pytrees import tree_flatten
from implicitkit.foundation.wording import raise_of_shapes

HALF = (torch.float16, torch.bfloat16)
_HALF = 1e-4  # eps of a precision in which eps^(2/3) is many times what rounding allows


def casts(device_type: str) -> bool:
    """Is autocast on for a device?  Never for one that autocast does not know."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def cast_as_now(device_type: str) -> Callable[[], Any]:
    """A context that restores the autocast state of this moment (backward runs outside the user's region)."""
    if not casts(device_type):
        return contextlib.nullcontext
    return Cast(device_type, torch.get_autocast_dtype(device_type))


@dataclass(frozen=True)
class Cast:
    """Makes contexts in which matrix products are computed in ``dtype``."""

    device_type: str
    dtype: torch.dtype

    def __call__(self) -> Any:
        return torch.autocast(self.device_type, dtype=self.dtype)


def cast_as(state: Any) -> Any:
    """A context with autocast in the precision of a state in half precision, from its first leaf; else none."""
    half = next((x for x in tree_flatten(state)[0] if isinstance(x, Tensor) and x.dtype in HALF), None)
    return contextlib.nullcontext() if half is None else torch.autocast(half.device.type, dtype=half.dtype)


def full_precision(device_type: str) -> Any:
    """A context without autocast: solvers compute in the dtype of the state, only the user's function is cast."""
    return torch.autocast(device_type, enabled=False) if casts(device_type) else contextlib.nullcontext()


def under(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called in this context."""
    if context is contextlib.nullcontext:
        return function

    def inside(*args: Any) -> Any:
        with context():
            return function(*args)

    return inside


def uncast_call(function: Callable[..., Any], part: Any, z: Any, *args: Any) -> Any:
    """``function(z, *args)`` of a ``part``, in the precision of the tensor ``z``; shapes that do not fit are said."""
    try:
        if isinstance(z, Tensor) and casts(z.device.type):
            with full_precision(z.device.type):
                return function(z, *args)
        return function(z, *args)
    except RuntimeError as error:
        raise_of_shapes(error, part, z, *args)


def uncast(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method ``(self, tensor, ...)`` of a part, called by :func:`uncast_call`."""

    @functools.wraps(method)
    def called(self: Any, z: Any, *args: Any) -> Any:
        return uncast_call(functools.partial(method, self), self, z, *args)

    return called


def computing_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The precision in which a function of tensors of ``dtype`` computes now, and so can be solved."""
    return precision(dtype, cast_as_now(device_type))


def precision(dtype: torch.dtype, context: Any) -> torch.dtype:
    """The dtype in which a function computes for a state of ``dtype`` in a context of :func:`cast_as_now`."""
    return context.dtype if isinstance(context, Cast) and dtype is not torch.float64 else dtype


def default_tolerance(dtype: torch.dtype, device_type: str, iteration: bool) -> float:
    """The ``rtol`` where none is given: ``eps^(2/3)``, of a fixed point (``iteration``) in half precision ``2 eps``, with
    ``eps`` of the precision in which a function of ``dtype`` computes now.  Rounding leaves about ``eps / 2`` of a fixed
    point's residual, and of others, where much cancels, more than ``2 eps``."""
    eps = torch.finfo(computing_dtype(dtype, device_type)).eps
    return 2 * eps if iteration and eps > _HALF else eps ** (2 / 3)
