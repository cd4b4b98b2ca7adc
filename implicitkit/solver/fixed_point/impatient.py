"""A method that gives up, sample by sample, where it gets nowhere: what a chain of methods hands over by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

__all__ = ["Impatient"]


@dataclass(frozen=True)
class Impatient(Method):
    r"""A method as it is, but a sample whose residual no longer falls is given up (status ``STALLED``).

    Every ``window`` steps the smallest residual ``b`` of a sample is compared with the one ``window`` steps earlier, ``b'``:
    at that rate the tolerance is ``window log(tolerance / b) / log(b / b')`` steps away.  More than ``horizon``: given up.
    So a method that converges linearly with ``\rho`` is kept while ``\log(tolerance / b) / \log \rho \le horizon``, and one
    that has stopped falling goes after one window.

    Args:
        method: any iterative method. window: steps between two looks, at least 2. horizon: steps it may still need.

    Raises:
        ValueError: ``window`` below 2 or ``horizon`` not positive. TypeError: not an iterative method.
    """

    method: Any
    window: int = 12
    horizon: float = 100.0
    keeps_best: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise TypeError(f"only an iterative method can be impatient, got {type(self.method).__name__}")
        if self.window < 2:
            raise ValueError(f"window must be at least 2, got {self.window}")
        if not self.horizon > 0:
            raise ValueError(f"horizon must be positive, got {self.horizon}")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The method's own."""
        return str(getattr(self.method, "name", "") or type(self.method).__name__)

    @property
    def solves(self) -> str:  # type: ignore[override]
        """What the method solves."""
        return str(self.method.solves)

    @property
    def default_max_steps(self) -> int:  # type: ignore[override]
        """The method's own."""
        return int(self.method.default_max_steps)

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        return {"inner": self.method.init(f, z), "step": 0, "before": None}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        step, before = state["step"], state["before"]
        best, tolerance = f.best_norm, f.tolerance
        z_next, inner = self.method.step(f, z, state["inner"])
        if step % self.window == 0:
            if before is not None:
                # falls too slowly: log(best / before) > window log(tolerance / best) / horizon, also where it is NaN
                slow = ~((best / before).log() <= (tolerance / best).log() * (self.window / self.horizon))
                slow.logical_and_(best > tolerance)
                f.stuck = slow if f.stuck is None else f.stuck | slow
            before = best
        return z_next, {"inner": inner, "step": step + 1, "before": before}

    def keep(self, state: dict[str, Any]) -> dict[str, Tensor]:
        return self.method.keep(state["inner"])

    def select(self, state: dict[str, Any], index: Tensor) -> dict[str, Any]:
        before = state["before"]
        return {
            "inner": self.method.select(state["inner"], index),
            "step": state["step"],
            "before": None if before is None else before.index_select(0, index),
        }
