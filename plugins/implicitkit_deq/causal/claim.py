"""Is a cell causal that is said to be?  A few evaluations tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq.rows import ripples

_GOLDEN = 0.381966  # of the sequence, modulo one: from one place where the future begins to the next
_PLACES = 4  # of them at least


def check_causal(cell: Any, f: Callable[[Any], Any], z: Any, joint: bool) -> bool:
    """Raise where the map ``f`` looks at later positions of the state; ``False`` where that cannot be told yet.

    ``f`` is asked at a state like no other, and where a part of that from some position on is another, in each sample from
    another one on; with few samples more than once.  What cannot be seen there (a gate that is shut at first, a later
    position that only a few look at) is not: :func:`future_leak` asks again.

    Args:
        cell: whose map it is. z: a state, every leaf ``(batch, positions, ...)``. joint: samples may read each other.

    Raises:
        ValueError: a value changed that comes before.
    """
    leaves = ik.extend.trees.tree_flatten(z)[0]
    samples, positions = leaves[0].shape[:2]
    if not samples or positions < 2 or ik.extend.transforms_active():
        return False
    order = torch.arange(samples, device=leaves[0].device) * (0 if joint else 1)
    with torch.no_grad(), ik.extend.modules_held():
        here = ik.extend.trees.tree_map(lambda t: t + ripples(t), z)
        before = ik.extend.trees.tree_flatten(f(here))[0]
        for first in range(0, _PLACES, 1 if joint else samples):
            cuts = 1 + ((0.5 + _GOLDEN * (first + order)) % 1 * (positions - 1)).long()
            later = torch.arange(positions, device=cuts.device) >= cuts.unsqueeze(1)  # (batch, positions)
            there = ik.extend.trees.tree_map(lambda t: torch.where(_beside(later, t), 1 - 2 * t, t), here)  # noqa: B023
            for a, b in zip(before, ik.extend.trees.tree_flatten(f(there))[0], strict=True):
                _compare(cell, a, b, later, cuts)
    return True


def _compare(cell: Any, a: Tensor, b: Tensor, later: Tensor, cuts: Tensor) -> None:
    """Raise where two values differ that are not ``later``, by more than sums that are taken in another order do (Fourier
    transforms)."""
    eps = torch.finfo(a.dtype).eps
    changed = (a - b).abs().masked_fill(_beside(later, a), 0)
    leaked = changed > min(eps**0.5, 1e3 * eps) * a.abs().amax()
    if bool(leaked.any()):
        sample, position, *_ = leaked.nonzero()[0].tolist()
        raise ValueError(
            f"{type(cell).__name__} is said to be causal, and is not: position {position} of its value (counted from 0) "
            f"changed when the state changed from position {int(cuts[sample])} on. Mask what looks ahead: in attention all "
            "later positions, in convolutions pad on the left only, and take no sums, means or normalisations over all "
            "positions; or leave causal out if later positions may be seen"
        )


def _beside(which: Tensor, leaf: Tensor) -> Tensor:
    """``which`` ``(batch, positions)``, to be broadcast against a leaf ``(batch, positions, ...)``."""
    return which.view(*which.shape, *[1] * (leaf.ndim - 2))
