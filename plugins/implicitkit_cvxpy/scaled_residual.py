r"""How rough the point is that a solver has found: ``|F|`` beside what is added up in it, in units of its own.

Where numbers are many orders apart a program can be solved wrongly with a small ``|F|``: in the user's units it is that
of the large numbers.  In those of the point itself (:class:`~implicitkit_cvxpy.units.Units`) right ones are below 1e-8 and
wrong ones above 1e-5, unless ``F`` is made of rounding errors in the units of the data, and the point is right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit_cvxpy.backends import Data
from implicitkit_cvxpy.cones.automorphism import terms
from implicitkit_cvxpy.equilibration import balanced
from implicitkit_cvxpy.program import ConeProgram
from implicitkit_cvxpy.units import Units, by_cone, row_sizes

UNEVEN = 1e-9  # roughness of a point that asks for other units
WRONG = 1e-6  # of one that is no solution
LOST = 1e-2  # of one that tells no units

_ORDINARY = 2.0**10  # numbers from its inverse to this do not ask for units
_FAR = 20.0  # powers of two that units may be from those of the point
_SMALL = 1e-3  # of the largest slack: below, errors are measured beside this
_ROUNDING = 1e-14
_BLUR = 1e3  # units of rounding


def roughness(problem: ConeProgram, data: Data, w: Tensor, units: Units | None) -> Tensor:
    """How rough the points ``w`` ``(batch, n + m)`` are, ``(batch,)``; of programs in some ``units``, the user's where that
    is ``None``.

    Zero where ``|F|`` has said all: where numbers are of ordinary size, and of sparse programs rows.
    """
    none = torch.zeros_like(w[:, 0])
    if problem.dual.smoothing:
        return none
    if data.sparse:
        return _of_sparse(problem, data, w) if units is None else none
    given = torch.cat([data.q, data.b, row_sizes(data)], 1).abs()
    least = torch.where(given > 0, given, torch.inf).amin(1)
    largest = torch.stack([t.detach().flatten(1).abs().amax(1) for t in (w, *data[:4]) if t.numel()]).amax(0)
    limit = _ORDINARY**2 if problem.dual.cones.polyhedral else _ORDINARY  # the active rows are solved for, to rounding
    ordinary = (largest <= limit) & (least >= 1 / limit)
    # in later rounds, of samples that have asked for no other units
    own = None if units is None else units.same(Units.users(problem.dual, data))
    if own is not None:
        ordinary &= own
    if bool(ordinary.all()):
        return none
    nearer = (units or Units.users(problem.dual, data)).nearer(data, w)
    F, size = _errors(problem, nearer, data, w)
    found = (F / size.clamp_min(_SMALL)).amax(1)
    if bool((found > UNEVEN).any()):
        F, size = _errors(problem, balanced(problem.dual, data), data, w)
        found = torch.where(F.amax(1) <= _ROUNDING * size.amax(1), 0, found)
    ask = _is_blurred(problem, data, w) if own is None else ~own & (nearer.spread > _FAR)
    found = torch.where(ask, found.clamp_min(2 * UNEVEN), found)
    nowhere = torch.full_like(none, torch.inf if own is None else 0.0)  # a certificate is asked for again
    return torch.where(ordinary, none, torch.where((w != 0).any(1), found, nowhere)).nan_to_num(torch.inf)


def _of_sparse(problem: ConeProgram, data: Data, w: Tensor) -> Tensor:
    """The roughness of a sparse program, which is not measured but asked: do linear rows of very different size hide which
    are active, or make it seem infeasible?"""
    size = row_sizes(data)[:, : problem.dual.cones.linear]
    uneven = ((size > _ORDINARY) | ((size > 0) & (size < 1 / _ORDINARY))).any(1)
    none = torch.zeros_like(w[:, 0])
    if not bool(uneven.any()):
        return none
    found = torch.where(_is_blurred(problem, data, w), 2 * UNEVEN, none)
    return torch.where(uneven, torch.where((w == 0).all(1), torch.inf, found), none)


def _is_blurred(problem: ConeProgram, data: Data, w: Tensor) -> Tensor:
    """Which samples have a cone whose ``y - s`` may be rounding, which does not tell the active piece, ``(batch,)``."""
    x, y = w.tensor_split((problem.n,), 1)
    v = y - data.b + data.A_held.times(data.A, x)
    rounding = _BLUR * torch.finfo(w.dtype).eps * (data.b.abs() + data.A_held.times(data.A.abs(), x.abs()))
    told = by_cone(problem.dual, v.abs()) >= by_cone(problem.dual, rounding)
    return ~told[:, problem.dual.cones.zero :].all(1)


def _errors(problem: ConeProgram, units: Units, data: Data, w: Tensor) -> tuple[Tensor, Tensor]:
    """``|F|`` and what is added up in it, without signs, ``(batch, n + m)`` each, in these units."""
    inner, z = units.apply(data), units.of(w)
    F = problem.residual(z, *inner[:4]).abs()
    x, y = z.tensor_split((problem.n,), 1)
    along = (inner.P.abs() @ x.abs().unsqueeze(2) + inner.A.abs().mT @ y.abs().unsqueeze(2)).squeeze(2) + inner.q.abs()
    across = by_cone(problem.dual, torch.maximum(terms(inner.A, inner.b, x), y.abs()))
    return F, torch.cat([along, across], 1)
