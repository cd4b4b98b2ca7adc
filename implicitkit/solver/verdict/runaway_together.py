r"""Do many unknowns run away together, while their differences are determined?

The abilities of a Bradley-Terry model whose reference has never won do: ``F`` changes by far more than itself whichever of
them moves, and so each equation looks healthy.  Their last step tells: it was long, led outwards, and left a third of ``F``
or more, as does the correction ``J d = -F`` where they are.  Nor is there more of ``F`` behind that, as there is behind a
zero.  And no zeros lead from there to the point of that line which is nearest to the origin, as where all ratings may be
moved alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import row_norm
from implicitkit.solver.verdict.rounding_level import NOISE, rounding

_LONG = 5e-4  # of |z|: 1 / (745 p) of exp(-z^p)
_LINE = 1e3  # times |F|, at most, what is left of it all along a line of zeros, which lead nowhere
_LEAVES, _PRODUCTS = 0.1, 20  # of F, what a correction by so many products may leave


def fade_together(f: Evaluations, z: Tensor, F: Tensor, which: Tensor, last: tuple[Tensor, ...], left: float) -> Tensor:
    """Which of the samples ``which`` run away together, ``(batch,)``; a correction where the last step says that they may.

    Args:
        f: the problem's. z, F: ``(batch, n)``. last: the points a step ago, ``F`` there, and the last step of those that
            were seen to run away, as far as they are known. left: what a correction leaves of ``F`` at most near a zero.
    """
    size, length = row_norm(F), row_norm(z)
    if not last:
        return which & False
    point, before, *known = last
    way = known[0] if known else torch.zeros_like(z)
    outwards = (row_norm(z - point) >= _LONG * length) & (length > row_norm(point))
    which = which & ((outwards & (size > left * row_norm(before)) & (size < row_norm(before))) | (row_norm(way) > 0))
    if not bool(which.any()):
        return which
    A = f.linearize(z)
    A.near = None
    found = GMRES().solve(A, -F.to(A.like.dtype), rtol=_LEAVES, atol=0.0, max_steps=_PRODUCTS)
    d = torch.nan_to_num(found.x).to(z.dtype)
    long = found.converged & (row_norm(d) >= _LONG * length)
    d = torch.where(long.unsqueeze(1), d, way)  # by that of rounding errors nothing is known
    further = row_norm(f.residual(z + d))
    which = which & (row_norm(d) > 0) & (further > left * size)
    doubtful = which & ~(further <= size)
    if bool(doubtful.any()):  # beyond a zero there is more
        which = which & ~(doubtful & ~(further <= NOISE * row_norm(rounding(f, z, doubtful))))
    if not bool(which.any()):
        return which
    origin = z - (z * d).sum(1, keepdim=True) / d.square().sum(1, keepdim=True) * d
    return which & (row_norm(f.residual(origin)) > _LINE * size)  # false for NaN
