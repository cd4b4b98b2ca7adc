"""Is a cell causal that is said to be?  A few evaluations tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_deq.rows import ripples

_GOLDEN = 0.381966  # of the sequence, modulo one: from one place where the future begins to the next
_PLACES = 4  # of them at least
_SMALL = 1e-3  # of the largest value, below which a change may be rounding of a part in single precision ...
_SHORT, _LESS = 1e-3, 0.1  # ... which a change of the future that is so much shorter leaves larger than this share


def check_causal(cell: Any, f: Callable[[Any], Any], z: Any, joint: bool) -> bool:
    """Raise where the map ``f`` looks at later positions of the state; ``False`` where that cannot be told yet.

    ``f`` is asked at a state like no other, and where a part of that from some position on is another, in each sample from
    another one on; with few samples more than once.  A change that is small and no smaller where the future changes little
    is rounding of a part in lower precision.  What cannot be seen there (a gate that is shut at first, a later
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
            leaks = _leaks(f, here, before, later, 1.0)
            leaked = [_is_leak(a, leak) for a, leak in zip(before, leaks, strict=True)]
            if not any(bool(at.any()) for at in leaked):
                continue
            if all(bool((leak <= _SMALL * a.abs().amax()).all()) for a, leak in zip(before, leaks, strict=True)):
                again = _leaks(f, here, before, later, _SHORT)
                rounded = [bool(b.amax() > _LESS * a.amax()) for a, b in zip(leaks, again, strict=True)]
                leaked = [at & (not is_rounding) for at, is_rounding in zip(leaked, rounded, strict=True)]
            _refuse(cell, leaked, cuts)
    return True


def _leaks(f: Callable[[Any], Any], here: Any, before: Sequence[Tensor], later: Tensor, share: float) -> list[Tensor]:
    """How much each value that is not ``later`` changes where the later part of the state is another, by this ``share``."""
    there = ik.extend.trees.tree_map(lambda t: torch.where(_beside(later, t), t + share * (1 - 3 * t), t), here)
    after = ik.extend.trees.tree_flatten(f(there))[0]
    return [(a - b).abs().masked_fill(_beside(later, a), 0) for a, b in zip(before, after, strict=True)]


def _is_leak(a: Tensor, leak: Tensor) -> Tensor:
    """Where a value ``a`` changes by more than sums that are taken in another order do (Fourier transforms)."""
    eps = torch.finfo(a.dtype).eps
    return leak > min(eps**0.5, 1e3 * eps) * a.abs().amax()


def _refuse(cell: Any, leaked: Sequence[Tensor], cuts: Tensor) -> None:
    for at in leaked:
        if bool(at.any()):
            sample, position, *_ = at.nonzero()[0].tolist()
            raise ValueError(
                f"{type(cell).__name__} is said to be causal, and is not: position {position} of its value (counted from "
                f"0) changed when the state changed from position {int(cuts[sample])} on. Mask what looks ahead: in "
                "attention all later positions, in convolutions pad on the left only, and take no sums, means or "
                "normalisations over all positions; or leave causal out if later positions may be seen"
            )


def _beside(which: Tensor, leaf: Tensor) -> Tensor:
    """``which`` ``(batch, positions)``, to be broadcast against a leaf ``(batch, positions, ...)``."""
    return which.view(*which.shape, *[1] * (leaf.ndim - 2))
