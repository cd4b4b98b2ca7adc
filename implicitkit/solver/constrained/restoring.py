"""Points that solvers of equations have found for a program, put where its set or its term has them exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.problem.argmin import Bounded, Projected
from implicitkit.solver.base import account
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

_ROUNDING = 64.0  # units in the last place of the largest ``z_j``, by which others may move


def put_inside(f: Evaluations, w: Tensor, which: Tensor, counted: Evaluations) -> Tensor:
    """The states ``w`` ``(batch, n + m)`` of the samples ``which`` after a short step ``z <- prox(z - t dL/dz, t)``.

    Newton's method on the natural map solves linear systems: its points are on a bound, or at a zero that ``|z|`` makes, up
    to rounding only (-1e-18, of which there is no root).  At a solution the step changes nothing, whatever ``t``; with
    ``t = sqrt(eps) max |z| / max |dL/dz|`` that rounding is gone, and the others move by rounding.  Where it moves anything
    by more, as where no bound is active and ``dL/dz`` is a residual, ``z`` is projected, or left as it is under a term.  One
    evaluation, which is added to those of ``counted``.
    """
    if f.problem.prox is None or not bool(which.any()):
        return w
    probe = Evaluations(f.system, f.theta, f.solves)
    model = Model(probe)
    z, multipliers = model.split(w)
    slope = model.slope(z, lambda _: multipliers)[2]
    account(counted, probe)
    eps, size = torch.finfo(z.dtype).eps, z.abs().amax(1)
    t = (eps**0.5 * size / slope.abs().amax(1)).nan_to_num(0, 0, 0)
    moved = model.proximal(z - t.unsqueeze(1) * slope, t)
    near = (moved - z).abs().amax(1) <= _ROUNDING * eps * size  # false for NaN
    other = model.proximal(z, 1.0) if isinstance(f.problem.prox, Bounded | Projected) else z
    z = torch.where(which.unsqueeze(1), torch.where(near.unsqueeze(1), moved, other), z)
    return torch.cat([z, multipliers], 1)
