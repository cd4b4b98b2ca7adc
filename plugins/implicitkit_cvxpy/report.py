"""How the programs of one call were solved: status is data."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import Status, extend
from implicitkit_cvxpy.program import ConeProgram


class ProgramError(ik.ConvergenceError):
    """Some programs of a batch have no solution, or none was found.

    Attributes:
        report: the :class:`ConeSolution` of the call. samples: flat indices of the programs that failed.
    """

    def __init__(self, message: str, report: ConeSolution, samples: tuple[int, ...]) -> None:
        super().__init__(message, None, samples)
        self.report = report


StructurallyZeroGradientWarning = extend.DegenerateWarning
"""A derivative is zero wherever it exists, whatever the values: the vertex of a linear program."""


@dataclass
class ConeSolution:
    """Figures of one call, on plain detached tensors (under ``torch.vmap`` of all samples together).

    Units: ``x`` and ``y`` have those of the reduced program, whose rows may have been scaled.

    Attributes:
        status: ``ik.Status`` numbers, shape ``batch``. residual_norm: of the optimality conditions. steps: of the solver.
        solver: its name. x, y: unknowns of the reduced program. degeneracy: what the derivatives mean there; of it
            ``weakly_active``, ``rank`` and ``condition`` by name.
    """

    status: Tensor
    residual_norm: Tensor
    steps: Tensor
    solver: str
    w: Tensor
    problem: ConeProgram
    data: tuple[Tensor, ...] = field(repr=False, default=())

    @property
    def converged(self) -> Tensor:
        """Which samples were solved."""
        return self.status == int(Status.CONVERGED)

    @property
    def x(self) -> Tensor:
        """``(batch, n)``."""
        return self.w[:, : self.problem.n]

    @property
    def y(self) -> Tensor:
        """``(batch, m)``."""
        return self.w[:, self.problem.n :]

    @functools.cached_property
    def degeneracy(self) -> extend.Degeneracy:
        """How well determined each solution is, as :func:`implicitkit.diagnostics.degeneracy` has it (computed when asked:
        one singular value decomposition a sample)."""
        P, _, A, b = self.data
        cones = self.problem.dual.cones
        rows = slice(cones.zero, cones.linear)
        kinks = self.y + self.problem.A_held.times(A, self.x) - b
        return extend.regularity(self.w, kinks[:, rows], self.problem.jacobian(self.w, P, A, b)[0].dense())

    @property
    def weakly_active(self) -> Tensor:
        """Inequalities with ``y_i`` and ``s_i`` both zero, a count for each sample: there the derivative has a kink."""
        return self.degeneracy.weakly_active

    @property
    def rank(self) -> Tensor:
        """Numerical rank of the KKT matrix of each sample (full: ``n + m``)."""
        return self.degeneracy.rank

    @property
    def condition(self) -> Tensor:
        """The condition number of the KKT matrix in the 2-norm; ``inf`` where it is singular."""
        return torch.where(self.rank < self.w.shape[1], torch.inf, self.degeneracy.condition)

    def __repr__(self) -> str:
        total, good = len(self.status), int(self.converged.sum())
        worst = float(self.residual_norm.nan_to_num(nan=torch.inf).max()) if total else 0.0
        return f"ConeSolution({good}/{total} solved; solver={self.solver}; residual={worst:.2e})"
