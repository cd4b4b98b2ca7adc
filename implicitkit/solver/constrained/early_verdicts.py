"""Has a program that one method has failed on a solution at all?  Asked before others go on, for long."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from implicitkit.problem.argmin import Bounded
from implicitkit.solution import Status
from implicitkit.solver.base import Outcome
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.constrained.no_point import no_point_satisfies, shown_around
from implicitkit.solver.constrained.phase_one import Ended, ended
from implicitkit.solver.constrained.second_order import falls_forever_within
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.subset import each

_SAMPLES = 16  # at most, each of which is looked at by itself
_FEW = 3  # points beside one that are looked at while others may do
_DENSE = 1000  # unknowns and constraint values at most
_OUT = 1e3  # of 1 + |z0|: a point farther away has run away, and the start is nearer to any other


def settled_without_others(f: Evaluations, z0: Tensor, total: Outcome, failed: Tensor) -> tuple[Tensor, Tensor]:
    """Samples among the ``failed`` whose objective falls forever, which are ``UNBOUNDED`` then, and those whose constraints
    no point seems to satisfy, both ``(batch,)``.  A few products and evaluations where neither is so."""
    falls = falls_forever_within(f, total.z, failed)
    none = no_point_satisfies(f, total.z, failed & ~falls)
    total.status = torch.where(falls, int(Status.UNBOUNDED), total.status)
    model = Model(f)
    known = model.problem.prox is None or isinstance(model.problem.prox, Bounded)
    if not known or not 0 < model.count <= _DENSE - model.size or model.is_sparse(z0):
        return falls, none
    for mask, number, part in each(f, failed & ~falls & ~none, _SAMPLES):
        begin, start = (Model(part).split(w[number : number + 1])[0] for w in (total.z, z0))
        near = bool((begin - start).abs().amax() <= _OUT * (1 + start.abs().amax()))
        with suppress(ArithmeticError, RuntimeError):  # beside a point whose domain ends there
            _said(part, ended(Model(part), begin if near else start), total, mask, falls, none)
    return falls, none


def has_no_solution(f: Evaluations, w: Tensor, which: Tensor, linear: Tensor) -> Tensor:
    """Samples among ``which``, whose first quadratic program has no solution, of which it is plain that they have none:
    nothing meets the constraints, or the objective, if that is ``linear``, falls forever; ``(batch,)``."""
    none = torch.zeros_like(which)
    for mask, number, part in each(f, which, _SAMPLES):
        model = Model(part)
        with suppress(ArithmeticError, RuntimeError):
            end = ended(model, model.split(w[number : number + 1])[0], _FEW)
            if end is not None and (end.y is not None or bool(linear[number])) and _is_sure(part, end):
                none |= mask
    return none


def _is_sure(part: Evaluations, end: Ended) -> bool:
    """Does what is around say so, too?"""
    model = Model(part)
    if end.y is None:
        return bool(falls_forever_within(part, model.join(end.z), torch.ones_like(end.z[:, 0], dtype=torch.bool)))
    return shown_around(model, end.z, end.y, end.level)


def _said(part: Evaluations, end: Ended | None, total: Outcome, mask: Tensor, falls: Tensor, none: Tensor) -> None:
    """What one sample's end says is noted in ``total``, and in ``falls`` or ``none``; a point that proves that there is
    none takes the place of the one found only where it violates less."""
    if end is not None and _is_sure(part, end):
        status, said = (Status.UNBOUNDED, falls) if end.y is None else (Status.STALLED, none)
        said |= mask
        total.status = torch.where(mask, int(status), total.status)
        model, found = Model(part), total.z[mask]
        if end.y is None or not _violation(model, model.split(found)[0]) <= _violation(model, end.z):
            w = model.join(end.z, end.y)
            total.move(mask, w, part.residual(w), status)


def _violation(model: Model, z: Tensor) -> float:
    """The largest violation of the constraints at one sample's point ``(1, n)``."""
    return float(model.violation(model.values(z)[1]).amax())
