"""Is a residual zero because it has underflowed, or been rounded away (``exp(-1000 z)`` at 1, ``1 - tanh(z)`` at 30)?"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.evaluations import Evaluations

__all__ = ["has_underflowed"]

_HALVINGS = 40  # of the way from the origin to z, at most ...
_BLIND = 2  # ... and as long as nothing but zeros has been seen
_NEAR = 1 / 64  # of its distance from the origin: how closely the edge is found
_TINY = 8.0  # times eps: what is left at the edge, beside F nearer to the origin, of what was rounded away
_DENSE = 64  # unknowns up to which the derivative of each equation is asked, beyond it is that of their sum


def has_underflowed(f: Evaluations, z: Tensor, flat: Tensor) -> Tensor:
    """Where equations ``flat`` ``(batch, n)``, zero at ``z`` and all around, only seem to hold, ``(batch,)``.

    On the way from the origin to ``z`` the last point ``t z`` is looked for, by bisection, at which one of them is not zero.
    A residual that was cut off has a value there that belongs to the distance (``relu(1 - z)`` at 0.99: 0.01); of one
    that has underflowed nothing is left already (``exp(-1000 z)`` at 0.7: 1e-304).  One that is zero all the way is
    a plateau, not more.  An equation that has a derivative at ``z`` has not been cut off
    (``z_0 - z_1`` does not change along ``z`` either, where it is zero).
    """
    A, tiny = f.linearize(z), torch.finfo(z.dtype).tiny
    if z.shape[1] <= _DENSE:
        flat = flat & (A.dense().abs() <= tiny).all(2)
    else:
        flat = flat & (A.T.mv(flat.to(z.dtype)).abs() <= tiny).all(1, keepdim=True)
    if not bool(flat.any()):
        return flat.any(1)

    def at(t: Tensor) -> Tensor:
        F = f.residual((t.unsqueeze(1) * z).to(z.dtype)).abs()
        return torch.where(flat, torch.nan_to_num(F.to(size), nan=0.0, posinf=0.0), 0)

    size = torch.zeros_like(z)
    inner, outer = z.new_zeros(len(z)), z.new_ones(len(z))
    size = edge = at(inner)
    for k in range(_HALVINGS):
        wide = outer - inner > _NEAR * outer
        if not bool((wide if k < _BLIND else wide & (size > tiny).any(1)).any()):
            break
        middle = torch.where(wide, (inner + outer) / 2, inner)
        F = at(middle)
        left = (tiny < F).any(1)
        size, edge = torch.maximum(size, F), torch.where((left & wide).unsqueeze(1), F, edge)
        inner, outer = torch.where(left, middle, inner), torch.where(left | ~wide, outer, middle)
    known = (size > tiny) & (edge > 0)
    return (known & (edge <= _TINY * torch.finfo(z.dtype).eps * size)).any(1)
