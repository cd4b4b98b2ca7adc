"""The step of sequential quadratic programming where Hessian and Jacobian are sparse, sample by sample.

One linear system with the active set that the multipliers say gives a step already, that of Newton's method for the
optimality conditions: near the solution it is that of the quadratic program, and well before that it may do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.linear.sparse_blocks import SparseBlocks
from implicitkit.solver.constrained.model import First, Model
from implicitkit.solver.qp import sparse as qp

__all__ = ["SparseDirection", "sparse_direction"]

_PENALTY = 10.0


class SparseDirection:
    """A step for every sample.

    Attributes:
        first: first order at the point. d: the step, ``(batch, n)``. y: the new multipliers, ``(batch, m)``.
    """

    def __init__(self, first: First, z: Tensor, multipliers: Tensor) -> None:
        self.first, self.d, self.y = first, torch.zeros_like(z), torch.zeros_like(multipliers)
        self._open: dict[int, tuple[qp.SparseProgram, qp.SparsePoint]] = {}

    def begin(self, i: int, program: qp.SparseProgram, y: np.ndarray) -> None:
        """The step of sample ``i`` from one linear system, if that can be solved; else from its program."""
        point = qp.active_set(program, qp.guess(program, y), sets=1)
        if point is None:
            self._take(i, *_solve(program, None))
            return
        self._take(i, point.d, point.y)
        if not point.settled:
            self._open[i] = program, point

    def finish(self, which: Tensor) -> None:
        """The steps of these samples, ``(batch,)`` bool, from their quadratic programs."""
        for i in [i for i in self._open if bool(which[i])]:
            self._take(i, *_solve(*self._open.pop(i)))

    def _take(self, i: int, d: np.ndarray, y: np.ndarray) -> None:
        self.d[i], self.y[i] = torch.from_numpy(d).to(self.d), torch.from_numpy(y).to(self.y)


def sparse_direction(
    model: Model, z: Tensor, multipliers: Tensor, bounds: tuple[Tensor, Tensor] | None
) -> SparseDirection | None:
    """The step at ``z``; ``None`` where the pattern does not hold there.

    Multipliers that are all zero are estimated first.
    """
    first = model.first(z)
    blank = ~(multipliers != 0).any(1) if model.count else multipliers.new_zeros(len(z), dtype=torch.bool)
    matrices = _matrices(model, z, multipliers)
    if matrices is None:
        return None
    if bool(blank.any()):
        estimates = multipliers.clone()
        for i in blank.nonzero().squeeze(1).tolist():
            estimates[i] = _estimate(_program(model, matrices[i], first, z, bounds, i)).to(z)
        if bool((estimates != multipliers).any()):
            multipliers = estimates
            matrices = _matrices(model, z, multipliers)
            if matrices is None:
                return None
    direction = SparseDirection(first, z, multipliers)
    for i, K in enumerate(matrices):
        if bool(model.f.active[i]) and np.isfinite(K.data).all():
            direction.begin(i, _program(model, K, first, z, bounds, i), _array(multipliers[i]))
    return direction


def _matrices(model: Model, z: Tensor, multipliers: Tensor) -> list[sp.csc_matrix] | None:
    """``[[H, J'], [J, 0]]`` of every sample, with the whole diagonal."""
    found = model.saddle(z, multipliers)
    if found is None:
        return None
    one, zero = torch.ones(len(z), dtype=torch.float64), torch.zeros(len(z), dtype=torch.float64)
    blocks = SparseBlocks(*found).shifted(zero, one)
    # by rows and by columns it is the same, since it is symmetric
    return [sp.csc_matrix(blocks.ready.matrix(v).T) for v in blocks.values]


def _program(
    model: Model, K: sp.csc_matrix, first: First, z: Tensor, bounds: tuple[Tensor, Tensor] | None, i: int
) -> qp.SparseProgram:
    """The quadratic program of sample ``i``."""
    far = np.full(model.size, np.inf)
    lower, upper = (-far, far) if bounds is None else (_array(bounds[0][i] - z[i]), _array(bounds[1][i] - z[i]))
    one_sided = model.one_sided.cpu().numpy()
    return qp.SparseProgram(K, _array(first.slope[i]), -_array(first.constraints[i]), one_sided, lower, upper)


def _estimate(program: qp.SparseProgram) -> Tensor:
    """Multipliers for a start without, of the rows that hold with equality or are violated."""
    y = qp.least_squares_multipliers(program, ~program.one_sided | (program.b <= 0))
    return torch.from_numpy(np.where(program.one_sided, np.maximum(y, 0.0), y))


def _solve(program: qp.SparseProgram, begun: qp.SparsePoint | None) -> tuple[np.ndarray, np.ndarray]:
    """The step and the multipliers: by active sets, from those so far or from an interior point; of the penalties where the
    program has no solution."""
    point = None if begun is None else qp.active_set(program, begun.active, begun.shift)
    if point is None:
        active = qp.interior_point(program)
        point = None if active is None else qp.active_set(program, active)
    if point is not None:
        return point.d, point.y
    return qp.penalised(program, _PENALTY)


def _array(t: Any) -> np.ndarray:
    array: np.ndarray = t.detach().to(device="cpu", dtype=torch.float64).numpy()
    return array
