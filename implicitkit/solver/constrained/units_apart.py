r"""A minimum over a set, claimed where unknowns have units far apart: is it one?

    z = P(z - g),   g = df(z)

is asked in one unit for all unknowns.  Of one in units of ``s_i`` the gradient is ``1 / s_i``, so that beside ``z_i = 1e9``
it is rounded away, or is little beside ``rtol |z|``, wherever ``z_i`` is.  In which units a set is nobody knows (a simplex
has one for all), but a lower point of it close by is a proof: for unknowns ``i`` of like ``|z_i| / |g_i|`` at a time

    f(P(z - t g_i)) < f(z) - eps^{1/2} max(|f(z)|, |Delta f|),   t |g_i| = 1/10, 1/100, 1/1000 of |z_i|

says that ``z`` is no minimum.  ``Delta f`` is the largest change of ``f`` to any of these points or to ``P((1 +- 1/10) z)``:
a small unknown known to ``rtol`` of the largest, as was asked, leaves the square of that, however small ``f(z)`` is.

Asked where the sizes of unknowns, zeros apart, are more than a hundred times apart; or ten times, and ``z_i - g_i`` is
``z_i`` by rounding, though ``g_i z_i`` is not little beside ``f``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.problem.argmin import Projected
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

_SHARES = (0.1, 0.01, 0.001)
_GROUPS = 8  # of unknowns
_RATHER, _APART = 10.0, 100.0  # the largest of them, times the smallest that is not zero
_LOST = 4.0  # units in the last place of ``z_i`` that a gradient step moves it by
UNITS_APART = (
    "The sizes of the unknowns are so far apart that the optimality conditions of a set, z = P(z - df/dz), say nothing of "
    "some of them: a lower point of the set is near. State the problem in units in which all unknowns are of like size "
    "(z = unit * y, minimised over y)"
)


def lower_in_other_units(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """For which of the samples ``which`` is a lower point of the set found so, ``(batch,)``?  ``w``: ``(batch, n)``."""
    model = Model(f)
    if not isinstance(model.problem.prox, Projected) or model.count:
        return torch.zeros_like(which)
    z, eps = model.split(w)[0], torch.finfo(w.dtype).eps
    size = z.abs()
    least = torch.where(size > 0, size, torch.inf).amin(1)
    which = which & (size.amax(1) > _RATHER * least)
    if not bool(which.any()):
        return which
    value, slope, _, _ = model.local(z)
    lost = (slope.abs() <= _LOST * eps * size) & ((slope * size).abs() > eps**0.5 * value.abs().unsqueeze(1))
    which = which & ((size.amax(1) > _APART * least) | lost.any(1))
    if not bool(which.any()):
        return which
    reach = torch.where((slope != 0) & (size > 0), size / slope.abs(), 0)
    decade = torch.where(reach > 0, reach.log10().round(), torch.nan)
    trials = [(1 - _SHARES[0]) * z, (1 + _SHARES[0]) * z]
    for group in decade[which][~decade[which].isnan()].unique()[-_GROUPS:]:
        chosen = decade == group
        t = torch.where(chosen, reach, torch.inf).amin(1, keepdim=True).nan_to_num(0, 0, 0)
        trials += [z - share * t * torch.where(chosen, slope, 0) for share in _SHARES]
    fall = torch.stack([value - model.values(model.proximal(trial, 1.0))[0] for trial in trials])
    fall = torch.where(torch.isfinite(fall), fall, 0)
    return which & (fall.amax(0) > eps**0.5 * torch.maximum(value.abs(), fall.abs().amax(0)))
