r"""Does any point satisfy the constraints, as far as a point that violates them least can tell?

There ``J'y = 0`` with ``y`` what is violated, ``y_i = h_i`` and ``max(g_i, 0)``: a stationary point of ``|y|^2``.  With
these weights held, ``y'c`` is zero or less wherever the constraints hold; if it is convex (always, if they are linear) it is
``|y|^2`` and more everywhere, and no point satisfies them (Farkas).  Whether it is nowhere far less is asked at points all
around, near and far.
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
_FAR = (1e-2, 1e-1, 1.0, 1e1, 1e2, 1e4)  # times max(|z|, 1)
_WAYS = 4  # and their opposites


def no_point_satisfies(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """Samples among ``which`` whose constraints no point seems to satisfy, ``(batch,)``; as many products as there
    are constraints, and 48 evaluations where a violation is stationary."""
    model = Model(f)
    known = model.problem.prox is None or isinstance(model.problem.prox, (Bounded, Projected))
    if not known or not 0 < model.count <= _LARGEST or model.size > _LARGEST or not bool(which.any()):
        return torch.zeros_like(which)
    z = model.split(w)[0]
    _, _, c, J = model.local(z)
    y = torch.where(model.one_sided & (c < 0), 0, c)
    along, terms = (y.unsqueeze(1) @ J).squeeze(1), (y.abs().unsqueeze(1) @ J.abs()).squeeze(1)
    left = z - model.proximal(z - along, 1.0)
    level = y.square().sum(1)
    size = z.abs().amax(1, keepdim=True).clamp_min(1)
    found = which & (level > 0) & ((left.abs() <= _STATIONARY * terms).all(1) | (along == 0).all(1))  # false for NaN
    for way in seeded.normal(_WAYS, z.shape[1], seed=0).to(z):
        for share in _FAR:
            for side in (share, -share):
                if not bool(found.any()):
                    return found
                there = model.values(model.proximal(z + side * size * way, 1.0))[1]
                found = found & ~((y * there).sum(1) < _LESS * level)
    return found
