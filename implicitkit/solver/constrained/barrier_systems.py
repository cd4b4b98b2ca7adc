r"""The linear systems of interior-point methods for programs, with their inertia: dense or sparse.

    [ W + D + shift   J' ] [ dz ]     [ a ]        W  (n, n), the Hessian of the Lagrangian,   J  (m, n), the constraints'
    [ J               -E ] [ dy ]  =  [ b ]        D, E  diagonal, nonnegative: what the barrier adds

A step descends if the matrix has exactly ``m`` negative eigenvalues; where it has others ``shift`` grows until it has
(Wächter & Biegler 2006, Math. Prog. 106, section 3.1, algorithm IC).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.conditions.active_factors import ActiveFactors
from implicitkit.linear.factors.dense import mv
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.constrained.sparse_step import Linear, active_system

_SPARSE = 48  # unknowns and multipliers from which a sparsity pattern is looked for
_REGULARISED = 1e-9  # of rows of size one
_LEAST = 1e-3  # rows of W count as no smaller than this
_SWEEPS = 4  # of refinement
_FIRST = 1e-4  # shift, in units of |W|, where none was needed before
_MOST = 1e6  # ... and one that leaves nothing of W
_SHIFTS = 40


class Systems(Protocol):
    """One matrix a sample; ``slope``: of the objectives, ``(batch, n)``; ``conditions``: ``(dL/dz, constraints)``, of which
    it is the derivative, ``(batch, n + m)``."""

    slope: Tensor
    conditions: Tensor

    def factor(self, which: Tensor, diagonal: Tensor, shift: Tensor, plain: bool = False) -> Tensor:
        """Factor the samples ``which`` with ``(D, -E)`` and ``shift`` added; is their inertia right?  ``(batch,)``.

        ``plain``: without ``W``."""

    def solve(self, rhs: Tensor) -> Tensor:
        """``(dz, dy)``, ``(batch, n + m)``; not finite where there are no factors."""

    def size(self) -> Tensor:
        """The largest entry of ``W``, one if there is none, ``(batch,)``."""

    def known(self) -> Any:
        """The factors of every sample's optimality conditions, without ``D``, ``E`` and shift; ``None`` where there are none
        that others can use."""

    def rows(self) -> tuple[Tensor, Tensor]:
        """The largest entry of each row of ``J``, ``(batch, m)``, and the number of its unknown if it is the only one,
        else -1."""


def systems_at(model: Model, w: Tensor, free: Tensor) -> Systems:
    """The systems at ``w``; unknowns that are not ``free``, ``(batch, n)``, stay where they are, and so do multipliers that
    are not, if it is ``(batch, n + m)``."""
    if free.shape[1] < w.shape[1]:
        free = torch.cat([free, torch.ones_like(w[:, model.size :], dtype=torch.bool)], 1)
    if w.shape[1] >= _SPARSE and model.f.is_sparse(w):
        at = Linear.at(model, w, None)
        if at is not None:
            return _Sparse(model, w, at, free)
    model.affordable(w, "filter_interior_point")
    return _Dense(model, w, free)


def corrected(systems: Systems, which: Tensor, diagonal: Tensor, last: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """Factor them, with the smallest shift from ``least`` on that gives the inertia asked for, where ``last`` was the one
    needed before; the shifts, and whether there is one, ``(batch,)`` all."""
    shift, good = least, systems.factor(which, diagonal, least) | ~which
    if bool(good.all()):
        return shift, good
    first = torch.where(last > 0, last / 3, _FIRST * systems.size())
    growth = torch.where(last > 0, 8.0, 100.0)
    for _ in range(_SHIFTS):
        if bool(good.all()):
            break
        shift = torch.where(good, shift, torch.where(shift > 0, growth * shift, first))
        good = good | systems.factor(~good, diagonal, shift)
    return shift, good


def after(systems: Systems, shift: Tensor, least: Tensor, short: Tensor, failed: Tensor) -> tuple[Tensor, Tensor]:
    """The least shift of the next step, if the last one was good only when it was ``short``, ``failed`` at any length, or
    neither; and where it cannot grow any more.  Where the model holds on a short way only, steps are to be short in its own
    metric (Levenberg and Marquardt's way); a step that is good all the way ends that at once: directions without curvature
    (singular arcs) take none of a shift that stays."""
    if not bool((short | failed).any() | (least > 0).any()):
        return torch.zeros_like(least), torch.zeros_like(short)
    size = systems.size()
    more = torch.maximum(shift, _FIRST * size) * torch.where(failed, 16.0, 4.0)
    return torch.where(short | failed, more, 0.0), least >= _MOST * size


class _Dense:
    """Dense systems, factored as ``L D L'`` with pivots of one and two rows (Bunch & Kaufman 1977), whose blocks show the
    inertia."""

    def __init__(self, model: Model, w: Tensor, free: Tensor) -> None:
        n = model.size
        out, A = model.f.saddle(w)
        self.conditions = out
        K = A.dense().detach().to(torch.float64)
        self.n, self.K = n, 0.5 * (K + K.mT)
        self.slope = out[:, :n] - mv(self.K[:, n:, :n].mT, w[:, n:].to(torch.float64)).to(out)
        self.there = free.to(torch.float64)
        self.sign = torch.ones_like(self.there)
        self.sign[:, n:] = -1
        self.factors: Any = None

    def size(self) -> Tensor:
        largest = self.K[:, : self.n, : self.n].abs().amax((1, 2))
        return torch.where(largest > 0, largest, 1.0).to(self.slope)

    def known(self) -> Any:
        return None

    def rows(self) -> tuple[Tensor, Tensor]:
        J = self.K[:, self.n :, : self.n].to(self.slope)
        if not J.shape[1]:
            return J.sum(2), J.sum(2).long()
        at = J.abs().argmax(2)
        return J.gather(2, at.unsqueeze(2)).squeeze(2), torch.where((J != 0).sum(2) == 1, at, -1)

    def factor(self, which: Tensor, diagonal: Tensor, shift: Tensor, plain: bool = False) -> Tensor:
        n, there = self.n, self.there
        K = self.K * there.unsqueeze(1) * there.unsqueeze(2)
        if plain:
            K = K.clone()
            K[:, :n, :n] = 0
        extra = diagonal * there + (1 - there) * self.sign
        extra[:, :n] += shift.unsqueeze(1) * there[:, :n]
        K = K + torch.diag_embed(extra)
        finite = K.isfinite().flatten(1).all(1)
        K = torch.where((which & finite)[:, None, None], K, torch.diag_embed(self.sign))
        scale = torch.ones_like(extra)
        for _ in range(3):
            rows = (K.abs() * scale.unsqueeze(1)).sum(2) * scale
            scale = scale / torch.where(rows > 0, rows, 1.0).sqrt()
        K = K * scale.unsqueeze(1) * scale.unsqueeze(2)
        signs = torch.full_like(extra, -_REGULARISED)
        signs[:, :n] = _REGULARISED * K[:, :n, :n].abs().sum(2).clamp_min(_LEAST)
        LD, pivots, _ = torch.linalg.ldl_factor_ex(K + torch.diag_embed(signs))
        D = LD.diagonal(dim1=1, dim2=2)
        negative = ((pivots > 0) & (D < 0)).sum(1) + (pivots < 0).sum(1) // 2
        new = (K, scale, LD, pivots)
        if self.factors is None:
            self.factors = new
        else:
            self.factors = tuple(
                torch.where(which.view(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(new, self.factors, strict=True)
            )
        return which & finite & (negative == K.shape[1] - n)

    def solve(self, rhs: Tensor) -> Tensor:
        K, scale, LD, pivots = self.factors
        b = rhs.to(torch.float64) * self.there * scale
        x = torch.linalg.ldl_solve(LD, pivots, b.unsqueeze(2)).squeeze(2)
        left = b - mv(K, x)
        for _ in range(_SWEEPS):
            trial = x + torch.linalg.ldl_solve(LD, pivots, left.unsqueeze(2)).squeeze(2)
            rest = b - mv(K, trial)
            better = (rest.abs().amax(1) < left.abs().amax(1)).unsqueeze(1)
            if not bool(better.any()):
                break
            x, left = torch.where(better, trial, x), torch.where(better, rest, left)
        return (x * scale).to(rhs)


class _Sparse:
    """Sample by sample (:mod:`implicitkit.linear.conditions.sparse_saddle`)."""

    def __init__(self, model: Model, w: Tensor, at: Linear, free: Tensor) -> None:
        self.n, self.m, self.more, self.conditions = model.size, model.count, at.more, at.conditions
        self.usable = set(at.usable())
        self.programs = {i: at.program(i) for i in self.usable}
        self.slope = torch.zeros_like(w[:, : self.n])
        for i, p in self.programs.items():
            self.slope[i] = torch.from_numpy(p.q[: self.n]).to(self.slope)
        more = np.ones(self.more, dtype=bool)
        there = free.cpu().numpy()
        self.free = [np.concatenate([t[: self.n], more, t[self.n :], more]) for t in there]
        self.one_sided = model.one_sided.cpu().numpy()
        self.factors: dict[int, Any] = {}

    def size(self) -> Tensor:
        found = torch.ones(len(self.slope), dtype=torch.float64, device="cpu")
        for i, p in self.programs.items():
            found[i] = p.largest_of_hessian or 1.0
        return found.to(self.slope)

    def known(self) -> Any:
        if len(self.factors) < len(self.slope):
            return None
        n, k = self.n, self.n + self.more
        systems = []
        for i, saddle in sorted(self.factors.items()):
            free = np.concatenate([self.free[i][:n], self.free[i][k : k + self.m]])
            systems.append(active_system(self.programs[i].matrix, saddle, free, self.one_sided, n))
        return ActiveFactors(systems)

    def rows(self) -> tuple[Tensor, Tensor]:
        largest = torch.zeros(len(self.slope), self.m, dtype=torch.float64, device="cpu")
        alone = torch.full((len(self.slope), self.m), -1, device="cpu")
        k = self.n + self.more
        for i, p in self.programs.items():
            J = p.K[:, k : k + self.m].tocsc()
            J.eliminate_zeros()
            for j in range(self.m):
                part = slice(J.indptr[j], J.indptr[j + 1])
                values = J.data[part]
                if len(values):
                    at = int(np.abs(values).argmax())
                    largest[i, j] = values[at]
                    if len(values) == 1 and J.indices[part][0] < self.n:
                        alone[i, j] = int(J.indices[part][0])
        return largest.to(self.slope), alone.to(self.slope.device)

    def factor(self, which: Tensor, diagonal: Tensor, shift: Tensor, plain: bool = False) -> Tensor:
        good = torch.zeros(len(which), dtype=torch.bool, device="cpu")
        none = np.zeros(self.more)
        for i in which.nonzero().flatten().tolist():
            if i not in self.usable:
                continue
            p, added = self.programs[i], array(diagonal[i])
            if plain:
                p = p.without_curvature()
            added = np.concatenate([added[: self.n], none, added[self.n :], none])
            saddle = p.system(self.free[i], float(shift[i]), added)
            self.factors[i] = saddle
            good[i] = saddle.negative == self.m + self.more
        return good.to(which.device)

    def solve(self, rhs: Tensor) -> Tensor:
        x = torch.full_like(rhs, torch.nan)
        none = np.zeros(self.more)
        for i, saddle in self.factors.items():
            b = array(rhs[i])
            b = np.where(self.free[i], np.concatenate([b[: self.n], none, b[self.n :], none]), 0.0)
            found, left = saddle.solve(b)
            if np.isfinite(left):
                k = self.n + self.more
                x[i] = torch.from_numpy(np.concatenate([found[: self.n], found[k : k + self.m]])).to(x)
        return x
