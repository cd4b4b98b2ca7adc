"""A few Newton steps that only ever lower ``|F|``: the last digits of a point that another method has found."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import solve_batched
from implicitkit.solver.evaluations import Evaluations


def dense_direction(f: Evaluations, w: Tensor, r: Tensor) -> Tensor:
    """``J^{-1} r`` with the dense Jacobian; zero for a sample whose Jacobian is singular."""
    return torch.nan_to_num(solve_batched(f.jacobian(w), r)[0])


def refine(
    f: Evaluations,
    w: Tensor,
    direction: Callable[[Evaluations, Tensor, Tensor], Tensor] = dense_direction,
    *,
    steps: int,
    halvings: int = 10,
) -> Tensor:
    """:func:`damped_newton` on the residual of a problem, all samples in every step; the point.

    Args:
        f: the residual. w: ``(batch, n)``. direction: ``(f, w, F(w)) -> J^{-1} F``.
        steps, halvings: at most.
    """
    return damped_newton(
        lambda z, _: f.residual(z),
        lambda z, r, _: direction(f, z, r),
        w,
        steps=steps,
        halvings=halvings,
        narrow=False,
    )[0]


def damped_newton(
    residual: Callable[[Tensor, Tensor], Tensor],
    direction: Callable[[Tensor, Tensor, Tensor], Tensor],
    w: Tensor,
    *,
    goal: Tensor | None = None,
    steps: int = 10,
    halvings: int = 10,
    wanted: Tensor | None = None,
    narrow: bool = True,
) -> tuple[Tensor, Tensor]:
    """``w <- w - t J^{-1} F(w)``, ``t`` halved until ``|F|`` falls, sample by sample; a sample whose residual does not fall
    any more is left alone.

    Args:
        residual: ``(w, rows) -> F`` for some of the samples, by their indices. direction: ``(w, F, rows) -> J^{-1} F``.
        w: ``(batch, n)``. goal: ``|F|`` that is enough, ``(batch,)``; ``None``: to rounding. steps, halvings: at most.
        wanted: which samples, ``(batch,)`` bool; ``None``: all.
        narrow: evaluate only the samples that are still open.

    Returns:
        ``w`` and ``|F(w)|``.
    """
    everything = torch.arange(len(w), device=w.device)
    r = residual(w, everything)
    norm = torch.linalg.vector_norm(r, dim=1)
    open_ = norm.isfinite() if wanted is None else wanted & norm.isfinite()
    for _ in range(steps):
        enough = 1e-14 * (1 + torch.linalg.vector_norm(w, dim=1)) if goal is None else goal
        open_ = open_ & (norm > enough)
        if not bool(open_.any()):
            break
        rows = everything if not narrow or bool(open_.all()) else open_.nonzero().squeeze(1)
        z, old = w.index_select(0, rows), norm.index_select(0, rows)
        d = direction(z, r.index_select(0, rows), rows)
        t = torch.ones_like(old)
        for _ in range(halvings + 1):
            trial = z - t.unsqueeze(1) * d
            new = residual(trial, rows)
            size = torch.linalg.vector_norm(new, dim=1)
            lower = size < old
            if bool((lower | ~open_[rows]).all()):
                break
            t = torch.where(lower, t, 0.5 * t)
        take = lower & open_[rows]
        open_ = open_.index_copy(0, rows, take)
        found = rows[take]
        w, r, norm = (a.index_copy(0, found, b[take]) for a, b in ((w, trial), (r, new), (norm, size)))
    return w, norm
