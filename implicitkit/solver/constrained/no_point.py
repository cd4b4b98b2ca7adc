r"""Does any point satisfy the constraints, as far as a point that violates them least can tell?

There ``J'y = 0`` with ``y`` what is violated, ``y_i = h_i`` and ``max(g_i, 0)``: a stationary point of ``|y|^2``.  With
these weights held, ``y'c`` is zero or less wherever the constraints hold; if it is convex (always, if they are linear) it is
``|y|^2`` and more everywhere, and no point satisfies them (Farkas).  Whether it is nowhere far less, nowhere concave, and no
plateau, of which nothing is known, is asked at points all around, near and far.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.problem.argmin import Bounded, Projected
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

LARGEST = 256  # unknowns, and constraints, of which each takes a product
_STATIONARY = 1e-3  # of what is added up in J'y
_LESS = 0.5  # times |y|^2: no convex function comes down to that
_FAR = (1e-2, 1e-1, 0.3, 1.0, 3.0, 1e1, 1e2, 1e4)  # times max(|z|, 1)
_BENT = 1e-6  # of what is added up: so much concave is none of rounding
_WAYS = 4  # and their opposites


def no_point_satisfies(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """Samples among ``which`` whose constraints no point seems to satisfy, ``(batch,)``; as many products as there
    are constraints, and 64 evaluations where a violation is stationary."""
    model = Model(f)
    known = model.problem.prox is None or isinstance(model.problem.prox, (Bounded, Projected))
    if not known or not 0 < model.count <= LARGEST or model.size > LARGEST or not bool(which.any()):
        return torch.zeros_like(which)
    z = model.split(w)[0]
    _, _, c, J = model.local(z)
    y = torch.where(model.one_sided & (c < 0), 0, c)
    along, terms = (y.unsqueeze(1) @ J).squeeze(1), (y.abs().unsqueeze(1) @ J.abs()).squeeze(1)
    level = y.square().sum(1)
    size = z.abs().amax(1, keepdim=True).clamp_min(1)
    steep = along.abs().amax(1, keepdim=True)
    unit = torch.where(steep > 0, size / steep, 1)  # neither so short that z rounds it away, nor beyond every bound
    left = z - model.proximal(z - unit * along, 1.0)
    found = which & (level > 0) & ((left.abs() <= _STATIONARY * unit * terms).all(1) | (along == 0).all(1))
    return _nowhere_lower(model, z, y, (level, level, along), found, (terms == 0).all(1))


def shown_around(model: Model, z: Tensor, y: Tensor, level: float) -> bool:
    """Is ``y'c`` no less than half of ``level`` around one sample's ``z`` ``(1, n)``, and nowhere concave?  Three products
    for each unknown and constraint at most, and 68 evaluations."""
    if model.size > LARGEST:
        return False
    size = 1 + float(z.abs().amax())
    curved, alone = (torch.nan_to_num(model.hessian(z, t)) for t in (y, torch.zeros_like(y)))
    bent = torch.linalg.eigvalsh(curved - alone)[0]
    if float(bent[0]) < -_BENT * max(float(bent[-1]), float((y.abs() * model.values(z)[1].abs()).sum()) / size**2):
        return False
    _, _, c, J = model.local(z)
    at = (y * c).sum(1), torch.full_like(z[:, 0], level), (y.unsqueeze(1) @ J).squeeze(1)
    yes = torch.ones_like(z[:, 0], dtype=torch.bool)
    return bool(_nowhere_lower(model, z, y, at, yes, ~yes))


def _nowhere_lower(
    model: Model, z: Tensor, y: Tensor, at: tuple[Tensor, Tensor, Tensor], found: Tensor, flat: Tensor
) -> Tensor:
    """Where, of the samples ``found``, ``y'c`` is nowhere around ``z`` far below a level, nor concave, nor constant where it
    is ``flat``, ``(batch,)``; ``at``: ``y'c`` there and the level, ``(batch,)``, and the slope, ``(batch, n)``."""
    (here, level, along), size = at, z.abs().amax(1, keepdim=True).clamp_min(1)
    for way in seeded.normal(_WAYS, z.shape[1], seed=0).to(z):
        for side in (size, -size):
            last, slope, begin = here, (along * side * way).sum(1), 0.0
            for share in _FAR:
                if not bool(found.any()):
                    return found
                straight = z + share * side * way
                point = model.proximal(straight, 1.0)
                there = (y * model.values(point)[1]).sum(1)
                rise = there - last
                bent = rise < slope * (share - begin) - _BENT * (there.abs() + last.abs())
                lower = (there < _LESS * level) | (bent & (point == straight).all(1))
                found = found & ~(lower | (flat & (rise == 0)))
                last, slope, begin = there, rise / (share - begin), share
    return found
