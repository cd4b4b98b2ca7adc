r"""A function that draws random numbers: is there anything to converge to?

Of one that is known to draw them (:mod:`implicitkit.lifting.purity`), ``F`` is evaluated twice at the point where a solver
ended.  Where the two differ by more than what ``|F|`` had to come down to, no point solves it, and whatever was claimed was
chance.
"""

from __future__ import annotations

import torch

from implicitkit.solution import Status
from implicitkit.solver.base import Outcome, account
from implicitkit.solver.evaluations import Evaluations


def refuse_noise(f: Evaluations, outcome: Outcome) -> bool:
    """Samples whose residual at ``outcome.z`` is another at each evaluation have ``STALLED``; have all?"""
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
