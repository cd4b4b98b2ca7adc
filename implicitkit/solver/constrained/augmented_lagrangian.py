"""The augmented Lagrangian method, batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.options import above, at_least, check_options, positive
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.constrained.proximal_gradient import initial, proximal_step
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

_GROWN = 1e7  # times the first penalty, at most
_NEAR = 1e-4  # of 1 + |z|: how far curvature is looked for
_PATIENCE = 20  # steps at that rho that lower the least residual by less than a tenth


@register_solver("augmented_lagrangian", solves="constrained")
@dataclass(frozen=True)
class AugmentedLagrangian(Method):
    r"""Method of multipliers.  A step minimises, over the set or with the proximal term that the problem may have,

        f(z) + sum_h (y h + rho h^2 / 2) + sum_g (max(lam + rho g, 0)^2 - lam^2) / (2 rho)

    by accelerated proximal gradient, then ``y <- y + rho h``, ``lam <- max(lam + rho g, 0)``; ``rho`` grows for a sample
    whose violation has not fallen to a quarter.  Needs no second derivatives and no matrices.  A sample whose ``rho`` can
    grow no more gives up when 20 steps have not lowered the residual of its best point by a tenth.

    The first ``rho`` is ``penalty`` in units of ``|d^2 f| / |J|^2``, ``J`` the Jacobian of the constraints, both as a few
    gradients show them: then ``rho J'J`` outweighs the curvature of ``f`` by as much in a sum of thousands of unknowns as in
    one unknown, and the inner minimisation is as well conditioned.

    (Bertsekas 1982, *Constrained Optimization and Lagrange Multiplier Methods*, sections 2.2 and 3.2; Nocedal & Wright
    2006, algorithm 17.4.)

    Args:
        penalty: the first ``rho``, in these units. growth: its factor. inner_steps: proximal gradient steps in one step.

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
        model = Model(f)
        first = self.penalty * _unit(model, model.split(z)[0])
        unmet = torch.full_like(first, torch.inf)
        zero = torch.zeros_like(first)
        return {"rho": first, "most": _GROWN * first, "violation": unmet, "best": unmet, "waited": zero}

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
            z, momentum = proximal_step(
                slope, lambda x: (augmented(*model.values(x)), None), model.proximal, z, momentum
            )
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
        grown = torch.where(slow, self.growth * state["rho"], state["rho"]).minimum(state["most"])
        nearer = f.best_norm < 0.9 * state["best"]
        waited = torch.where(nearer | (grown < state["most"]), 0.0, state["waited"] + 1)
        f.stuck = waited >= _PATIENCE
        return model.join(z, new), {
            "rho": grown,
            "violation": violation,
            "best": torch.where(nearer, f.best_norm, state["best"]),
            "waited": waited,
            "most": state["most"],
        }


def _unit(model: Model, z: Tensor) -> Tensor:
    """``|d^2 f| / |J|^2``, ``(batch,)``; one where either cannot be told, as of a linear ``f``.

    ``|d^2 f|`` is what the gradient changes by along itself.  ``|J|^2`` is ``|J'J v| / |v|`` for ``v = J's``, ``s`` random
    signs.  Both are looked at beside ``z``: farther away ``f`` may not be defined.
    """
    if not model.count:
        return torch.ones_like(z[:, 0])
    _, constraints, g = model.slope(z)
    reach = 1 + torch.linalg.vector_norm(z, dim=1, keepdim=True)

    def along(v: Tensor) -> tuple[Tensor, Tensor]:
        """A point near ``z`` along ``v``, and how far."""
        h = _NEAR * reach / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
        return z - h * v, torch.linalg.vector_norm(h * v, dim=1)

    point, way = along(g)
    curvature = torch.linalg.vector_norm(model.slope(point)[2] - g, dim=1) / way
    signs = seeded.signs(model.count, seed=0xA1).to(z).expand_as(constraints)
    v = model.slope(z, lambda _: signs)[2] - g
    point, way = along(v)
    moved = (model.values(point)[1] - constraints) / way.unsqueeze(1)
    steep = torch.linalg.vector_norm(model.slope(z, lambda _: moved)[2] - g, dim=1)
    unit = curvature / steep
    return torch.where(unit.isfinite() & (unit > 0), unit, 1.0)
