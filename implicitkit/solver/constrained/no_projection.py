r"""Is what was given as a projection one?

Of a set, ``P(P(z)) = P(z)``; hence where ``z = P(z - df(z))`` is met, ``P(z) = z``.  A map into a set that moves its points
(softmax into the simplex, a sigmoid into ``[0, 1]``) has such a ``z`` as well, which is no minimum.  How far ``P(z)`` may be
from ``z`` is ``eps^{1/4}`` times ``|z|`` or ``|z - df(z)|``: projections that are found by iterations are known to some
digits only of what they are given, the tip of a cone, which is at zero, to none of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.problem.argmin import Projected
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

NO_PROJECTION = (
    "What is given as project= is no projection on a set: it moves points that it has returned itself (as softmax and "
    "sigmoid do), and minima are not its fixed points. Give the nearest point of the set (ik.project has those of common "
    "sets), or minimise over unknowns that the map takes into the set, f(map(y))"
)


def moved_by_projection(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """Which of the samples ``which`` does their projection move, though it has returned them, ``(batch,)``?  ``w``:
    ``(batch, n)``."""
    model = Model(f)
    if (
        type(model.problem.prox) is not Projected or model.count or not bool(which.any())
    ):  # those with natural maps are ours
        return torch.zeros_like(which)
    z = model.split(w)[0]
    off = torch.linalg.vector_norm(model.proximal(z, 1.0) - z, dim=1)
    known = off / torch.finfo(z.dtype).eps ** 0.25
    which = which & (known > torch.linalg.vector_norm(z, dim=1))
    return which & (known > torch.linalg.vector_norm(z - model.slope(z)[2], dim=1)) if bool(which.any()) else which
