"""Numbers held between two others."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.constants import look


def check_order(what: str, lower: Any, upper: Any) -> None:
    """Raise ``ValueError`` where no number lies between ``lower`` and ``upper`` (numbers, tensors that broadcast, or
    ``None``), under every transform, or one of them is NaN (where they are mapped over, that spoils its own sample)."""
    if torch.compiler.is_compiling():
        return
    given = (-math.inf if lower is None else lower, math.inf if upper is None else upper)
    numbers = isinstance(given[0], (int, float)) and isinstance(given[1], (int, float))
    if numbers and given[0] <= given[1] and given[0] < math.inf and given[1] > -math.inf:
        return
    device = next((end.device for end in given if isinstance(end, Tensor)), "cpu")
    ends = [end if isinstance(end, Tensor) else torch.tensor(end, device=device) for end in given]
    mapped = any(map(compat.is_wrapped, ends))
    look(functools.partial(_check_order, what, mapped), *torch.broadcast_tensors(*ends))


def _check_order(what: str, mapped: bool, low: Tensor, high: Tensor) -> None:
    wrong = ((low > high) if mapped else ~(low <= high)) | (low == math.inf) | (high == -math.inf)
    if bool(wrong.any()):
        raise ValueError(
            f"{what}: the lower bound must not be above the upper one, neither may be NaN, and a number must lie between "
            f"them; got {low[wrong][0]:.6g} and {high[wrong][0]:.6g}"
        )


def held(v: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """``v``, or the end that it has passed, ``low`` or ``high`` (tensors of its shape, or ``None``), each with its own
    derivative; at the very ends that of ``v``.  NaN where one of them is."""
    if low is not None:
        v = torch.where((v < low) | low.isnan(), low, v)
    return v if high is None else torch.where((v > high) | high.isnan(), high, v)
