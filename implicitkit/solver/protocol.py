"""What the loop of :mod:`~implicitkit.solver.driver` asks of a method."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from implicitkit.solver.evaluations import Evaluations


class Steps(Protocol):
    """What the loop asks of a method (see :class:`~implicitkit.solver.method.Method`)."""

    @property
    def default_max_steps(self) -> int:
        """Steps allowed when nobody says how many."""

    @property
    def keeps_best(self) -> bool:
        """Is the point with the smallest residual returned?"""

    @property
    def hands_over(self) -> bool:
        """Is what it gives up for others to go on with, and to judge?"""

    @property
    def descends(self) -> bool:
        """Does every step of a minimisation lead down?"""

    @property
    def encloses(self) -> bool:
        """Does every step get on, whatever ``|F|`` is after it?"""

    def init(self, f: Evaluations, z: Tensor) -> Any:
        """The state before the first step."""

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step."""

    def keep(self, state: Any) -> dict[str, Tensor]:
        """What is kept of the final state."""

    def select(self, state: Any, index: Tensor) -> Any:
        """The state of some samples."""
