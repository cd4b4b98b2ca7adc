"""A method that gives up, sample by sample, where it gets nowhere: what a chain of methods hands over by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import adopts, at_least, check_options, flag, positive
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.restarts import maybe_any

_RISES = 1.1  # times the residual of the last look


@dataclass(frozen=True)
@adopts("method", "solves", "default_max_steps")
class Impatient(Method):
    r"""A method as it is, but a sample whose residual no longer falls is given up (status ``STALLED``).

    Every ``window`` steps the smallest residual ``b`` of a sample is compared with the one ``window`` steps earlier, ``b'``:
    at that rate the tolerance is ``window log(tolerance / b) / log(b / b')`` steps away.  More than ``horizon``: given up.
    So a method that converges linearly with ``\rho`` is kept while ``\log(tolerance / b) / \log \rho \le horizon``, and one
    that has stopped falling goes after one window.  A step that costs more counts as more steps.

    A sample is given up, too, when its next iterate would be further out than ``reach (|z_0| + |f(z_0)|)``.  Where a map is
    nearly the identity far out, as a gated one is whose gate has closed, every far point looks like a solution to a
    tolerance relative to ``|z|``.

    With ``follow`` it is the present residual ``b`` that is looked at, not the smallest, one that has risen by a tenth is no
    reason to give up, and what is gives a sample up the second time in a row: an iteration may first lead away from a point
    that repels, and only then to one that attracts.

    Args:
        method: any iterative method. window: steps between two looks, at least 2.
        horizon: steps it may still need; ``inf``: any number.
        reach: how far out, in units of the start; ``inf``: anywhere. follow: is a residual that rises followed?

    Raises:
        ValueError: ``window`` below 2 or ``horizon`` or ``reach`` not positive. TypeError: not an iterative method.
    """

    method: Any
    window: int = 12
    horizon: float = 100.0
    reach: float = math.inf
    follow: bool = False
    keeps_best: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, window=at_least(2), horizon=positive(), reach=positive(), follow=flag())
        if not isinstance(self.method, Method):
            raise TypeError(f"only an iterative method can be impatient, got {type(self.method).__name__}")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The method's own."""
        return self.method.name or type(self.method).__name__

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        radius = None
        if math.isfinite(self.reach):
            radius = self.reach * sum(torch.linalg.vector_norm(v, dim=1) for v in (z, z + f.residual(z)))
        missed = torch.zeros_like(f.active) if self.follow else None
        return {"inner": self.method.init(f, z), "since": 0, "before": None, "radius": radius, "missed": missed}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        since, before, radius, missed = state["since"], state["before"], state["radius"], state["missed"]
        best, tolerance = f.norm if self.follow else f.best_norm, f.tolerance
        z_next, inner = self.method.step(f, z, state["inner"])
        if radius is not None:
            out = torch.linalg.vector_norm(z_next, dim=1) > radius
            z_next = torch.where(out.unsqueeze(1), f.best, z_next)
            f.stuck = out if f.stuck is None else f.stuck | out
        if (before is None or since >= self.window) and math.isfinite(self.horizon):
            if before is not None:
                # falls too slowly: log(best / before) > since log(tolerance / best) / horizon, also where it is NaN
                slow = ~((best / before).log() <= (tolerance / best).log() * (since / self.horizon))
                slow.logical_and_(best > tolerance)
                if self.follow:
                    slow.logical_and_(best <= _RISES * before)
                    slow, missed = slow & missed, slow
                if maybe_any(slow):
                    f.stuck = slow if f.stuck is None else f.stuck | slow
            before, since = best, 0
        since += f.taken + f.dear
        return z_next, {"inner": inner, "since": since, "before": before, "radius": radius, "missed": missed}

    def keep(self, state: dict[str, Any]) -> dict[str, Tensor]:
        return self.method.keep(state["inner"])

    def select(self, state: dict[str, Any], index: Tensor) -> dict[str, Any]:
        kept = {
            k: None if state[k] is None else state[k].index_select(0, index) for k in ("before", "radius", "missed")
        }
        return {"inner": self.method.select(state["inner"], index), "since": state["since"], **kept}
