"""The chord method: Newton's method that keeps its Jacobian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, between, check_options
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.factored import at_rounding, jacobian_at, leave
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

    From 128 unknowns on, a Jacobian with a sparsity pattern (``jac_sparsity``) is factored sparse; above 4,096 one without a
    pattern is not formed, and GMRES takes its place.

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
        return {"at": None, "weak": None, "jacobian": None}

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        at, jacobian, residual = state["at"], state["jacobian"], f(z)
        trial, good = z, torch.zeros_like(f.active)
        if at is not None:
            if jacobian is None:
                jacobian = jacobian_at(f, at)
            trial = z - jacobian.blocks.solve(residual)
            good = torch.linalg.vector_norm(f(trial), dim=1) <= self.contraction * f.norm
            if bool((good | ~f.active).all()):
                return trial, state | {"jacobian": jacobian}
        # samples whose old factors did well keep them, and stay where those took them
        at = z if at is None else torch.where((good | ~f.active).unsqueeze(1), at, z)
        jacobian = jacobian_at(f, at)
        d = torch.where(good.unsqueeze(1), trial - z, jacobian.direction(f, residual))
        settled = at_rounding(f, jacobian.blocks, z) & ~good
        d = torch.where(settled.unsqueeze(1), 0, d)
        norm = torch.where(good | settled, torch.inf, f.norm).to(z.dtype)
        z_next, _, weak = damped_step(f, z, d, norm, state["weak"], self.halvings, self.patience)
        leave(f, settled)
        return z_next, {"at": at, "weak": weak, "jacobian": jacobian}

    def select(self, state: Any, index: Tensor) -> Any:
        at, weak = (None if t is None else t.index_select(0, index) for t in (state["at"], state["weak"]))
        return {"at": at, "weak": weak, "jacobian": None}  # formed again when it is needed
