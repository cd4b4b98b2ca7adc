r"""Has a minimisation ended higher than it began?

A stationary point above the start is a minimum of another valley at best, which no descent leads to: a step has jumped
there, over a pole of ``r tan(a s)`` to ``r = 0`` at a bound, where the gradient by ``a`` vanishes with ``r``.  In the valley
of the start, convex say, ``f(z) - f(z_0) <= g(z)'(z - z_0)``, which is next to nothing at a point that meets its tolerance.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from implicitkit.problem.argmin import Bounded, Projected
from implicitkit.solver.base import Solver
from implicitkit.solver.constrained.model import SPARSE, Model
from implicitkit.solver.evaluating.differentiated import kept_graphs
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import in_working_precision, row_norm
from implicitkit.solver.verdict.rounding_level import ROUNDING

RISEN = (
    "The objective is higher at the point found than at z0: a stationary point that no descent from there leads to, since a "
    "step has jumped into another valley. Try another solver=, or begin nearer to the minimum that is meant"
)
_FEASIBLE = 1e-8  # of what a constraint has changed by: how far from where it holds the start may be
_VALLEY = 2.0  # times what a convex objective may have risen by, of a point that meets its tolerance
_BETWEEN = (0.0, 0.125, 0.375, 0.625, 0.875)  # of the way from the start
_RISE = 1e-3  # of the objective: what lies between valleys, and not between warm start and minimum
_SHOWN = 0.1  # of a rise, that the gradients there must show


class Start:
    """What is known of the objective where a minimisation began.

    Args:
        f: the problem's; its residual there is what a solver asks for first, and nothing is evaluated twice.
            z0: ``(batch, n)``. solver: who begins there.
    """

    def __init__(self, f: Evaluations, z0: Tensor, solver: Solver) -> None:
        self.f, self.z0, self.model = f, z0, None
        self._level: Tensor | None = None
        self._constraints = z0[:, :0]
        self.steep: Tensor | None = None  # |g(z0)| of minima without constraints, ``(batch,)``
        if f.kind.returns_program:
            self.model, keeps = Model(f), f.keeps
            if z0.shape[1] >= SPARSE and not keeps:  # a solver that has asked for a matrix before asks for it again
                f.keeps = any([f.system.sparsity(what).is_known for what in ("saddle", "hessian")])
            f.residual(z0)
            f.keeps = keeps
            self._level, self._constraints = f.values(z0)
        elif f.kind.returns_scalar or f.kind.of_residuals:
            with kept_graphs(f, solver.keeps_graphs(z0)):
                self._level, slope = f.value(z0), in_working_precision(f.residual(z0))
            self.steep = torch.linalg.vector_norm(slope, dim=1)

    def risen(self, z: Tensor, which: Tensor) -> Tensor:
        """Which of the samples ``which`` at ``z`` are higher than a start that meets the constraints, by more than rounding
        (be it that of residuals that cancel) and ``|g(z)| |z - z_0|`` explain, ``(batch,)``.

        One evaluation or none, of a program two at most; and up to a dozen where there is a rise.
        """
        if not bool(which.any()):
            return which
        begun = self._begun(z)
        if begun is None:
            return torch.zeros_like(which)
        level, constraints, start = begun
        value, after = (self.f.value(z), z[:, :0]) if self.model is None else self.f.values(z)
        size = torch.maximum(value.abs(), level.abs())
        rise = value - level
        which = which & (
            rise > max(_RISE, ROUNDING * self.f.eps) * size
        )  # false for NaN, and from where it is infinite
        if bool(which.any()):
            which = which & self._meets(constraints, after)
        if bool(which.any()):
            which = which & (rise > _VALLEY * self._explained(z, start))
        if bool(which.any()):
            which = which & (_SHOWN * rise <= self._climbed(z, start))
        return which

    def _begun(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Objective and constraints at the start, and the start, in its set; ``None``: they are not known, of a term or of
        equations."""
        if self._level is None or self.model is None:
            return None if self._level is None else (self._level, self._constraints, self.z0)
        prox: Any = self.model.problem.prox
        if prox is not None and not isinstance(prox, (Bounded, Projected)):
            return None
        given, known = self.model.split(self.z0)[0], (self._level, self._constraints)
        z0 = self.model.inside(given) if prox is None or isinstance(prox, Bounded) else self.model.proximal(given, 1.0)
        if not torch.equal(z0, given):
            known = self.model.values(z0)
        return *known, torch.cat([z0, self.model.split(z)[1]], 1)

    def _meets(self, before: Tensor, after: Tensor) -> Tensor:
        """Whether the start meets the constraints, but for a share of their change on the way to ``z``, ``(batch,)``."""
        if self.model is None or not self.model.count:
            return torch.ones(len(before), dtype=torch.bool, device=before.device)
        return (self.model.violation(before) <= _FEASIBLE * (after - before).abs()).all(1)

    def _explained(self, z: Tensor, start: Tensor) -> Tensor:
        """``|F| (|z - z_0| + |g|)``, of a convex objective within a convex set: by how much ``f`` may rise from ``z_0`` to
        where its residual is ``F`` (without a set, ``|g| |z - z_0|``), ``(batch,)``."""
        way = row_norm(z - start)
        if self.model is None:
            return row_norm(self._slope(z)) * way
        return row_norm(self.f.residual(z)) * (way + row_norm(self._slope(z)))

    def _climbed(self, z: Tensor, start: Tensor) -> Tensor:
        """The steepest change that gradients show on the straight way from the start, over all of that, ``(batch,)``: where
        an objective has risen, and not by rounding, it is as much somewhere."""
        most, way = z.new_zeros(len(z)), z - start
        with suppress(Exception):  # outside its domain
            for share in _BETWEEN:
                there = start + share * way
                slope = self._slope(there)
                most = torch.fmax(most, (slope * way[:, : slope.shape[1]]).sum(1).abs().to(most))
        return most

    def _slope(self, z: Tensor) -> Tensor:
        """The gradient of the objective, ``(batch, n)``."""
        return self.f.residual(z) if self.model is None else self.model.slope(self.model.split(z)[0])[2]
