"""The numbers of a tensor, for libraries that know no tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import compat

__all__ = ["largest", "numbers"]


def numbers(t: Tensor) -> np.ndarray:
    """``t`` in double precision on the host, whatever transforms surround it; what ``torch.vmap`` maps over stays where it
    is stored."""
    inner = compat.physical(t.to(device="cpu", dtype=torch.float64))
    with compat.at_level_of(inner):
        array: np.ndarray = inner.detach().numpy()
    return array


def largest(t: Tensor) -> float:
    """The largest entry, under ``torch.vmap`` of all that are mapped over; NaN if there is one."""
    return float(compat.batches_in_front(t)[0].max())
