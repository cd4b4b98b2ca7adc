"""Is there anything to converge to?  Not where a function draws random numbers, nor for a map like ``z + 1``."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solution import Status
from implicitkit.solver.base import Outcome, account
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import in_working_precision

DRIFTS = (
    "The map moves a component by the same amount, and not by zero, wherever it was asked, near and far: it seems to have "
    "no fixed point"
)
_FAR = (1e-2, 1.0, 1e2, 1e4)  # times max(|z|, 1)
_WAYS = 3  # and their opposites
_ROUNDED = 4.0  # units in the last place of z + F
_CLEAR = 10.0  # times that, what a component is moved by


def refuse_noise(f: Evaluations, outcome: Outcome) -> bool:
    """Samples whose residual at ``outcome.z`` is another at each evaluation, by more than ``|F|`` had to come down to, have
    ``STALLED``; have all?  Asked of functions known to draw random numbers (:mod:`implicitkit.lifting.purity`)."""
    if not f.system.lifted.random or not len(outcome.z):
        return False
    draws = []
    for _ in range(2):
        probe = Evaluations(f.system, f.theta, f.solves)
        draws.append(probe.residual(outcome.z))
        account(outcome, probe)
    change = torch.linalg.vector_norm(draws[1] - draws[0], dim=1)
    allowed = torch.zeros_like(change) if outcome.tolerance is None else outcome.tolerance.to(change)
    noisy = (change > allowed) & (outcome.status != int(Status.STOPPED))
    if bool(noisy.any()):
        outcome.status = torch.where(noisy, int(Status.STALLED), outcome.status)
        outcome.message = (
            f"The function draws random numbers: at one point its residual changes by {float(change[noisy].max()):.3g} from "
            "one evaluation to the next, so there is nothing to converge to. Call .eval() on a module with dropout, or draw "
            "the numbers once outside and pass them as an argument"
        )
    return bool(noisy.all())


def drifts(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """Samples among ``which`` for which some ``map_i(z) - z_i`` is one number but zero at points all around, near and far,
    ``(batch,)``.

    Where each of them changes, as that of a map with a fixed point does, one evaluation; else 24.
    """
    F = in_working_precision(f.residual(z))
    size = z.abs().amax(1, keepdim=True).clamp_min(1)
    same = which.unsqueeze(1) & torch.isfinite(F) & (F != 0)
    with suppress(Exception):  # outside its domain
        for way in seeded.normal(_WAYS, z.shape[1], seed=0).to(z):
            for share in _FAR:
                for side in (size, -size):
                    if not bool(same.any()):
                        return same.any(1)
                    there = z + share * side * way
                    noise = _ROUNDED * f.eps * (there.abs() + F.abs())
                    moved = in_working_precision(f.residual(there))
                    same = same & ((moved - F).abs() <= noise) & (F.abs() > _CLEAR * noise)  # false for NaN
        return same.any(1)
    return torch.zeros_like(which)
