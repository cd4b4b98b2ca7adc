"""Monotone step halving: the line search of the Newton methods."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.solvers.function import Function

__all__ = ["Halved", "halve"]

_DECREASE = 1e-4


class Halved(NamedTuple):
    """The outcome of a search: the points, the factors ``t`` ``(batch,)``, and where ``|F|`` was lowered ``(batch,)``."""

    z: Tensor
    t: Tensor
    lowered: Tensor


def halve(f: Function, z: Tensor, d: Tensor, norm: Tensor, halvings: int) -> Halved:
    """The first of ``t = 1, 1/2, 1/4, ...`` with ``|F(z + t d)| <= (1 - 1e-4 t) |F(z)|``, sample by sample.

    (Deuflhard 2011, *Newton Methods for Nonlinear Problems*, section 3.1; Kelley 1995, eq. 8.1.)  A trial that is not
    finite counts as too long.  Where no ``t`` down to ``2^-halvings`` will do, the best of those tried is returned, and
    ``lowered`` says so.  ``f`` has been evaluated last at the points returned.

    Args:
        f: the residual. z, d: point and direction ``(batch, n)``. norm: ``|F(z)|``, ``(batch,)``.
        halvings: how often at most.
    """
    trial = z + d
    trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
    t = torch.ones_like(norm)
    lowered = trial_norm <= (1 - _DECREASE) * norm
    searching = f.active & ~lowered
    if not bool(searching.any()):
        return Halved(trial, t, lowered)
    best_t, best_norm = t, torch.where(trial_norm < torch.inf, trial_norm, torch.inf)
    for _ in range(halvings):
        t = torch.where(searching, 0.5 * t, best_t)
        trial = torch.addcmul(z, t.unsqueeze(1), d)
        trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
        better = searching & (trial_norm < best_norm)
        best_t, best_norm = torch.where(better, t, best_t), torch.where(better, trial_norm, best_norm)
        lowered = lowered | (searching & (trial_norm <= (1 - _DECREASE * t) * norm))
        searching = searching & ~lowered
        if not bool(searching.any()):
            break
    if not bool((t == best_t).all()):
        trial = torch.addcmul(z, best_t.unsqueeze(1), d)
    return Halved(trial, best_t, lowered)
