r"""Multipliers of a point that somebody else has found.

With ``g`` the gradient of the objective, ``J`` the Jacobian of the constraints ``c``, ``F`` the unknowns at no bound:

    minimise over lam   |(g + J' lam)_F|^2 + sum_i (w c_i lam_i)^2,      w = |J_F| / |z|,    the sum over inequalities

At a point with multipliers both terms vanish: where the active constraints are independent these are the only ones.  An
inequality that is not active has none, whatever the weight; those below zero by rounding are raised to it.

Source: Glad & Polak (1979), "A multiplier method with automatic limitation of penalty growth", Math. Programming 17,
140-155.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.dense import lstsq_batched
from implicitkit.problem.argmin import Bounded
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

__all__ = ["with_multipliers"]

_AT = 1e-6  # of the largest unknown and the bound: as near it is at the bound


def with_multipliers(f: Evaluations, z: Tensor) -> Tensor:
    """The state of a program at ``z`` ``(batch, n)``: ``(batch, n + m)``."""
    model = Model(f)
    if not model.count:
        return z
    at = model.local(z)
    free = torch.ones_like(z)
    if isinstance(model.problem.prox, Bounded):
        ends = [e for e in model.bounds(z) or () if e is not None]
        near = [(z - e).abs() <= _AT * (z.abs().amax(1, keepdim=True) + e.abs()) for e in ends]
        free = (~torch.stack([n & e.isfinite() for n, e in zip(near, ends, strict=True)]).any(0)).to(z)
    J = at.jacobian * free.unsqueeze(1)
    size = torch.linalg.vector_norm(J, dim=(1, 2)) / torch.linalg.vector_norm(z, dim=1).clamp_min(
        torch.finfo(z.dtype).tiny
    )
    weight = torch.where(model.one_sided, size.unsqueeze(1) * at.constraints, 0)
    A = torch.cat([J.mT, torch.diag_embed(weight)], 1)
    b = torch.cat([-at.slope * free, torch.zeros_like(weight)], 1)
    found = lstsq_batched(A, b, rcond=1e-12)[0]
    return model.join(z, torch.where(model.one_sided, found.clamp_min(0), found))
