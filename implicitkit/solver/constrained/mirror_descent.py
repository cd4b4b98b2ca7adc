"""Mirror descent on the simplex."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.errors import CapabilityError
from implicitkit.sets.simplex import Simplex
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

__all__ = ["MirrorDescent"]


@register_solver("mirror_descent", solves="constrained")
@dataclass(frozen=True)
class MirrorDescent(Method):
    r"""Exponentiated gradient, ``z_i <- z_i exp(-t g_i) r / sum``, for ``project=ik.project.simplex(r)``.

    Mirror descent with the entropy as mirror map (Beck & Teboulle 2003); ``t`` is halved until
    ``f(z+) <= f(z) + <g, z+ - z> + KL(z+ | z) / t`` (relative smoothness, Bauschke, Bolte & Teboulle 2017) and grows
    again after each step.  It begins inside the simplex, whatever ``z0``.

    Raises:
        CapabilityError: the problem is not over a simplex, or has constraints.
    """

    default_max_steps: ClassVar[int] = 20000

    def init(self, f: Evaluations, z: Tensor) -> Any:
        model = Model(f)
        self._check(model)
        return (torch.ones(len(z), dtype=z.dtype, device=z.device),)

    @staticmethod
    def _check(model: Model) -> None:
        layout = model.problem.layout
        vector = len(layout.events) == 1 and len(layout.events[0]) == 1
        if model.count or not vector or not isinstance(getattr(model.problem.prox, "project", None), Simplex):
            raise CapabilityError(
                "mirror_descent is for one vector on a simplex, project=ik.project.simplex(), without constraints=; use "
                "solver='proximal_gradient' or 'auto'"
            )

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model = Model(f)
        (t,) = state
        inside = model.proximal(z, 1.0)
        radius = inside.sum(1, keepdim=True)
        outside = ((z - inside).abs().amax(1) > 1e-9 * radius.squeeze(1)) | (z <= 0).any(1)
        z = torch.where(outside.unsqueeze(1), (inside.clamp_min(0) + 1e-2 * radius / z.shape[1]), z)
        z = z * radius / z.sum(1, keepdim=True)
        value, _, g = model.slope(z)
        noise = 1e-12 * (1 + value.abs())
        g = g - g.mean(1, keepdim=True)  # on the simplex only differences count
        for _ in range(60):
            log = torch.log(z) - t.unsqueeze(1) * g
            z_next = radius * torch.softmax(log, 1)
            z_next = z_next.clamp_min(torch.finfo(z.dtype).tiny)
            divergence = (z_next * (torch.log(z_next) - torch.log(z)) - z_next + z).sum(1)
            short = model.values(z_next)[0] <= value + (g * (z_next - z)).sum(1) + divergence / t + noise
            if bool((short | ~f.active).all()):
                break
            t = torch.where(short, t, 0.5 * t)
        return z_next, (1.2 * t,)
