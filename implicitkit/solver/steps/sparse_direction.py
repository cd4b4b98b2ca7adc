"""Newton directions by sparse factors."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.gmres import GMRES
from implicitkit.solver.evaluations import Evaluations

__all__ = ["sparse_direction"]

_ROUNDING = 4.0  # units of rounding in |J| |z| that are all that is left of a residual


def sparse_direction(f: Evaluations, A: Operator, z: Tensor, residual: Tensor) -> Tensor | None:
    """``d`` with ``A d = -F``; ``None`` where ``A`` has no sparsity pattern.

    Where a block is singular, GMRES gives a direction that lowers ``|F + A d|``.  Samples whose residual is
    nothing but rounding errors, ``|F| <= 4 eps | |A| |z| |``, are marked in ``f.stuck``: no step can do better.  The factors
    are left with the system, for the derivative.
    """
    blocks = A.sparse()
    if blocks is None:
        return None
    d: Tensor = -blocks.solve(residual)
    regular = blocks.factor.ok.to(d.device)
    if len(d) == f.system.batch and bool(regular.all()):
        f.system.factored = blocks
    bad = ~regular & torch.isfinite(residual).all(1)
    if bool(bad.any()):
        rhs = torch.where(bad.unsqueeze(1), -residual, 0)
        d = torch.where(bad.unsqueeze(1), GMRES().solve(A, rhs, rtol=1e-3, atol=0.0, max_steps=200).x, d)
    noise = _ROUNDING * torch.finfo(z.dtype).eps * torch.linalg.vector_norm(blocks.size(z), dim=1)
    f.at_rounding = torch.linalg.vector_norm(residual, dim=1) <= noise
    return torch.where(torch.isfinite(d), d, 0)
