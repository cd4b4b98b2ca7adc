"""Is a residual zero because a number underflowed, was rounded away or overflowed, and not because ``z`` is a zero?

Examples are ``exp(-1000 z)`` at 1, ``1 - tanh(z)`` at 30, and ``(1 + z^2)^-0.05`` where ``z^2`` is infinite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.tracers import TorchDispatchMode
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import doubling, in_working_precision, uneven
from implicitkit.solver.verdict.rounding_level import exceeds_rounding

_HALVINGS = 40  # of the way from the origin to z, or of its logarithm, at most ...
_BLIND = 8  # ... and as long as nothing but zeros has been seen
_NEAR = 1 / 64  # of its distance from the origin: how closely the edge is found
_INSIDE = (1 / 2, 1 / 4, 1 / 8)  # of the way to the edge: F is evaluated there, too (z e^-z vanishes at the origin)
_NOISE = 1e3  # times eps: what rounding leaves of a derivative
_SHARE = 0.4  # power of eps: what is left at the edge, at most, of what rounding may have left
_DENSE = 64  # unknowns up to which the derivative of each equation is asked, beyond it is that of their sum
_TINY = 8.0  # times eps: what is left at the edge, beside F nearer to the origin, of what was rounded away
_MANY = 16  # samples that are looked at one by one; beyond, they are looked at together


def has_underflowed(
    f: Evaluations, z: Tensor, flat: Tensor, seen: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Where equations ``flat`` ``(batch, n)``, zero at ``z`` and all around, only seem to hold, and where each of them has
    been seen to end in zeros, or to be nothing else, ``(batch,)`` both.

    On the way from the origin to ``z`` the last point ``t z`` is looked for, by bisection, at which one of them is not zero.
    A residual that was cut off has a value there that belongs to the distance (``relu(1 - z)`` at 0.99: 0.01); of one
    that has underflowed nothing is left already (``exp(-1000 z)`` at 0.7: 1e-304), and one that jumps to zero may have
    overflowed (:func:`has_overflowed`).  One that is zero all the way, origin included, is a plateau.  An equation that has
    a derivative at ``z`` has not been cut off (``z_0 - z_1`` does not change along ``z`` either, where it is zero).

    ``seen``: :func:`~implicitkit.solver.verdict.differences.doubling` the uneven way, where that is known.
    """
    tiny = torch.finfo(z.dtype).tiny
    if z.shape[1] > _DENSE:  # one that grows as z moves otherwise than along itself has not: that costs no Jacobian
        if seen is None:
            zero, move = torch.zeros_like(z), f.eps**0.25 * uneven(z)[1]
            seen = doubling(f, z, zero, move)
        flat = flat & ~seen[0]
    if bool(flat.any()):
        flat = flat & ~_has_derivative(f, z, flat)
    if not bool(flat.any()):
        return flat.any(1), flat.any(1)

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
        middle = torch.where(wide, _between(inner, outer), inner)
        F = at(middle)
        left = (tiny < F).any(1)
        size, edge = torch.maximum(size, F), torch.where((left & wide).unsqueeze(1), F, edge)
        inner, outer = torch.where(left, middle, inner), torch.where(left | ~wide, outer, middle)
    for share in _INSIDE if bool((edge > 0).any()) else ():
        size = torch.maximum(size, at(share * inner))
    known = (size > tiny) & (edge > 0)
    lost = edge <= _TINY * f.eps * size
    point = (inner.unsqueeze(1) * z).to(z.dtype)
    if f.kind.minimisation and bool((known & ~lost).any()):  # a plateau that the objective rises to is no minimum
        rises = torch.where(flat, f.residual(point) * z, 0).sum(1, keepdim=True) > 0
        # where only a part is off (a unit of a network), the rest has settled with that
        lost = lost | (known & rises & flat.all(1, keepdim=True))
    asked = known & ~lost & (edge <= f.eps**_SHARE * size)
    if bool(asked.any()):
        lost = lost | (asked & ~exceeds_rounding(f, point, in_working_precision(f.residual(point)), asked))
    jumps = (known & ~lost).any(1)
    if bool(jumps.any()):
        lost = lost | has_overflowed(f, z, point, jumps).unsqueeze(1)
    plateau = (known & ~lost) | (size == 0) | ~flat
    return (known & lost).any(1), plateau.all(1) & flat.any(1)


def _between(inner: Tensor, outer: Tensor) -> Tensor:
    """The next place to look at: near zero for as long as nothing is known there, then in the middle, of the logarithms
    where these are far apart."""
    far = torch.where(inner > 0, inner.sqrt() * outer.sqrt(), torch.where(outer < 1, outer * outer, outer / 2))
    return torch.where(outer > 2 * inner, far, (inner + outer) / 2)


def _has_derivative(f: Evaluations, z: Tensor, flat: Tensor) -> Tensor:
    """Which of the equations ``flat`` have a derivative at ``z`` (of many unknowns, their sum) that is not what rounding
    leaves of that at the origin, ``(batch, n)``."""
    if z.shape[1] <= _DENSE:
        here, there = (f.linearize(point).dense().abs().amax(2) for point in (z, torch.zeros_like(z)))
    else:
        here, there = (
            f.linearize(point).T.mv(flat.to(z.dtype)).abs().amax(1, keepdim=True) for point in (z, torch.zeros_like(z))
        )
    least = _NOISE * f.eps * torch.nan_to_num(there, nan=0.0, posinf=0.0)
    return flat & (here > least.clamp_min(torch.finfo(z.dtype).tiny))


def has_overflowed(f: Evaluations, z: Tensor, point: Tensor, which: Tensor) -> Tensor:
    """Where more numbers are infinite on the way to ``F(z)`` than on that to ``F(point)``, ``(batch,)`` of ``which``.

    ``z`` and ``point``: ``(batch, n)``, on both sides of a jump to zero.  Infinities that are meant (a mask's) are on both.
    Two evaluations of each sample.
    """
    if not bool(which.any()):
        return which
    samples = which.nonzero().squeeze(1).tolist()
    groups = [[i] for i in samples] if len(samples) <= _MANY else [samples]
    before, found = _infinities(f, point), torch.zeros_like(which)
    for group in groups:
        mine = torch.zeros_like(which)
        mine[group] = True
        found = found | (mine & (_infinities(f, torch.where(mine.unsqueeze(1), z, point)) > before))
    return found


def _infinities(f: Evaluations, z: Tensor) -> int:
    with _Infinities() as seen:
        f.residual(z.clone())  # not remembered
    return seen.count


class _Infinities(TorchDispatchMode):
    """Counts infinite numbers in whatever operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                self.count += int(torch.isinf(t).count_nonzero())
        return out
