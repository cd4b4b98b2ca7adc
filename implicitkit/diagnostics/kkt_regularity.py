r"""How well determined is the solution of a constrained problem, and what does its derivative mean?

The derivative of a solution of ``minimise f, h = 0, g <= 0`` is that of its active set.  It is the classical one where
the KKT matrix is regular and no constraint is weakly active (``lam_i = 0`` and ``g_i = 0`` at once); elsewhere it is one
element of a set.

Source: Nocedal & Wright (2006), definitions 12.4 and 12.5 (independence, strict complementarity), section 12.8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.linear.factors.dense import svd_batched
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.problem.quadratic_program import QPConditions
from implicitkit.solution import Solution


@dataclass(frozen=True)
class Degeneracy:
    """Figures of a constrained solution, one entry a sample.

    Attributes:
        active: inequality constraints in force. weakly_active: among all, those at the kink: multiplier and constraint
            both zero, to the tolerance.
        rank, size: of the KKT matrix; the derivative is unique where they are equal. condition: of its regular part.
        regular: full rank, and nothing weakly active.
    """

    active: Tensor
    weakly_active: Tensor
    rank: Tensor
    size: int
    condition: Tensor

    @property
    def regular(self) -> Tensor:
        """Is the derivative the classical one?"""
        return (self.rank == self.size) & (self.weakly_active == 0)

    def __str__(self) -> str:
        good, total = int(self.regular.sum()), self.regular.numel()
        return (
            f"Degeneracy({good} of {total} samples regular; active {int(self.active.max())}, weakly active "
            f"{int(self.weakly_active.max())}, rank {int(self.rank.min())} of {self.size}, condition "
            f"{float(self.condition.max()):.2e} at worst)"
        )


@despite_inference_mode
def degeneracy(solution: Solution, *, tolerance: float = 1e-6) -> Degeneracy:
    """Count what is weakly active and take the singular values of the KKT matrix (dense: one decomposition a sample).

    Args:
        solution: of a problem with constraints, or of a quadratic program. tolerance: relative to the largest multiplier
            and constraint value, below which a number counts as zero; singular values below ``1e-10`` of the largest do.

    Raises:
        ValueError: the solution has no multipliers, or does not know its problem any more.
    """
    record = solution._record
    problem = getattr(record.system, "problem", None)
    if not isinstance(problem, (ConstrainedMinimisation, QPConditions)):
        raise ValueError("degeneracy is for solutions of constrained problems that ik.solve returned in this process")
    system, w = record.system, record.outcome.z
    theta = [t.detach() for t in record.theta]
    _, A = problem.linearise(system, w, theta)
    with torch.no_grad():
        found = regularity(w, _kinks(problem, system, w, theta), A.dense(), tolerance=tolerance)
    figures = (found.active, found.weakly_active, found.rank, found.condition)
    active, weak, rank, condition = map(solution._layout.unpack_batch, figures)
    return Degeneracy(active, weak, rank, found.size, condition)


@despite_inference_mode
def regularity(w: Tensor, distance: Tensor, matrix: Tensor, *, tolerance: float = 1e-6) -> Degeneracy:
    """The figures for plain tensors.

    Args:
        w: points and multipliers ``(batch, n)``. distance: ``lam + g`` of every inequality ``(batch, m)``.
        matrix: KKT matrices ``(batch, n, n)``. tolerance: as in :func:`degeneracy`.
    """
    scale = tolerance * (1 + w.abs().amax(1, keepdim=True))
    s = svd_batched(matrix)[1]
    kept = s > 1e-10 * s[:, :1]
    smallest = torch.where(kept, s, torch.inf).amin(1)
    weak, active = (distance.abs() <= scale).sum(1), (distance > scale).sum(1)
    return Degeneracy(active, weak, kept.sum(1), w.shape[1], s[:, 0] / smallest)


def _kinks(problem: ConstrainedMinimisation | QPConditions, system: object, w: Tensor, theta: list[Tensor]) -> Tensor:
    """``lam + g`` of every inequality: positive where it is active, negative where it is not, zero at the kink."""
    if isinstance(problem, QPConditions):
        data = problem.data(system, theta)  # type: ignore[arg-type]
        if "G" not in data:
            return w.new_zeros(len(w), 0)
        Gz = problem.times("G", data["G"], w[:, : data["q"].shape[1]])
        v = w[:, w.shape[1] - Gz.shape[1] :] + Gz
        sides = [v - data["h"]] if "h" in data else []
        sides += [data["lower"] - v] if "lower" in data else []
        return torch.cat(sides, 1)
    values = problem.values(lambda y: system.kernel(y, *theta), w)[1]  # type: ignore[attr-defined]
    return (w[:, problem.size :] + values)[:, problem.sides(w)]
