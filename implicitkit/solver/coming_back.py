r"""Steps that have led out of the domain, and the way back into it."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.claims_that_wait import Point
from implicitkit.solver.evaluations import Evaluations

_HALVINGS = 30  # of a step, at most
_BESIDE = 1e-6  # of a step, where the gradient is there again if it is a kink that the step has met


def come_back(f: Evaluations, last: Point, z: Tensor, lost: Tensor) -> Tensor:
    r"""Where samples that are ``lost`` at ``z``, one step after ``last``, go on from, ``(batch, n)``: ``z`` where there is
    no way back.

    Of an iteration by the plain step, where an accelerated one has led where the map has no value (a capital below zero,
    of which it takes a power).  Of a minimisation by halving the step until the gradient is finite again: the objective
    may have a value, and a low one, where its derivative overflows (``1 / (1 + exp(u))`` at ``u = 89`` in single precision:
    zero, with the slope ``inf / inf``).  Not where the gradient is finite beside ``z``: that is a kink, in which a minimum
    may lie.
    """
    assert last.F is not None
    if f.kind.iteration:
        return torch.where(lost.unsqueeze(1), last.z + last.F, z)
    open_, share, found = lost & torch.isfinite(z).all(1), 1 - _BESIDE, z
    for halving in range(_HALVINGS + 1):
        if not bool(open_.any()):
            break
        trial = torch.where(open_.unsqueeze(1), last.z + share * (z - last.z), found)
        back = open_ & torch.isfinite(f.residual(trial)).all(1)
        if halving:
            found = torch.where(back.unsqueeze(1), trial, found)
        open_, share = open_ & ~back, 0.5 ** (halving + 1)
    return found
