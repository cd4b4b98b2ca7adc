"""``torch.autocast`` around a solve: the user's function is cast, as it would be anywhere, what a solver computes is not.

Autocast computes matrix products and convolutions of ``float32`` in its own dtype.  It leaves ``float64`` alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["cast_as_now", "computing_dtype", "full_precision"]


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
