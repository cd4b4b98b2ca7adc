"""A strategy from a plugin: another solver from several starts, the best result of each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik


@ik.register_solver("multistart", solves="root")
@dataclass(frozen=True)
class MultiStart(ik.extend.Solver):
    """Begins at ``scale * z0`` for each scale and keeps, sample by sample, the smallest residual.

    Args:
        solver: for roots. scales: of the starts.
    """

    solver: Any = "newton"
    scales: tuple[float, ...] = (1.0, -1.0, 0.1)
    solves: ClassVar[str] = "root"

    def run(self, f: ik.extend.Evaluations, z0: Tensor, options: ik.extend.Options) -> ik.extend.Outcome:
        solver = ik.extend.get_solver(self.solver)
        best = solver.run(f, z0, options)
        for scale in self.scales[1:]:
            found = solver.run(f, scale * z0, options)
            better = (found.residual_norm < best.residual_norm) | best.residual_norm.isnan()
            for name in ("residual_norm", "steps", "status"):
                setattr(best, name, torch.where(better, getattr(found, name), getattr(best, name)))
            best.z = torch.where(better.unsqueeze(1), found.z, best.z)
        best.evaluations, best.sample_evaluations = f.evaluations, f.sample_evaluations
        return best
