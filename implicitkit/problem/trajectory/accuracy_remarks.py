"""What is said of a trajectory that ends before its time, or that small errors decide."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceWarning, warn

APART = 1e-2  # of its size, by which two trajectories as accurate as this one may differ
_REMEMBERED = 1000  # functions
_grown: dict[Hashable, None] = {}


def end_of(edges: Tensor, states: Tensor) -> str:
    """Up to where trajectories could be followed, of those that could not be to the end."""
    finite = compat.batches_in_front(torch.isfinite(states).all(-1))[0]
    finite = finite.movedim(-2, 0).flatten(1)  # (N + 1, samples)
    lost = ~finite[-1]
    if not bool(lost.any()):
        return ""
    reached = edges[finite[:, lost].sum(0).clamp_min(1) - 1]
    where = ", ".join(f"{float(at):.6g}" for at in reached[:4]) + (", ..." if len(reached) > 4 else "")
    why = "the solution ends there, or rhs is not finite or not smooth"
    return f"The trajectory could be followed to t = {where} only: {why}."


def compare(followed: Tensor, found: Tensor, share: float) -> bool:
    """Warn where two trajectories have little in common; ``share`` of what is between them counts.  Has it been said?"""
    if compat.batches_in_front(found)[1] or compat.batches_in_front(followed)[1] or not found.numel():
        return False
    size = torch.maximum(followed.abs(), found.abs()).amax(-2, keepdim=True)
    apart = ((found - followed).abs() / size.amax(-1, keepdim=True)).nan_to_num(0).amax((-2, -1))
    worst = share * float(apart.max())
    if worst > APART:
        warn(
            f"InitialValue: two methods whose steps are as accurate as accuracy= says give trajectories that differ by "
            f"{worst:.1g} of their size: small errors grow that much (a chaotic equation over a long time, or one without a "
            "continuous solution), or the steps are long for so few stages. The derivative is that of this trajectory, and "
            "as uncertain. Ask for a shorter time, a smaller accuracy= or more stages=",
            ConvergenceWarning,
        )
    return worst > APART


def is_new(rhs: Any, growth: float, accuracy: float | None, later: Tensor) -> bool:
    """Is it the first time that errors of this function may have grown so much?  From now on it is not."""
    if compat.batches_in_front(later)[1]:
        return False
    key = getattr(rhs, "__code__", type(rhs)), int(math.log2(growth)), accuracy, later.dtype
    new = key not in _grown
    if len(_grown) >= _REMEMBERED:
        _grown.clear()
    _grown[key] = None
    return new


def tell_lost(off: np.ndarray) -> None:
    """Warn that derivatives move by what the steps do not follow; ``off (samples,)``: by how much, infinity where that is
    not known."""
    by = f"by {off.max():.1g} of their size" if np.isfinite(off).all() else "or it cannot be told"
    warn(
        f"InitialValue: the steps follow the trajectory, but not its derivatives, {by}{_where(off)}: something "
        "at rest, or nearly so, moves faster than they are long once it is disturbed, over so long a time that steps short "
        "enough are too many. Ask for a shorter time or give shorter steps (accuracy=, steps=)",
        ConvergenceWarning,
    )


def tell_unfollowed(off: np.ndarray) -> None:
    """Warn that derivatives by given steps are not those of the equation; ``off``: as above."""
    by = f"by {off.max():.1g} of their size" if np.isfinite(off).all() else "or it cannot be told"
    warn(
        f"InitialValue: derivatives are those of the given steps, and not those of the equation, {by}{_where(off)}: "
        "once it is disturbed, something turns, grows or is damped faster than the steps are long. Give more steps= or "
        "stages=, or neither: then steps are chosen that follow derivatives, too",
        ConvergenceWarning,
    )


def _where(off: np.ndarray) -> str:
    """Which samples, of several."""
    bad = np.flatnonzero(off > APART)
    if len(bad) == len(off):
        return ""
    return ", in samples " + ", ".join(map(str, bad[:4])) + (", ..." if len(bad) > 4 else "")
