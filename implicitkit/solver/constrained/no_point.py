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

_LARGEST = 256  # unknowns, and constraints, of which each takes a product
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
    if not known or not 0 < model.count <= _LARGEST or model.size > _LARGEST or not bool(which.any()):
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
    for way in seeded.normal(_WAYS, z.shape[1], seed=0).to(z):
        for side in (size, -size):
            last, slope, at = level, (along * side * way).sum(1), 0.0
            for share in _FAR:
                if not bool(found.any()):
                    return found
                straight = z + share * side * way
                point = model.proximal(straight, 1.0)
                there = (y * model.values(point)[1]).sum(1)
                rise = there - last
                bent = rise < slope * (share - at) - _BENT * (there.abs() + last.abs())
                lower = (there < _LESS * level) | (bent & (point == straight).all(1))
                plateau = (terms == 0).all(1) & (rise == 0)
                found = found & ~(lower | plateau)
                last, slope, at = there, rise / (share - at), share
    return found
