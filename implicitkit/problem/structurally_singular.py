"""Unknowns that a function does not look at, and equations that nothing moves: for messages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, seeded, trees
from implicitkit.system import System

_BESIDE = 1e-3  # of max(|z|, 1), where what depends on nothing at a point depends on nothing still


def idle(F: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """Which unknowns move nothing and which equations, not met, nothing moves, at ``z`` and beside, ``(batch, n)``."""
    w, F0 = seeded.normal(*z.shape, seed=1).to(z), F(z)
    unused, fixed = torch.ones_like(z, dtype=torch.bool), F0 != 0
    for point in (z, z + _BESIDE * z.abs().clamp_min(1) * w):
        pull = autodiff.vjp(F, point)[1]
        columns, push = autodiff.vjp(lambda v: pull(v)[0], w)  # noqa: B023
        unused, fixed = unused & (columns == 0), fixed & (push(w)[0] == 0)
    return unused, fixed


def named(system: System, which: Tensor, name: str) -> list[str]:
    """Some of the numbers of a packed state ``(n,)`` by leaf and index, for messages."""
    leaves = system.layout.unpack(which.to(system.layout.dtype).expand(system.batch, -1))
    lead = len(system.layout.batch_shape)

    def said(t: Tensor) -> str:
        found = t.flatten(0, lead - 1)[0] != 0 if lead else t != 0
        return " " if bool(found.all()) else str(found.nonzero().tolist())[1:-1] if bool(found.any()) else ""

    return trees.describe_leaves(leaves, name, said)
