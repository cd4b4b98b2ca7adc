"""Aitken's extrapolation of a fixed-point iteration, and its vector form by Irons and Tuck."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import above, at_least, between, check_options, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.restarts import return_to_best, watch


@register_solver("aitken", solves="fixed_point")
@dataclass(frozen=True)
class Aitken(Method):
    r"""Dynamic relaxation: ``z <- z + w r`` with ``r = f(z) - z`` and one factor ``w`` a sample from the last two residuals.

    For one unknown the secant method, ``w = -dz / dr``, of order 1.618; for more the vector form of Irons & Tuck (1969),

        w_k = -w_{k-1} r_{k-1}.(r_k - r_{k-1}) / |r_k - r_{k-1}|^2,

    (Küttler & Wall 2008, eq. 44), the usual relaxation of coupled simulations.  ``|w|`` is kept within ``bound``.  A sample
    that does badly takes a plain step from its best point (:func:`~implicitkit.solver.steps.restarts.watch`).

    Memory: two vectors a sample.  One evaluation a step.

    Args:
        damping: the first ``w``, in (0, 2). bound: the largest ``|w|``, positive.
        safeguard: growth of the residual at which a sample restarts, greater than 1; ``inf`` switches it off.
        patience: steps without a new best residual after which a sample restarts.

    Raises:
        ValueError: an option out of range.
    """

    damping: float = 1.0
    bound: float = 1e4
    safeguard: float = 10.0
    patience: int = 50
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(self, damping=between(0, 2), bound=positive(), safeguard=above(1), patience=at_least(2))

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        return {"last": None, "guard": {}}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        r = f.residual(z)
        forget, guard = watch(f, state["guard"], self.safeguard, self.patience)
        w = r.new_full((len(r), 1), self.damping)
        if state["last"] is not None:
            last_z, last_r = state["last"]
            dz, dr = z - last_z, r - last_r
            # dz = w r at the last step, whatever became of it since
            found = -(dz * dr).sum(1, keepdim=True) / dr.square().sum(1, keepdim=True)
            found = found.clamp(-self.bound, self.bound)
            usable = torch.isfinite(found) & (found != 0)
            w = torch.where(usable if forget is None else usable & ~forget.unsqueeze(1), found, w)
        return return_to_best(f, torch.addcmul(z, w, r), guard), {"last": (z, r), "guard": guard}


@register_solver("steffensen", solves="fixed_point", max_size=1)
@dataclass(frozen=True)
class Steffensen(Method):
    r"""Aitken's delta-squared applied anew to ``z, f(z), f(f(z))``: quadratic convergence without derivatives, one unknown.

        z <- z - (f(z) - z)^2 / (f(f(z)) - 2 f(z) + z)

    (Steffensen 1933; Henrici 1964, section 4.10.)  Where the second difference vanishes, or the outcome is not finite, the
    sample takes ``f(f(z))``; one that does badly goes back to its best point for a plain step
    (:func:`~implicitkit.solver.steps.restarts.watch`).  Two evaluations a step.  For systems use ``aitken`` or ``anderson``.

    Args:
        safeguard: growth of the residual at which a sample restarts, greater than 1; ``inf`` switches it off.
        patience: steps without a new best residual after which a sample restarts.

    Raises:
        ValueError: an option out of range.
    """

    safeguard: float = 100.0
    patience: int = 50
    default_max_steps: ClassVar[int] = 200

    def __post_init__(self) -> None:
        check_options(self, safeguard=above(1), patience=at_least(2))

    def init(self, f: Evaluations, z: Tensor) -> dict[str, Any]:
        return {"guard": {}}

    def step(self, f: Evaluations, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        once, r = f(z), f.residual(z)
        forget, guard = watch(f, state["guard"], self.safeguard, self.patience)
        twice = f(once)
        z_next = z - r.square() / (twice - once - r)
        plain = ~torch.isfinite(z_next)
        if forget is not None:
            plain = plain | forget.unsqueeze(1)
        return return_to_best(f, torch.where(plain, twice, z_next), guard), {"guard": guard}
