"""Newton's method with dense or sparse Jacobians, and the chord method, which keeps its Jacobian."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.foundation.options import at_least, between, check_options, flag
from implicitkit.linear.factors.dense import lstsq_batched, solve_batched
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluating.differentiated import may_keep_graphs
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.steps.factored import at_rounding, chord_steps, is_large, jacobian_at, leave
from implicitkit.solver.steps.newton_damping import damped_step
from implicitkit.solver.steps.sums import direction_of_map, keeping_sums


@register_solver("newton", solves="root")
@dataclass(frozen=True)
class Newton(Method):
    r"""``z <- z + t d``, ``(dF/dz) d = -F`` (Nocedal & Wright 2006, algorithm 11.1), one dense block a sample.

    The full step (``t = 1``) is taken if it lowers ``|F|``; else ``t`` is halved, per sample, until it does.  A sample that
    has hardly lowered ``|F|`` for ``patience`` steps in a row goes over to full steps: descent on ``|F|`` alone sticks at
    stationary points that are no roots.  Without line search every step is full.  A singular block gives the
    least-squares step of minimum norm, or of a fixed point that which keeps the sums that the map conserves
    (:mod:`~implicitkit.solver.steps.sums`).  The driver keeps the best iterate.

    One evaluation (from 128 unknowns, or 65,536 numbers, on two) and ``n`` vector-Jacobian products a step (in batched
    calls), ``O(batch n^3)`` work, ``O(batch n^2)`` memory.  From 128 unknowns on (48, if the pattern is given), a Jacobian
    with a sparsity pattern (``jac_sparsity``) is formed from as many products as the pattern has colours and factored
    sparse, and factors serve further steps while ``|F|`` falls to a fifth in each.  Above 4,096 unknowns a Jacobian without
    a pattern is not formed: GMRES takes its place.

    Args:
        line_search: halve steps that do not lower ``|F|``. halvings: how often at most.
        patience: weak steps in a row before full ones.

    Raises:
        ValueError: negative ``halvings`` or ``patience``.
    """

    line_search: bool = True
    halvings: int = 30
    patience: int = 5
    default_max_steps: ClassVar[int] = 100

    def __post_init__(self) -> None:
        check_options(self, line_search=flag(), halvings=at_least(0), patience=at_least(0))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        f.linearises = may_keep_graphs(z)
        return None  # weak steps in a row (batch,), once there has been one

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.factored_step(f, f.linearize(z), z, state)

    def factored_step(self, f: Evaluations, A: Operator, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        """A step with factors of ``A``, the Jacobian at ``z``."""
        residual, norm = f(z), f.norm.to(z.dtype)
        if not is_large(f, z):
            blocks = DenseBlocks(A.dense())
            return self._damped(f, z, _dense_direction(f, blocks, residual), norm, state, blocks)
        jacobian = jacobian_at(f, z, A=A)
        blocks = jacobian.blocks
        settled = at_rounding(f, blocks, z)
        if bool((settled | ~f.active).all()):
            leave(f, settled)
            return z, state
        d, blocks = direction_of_map(f, jacobian, residual)
        d = torch.where(settled.unsqueeze(1), 0, d)
        z_next, state = self._damped(
            f, z, d, torch.where(settled, torch.inf, norm), state, blocks if jacobian.exact else None
        )
        z_next = chord_steps(f, blocks, z_next, norm, z)
        leave(f, settled)
        return z_next, state

    def _damped(
        self, f: Evaluations, z: Tensor, d: Tensor, norm: Tensor, state: Any, blocks: Any
    ) -> tuple[Tensor, Any]:
        if not self.line_search:
            return z + d, state
        return damped_step(f, z, d, norm, state, self.halvings, self.patience, blocks)[::2]


def _dense_direction(f: Evaluations, blocks: DenseBlocks, residual: Tensor) -> Tensor:
    """:func:`newton_direction`, of a map with what it conserves."""
    if f.kind.iteration and residual.shape[1] > 1:
        if (kept := keeping_sums(blocks)) is not None:
            return newton_direction(kept.matrix, residual)
        d = -blocks.solve(residual)
        if math.isfinite(float(d.sum())):
            return d
    return newton_direction(blocks.matrix, residual)


def newton_direction(J: Tensor, residual: Tensor) -> Tensor:
    """``d`` with ``J d = -F``; of minimum norm in the least-squares sense where ``J`` is singular, zero where it, or
    ``F``, is not finite."""
    if residual.shape[1] == 1:  # a quotient: a batch of scalar equations needs no factorisation
        d = -residual / J.squeeze(2)
        return d if math.isfinite(float(d.sum())) else torch.where(torch.isfinite(d), d, 0)
    d, regular, reason = solve_batched(J, -residual)
    if reason:
        bad = ~regular & torch.isfinite(J).flatten(1).all(1) & torch.isfinite(residual).all(1)
        if bool(bad.any()):
            d = d.clone()
            d[bad] = lstsq_batched(J[bad], -residual[bad])[0]
        d = torch.where(torch.isfinite(d), d, 0)
    return d


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
