"""A few Newton steps that only ever lower ``|F|``: the last digits of a point that another method has found."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.linear.dense import solve_batched
from implicitkit.solver.evaluations import Evaluations

__all__ = ["dense_direction", "refine"]


def dense_direction(f: Evaluations, w: Tensor, r: Tensor) -> Tensor:
    """``J^{-1} r`` with the dense Jacobian; zero for a sample whose Jacobian is singular."""
    return torch.nan_to_num(solve_batched(f.jacobian(w), r)[0])


def refine(
    f: Evaluations,
    w: Tensor,
    direction: Callable[[Evaluations, Tensor, Tensor], Tensor] = dense_direction,
    *,
    goal: Tensor | None = None,
    steps: int = 10,
    halvings: int = 10,
) -> Tensor:
    """``w <- w - t J^{-1} F(w)``, ``t`` halved until ``|F|`` falls, sample by sample; stops where it does not fall any more.

    Args:
        f: the residual. w: ``(batch, n)``. direction: ``(f, w, F(w)) -> J^{-1} F``.
        goal: ``|F|`` that is enough, ``(batch,)``; ``None``: to rounding. steps, halvings: at most.
    """
    open_ = torch.ones(len(w), dtype=torch.bool, device=w.device)
    for _ in range(steps):
        r = f.residual(w)
        norm = torch.linalg.vector_norm(r, dim=1)
        open_ = open_ & (norm > (1e-14 * (1 + torch.linalg.vector_norm(w, dim=1)) if goal is None else goal))
        if not bool(open_.any()):
            break
        d = direction(f, w, r)
        t = torch.ones_like(norm)
        for _ in range(halvings + 1):
            trial = w - t.unsqueeze(1) * d
            lower = torch.linalg.vector_norm(f.residual(trial), dim=1) < norm
            if bool((lower | ~open_).all()):
                break
            t = torch.where(lower, t, 0.5 * t)
        open_ = open_ & lower
        w = torch.where(open_.unsqueeze(1), trial, w)
    return w
