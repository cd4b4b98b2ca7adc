"""What a method sees where it is itself differentiated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.solver.evaluations import Evaluations
from implicitkit.system import System

__all__ = ["TrackedEvaluations"]


class TrackedEvaluations(Evaluations):
    """``f`` with every operation visible to autograd and to the transforms around the call."""

    def __init__(self, system: System, theta: Sequence[Tensor], solves: str) -> None:
        super().__init__(system, theta, solves)
        self._how, self.fits = "plain", None

    def _kernel(self, z: Tensor) -> Tensor:
        return self.system.kernel(z, *self.theta)

    def _compute_plain(self, point: dict[str, Tensor], name: str) -> None:
        z, problem = point["z"], self.problem
        self._count()
        if self.of_map:
            point["f"] = self._kernel(z)
            point["residual"] = point["f"] - z
            return
        point["residual"] = problem.flat_residual(self._kernel, z)
        point["f"] = point["residual"]
        if self.of_gradient:
            point["value"], point["f"] = autodiff.gradient(lambda y: problem.flat_objective(self._kernel, y), z)
