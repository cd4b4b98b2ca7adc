"""The step of sequential quadratic programming where Hessian and Jacobian are sparse, sample by sample.

One linear system with the active set that the multipliers say gives a step already, that of Newton's method for the
optimality conditions: near the solution it is that of the quadratic program, and well before that it may do.  The other
systems of the program are worth their while where it is that of the last step too, with other numbers on the right: where
its matrices change from step to step, a step that takes the residual down is kept, and the next active set is one of the
matrices there.  A Hessian that is sparse but for a few numbers that all unknowns share has as many unknowns and rows more
(:mod:`implicitkit.linear.conditions.lifted_saddle`), behind those of the program.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.conditions.active_factors import ActiveFactors, ActiveSystem, Saddle
from implicitkit.linear.conditions.lifted_saddle import LiftedFactors, LiftedMatrix, lifted_saddles
from implicitkit.linear.conditions.sparse_saddle import Layout, SaddleMatrix
from implicitkit.linear.factors.arrowhead import ArrowheadMatrix
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.solver.constrained.model import First, Model
from implicitkit.solver.qp import sparse as qp
from implicitkit.solver.qp.sparse_interior_point import interior_point
from implicitkit.sparsity.same_pattern import with_entries

_PENALTY = 10.0
_REACH = 1e3  # times 1 + max |z|: a step that is longer is one of a Hessian that is all but singular
_ENOUGH = 1e-13  # backward error of a step, of which the next one corrects what is left
_SAME = 1e3  # units of rounding of the largest entry: matrices that differ by less are the same


class SparseDirection:
    """A step for every sample.

    Attributes:
        first: what is known of first order at the point. conditions: ``(dL/dz, h, g)`` there, ``(batch, n + m)``. d: the
            step, ``(batch, n)``. y: the new multipliers, ``(batch, m)``. entries: of the matrices, ``(batch, nnz)``.
            inside: was a program solved from inside? same: are the matrices those of the last time, here or in another
            solve, as where they do not depend on the point?
    """

    def __init__(self, first: First, conditions: Tensor, entries: Tensor, same: bool = False) -> None:
        self.first, self.conditions, self.entries, self.inside, self.same = first, conditions, entries, False, same
        self.d, self.y = torch.zeros_like(first.slope), torch.zeros_like(first.constraints)
        self._open: dict[int, tuple[qp.SparseProgram, qp.SparsePoint]] = {}
        self._settled: dict[int, ActiveSystem] = {}

    def begin(self, i: int, program: qp.SparseProgram, y: np.ndarray, reach: float | None = None) -> bool:
        """The step of sample ``i`` from one linear system, if that can be solved; else from its program.

        ``reach``: only if ``H`` is positive definite on the active constraints and the step no longer than this; was it?
        """
        y = np.concatenate([y, np.zeros(len(program.b) - len(y))])
        guess = qp.guess(program, y)
        point = None  # as that of a linear program mostly is: nothing to begin with
        if not qp.lacks_curvature(program, guess):
            point = qp.active_set(program, guess, sets=1, convex=reach is not None, enough=_ENOUGH)
        if reach is not None and (point is None or not np.abs(point.d).max() <= reach):
            return False
        if point is not None and not point.settled and qp.is_cheap(program):
            point = qp.active_set(program, point.active._replace(y=point.y), point.shift) or point
        self.first.slope[i] = torch.from_numpy(program.q[: self.d.shape[1]]).to(self.d)
        if point is None:
            self._settle(i, program, None)
            return True
        self._take(i, program, point)
        if not point.settled:
            self._open[i] = program, point
        return True

    def _take(self, i: int, program: qp.SparseProgram, point: qp.SparsePoint) -> None:
        self._move(i, point.d, point.y)
        if point.settled and not point.shift:
            self._keep(i, program, point)

    def _settle(self, i: int, program: qp.SparseProgram, begun: qp.SparsePoint | None) -> None:
        """The step from the program: by active sets, from those so far or from an interior point; of the penalties where the
        program has no solution."""
        point = None if begun is None else qp.active_set(program, begun.active._replace(y=begun.y), begun.shift)
        if point is None:
            self.inside, point = True, interior_point(program)
        if point is None:
            self._move(i, *qp.penalised(program, _PENALTY))
        else:
            self._take(i, program, point)

    def _keep(self, i: int, program: qp.SparseProgram, point: qp.SparsePoint) -> None:
        n, m = self.d.shape[1], self.y.shape[1]
        rows = point.active.rows[:m]
        free = np.concatenate([point.active.bounds[:n] == 0, rows])
        self._settled[i] = active_system(program.matrix, point.saddle, free, program.one_sided[:m], n)

    @property
    def factors(self) -> ActiveFactors | None:
        """Factors of the optimality conditions of every sample, if a system with the active set of the end gave each its
        step."""
        return (
            ActiveFactors([self._settled[i] for i in range(len(self.d))]) if len(self._settled) == len(self.d) else None
        )

    def finish(self, which: Tensor) -> None:
        """The steps of these samples, ``(batch,)`` bool, from their quadratic programs."""
        for i in [i for i in self._open if bool(which[i])]:
            self._settle(i, *self._open.pop(i))

    def changed(self, last: Tensor) -> Tensor:
        """Which matrices are not those of the last step, with these entries, ``(batch,)``; all, if there was none."""
        if last.shape != self.entries.shape:
            return torch.ones(len(last), dtype=torch.bool, device=last.device)
        rounding = _SAME * torch.finfo(last.dtype).eps * self.entries.abs().amax(1)
        return (self.entries - last).abs().amax(1) > rounding

    def _move(self, i: int, d: np.ndarray, y: np.ndarray) -> None:
        self.d[i] = torch.from_numpy(d[: self.d.shape[1]]).to(self.d)
        self.y[i] = torch.from_numpy(y[: self.y.shape[1]]).to(self.y)


def active_system(
    K: sp.csc_matrix | ArrowheadMatrix, saddle: Saddle, free: np.ndarray, one_sided: np.ndarray, n: int
) -> ActiveSystem:
    """The system of optimality conditions by ``K`` and its factors, which may have as many unknowns and rows more.

    Args:
        free: which conditions are, ``(n + m,)``. one_sided: which rows, ``(m,)``. n: unknowns.
    """
    m = len(one_sided)
    sign = np.concatenate([np.ones(n), np.where(free[n:] & one_sided, -1.0, 1.0)])
    more = (K.shape[0] - n - m) // 2
    if more:
        return ActiveSystem(LiftedMatrix(K, n, m), LiftedFactors(saddle, n, m, more), free, sign)
    return ActiveSystem(K, saddle, free, sign)


def sparse_direction(model: Model, w: Tensor, bounds: tuple[Tensor, Tensor] | None) -> SparseDirection | None:
    """The step at ``w``; ``None`` where the pattern does not hold there.

    Multipliers that are all zero are taken as they are where the Hessian of the objective alone is positive definite on the
    active constraints, and not so little that the step is long; else they are estimated first.
    """
    z, multipliers = model.split(w)
    blank = ~(multipliers != 0).any(1) if model.count else multipliers.new_zeros(len(z), dtype=torch.bool)
    at = Linear.at(model, w, bounds)
    if at is None:
        return None
    value, constraints = model.f.values(w)
    direction = SparseDirection(First(value, torch.zeros_like(z), constraints), at.conditions, at.entries, at.same)
    again = []
    for i in at.usable():
        reach = _REACH * (1 + float(z[i].abs().max())) if bool(blank[i]) else None
        if not direction.begin(i, at.program(i), array(multipliers[i]), reach):
            again.append(i)
    if again:
        multipliers = multipliers.clone()
        for i in again:
            multipliers[i] = _estimate(at.program(i))[: model.count].to(z)
        at = Linear.at(model, model.join(z, multipliers), bounds)
        if at is None:
            return None
        usable = set(at.usable())
        for i in again:
            if i in usable:
                direction.begin(i, at.program(i), array(multipliers[i]))
        direction.entries = at.entries
    return direction


class Linear(NamedTuple):
    """Optimality conditions to first order: ``dL/dz`` and the constraints ``(batch, n + m)``, their matrices, the bounds."""

    model: Model
    z: Tensor
    multipliers: Tensor
    bounds: tuple[Tensor, Tensor] | None
    conditions: Tensor
    entries: Tensor
    matrices: list[SaddleMatrix]
    more: int = 0  # unknowns, and as many rows
    same: bool = False  # are the matrices those of the last time, here or in another solve?

    @classmethod
    def at(cls, model: Model, w: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Linear | None:
        """At a point; ``None`` where the pattern does not hold.  The matrices have their whole diagonal."""
        z, multipliers = model.split(w)
        found = model.saddle(w)
        if found is None:
            parts = model.low_rank(w)
            if parts is None:
                return None
            out, border, entries, J = parts
            lifted, same = lifted_saddles(border, entries, array(J))
            values = torch.from_numpy(lifted.entries).to(z)
            return cls(model, z, multipliers, bounds, out, values, lifted.matrices, lifted.more, same)
        out, ready, values = found
        one, zero = (torch.full((len(z),), x, dtype=torch.float64, device="cpu") for x in (1.0, 0.0))
        blocks = SparseBlocks(ready, values).shifted(zero, one)
        pattern, layout = blocks.ready.analysed(_by_columns)
        matrices = [SaddleMatrix(with_entries(pattern, v), model.size, layout) for v in blocks.values]
        return cls(model, z, multipliers, bounds, out, torch.from_numpy(values).to(z), matrices)

    def usable(self) -> list[int]:
        """Samples at work whose matrix is finite."""
        return [i for i, K in enumerate(self.matrices) if bool(self.model.f.active[i]) and K.finite]

    def program(self, i: int) -> qp.SparseProgram:
        """The quadratic program of sample ``i``."""
        n, K, none = self.model.size, self.matrices[i], np.zeros(self.more)
        far = np.full(n + self.more, np.inf)
        lower, upper = -far, far
        if self.bounds is not None:
            lower[:n], upper[:n] = (array(b[i] - self.z[i]) for b in self.bounds)
        out = array(self.conditions[i])
        y = array(self.multipliers[i])
        slope = out[:n] - (K.matrix @ np.concatenate([np.zeros(n), none, y, none]))[:n] if y.any() else out[:n]
        one_sided = np.concatenate([self.model.one_sided.cpu().numpy(), none > 0])
        return qp.SparseProgram(
            K.K, np.concatenate([slope, none]), np.concatenate([-out[n:], none]), one_sided, lower, upper, K
        )


def _by_columns(pattern: sp.csr_matrix) -> tuple[sp.csc_matrix, Layout]:
    """By rows and by columns it is the same, since it is symmetric."""
    turned = sp.csc_matrix(pattern.T)
    return turned, Layout(turned)


def _estimate(program: qp.SparseProgram) -> Tensor:
    """Multipliers for a start without, of the rows that hold with equality or are violated."""
    y = qp.least_squares_multipliers(program, ~program.one_sided | (program.b <= 0))
    return torch.from_numpy(np.where(program.one_sided, np.maximum(y, 0.0), y))
