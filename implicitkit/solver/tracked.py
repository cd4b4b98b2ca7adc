"""What a method sees where it is itself differentiated."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.system import System

__all__ = ["TrackedEvaluations"]


class TrackedEvaluations(Evaluations):
    """``f`` with every operation visible to autograd and to the transforms around the call."""

    def __init__(self, system: System, theta: Sequence[Tensor], solves: str) -> None:
        super().__init__(system, theta, solves)
        self._how, self.fits = "visible", None

    def _kernel(self, z: Tensor) -> Tensor:
        return self.system.kernel(z, *self.theta)
