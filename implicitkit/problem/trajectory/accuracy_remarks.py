"""What is said of a trajectory that ends before its time, or that small errors decide."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.errors import ConvergenceWarning, warn

APART = 1e-2  # of its size, by which two trajectories as accurate as this one may differ


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


def compare(followed: Tensor, found: Tensor, share: float) -> None:
    """Warn where two trajectories have little in common; ``share`` of what is between them counts."""
    if compat.batches_in_front(found)[1] or compat.batches_in_front(followed)[1] or not found.numel():
        return
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


def tell_lost() -> None:
    """Warn that derivatives move by what the steps do not follow."""
    warn(
        "InitialValue: the steps follow the trajectory, but not its derivatives, by more than 0.01 of their size: something "
        "at rest, or nearly so, moves faster than they are long once it is disturbed, over so long a time that steps short "
        "enough are too many. Ask for a shorter time or give shorter steps (accuracy=, steps=)",
        ConvergenceWarning,
    )
