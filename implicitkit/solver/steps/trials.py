"""Points that are put together of trials, sample by sample."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["taken_where"]


def taken_where(accept: Tensor, trial: Tensor, z: Tensor) -> Tensor:
    """``trial`` of the samples that ``accept`` it, ``(batch,)`` bool, and ``z`` of the others, ``(batch, n)``; where all do,
    the same tensor, of which :class:`~implicitkit.solver.evaluations.Evaluations` remembers what is known."""
    return trial if bool(accept.all()) else torch.where(accept.unsqueeze(1), trial, z)
