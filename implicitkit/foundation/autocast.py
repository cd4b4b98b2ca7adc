"""``torch.autocast`` around a solve: the user's function is cast, as it would be anywhere, what a solver computes is not.

Autocast computes matrix products and convolutions of ``float32`` in its own dtype.  It leaves ``float64`` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_HALF = 1e-4  # eps of a precision in which eps^(2/3) is many times what rounding allows


def cast_as_now(device_type: str) -> Callable[[], Any]:
    """A context that restores the autocast state of this moment (backward runs outside the user's region)."""
    if not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype)


def full_precision(device_type: str) -> Any:
    """A context without autocast: solvers compute in the dtype of the state, only the user's function is cast."""
    return (
        torch.autocast(device_type, enabled=False)
        if torch.is_autocast_enabled(device_type)
        else contextlib.nullcontext()
    )


def computing_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The precision in which a function of tensors of ``dtype`` computes now, and so can be solved."""
    if dtype is torch.float64 or device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return dtype
    return torch.get_autocast_dtype(device_type)


def default_tolerance(dtype: torch.dtype, device_type: str, iteration: bool) -> float:
    """The ``rtol`` where none is given: ``eps^(2/3)``, of a fixed point (``iteration``) in half precision ``2 eps``, with
    ``eps`` of the precision in which a function of ``dtype`` computes now.  Rounding leaves about ``eps / 2`` of a fixed
    point's residual, and of others, where much cancels, more than ``2 eps``."""
    eps = torch.finfo(computing_dtype(dtype, device_type)).eps
    return 2 * eps if iteration and eps > _HALF else eps ** (2 / 3)
