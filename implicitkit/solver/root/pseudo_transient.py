"""Pseudo-transient continuation: follow the flow with implicit steps that grow into Newton's method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import shifted
from implicitkit.foundation.options import above, at_least, check_options, optional, positive
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.method import Method
from implicitkit.solver.root.newton import newton_direction
from implicitkit.solver.steps.factored import Jacobian, at_rounding, jacobian_at, leave

_DENSE = 512  # unknowns a sample up to which Jacobians without a sparsity pattern are formed


@register_solver("pseudo_transient", solves="root")
@dataclass(frozen=True)
class PseudoTransient(Method):
    r"""``z <- z + p``, ``(I / \delta - s J) p = s F(z)``, ``J = dF/dz``: a linearly implicit Euler step of ``dz/dt = s F``.

    Switched evolution relaxation (Mulder & van Leer 1985; Kelley & Keyes 1998, eq. 2.4): ``\delta`` grows as the residual
    falls, ``\delta_k = \delta_{k-1} |F_{k-1}| / |F_k|`` but no less than ``\delta_0``, so that the path follows the flow
    while it is far from rest and the method is Newton's at the end (``1 / \delta`` is dropped once it has fallen by
    ``switch``).  Of several states at rest it tends to find the one that the flow leads to, and it does not stop where
    ``|F|`` has a minimum that is no root.

    The sign ``s`` is part of the problem: ``+1`` for a steady state ``dz/dt = F`` and a fixed point (``F = f(z) - z``),
    ``-1`` for a gradient that is to vanish.  Plain equations have none: it is taken such that ``s F' J F <= 0`` at the
    start, where the flow then lets ``|F|`` fall.

    One Jacobian and one solve a step: sparse where the Jacobian has a sparsity pattern (from 128 unknowns a sample on;
    ``jac_sparsity``), else dense up to 512 unknowns, and above that GMRES with Jacobian-vector products.  A step
    into a state where ``F`` is not finite is taken back and ``\delta`` divided by ten; after ``retreats`` in a row a sample
    is given up.

    Args:
        step_size: the first ``\delta``, in units of time; ``None``: that which moves ``z`` by a tenth of
            ``max(|z|, sqrt(n))``, and no more than half the time in which the flow speeds up e-fold, ``F'F / F'JF``: beyond
            that time the implicit step would go against the flow.
        switch: factor of growth of ``\delta`` beyond which steps are Newton's. retreats: at most, in a row.

    Raises:
        ValueError: an option out of range.
    """

    step_size: float | None = None
    switch: float = 1e10
    retreats: int = 40
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        check_options(self, step_size=optional(positive()), switch=above(1), retreats=at_least(0))

    def init(self, f: Evaluations, z: Tensor) -> Any:
        F = f(z)
        norm = torch.linalg.vector_norm(F, dim=1)
        speeding = (F * f.linearize(z).mv(F)).sum(1) / norm.square()
        sign = _orientation(f, speeding)
        if self.step_size is None:
            first = 0.1 * torch.linalg.vector_norm(z, dim=1).clamp_min(z.shape[1] ** 0.5) / norm
            first = torch.where(sign * speeding > 0, torch.minimum(first, 0.5 / speeding.abs()), first)
        else:
            first = torch.full_like(norm, self.step_size)
        return {
            "delta": first,
            "first": first,
            "norm": norm,
            "sign": sign,
            "retreats": torch.zeros_like(norm, dtype=torch.int64),
        }

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        F, sign = f(z), state["sign"]
        norm = torch.linalg.vector_norm(F, dim=1)
        first = state["first"]
        delta = (state["delta"] * state["norm"] / norm).nan_to_num(torch.inf, torch.inf, 0)
        delta = torch.where(state["retreats"] > 0, state["delta"], torch.maximum(delta, first))
        inverse = torch.where(delta > self.switch * first, 0, 1 / delta)
        J = jacobian_at(f, z, _DENSE)
        settled = at_rounding(f, J.blocks, z)
        p = torch.where(settled.unsqueeze(1), 0, _implicit_euler(f, J, sign.unsqueeze(1) * F, inverse, sign))
        trial = z + p
        finite = torch.isfinite(f(trial)).all(1) & torch.isfinite(p).all(1)
        if bool((finite | ~f.active).all()):
            z_next, retreats = trial, torch.zeros_like(state["retreats"])
        else:
            z_next = torch.where(finite.unsqueeze(1), trial, z)
            delta = torch.where(finite, delta, 0.1 * torch.minimum(delta, self.switch * first))
            first = torch.minimum(first, delta)
            retreats = torch.where(finite, 0, state["retreats"] + 1)
            f.stuck = f.active & (retreats > self.retreats)
        leave(f, settled)
        return z_next, {"delta": delta, "first": first, "norm": norm, "sign": sign, "retreats": retreats}


def _implicit_euler(f: Evaluations, J: Jacobian, F: Tensor, inverse: Tensor, sign: Tensor) -> Tensor:
    """``p`` with ``(I / delta - s J) p = F``."""
    if J.dense is not None:
        matrix = sign[:, None, None] * J.dense
        matrix.diagonal(dim1=1, dim2=2).sub_(inverse.unsqueeze(1))
        return newton_direction(matrix, F)
    if J.sparse is not None:
        return J.sparse.shifted(inverse, -sign).solve(F)
    rhs = torch.where(f.active.unsqueeze(1), F, 0)
    return GMRES(restart=50).solve(shifted(J.A, inverse, -sign), rhs, rtol=1e-3, atol=0.0, max_steps=500).x


def _orientation(f: Evaluations, speeding: Tensor) -> Tensor:
    """The sign ``s`` of the flow ``dz/dt = s F``, ``(batch,)``; ``speeding``: ``F'JF / F'F`` at the start."""
    if f.kind.flow > 0:
        return torch.ones_like(speeding)
    if f.kind.flow < 0:
        return -torch.ones_like(speeding)
    return torch.where(speeding > 0, -1.0, 1.0).to(speeding)
