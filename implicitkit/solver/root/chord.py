"""The chord method: Newton's method that keeps its Jacobian."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, between, check_options
from implicitkit.linear.dense import Factor, factor_batched
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.root.newton import newton_direction
from implicitkit.solver.steps.newton_damping import damped_step

__all__ = ["Chord"]


@register_solver("chord", solves="root")
@dataclass(frozen=True)
class Chord(Method):
    r"""``z <- z - J_old^{-1} F(z)`` with the factors of an earlier Jacobian (Kelley 1995, section 5.4.1).

    A sample keeps its factors as long as a step shrinks ``|F|`` to ``contraction`` of what it was.  When one does not,
    that step is not taken: the Jacobian is formed anew where the sample stands and a Newton step with halving is made
    (Shamanskii's variant with an adaptive period).  So the method converges from wherever ``newton`` does, and near the
    solution a step costs one evaluation and two triangular solves.

    Args:
        contraction: in (0, 1); larger keeps a Jacobian longer.
        halvings: of the steps with a new Jacobian, at most. patience: weak steps in a row before full ones, as in
            ``newton``.

    Raises:
        ValueError: an option out of range.
    """

    contraction: float = 0.3
    halvings: int = 30
    patience: int = 5
    default_max_steps: ClassVar[int] = 200

    def __post_init__(self) -> None:
        check_options(self, contraction=between(0, 1), halvings=at_least(0), patience=at_least(0))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        return {"factor": None, "weak": None}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        factor, residual = state["factor"], f(z)
        trial, good = z, torch.zeros_like(f.active)
        if factor is not None:
            trial = z - factor.solve(residual)
            good = torch.linalg.vector_norm(f(trial), dim=1) <= self.contraction * f.norm
            if bool((good | ~f.active).all()):
                return trial, state
        rows = (f.active & ~good).nonzero().squeeze(1)
        J = f.jacobian(z)[rows]
        fresh = factor_batched(J)
        d = -fresh.solve(residual[rows])
        if not bool(fresh.ok.all()):
            d[~fresh.ok] = newton_direction(J[~fresh.ok], residual[rows][~fresh.ok])
        # samples whose old factors did well stay where those took them
        direction = torch.where(good.unsqueeze(1), trial - z, 0).index_copy(0, rows, d)
        norm = torch.where(good, torch.inf, f.norm).to(z.dtype)
        z_next, _, weak = damped_step(f, z, direction, norm, state["weak"], self.halvings, self.patience)
        return z_next, {"factor": _replaced(factor, fresh, rows, len(z)), "weak": weak}

    def select(self, state: Any, index: Tensor) -> Any:
        factor, weak = state["factor"], state["weak"]
        return {
            "factor": factor if factor is None else _rows(factor, index),
            "weak": weak if weak is None else weak.index_select(0, index),
        }


def _rows(factor: Factor, index: Tensor) -> Factor:
    """The factors of some blocks."""
    scale = factor.row_scale
    return dataclasses.replace(
        factor,
        ok=factor.ok[index],
        lu=factor.lu[index],
        pivots=factor.pivots[index],
        row_scale=scale if scale is None else scale[index],
    )


def _replaced(old: Factor | None, fresh: Factor, rows: Tensor, batch: int) -> Factor:
    """The factors with ``fresh`` in the blocks ``rows``."""
    if old is None or len(rows) == batch:
        if len(rows) == batch:
            return fresh
        where = torch.zeros(batch, dtype=torch.int64, device=rows.device)  # the others have ended: any block will do
        return _rows(fresh, where.index_copy(0, rows, torch.arange(len(rows), device=rows.device)))
    scale = None
    if old.row_scale is not None or fresh.row_scale is not None:
        ones = fresh.lu.new_ones(batch, fresh.lu.shape[1], 1)
        scale = ones if old.row_scale is None else old.row_scale
        scale = scale.index_copy(0, rows, ones[rows] if fresh.row_scale is None else fresh.row_scale)
    return Factor(
        old.ok.index_copy(0, rows, fresh.ok),
        fresh.reason,
        fresh.dtype,
        old.lu.index_copy(0, rows, fresh.lu),
        old.pivots.index_copy(0, rows, fresh.pivots),
        scale,
    )
