"""How the programs of one call were solved: status is data; and what is said, and raised, of those that were not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import cvxpy as cp
import numpy as np
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import Status, extend
from implicitkit_cvxpy.parameters import Declared
from implicitkit_cvxpy.program import ConeProgram

__all__ = ["ConeSolution", "ProgramError", "StructurallyZeroGradientWarning", "explain", "program_error"]


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
        """Its condition number in the 2-norm; ``inf`` where it is singular."""
        return torch.where(self.rank < self.w.shape[1], torch.inf, self.degeneracy.condition)

    def __repr__(self) -> str:
        total, good = len(self.status), int(self.converged.sum())
        worst = float(self.residual_norm.nan_to_num(nan=torch.inf).max()) if total else 0.0
        return f"ConeSolution({good}/{total} solved; solver={self.solver}; residual={worst:.2e})"


_MEANING = {
    Status.INFEASIBLE: "infeasible, no point satisfies the constraints",
    Status.UNBOUNDED: "unbounded, the objective falls without limit on the constraints",
    Status.INACCURATE: "inaccurate, the solver stopped short of its tolerance (loosen it, or try another solver=)",
    Status.MAX_STEPS: "iteration limit reached",
    Status.STALLED: "the solver failed numerically",
    Status.NONCONVEX: "not convex, the quadratic part has a negative eigenvalue",
    Status.NONFINITE: "invalid data, NaN or Inf or a violated declaration",
}


def program_error(message: str, report: ConeSolution, samples: tuple[int, ...]) -> ProgramError:
    """A :class:`ProgramError` that ``except cvxpy.SolverError`` catches too, and ``except diffcp.SolverError`` where diffcp
    has been imported (nobody can name its class otherwise): code written for cvxpylayers goes on working."""
    theirs = getattr(sys.modules.get("diffcp"), "SolverError", None)
    error: ProgramError = _caught_as(theirs)(message, report, samples)
    return error


@functools.lru_cache(maxsize=8)
def _caught_as(theirs: type[Exception] | None) -> Any:
    bases = (ProgramError, cp.error.SolverError, *((theirs,) if theirs else ()))
    return type("ProgramError", bases, {"__module__": ProgramError.__module__, "__doc__": ProgramError.__doc__})


def explain(
    report: ConeSolution, wrong: Tensor, lead: tuple[int, ...], declared: Sequence[Declared]
) -> tuple[str, bool]:
    """What went wrong where, and whether a declared property is the cause.

    Args:
        report: of the call. wrong: flags ``(batch, 2 k)``, not finite and declaration violated, for each parameter.
        lead: the batch shape. declared: what is known of the parameters.
    """
    bad = (~report.converged).nonzero().squeeze(1).tolist()

    def name(i: int) -> str:
        index = np.unravel_index(i, lead) if lead else ()
        return "the program" if not lead else f"sample {index[0] if len(index) == 1 else tuple(map(int, index))}"

    nonfinite, violated = wrong.tensor_split(2, 1)
    if bool((violated > 0).any()) and not bool((nonfinite > 0).any()):
        i, k = (int(v) for v in (violated > 0).nonzero()[0])
        return f"{name(i)}: {declared[k].complaint} (by {float(violated[i, k]):.3g})", True
    kinds: dict[str, list[int]] = {}
    for i in bad:
        kinds.setdefault(_MEANING.get(Status(int(report.status[i])), "not solved"), []).append(i)
    listed = "; ".join(
        f"{meaning}: " + ", ".join(name(i) for i in those[:6]) + (", ..." if len(those) > 6 else "")
        for meaning, those in kinds.items()
    )
    total = len(report.status)
    count = f"{len(bad)} of {total} programs were not solved by {report.solver}: " if total > 1 else ""
    hint = ' on_failure="nan" lets the other samples through.' if total > len(bad) else ""
    culprits = [d.name for d, bad in zip(declared, (nonfinite > 0).any(0), strict=True) if bad]
    hint = f" NaN or Inf in parameter(s) {', '.join(culprits)}.{hint}" if culprits else hint
    return f"{count}{listed}.{hint}", False
