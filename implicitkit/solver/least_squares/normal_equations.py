r"""The normal equations of a linear least-squares problem, ``(R'R + \mu D^2) p = -R'r``, for systems of many unknowns.

Where ``R`` has a sparsity pattern they are formed and factored sparse, else dense by Cholesky: one matrix for all ``\mu`` of
a step, and no singular value decomposition.  With ``\mu > 0`` the matrix is definite whatever ``R`` is.

Source: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), section 5.3.2; Nocedal & Wright (2006), section 10.2.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from implicitkit.linear.dense import cholesky_batched
from implicitkit.solver.evaluations import Evaluations

__all__ = ["NormalEquations", "column_scales", "normal_equations"]

_SWEEPS = 5  # of the power method: one digit of the largest eigenvalue is enough


class NormalEquations(Protocol):
    """``R'R`` at one point.

    ``columns``: the norms of the columns of ``R``, ``(batch, n)``.
    """

    columns: Tensor

    def scale(self, D: Tensor) -> None:
        """The unknowns are measured in units of ``1 / D`` from now on, ``(batch, n)``."""

    def largest(self) -> Tensor:
        """The largest eigenvalue of ``D^-1 R'R D^-1``, about; ``(batch,)``."""

    def solve(self, mu: Tensor, g: Tensor) -> Tensor:
        """``p`` with ``(R'R + mu D^2) p = -g``; not finite where that is not definite."""


def column_scales(f: Evaluations, before: Tensor, columns: Tensor) -> Tensor:
    """The scales of the unknowns in a trust region, ``(batch, n)``: the largest norm so far of each column of ``R`` (Moré
    1978, section 5), or one where the problem has units of its own (``x_scale=``)."""
    if not isinstance(f.problem.x_scale, str):
        return torch.ones_like(before)
    return torch.maximum(before, columns.nan_to_num(0, 0, 0))


def normal_equations(f: Evaluations, z: Tensor) -> NormalEquations:
    """Of the residuals of ``f`` at ``z``, sparse where they have a pattern."""
    found = f.residuals_sparse(z)
    if found is None:
        return _Dense(f.residuals_jacobian(z))
    from implicitkit.linear.sparse_normal import SparseNormal

    return SparseNormal(*found, z)


class _Dense:
    """By Cholesky."""

    def __init__(self, R: Tensor) -> None:
        self.R, self.D = R, R.new_ones(len(R), R.shape[2])
        self.columns = torch.linalg.vector_norm(R, dim=1)
        self.N = R.mT @ R

    def scale(self, D: Tensor) -> None:
        self.D = D
        self.N = self.N / (D.unsqueeze(1) * D.unsqueeze(2))

    def largest(self) -> Tensor:
        v = torch.ones_like(self.D)
        for _ in range(_SWEEPS):
            v = torch.bmm(self.N, v.unsqueeze(2)).squeeze(2)
            size = torch.linalg.vector_norm(v, dim=1)
            v = v / torch.where(size > 0, size, 1).unsqueeze(1)
        return size

    def solve(self, mu: Tensor, g: Tensor) -> Tensor:
        shifted = self.N + torch.diag_embed(mu.to(self.N).unsqueeze(1).expand_as(self.D))
        L, ok = cholesky_batched(shifted)
        p = torch.cholesky_solve((-g / self.D).unsqueeze(2), L).squeeze(2) / self.D
        return torch.where(ok.unsqueeze(1), p, torch.nan)
