"""The step of sequential quadratic programming where Hessian and Jacobian are sparse, sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.linear.sparse_blocks import SparseBlocks
from implicitkit.solver.constrained.model import First, Model
from implicitkit.solver.qp import sparse as qp

__all__ = ["sparse_direction"]

_PENALTY = 10.0


def sparse_direction(
    model: Model, z: Tensor, multipliers: Tensor, bounds: tuple[Tensor, Tensor] | None
) -> tuple[First, Tensor, Tensor] | None:
    """First order at ``z``, the step ``(batch, n)`` and the new multipliers ``(batch, m)``; ``None`` where the pattern does
    not hold there.

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
    steps, found = torch.zeros_like(z), torch.zeros_like(multipliers)
    for i, K in enumerate(matrices):
        if not (bool(model.f.active[i]) and np.isfinite(K.data).all()):
            continue
        program = _program(model, K, first, z, bounds, i)
        d, y = _solve(program, _array(multipliers[i]))
        steps[i], found[i] = torch.from_numpy(d).to(z), torch.from_numpy(y).to(z)
    return first, steps, found


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


def _solve(program: qp.SparseProgram, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The step and the multipliers: by active sets, from the multipliers so far or from an interior point; of the penalties
    where the program has no solution."""
    point = qp.active_set(program, qp.guess(program, y))
    if point is None:
        active = qp.interior_point(program)
        point = None if active is None else qp.active_set(program, active)
    if point is not None:
        return point.d, point.y
    return qp.penalised(program, _PENALTY)


def _array(t: Any) -> np.ndarray:
    array: np.ndarray = t.detach().to(device="cpu", dtype=torch.float64).numpy()
    return array
