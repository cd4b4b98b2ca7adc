"""The default linear solver: dense where it is cheap, Krylov otherwise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.cg import CG
from implicitkit.linear.gmres import GMRES
from implicitkit.linear.lu import LU
from implicitkit.operators import Operator

__all__ = ["Auto"]


@register_linear_solver("auto")
@dataclass(frozen=True)
class Auto(LinearSolver):
    """Chooses by size and structure.

    - up to ``dense_size`` unknowns a sample: ``lu`` (all blocks at once, ``n`` products in one batched call);
    - larger and symmetric (Hessians): ``cg``; samples it cannot do (indefinite Hessian) go on with ``gmres``;
    - larger otherwise: ``gmres``.

    The Jacobian of a large system is never formed.
    """

    dense_size: int = 64

    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        limits = {"rtol": rtol, "atol": atol, "max_steps": max_steps}
        if A.size <= self.dense_size:
            return LU().solve(A, b, **limits)  # type: ignore[arg-type]
        if not A.symmetric:
            return GMRES().solve(A, b, **limits)  # type: ignore[arg-type]
        first = CG().solve(A, b, **limits)  # type: ignore[arg-type]
        if bool(first.converged.all()):
            return first
        second = GMRES().solve(A, torch.where(first.converged.unsqueeze(1), 0, b), **limits)  # type: ignore[arg-type]
        kept = first.converged
        return LinearSolution(
            torch.where(kept.unsqueeze(1), first.x, second.x),
            torch.where(kept, first.residual_norm, second.residual_norm),
            first.steps + torch.where(kept, 0, second.steps),
            kept | second.converged,
            second.reason,
        )
