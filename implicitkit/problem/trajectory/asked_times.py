"""The times at which a trajectory is asked for, and the states there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.trees import Layout, tree_map


def check_order(t: Tensor) -> None:
    """Times go one way, and end.

    Raises:
        ValueError: they do not.
    """
    if not bool(torch.isfinite(t).all()):
        raise ValueError(f"t must be finite, got {t.tolist()}: a state at rest is found by ik.steady_state")
    d = t.diff()
    if not bool((d > 0).all() | (d < 0).all()):
        raise ValueError(f"t must be strictly increasing or strictly decreasing, got {t.tolist()}")


def as_times(t: Any) -> Tensor:
    """Numbers as a tensor."""
    try:
        return torch.as_tensor(t, dtype=torch.float64, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"t must hold times, a tensor or a list of numbers, got {t!r}") from None


def unpacked(layout: Layout, z0: Any, y0: Tensor, later: Tensor) -> Any:
    """The states at the times asked for, ``(*batch, T, ...)`` in every leaf."""
    states = torch.cat((y0.unsqueeze(-2), later), -2)
    dims, count = layout.batch_dims, states.shape[-2]
    alike = tree_map(
        lambda leaf: leaf.detach().unsqueeze(dims).expand(*leaf.shape[:dims], count, *leaf.shape[dims:]), z0
    )
    return Layout(alike, dims + 1).unpack(states.reshape(layout.batch * count, layout.size))
