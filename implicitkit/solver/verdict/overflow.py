"""Is a residual zero because a number on its way there has overflowed (``(1 + z^2)^-0.05`` where ``z^2`` is infinite)?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.tracers import TorchDispatchMode
from implicitkit.solver.evaluations import Evaluations

__all__ = ["has_overflowed"]

_MANY = 16  # samples that are looked at one by one; beyond, they are looked at together


def has_overflowed(f: Evaluations, z: Tensor, point: Tensor, which: Tensor) -> Tensor:
    """Where more numbers are infinite on the way to ``F(z)`` than on that to ``F(point)``, ``(batch,)`` of ``which``.

    ``z`` and ``point``: ``(batch, n)``, on both sides of a jump to zero.  Infinities that are meant (a mask's) are on both.
    Two evaluations of each sample.
    """
    if not bool(which.any()):
        return which
    samples = which.nonzero().squeeze(1).tolist()
    groups = [[i] for i in samples] if len(samples) <= _MANY else [samples]
    before, found = _infinities(f, point), torch.zeros_like(which)
    for group in groups:
        mine = torch.zeros_like(which)
        mine[group] = True
        found = found | (mine & (_infinities(f, torch.where(mine.unsqueeze(1), z, point)) > before))
    return found


def _infinities(f: Evaluations, z: Tensor) -> int:
    with _Infinities() as seen:
        f.residual(z.clone())  # not remembered
    return seen.count


class _Infinities(TorchDispatchMode):
    """Counts infinite numbers in whatever operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.count += int(torch.isinf(t).count_nonzero())
        return out
