"""The augmented Lagrangian method, batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import above, at_least, check_options, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.constrained.proximal_gradient import initial, proximal_step
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

__all__ = ["AugmentedLagrangian"]

_STEEPEST = 1e8  # rho at most
_PATIENCE = 20  # steps at that rho that lower the least residual by less than a tenth


@register_solver("augmented_lagrangian", solves="constrained")
@dataclass(frozen=True)
class AugmentedLagrangian(Method):
    r"""Method of multipliers: a step minimises, over the set or with the proximal term that the problem may have,

        f(z) + sum_h (y h + rho h^2 / 2) + sum_g (max(lam + rho g, 0)^2 - lam^2) / (2 rho)

    by accelerated proximal gradient, then ``y <- y + rho h``, ``lam <- max(lam + rho g, 0)``; ``rho`` grows for a sample
    whose violation has not fallen to a quarter.  Needs no second derivatives and no matrices.  A sample whose ``rho`` can
    grow no more gives up when 20 steps have not lowered the residual of its best point by a tenth.

    (Bertsekas 1982, *Constrained Optimization and Lagrange Multiplier Methods*, sections 2.2 and 3.2; Nocedal & Wright
    2006, algorithm 17.4.)

    Args:
        penalty: the first ``rho``. growth: its factor. inner_steps: proximal gradient steps in one step.

    Raises:
        ValueError: ``penalty`` not positive, ``growth`` not above 1, ``inner_steps`` below 1.
    """

    penalty: float = 10.0
    growth: float = 4.0
    inner_steps: int = 300
    default_max_steps: ClassVar[int] = 100

    def __post_init__(self) -> None:
        check_options(self, penalty=positive(), growth=above(1), inner_steps=at_least(1))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        full = torch.full_like(z[:, 0], self.penalty)
        unmet = torch.full_like(full, torch.inf)
        return {"rho": full, "violation": unmet, "best": unmet, "waited": torch.zeros_like(full)}

    def step(self, f: Evaluations, w: Tensor, state: Any) -> tuple[Tensor, Any]:
        model = Model(f)
        z, multipliers = model.split(w)
        rho = state["rho"].unsqueeze(1)

        def force(constraints: Tensor) -> Tensor:
            raw = multipliers + rho * constraints
            return torch.where(model.one_sided, raw.clamp_min(0), raw)

        def augmented(value: Tensor, constraints: Tensor) -> Tensor:
            return value + ((force(constraints).square() - multipliers.square()) / (2 * rho)).sum(1)

        def slope(x: Tensor) -> tuple[Tensor, Tensor]:
            value, constraints, gradient = model.slope(x, force)
            return augmented(value, constraints), gradient

        momentum = initial(slope, z)
        goal = 0.1 * torch.minimum(f.norm.to(z.dtype), state["violation"])
        for number in range(self.inner_steps):
            before = z
            z, momentum = proximal_step(slope, lambda x: augmented(*model.values(x)), model.proximal, z, momentum)
            if number % 5 == 4:
                moved = torch.linalg.vector_norm(z - before, dim=1) / momentum.length
                if bool(((moved <= goal.clamp_min(0.1 * f.tolerance)) | ~f.active).all()):
                    break
        constraints = model.values(z)[1]
        new = force(constraints)
        violation = torch.linalg.vector_norm(
            torch.where(model.one_sided, torch.maximum(constraints, -multipliers / rho), constraints), dim=1
        )
        slow = violation > 0.25 * state["violation"]
        grown = torch.where(slow, self.growth * state["rho"], state["rho"]).clamp(max=_STEEPEST)
        nearer = f.best_norm < 0.9 * state["best"]
        waited = torch.where(nearer | (grown < _STEEPEST), 0.0, state["waited"] + 1)
        f.stuck = waited >= _PATIENCE
        return model.join(z, new), {
            "rho": grown,
            "violation": violation,
            "best": torch.where(nearer, f.best_norm, state["best"]),
            "waited": waited,
        }
