"""Numbers held between two others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def held(v: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """``v``, or the end that it has passed, ``low`` or ``high`` (tensors of its shape, or ``None``), each with its own
    derivative; at the very ends that of ``v``.  NaN where one of them is."""
    if low is not None:
        v = torch.where((v < low) | low.isnan(), low, v)
    return v if high is None else torch.where((v > high) | high.isnan(), high, v)
