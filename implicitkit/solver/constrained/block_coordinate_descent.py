"""Block coordinate descent."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import at_least, check_options
from implicitkit.sets.groups import blocks
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method

__all__ = ["BlockCoordinateDescent"]


@register_solver("block_coordinate_descent", solves="constrained")
@dataclass(frozen=True)
class BlockCoordinateDescent(Method):
    """Proximal gradient steps on one block of coordinates after another, each with its own step length; a step is a sweep.

    (Beck & Tetruashvili 2013; Wright 2015, "Coordinate descent algorithms"; with groups, Qin, Scheinberg & Goldfarb 2013.)
    The proximal map must act on each block alone: on single numbers (``ik.prox.l1``, ``ik.prox.elastic_net``, bounds, ...),
    or on groups, which are then the blocks (rows of a matrix for ``ik.prox.l2``, balls and simplices; the groups of
    ``ik.prox.group_lasso``).  One gradient a block.

    ``z_b <- prox(z_b - t_b df/dz_b, t_b)`` for one block ``b`` after another.

    Args:
        block_size: coordinates in a block, at least; groups are never split.

    Raises:
        ValueError: ``block_size`` below 1. CapabilityError: constraints, or a proximal map that couples everything.
    """

    block_size: int = 1
    default_max_steps: ClassVar[int] = 2000

    def __post_init__(self) -> None:
        check_options(self, block_size=at_least(1))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        return (torch.ones(len(z), len(self._blocks(Model(f))), dtype=z.dtype, device=z.device),)

    def _blocks(self, model: Model) -> list[slice]:
        """Consecutive coordinates that the proximal map couples with no others."""
        prox = getattr(model.problem.prox, "project", model.problem.prox)
        sizes: list[int] | None = []
        for shape in model.problem.layout.events:
            found = blocks(prox, tuple(shape))
            sizes = None if sizes is None or found is None else sizes + found
        if model.count or sizes is None:
            raise CapabilityError(
                "block_coordinate_descent takes bounds, or a prox= or project= that is separable or acts on groups, and no "
                "constraints=: use solver='proximal_gradient' or 'auto'"
            )
        ends = [0]
        for stop in itertools.accumulate(sizes):
            if stop - ends[-1] >= self.block_size or stop == model.size:
                ends.append(stop)
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        model = Model(f)
        lengths = state[0].clone()
        for number, block in enumerate(self._blocks(model)):
            value, _, g = model.slope(z)
            noise = 1e-10 * (1 + value.abs())
            t = lengths[:, number]
            for _ in range(60):
                trial = z.clone()
                trial[:, block] = model.proximal(z - t.unsqueeze(1) * g, t)[:, block]
                d = (trial - z)[:, block]
                square = d.square().sum(1)
                bound = value + (g[:, block] * d).sum(1) + 0.5 * square / t
                new = model.values(trial)[0]
                short = new <= bound
                close = ~short & (new <= bound + noise)
                if bool(close.any()):  # rounding hides the decrease: ask the gradients
                    curvature = ((model.slope(trial)[2] - g)[:, block] * d).sum(1)
                    short = short | (close & (curvature <= square / t))
                if bool((short | ~f.active).all()):
                    break
                t = torch.where(short, t, 0.5 * t)
            z = trial
            lengths[:, number] = 1.2 * t
        return z, (lengths,)
