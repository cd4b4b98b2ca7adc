r"""Is a zero near, as the factors ``N`` of the last step tell: a small correction, and a Jacobian that hardly changes?

The two figures of Kantorovich's theorem (1948; Deuflhard, *Newton Methods for Nonlinear Problems*, 2011, section 2.1): the
correction ``c = N^{-1} F(z)``, next to nothing beside ``z`` near a zero and ``z / 745`` and more on the way to infinity (of
``exp(-z)``, which underflows there), and how far the change of ``F`` along the step is from what ``N`` says.  That costs a
solve, where :mod:`~implicitkit.solver.verdict.runaway` costs evaluations.

Factors of a fit are those of ``N = R'R + mu D^2``, near the Hessian where residuals or their curvature are small, which the
change of ``F`` tells, and where ``mu`` is nothing beside ``R'R``: the largest eigenvalue of ``N^{-1} mu D^2``, two solves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.hessian_factors import SAME
from implicitkit.solver.verdict.backward_error import healthy_share
from implicitkit.solver.verdict.curvature import difference_step, hessian_times, unlike
from implicitkit.solver.verdict.differences import FLOOR, change, in_working_precision, uneven
from implicitkit.solver.verdict.newton_correction import DENSE

_SHORT = 1e-3  # of z: a step of which the factors still hold behind it ...
_BESIDE = 1e-2  # ... or of this share of the largest z_j
_SECANT = 0.5  # of the step: how far from it the change of F along it may be, by the factors
_NEWTON = 0.1  # ... of few unknowns, whose N is that of the point before: on the way to infinity it is a third
_LONGER, _FAITHFUL = 100.0, 1e-2  # ... or for a step so many times as long: no more than this
_LINEAR = 1e-6  # of each F_i: what it may change otherwise along a step that is longer still ...
_ROUNDED = 1e-12  # ... and of the largest, where it was next to nothing
_DAMPED = 0.1  # of N in any direction, how much damping may be for a correction to be one without ...
_SWEEPS = 2  # ... by so many steps of the power method: all but few eigenvalues are next to nothing
_STEEPER = 1e6  # times its change beside z, at most, an equation may be by factors of another point ...
_FORETOLD = 0.5  # of its change beside z by N, how far from that it may be of an F_i that is zero to the last bit
_NEXT = 1e-10  # ... of z: a correction by them which is next to nothing even so; exp(-z) has 1 / 745 / 1e6 and more


def zero_is_near(f: Evaluations, known: Any, z: Tensor, point: Tensor, before: Tensor) -> Tensor:
    """Where a zero is near ``z`` by factors (:func:`correction_is_settled`), ``(batch,)``; one evaluation if an ``F_i`` is
    zero to the last bit there, none else, nor of a program, whose constraints often are.

    Of what rounding has left (``sqrt(z^2 + 1) - z``, far out) the slope is rounding, too, and a step with it leads to what
    looks like a zero.  So such an ``F_i`` must change beside ``z`` as ``N`` says.
    """
    F = f.residual(z)
    near = correction_is_settled(known, z, F, point, before)
    zero = near.unsqueeze(1) & (F == 0)
    if f.kind.returns_program or not hasattr(known, "product") or not bool(zero.any()):
        return near
    way = f.eps**0.25 * uneven(z)[1]
    told = known.product(in_working_precision(way))
    off = (in_working_precision(f.beside("root").residual(z + way)) - told).abs()
    return near & (~zero | (off <= _FORETOLD * told.abs())).all(1)


def correction_is_settled(known: Any, z: Tensor, F: Tensor, point: Tensor, before: Tensor) -> Tensor:
    """Where a zero is near ``z``, ``(batch,)``; where not, nothing is known.

    ``F`` changed along the step as ``N`` says: roughly, along one that was short beside ``z`` (of ``exp(1e6 - z)`` each is);
    to a hundredth, along a tenth of ``z`` at most (on the way to infinity a third is left); or each ``F_i`` to a millionth,
    however long: the equations are linear.  And ``c`` is beside each ``z_j`` what ``F`` near a zero is beside its changes.
    An ``F_i`` that is zero to the last bit must be one that ``N`` says to change: it may have underflowed.  Of a program
    ``F`` before is that of the conditions that are active at ``z``, where ``N`` says what it was there.

    Args:
        known: ``N``, with ``solve``, ``size``, ``factor`` and perhaps ``product``; of a fit also ``damping``, ``mu`` of
            every sample, and ``units``, ``D``. z: the points. F: there. point: those a step before. before: ``F`` there;
            each ``(batch, n)``.
    """
    switching = getattr(known, "before", None)  # conditions whose form changes with the active set
    here = None if switching is None else switching(point, z - point, F)
    z, F, point, before = (in_working_precision(t) for t in (z, F, point, before if here is None else here))
    largest, step = z.abs().amax(1, keepdim=True), z - point
    unit = z.abs() + FLOOR * largest
    wide = unit + _BESIDE * largest
    length = (step / wide).abs().amax(1)
    short = length <= _SHORT
    tenth = length <= _LONGER * _SHORT
    few = z.shape[1] <= DENSE
    asked = tenth
    if not (few or moved(known) is None or bool(tenth.all())):
        asked = tenth | changes_as_told(known, step, F, before)
    asked = asked & known.factor.ok.to(z.device)
    if bool((F == 0).any()):
        size, share = known.size(z), torch.finfo(z.dtype).tiny ** (1 / 3)
        changes = size > share * size.amax(1, keepdim=True)
        changes = changes if here is None else changes | ~known.where[0]  # an unknown is at its bound, to the last bit
        asked = asked & ((F != 0) | changes).all(1)
    if bool(asked.any()) and hasattr(known, "damping"):
        asked = asked & (_share_of_damping(known, z) <= _DAMPED)
    if not bool(asked.any()):
        return asked
    if not bool((asked & tenth).any()):
        return asked & (known.solve(F).abs() <= healthy_share(F) * unit).all(1)
    c, along = known.solve(torch.stack([F, F - before], 2)).unbind(2)
    near = (c.abs() <= healthy_share(F) * unit).all(1)
    far = torch.where(short, _NEWTON if few else _SECANT, _FAITHFUL)
    secant = ((along - step) / wide).abs().amax(1) <= far * length
    if few:  # whose step may have been but a small part of that, or none
        fell = (c / wide).abs().amax(1) <= _NEWTON * ((c - along) / wide).abs().amax(1)
        secant = secant & (fell | (c.abs() <= _NEXT * unit).all(1))
    return asked & near & (secant | ~tenth)


def last_jacobian(f: Evaluations, point: Tensor) -> DenseBlocks | None:
    """The matrices ``dF/dz`` of few unknowns at the point where the last step began, if it has formed them; ``None`` of
    fixed points, whose steps are judged by themselves."""
    at, J = f.jacobian_there or (None, None)
    return DenseBlocks(J) if J is not None and at is point and not f.kind.iteration else None


def minimum_is_near(f: Evaluations, z: Tensor) -> Tensor:
    """Where a step left factors ``N`` of a positive definite Hessian that holds at ``z`` (on the way to infinity a step
    changes it by a third and more), or near that of a fit, and ``N^{-1} F`` is small beside each ``z_j``, ``(batch,)``; one
    evaluation or none."""
    known: Any = f.system.factored if f.kind.of_residuals else f.curved if f.of_gradient else None
    if not getattr(known, "positive", False) or len(known.units) != len(z):
        return torch.zeros(len(z), dtype=torch.bool, device=z.device)
    if f.kind.of_residuals:
        held = unlike(f, z, known) <= SAME
    else:
        g, probe, h = f.residual(z), f.beside("minimise"), difference_step(z, f.eps**0.5)
        held = known.hold(lambda q: hessian_times(probe, z, g, h, q), z)
    if not bool(held.any()):
        return held
    point = in_working_precision(z).abs()
    unit = point + FLOOR * point.amax(1, keepdim=True)
    near: Tensor = (in_working_precision(known.solve(f.residual(z))).abs() <= healthy_share(point) * unit).all(1)
    return held & near


def moved(known: Any) -> Any:
    """The product with the matrix that the factors ``known`` are of, or near; ``None`` where they have none."""
    return getattr(known, "moved", None) or getattr(known, "product", None)


def changes_as_told(known: Any, step: Tensor, F: Tensor, before: Tensor) -> Tensor:
    """Whose equations change along a step as ``N`` says, each to a millionth, ``(batch,)``; ``N`` has a product."""
    size = before.abs()
    may = _LINEAR * size + _ROUNDED * size.amax(1, keepdim=True)
    told: Tensor = ((F - before - moved(known)(step)).abs() <= may).all(1)
    return told


def _share_of_damping(known: Any, z: Tensor) -> Tensor:
    """The largest eigenvalue of ``N^{-1} mu D^2``, from below, by the power method; ``(batch,)``."""
    mu, D = known.damping.to(z).unsqueeze(1), known.units.to(z)
    v, share = seeded.normal(z.shape[1], seed=0).to(z).expand_as(z), mu.squeeze(1)
    for _ in range(_SWEEPS):
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
        v = torch.nan_to_num(D * known.solve(mu * D * v.nan_to_num()))
        share = torch.linalg.vector_norm(v, dim=1)
    return share


def distant_factors_hold(f: Evaluations, z: Tensor, which: Tensor, known: Any) -> Tensor:
    """By how much ``F`` changes beside ``z`` as a whole, ``|J w|``, and 1 where a zero is near by factors of a point however
    far, ``(batch, 2)``; one evaluation.

    The correction ``c`` is next to nothing beside each ``z_j``, and each ``F_i`` changes by what ``N`` says of it but for a
    factor of a million: so much may cancel, and so much steeper may it have been where ``N`` is from.
    """
    F, way = in_working_precision(f.residual(z)), uneven(z)[1]
    h = f.eps**0.5
    moved = change(f, z, F, way, h)
    steepness = torch.linalg.vector_norm(moved, dim=1)
    size = known.size(in_working_precision(way))
    held = which & ((size <= _STEEPER * moved) & (size > 0)).all(1) & known.factor.ok.to(z.device)
    unit = in_working_precision(z).abs()
    unit = unit + FLOOR * unit.amax(1, keepdim=True)
    if bool(held.any()):
        held = held & (known.solve(F).abs() <= _NEXT * unit).all(1)
    return torch.stack([steepness, held.to(steepness)], 1)
