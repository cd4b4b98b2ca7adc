"""A check of what a solver of quadratic programs finds itself: Newton's steps afterwards mend much that may be wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from implicitkit.problem.qp_data import QPData, natural_residual
from implicitkit.solver.qp.base import QPSolver
from implicitkit.solver.qp.polish import QPPoint
from implicitkit.solver.return_checks import programs_point
from implicitkit.testing.programs import ProgramSubject, check

_ROUGH = 1e-2  # of the size of the point and its multipliers: what methods of first order leave
_CONDITIONS = ("Pz + q + A'y + G'lam", "Az - b", "lam - max(lam + Gz - h, 0)")


@dataclass(frozen=True)
class _Watched(QPSolver):
    """A solver of programs whose answers are kept."""

    part: Any
    seen: list[tuple[QPData, QPPoint]]

    def find(self, data: QPData, tol: float, max_steps: int) -> QPPoint:
        point = programs_point(self.part, data, tol, max_steps)
        self.seen.append((data, point))
        return point


@check(
    "find returns QPPoint(z, y, lam, ...) of the Lagrangian z'Pz/2 + q'z + y'(Az - b) + lam'(Gz - h), lam >= 0, row i of "
    "program i: turn multipliers round, and bring samples into order, before they are returned.",
    lambda solver: isinstance(solver, QPSolver),
)
def finds_points_that_need_little_polish(subject: ProgramSubject) -> None:
    """What ``find`` returns for programs that have solutions meets the conditions of optimality roughly, by itself."""
    for known in subject.known:
        seen: list[tuple[QPData, QPPoint]] = []
        known.solve(_Watched(subject.part, seen), known.theta, on_failure="ignore")
        for data, point in seen:
            size = 1 + float(torch.cat(point[:3], 1).abs().max())
            for left, condition in zip(natural_residual(*point[:3], data), _CONDITIONS, strict=True):
                worst = float(left.abs().max()) if left.numel() else 0.0
                assert worst <= _ROUGH * size, (
                    f"{known.name}: {condition} = 0 is off by {worst:.3g} at the point found, before it is polished"
                )
