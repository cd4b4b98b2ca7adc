r"""Unknowns on which nothing depends where a search has come to rest: a price below which nobody sells.

The equations of a complementarity problem, ``min(x, G(x, u)) = 0`` with a multiplier ``u``, do not depend on ``u`` while
all ``x_i < G_i``; nor does ``relu(u) - 1`` for ``u < 0``.  Every column ``dF/du`` is then zero, ``|F|`` has a minimum along
the other unknowns that is no solution, and no step that follows a derivative moves ``u``.  So ``u`` is moved until something
depends on it, and the search goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.options import adopts, check_options, part
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.evaluations import Evaluations

_MOVES = (1.0, -1.0, 10.0, -10.0, 100.0, -100.0)  # of an unknown, or where it is zero of the largest; of one if all are
_BESIDE = 1e-3  # likewise, where an idle unknown is idle still


@dataclass(frozen=True)
@adopts("solver", "solves")
class Awakened(Solver):
    """A solver from where the start has no idle unknowns; samples that have none to begin with are given up at once.

    Columns of ``J`` that are zero are seen in one product ``J' w``, ``w`` random: ``(J' w)_j = 0`` almost surely means that
    ``J_ij = 0`` for all ``i``.  One evaluation and one product, and as many for each of up to six moves.

    Args:
        solver: of equations.

    Raises:
        TypeError: it is no solver.
    """

    solver: Any
    name: ClassVar[str] = "awakened"

    def __post_init__(self) -> None:
        check_options(self, solver=part("solver", Solver))

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        start = awake(f, z0)
        if start is z0:
            norm = torch.full_like(options.size(z0), torch.inf)
            steps = torch.zeros(len(z0), dtype=torch.int64, device=z0.device)
            given_up = torch.full_like(steps, int(Status.STALLED))
            return Outcome(z0, norm, steps, given_up, f.evaluations, f.sample_evaluations)
        found: Outcome = self.solver.run(f, start, options)
        found.solver = found.solver or self.solver.name
        woken = (start != z0).any(1)
        if not bool(woken.all()):  # the others go the way that they go alone
            found.z, found.steps = torch.where(woken.unsqueeze(1), found.z, z0), torch.where(woken, found.steps, 0)
            found.residual_norm = torch.where(woken, found.residual_norm, torch.inf)
            kept = woken | (found.status == int(Status.STOPPED))
            found.status = torch.where(kept, found.status, int(Status.STALLED))
        return found


def awake(f: Evaluations, z: Tensor) -> Tensor:
    """``z`` with the unknowns moved on which ``F`` does not depend there, by 1, 10 or 100 times their own size to either
    side, wherever it first does; ``z`` itself where there are none, or none that can be helped.  ``(batch, n)``."""
    probe = f.beside("root")
    idle = torch.isfinite(probe(z)).all(1, keepdim=True) & (_pull(probe, z) == 0)
    start, found = z, torch.zeros_like(idle)
    largest = z.abs().amax(1, keepdim=True)
    size = torch.where(z != 0, z.abs(), torch.where(largest > 0, largest, 1))
    if bool(idle.any()):  # on one side at least, unlike z^2 at zero
        level = [_pull(probe, torch.where(idle, z + side * size, z)) == 0 for side in (_BESIDE, -_BESIDE)]
        idle = idle & (level[0] | level[1])
    if bool(idle.any()):
        for move in _MOVES:
            moved = torch.where(idle & ~found, z + move * size, start)
            pull = _pull(probe, moved)
            woken = idle & ~found & torch.isfinite(pull) & (pull != 0)
            start, found = torch.where(woken, moved, start), found | woken
            if bool((found | ~idle).all()):
                break
    return start if bool(found.any()) else z


def _pull(f: Evaluations, z: Tensor) -> Tensor:
    """``J' w``, ``(batch, n)``."""
    return f.linearize(z).rmv(seeded.normal(*z.shape, seed=1).to(z))
