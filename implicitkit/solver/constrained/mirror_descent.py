"""Mirror descent on simplices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
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
    ``f(z+) <= f(z) + <g, z+ - z> + KL(z+ | z) / t`` (relative smoothness, Bauschke, Bolte & Teboulle 2017; where rounding
    hides the decrease, until ``<dg, dz> <= <d log z, dz> / t``) and grows again after each step.  It begins inside the
    simplex, whatever ``z0``.  The last dimension of ``z`` is the simplex: a matrix is one simplex in each of its rows, all
    moved by one ``t`` a sample.

    Raises:
        CapabilityError: the problem is not over simplices, or has constraints.
    """

    default_max_steps: ClassVar[int] = 20000

    def init(self, f: Evaluations, z: Tensor) -> Any:
        self._rows(Model(f))
        return (torch.ones(len(z), dtype=z.dtype, device=z.device),)

    @staticmethod
    def _rows(model: Model) -> int:
        """How many simplices there are in a sample."""
        layout = model.problem.layout
        shape = layout.events[0] if len(layout.events) == 1 else ()
        if model.count or not shape or not isinstance(getattr(model.problem.prox, "project", None), Simplex):
            raise CapabilityError(
                "mirror_descent is for one tensor whose last dimension is a simplex, project=ik.project.simplex(), without "
                "constraints=; use solver='proximal_gradient' or 'auto'"
            )
        return math.prod(shape[:-1])

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model = Model(f)
        (t,), rows = state, self._rows(model)

        def split(x: Tensor) -> Tensor:
            return x.reshape(len(x), rows, -1)

        inside, x = split(model.proximal(z, 1.0)), split(z)
        radius = inside.sum(2, keepdim=True)
        outside = ((x - inside).abs().amax(2, keepdim=True) > 1e-9 * radius) | (x <= 0).any(2, keepdim=True)
        x = torch.where(outside, inside.clamp_min(0) + 1e-2 * radius / x.shape[2], x)
        x = x * radius / x.sum(2, keepdim=True)
        value, _, slope = model.slope(x.flatten(1))
        noise = 1e-10 * (1 + value.abs())
        g = split(slope)
        g = g - g.mean(2, keepdim=True)  # on the simplex only differences count
        for _ in range(60):
            new = (radius * torch.softmax(torch.log(x) - t[:, None, None] * g, 2)).clamp_min(torch.finfo(z.dtype).tiny)
            ratio, d = torch.log(new) - torch.log(x), (new - x).flatten(1)
            divergence = (new * ratio - new + x).flatten(1).sum(1)
            bound = value + (g.flatten(1) * d).sum(1) + divergence / t
            reached = model.values(new.flatten(1))[0]
            short, close = reached <= bound, (reached - bound).abs() <= noise
            if bool(close.any()):  # rounding hides the decrease: ask the gradients, for KL(z+ | z) + KL(z | z+)
                curvature = ((model.slope(new.flatten(1))[2] - slope) * d).sum(1)
                short = torch.where(close, curvature <= (ratio.flatten(1) * d).sum(1) / t, short)
            if bool((short | ~f.active).all()):
                break
            t = torch.where(short, t, 0.5 * t)
        return new.flatten(1), (1.2 * t,)
