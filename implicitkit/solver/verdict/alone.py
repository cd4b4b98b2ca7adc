"""States at rest whose Jacobian is singular although no family of others lies beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import in_working_precision

_ASIDE = 0.1  # of the way that a solve has come, to other states of a family


def is_alone(f: Evaluations, z: Tensor, way: Tensor, factors: tuple[Tensor, Tensor, Tensor], least: Tensor) -> Tensor:
    """Which states ``z`` with a singular ``J = U S V'`` belong to no family, as zero of ``dx/dt = -x^3``, ``(batch,)``:
    a tenth of the ``way`` from the start further along the null space, steps in the other directions do not lead to rest:
    more than ``least`` ``(batch,)`` is left in the directions ``U`` that they do not reach.  Four evaluations.
    """
    U, S, Vh = factors
    along = torch.where(S == 0, (Vh @ in_working_precision(way).unsqueeze(2)).squeeze(2), 0)
    there, left = in_working_precision(z) + _ASIDE * (Vh.mT @ along.unsqueeze(2)).squeeze(2), []
    for _ in range(4):
        F = (U.mT @ in_working_precision(f.residual(there.to(z))).unsqueeze(2)).squeeze(2)
        left.append(torch.linalg.vector_norm(torch.where(S == 0, F, 0), dim=1))
        there = there - (Vh.mT @ torch.where(S == 0, 0, F / S).unsqueeze(2)).squeeze(2)
    return (left[-1] > least) & (left[-1] > _ASIDE * left[0])  # false for NaN
