r"""A minimum over a set, claimed beside the set, or at zero: has the objective a value in the set there?

    z = P(z - g),   g = df(z)

is met to any tolerance by a ``z`` that is small enough and a ``g`` that points out of the set, wherever the step may lead.
A search that is led to the edge of an objective's domain (``-log det Z`` on the cone: to ``Z = 0``, where it is infinite)
ends at such a point: beside the set by as much as the point is large, where the objective is another function, or none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.problem.argmin import Bounded, Projected
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

_HIDDEN = 1e3  # units in the last place of a slope, of which so large a ``z`` has few digits left beside it
OUT_OF_DOMAIN = (
    "There, or at the nearest point of the set, the objective has no finite value: the search was led to the edge of the "
    "objective's domain (that of a logarithm, of log det, of 1 / z). Start well inside it, or say where it ends (for z >= 0 "
    "minimise over z = exp(y), for a matrix over L with Z = L L')"
)


def no_value_in_the_set(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """For which of the samples ``which`` is ``|z - P(z)| >= eps^{1/2} |z|``, and the objective not finite at ``P(z)``,
    ``(batch,)``?  ``w``: ``(batch, n + m)``."""
    model = Model(f)
    if not isinstance(model.problem.prox, (Bounded, Projected)) or not bool(which.any()):
        return torch.zeros_like(which)
    z = model.split(w)[0]
    inside = model.inside(z) if isinstance(model.problem.prox, Bounded) else model.proximal(z, 1.0)
    beside = torch.linalg.vector_norm(z - inside, dim=1) >= torch.finfo(w.dtype).eps ** 0.5 * z.norm(dim=1)
    which = which & beside
    return which & ~torch.isfinite(model.values(inside)[0]) if bool(which.any()) else which


def no_value_at_the_end(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """For which of the samples ``which``, from where no way led down, is the objective not finite at ``z``, or at ``P(z)``
    where that is another point and the slope ``10^{-3} / eps`` times as long as ``z``, ``(batch,)``?"""
    model = Model(f)
    if not isinstance(model.problem.prox, Projected) or not bool(which.any()):  # between bounds a slope is lost with it
        return torch.zeros_like(which)
    z, value = model.split(w)[0], f.values(w)[0]
    lost, inside = which & ~torch.isfinite(value), model.proximal(z, 1.0)
    moved = which & ~lost & (inside != z).any(1)
    if bool(moved.any()):
        steep = torch.linalg.vector_norm(model.slope(z, None, w)[2], dim=1)
        moved = moved & ~(torch.linalg.vector_norm(z, dim=1) > _HIDDEN * torch.finfo(w.dtype).eps * steep)
    return lost | (moved & ~model.values(inside)[0].isfinite()) if bool(moved.any()) else lost
