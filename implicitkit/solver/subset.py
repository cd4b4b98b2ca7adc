"""Some samples of a solve, to be looked at alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations

__all__ = ["subset"]


def subset(f: Evaluations, which: Tensor, whole: bool = False) -> tuple[Tensor, Any, Any]:
    """The samples of all rows in which one is asked for (``whole``: of all rows), and the system and tensors of those."""
    per_row = f.system.samples_per_row
    rows = which.view(-1, per_row).any(1)
    samples = rows.repeat_interleave(per_row).nonzero().squeeze(1)
    if whole or not f.system.can_select or len(samples) == len(which):
        return torch.arange(len(which), device=which.device), f.system, f.theta
    system, theta = f.system.select(rows.nonzero().squeeze(1), f.theta)
    return samples, system, theta
