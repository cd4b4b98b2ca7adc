r"""A start at which the function has a value and no derivative: ``sqrt(z)``, ``q |q|^0.85`` or ``sqrt(z^2)`` at zero.

By the chain rule ``d sqrt(u) = du / (2 sqrt(u))`` is ``0 / 0`` there, whatever the limit is, and no step that follows a
derivative leaves the point.  It is left by a little, in the unknowns concerned alone.  A start outside the bounds, where the
function need not be defined, is taken to the nearest point within.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations

_MOVES = (1e-3, -1e-3, 1e-6, -1e-6, 0.1)  # times 1 + |z|: outwards first, since roots and logarithms end at zero
_ALONE = 8  # unknowns that are moved one by one
_SPREAD = 0.6180339887498949  # no two unknowns move by the same: |z_1 - z_2| has no derivative either


def has_no_slope(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """Which unknowns have no finite derivative at ``z`` where the function is finite, in the samples ``which``; ``(batch,
    n)``."""
    probe = f.beside("minimise" if f.kind.minimisation else "root")
    try:
        missing = which.unsqueeze(1) & ~torch.isfinite(_slope(probe, z))
    except Exception:  # the function is not to be differentiated: that is no news where no derivative was asked for
        missing = torch.zeros_like(z, dtype=torch.bool)
    if bool(missing.any()):
        missing = missing & _has_value(probe, z).unsqueeze(1)
    return missing


def beside(f: Evaluations, z0: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
    """A start beside ``z0`` ``(batch, n)`` for the samples ``which`` where the derivative there is not finite and the
    function is, or in the set that it is to lie in where the function is not, ``z0`` for all others; and the samples that
    would need one and have none near, ``(batch,)``."""
    z0 = _in_its_set(f, z0, which) if f.kind.returns_program else z0
    missing = has_no_slope(f, z0, which)
    start, open_ = z0, missing.any(1)
    if not bool(open_.any()):
        return z0, open_
    uneven = 0.5 + torch.arange(z0.shape[1], dtype=z0.dtype, device=z0.device).mul_(_SPREAD).frac_()
    probe = f.beside("minimise" if f.kind.minimisation else "root")
    for move in _MOVES:
        moved = torch.where(missing & open_.unsqueeze(1), z0 + move * uneven * (1 + z0.abs()), start)
        good = open_ & torch.isfinite(_slope(probe, moved)).all(1) & _has_value(probe, moved)
        start, open_ = torch.where(good.unsqueeze(1), moved, start), open_ & ~good
        if not bool(open_.any()):
            break
    return start, open_


def _in_its_set(f: Evaluations, z0: Tensor, which: Tensor) -> Tensor:
    """The nearest point of the bounds, or of the set, where it is another than the start and the function has a value there
    alone: what lies outside need not be in its domain."""
    z, multipliers = Model(f).split(z0)
    inside = torch.cat([Model(f).proximal(z, 1.0), multipliers], 1)
    probe = f.beside("root")
    which = which & (inside != z0).any(1) & ~_has_value(probe, z0) & _has_value(probe, inside)
    return torch.where(which.unsqueeze(1), inside, z0)


def has_a_value(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """Where what the user's function returns is finite at a finite ``z``, of the samples ``which``, ``(batch,)``; asked if
    there are any."""
    if not bool(which.any()):
        return which
    probe = f.beside("minimise" if f.kind.minimisation else "root")
    found = which & torch.isfinite(z).all(1) & _has_value(probe, z)
    return found


def is_lowest(f: Evaluations, z: Tensor, which: Tensor, atol: float) -> Tensor:
    """Where an objective without a derivative at ``z`` is lower there than on both sides, near and less near, along every
    one of those unknowns alone, up to eight, and all of them at once, and does not change with the others, ``(batch,)``: a
    minimum in a kink, ``sqrt(z^2)`` at zero."""
    probe = f.beside("minimise")
    slope = probe(z)
    missing, level = ~torch.isfinite(slope) & which.unsqueeze(1), probe.value(z)
    found = which & missing.any(1) & (missing | (slope.abs() <= atol)).all(1)
    alone = min(int(missing.sum(1).max()), _ALONE)
    for k in range(alone + 1):
        moved = missing & (missing.cumsum(1) == k) if k else missing  # all at once first
        for move in _MOVES[:4]:
            if not bool(found.any()):
                break
            there = probe.value(torch.where(moved, z + move * (1 + z.abs()), z))
            found = found & ((there > level) | ~moved.any(1))
    return found


def _slope(f: Evaluations, z: Tensor) -> Tensor:
    """Something with a NaN or an Inf wherever the derivative by an unknown has one, ``(batch, n)``: the gradient of an
    objective, the conditions of a program, the sum of all rows of a Jacobian."""
    if f.kind.minimisation or f.kind.returns_program:
        return f(z)
    return f.linearize(z).rmv(torch.ones_like(z))


def _has_value(f: Evaluations, z: Tensor) -> Tensor:
    """Where what the user's function returns is finite, ``(batch,)``."""
    return torch.isfinite(f.kernel(z).reshape(len(z), -1)).all(1)
