r"""Newton's steps of a map that conserves sums.

A Markov chain keeps its probability: with rows ``C`` of ``C f(z) = C z`` for every ``z`` the Jacobian of ``F = f(z) - z`` is
singular, ``C J = 0``, and ``J d = -F`` has many solutions ``d``, each of which leads to another member of a family of fixed
points.  What rounding makes of it is one of them by chance.  Of

    (J - s I) d = -F,    s = eps^{1/2},    -s C d = -C F = 0

the one solution keeps the sums.  The other eigenvalues of ``J`` are those of the map less one, in whatever units, of which
``s`` is a small part.

Source: as a step of pseudo-transient continuation, Kelley & Keyes (1998), SIAM J. Numer. Anal. 35, equation 1.3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.factored import Jacobian

_LARGE = 0.6  # power of rounding by which a solution outgrows its right-hand side


def direction_of_map(f: Evaluations, jacobian: Jacobian, residual: Tensor) -> tuple[Tensor, Any]:
    """``d`` with ``J d = -F``, of a map's with what it conserves, and the blocks whose factors have shown it."""
    kept = keeping_sums(jacobian.blocks) if f.kind.iteration and jacobian.exact and residual.shape[1] > 1 else None
    if kept is None:
        return jacobian.direction(f, residual), jacobian.blocks
    d = -kept.solve(residual)
    return torch.where(torch.isfinite(d), d, 0), kept


def keeping_sums(blocks: Any) -> Any:
    """Blocks of ``J - s I``, ``s = 0`` unless those of ``J`` are singular, or regular by rounding only; ``None`` where none
    are.  One solve with factors that are at hand."""
    columns = blocks.columns
    v = seeded.normal(columns.shape[1], seed=0x75).to(columns).expand_as(columns)
    length, size = (torch.linalg.vector_norm(t, dim=1) for t in (blocks.solve(v), v))
    eps = torch.finfo(columns.dtype).eps
    singular = ~(length < eps**-_LARGE * size)  # NaN too
    if not bool(singular.any()):
        return None
    shift = torch.where(singular, -(eps**0.5), 0.0).to(columns)
    if isinstance(blocks, DenseBlocks):
        return DenseBlocks(blocks.matrix + torch.diag_embed(shift.unsqueeze(1).expand_as(columns)))
    return blocks.shifted(shift, torch.ones_like(shift))
