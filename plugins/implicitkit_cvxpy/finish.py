"""From a solver's answer to a solution: judge it, and take it to rounding by Newton's method.

The natural map is piecewise smooth and its active piece is found by any solver to low accuracy, so that one or two steps

    w <- w - J(w)^{-1} F(w)

reach rounding (Robinson 1992); a step that does not lower ``|F|`` is not taken.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit_cvxpy.backends import Data, Status
from implicitkit_cvxpy.kkt import ConeKKT
from implicitkit_cvxpy.program import ConeProgram

__all__ = ["finish"]

_SOLVED = 1e-7  # |F| relative to the data
_ENOUGH = 1e-11  # no further step for quadratic programs, whose derivative does not depend on the last digits
_ROUNDING = 1e-14


def finish(
    problem: ConeProgram, backend: Any, data: Data, wrong: Tensor, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve a batch of programs on plain tensors.

    Args:
        problem: the optimality conditions. backend: finds a point. wrong: ``(batch, k)``, positive where a sample's data are
            invalid; it is not solved. start: ``w`` to try first, ``(batch, n + m)``.

    Returns:
        ``w (batch, n + m)``, zero where there is no solution, status, ``|F|`` and the solver's steps, each ``(batch,)``.
    """
    scale = 1 + _norm(torch.cat([data.q, data.b], 1))
    invalid = (wrong > 0).any(1)
    if start is None and not bool(invalid.any()):
        return _solve(problem, backend, data, scale)
    batch, size = data.q.shape[0], data.q.shape[1] + data.b.shape[1]
    valid = ~invalid
    w = data.q.new_zeros(batch, size)
    status = torch.full((batch,), int(Status.NONFINITE), device=w.device)
    steps = torch.zeros(batch, dtype=torch.int64, device=w.device)
    norm = torch.full_like(scale, torch.inf)
    if start is not None and start.shape == w.shape and bool(start.isfinite().all()):
        w, norm = _newton(problem, data, start.to(w), scale, valid, 8)
        status = torch.where(valid & (norm <= _SOLVED * scale), int(Status.CONVERGED), status)
    rows = (valid & (status != int(Status.CONVERGED))).nonzero().squeeze(1)
    if not len(rows):
        return w, status, norm, steps
    found = _solve(problem, backend, data.rows(rows), scale[rows])
    old = (w, status, norm, steps)
    return tuple(a.index_copy(0, rows, b) for a, b in zip(old, found, strict=True))  # type: ignore[return-value]


def _solve(problem: ConeProgram, backend: Any, data: Data, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same for valid samples, from the solver's own start."""
    w, status, steps = backend(data)
    failed = (status == int(Status.INFEASIBLE)) | (status == int(Status.UNBOUNDED))
    w, norm = _newton(problem, data, w, scale, ~failed, 60 if problem.dual.smoothing else 4)
    solved = ~failed & (norm <= _SOLVED * scale)
    if bool(solved.all()):
        return w, torch.zeros_like(status), norm, steps
    verdict = torch.where(status == int(Status.CONVERGED), int(Status.INACCURATE), status)
    return w, torch.where(solved, int(Status.CONVERGED), verdict), norm, steps


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=1)


def _newton(
    problem: ConeProgram, data: Data, w: Tensor, scale: Tensor, wanted: Tensor, limit: int
) -> tuple[Tensor, Tensor]:
    """Damped Newton steps while they help; ``w`` and ``|F|``."""
    P, q, A, b, _ = data
    F = problem.residual(w, P, q, A, b)
    norm = _norm(F)
    solver, target = ConeKKT(), (_ENOUGH if problem.dual.cones.polyhedral else _ROUNDING) * scale
    for _ in range(limit):
        rows = (wanted & (norm > target) & (norm < torch.inf)).nonzero().squeeze(1)
        if not len(rows):
            break
        part = [t if len(rows) == len(w) else t.index_select(0, rows) for t in (w, F, norm, P, q, A, b)]
        z, r, n, *values = part
        step = solver.answer(problem.operator(z, values[0], values[2], values[3]), r)
        length, better = 1.0, torch.zeros_like(n, dtype=torch.bool)
        for _ in range(8 if problem.dual.smoothing else 1):
            trial = z - length * step
            new = problem.residual(trial, *values)
            size = _norm(new)
            take = (size < n) & ~better
            z, r, n = (torch.where(_like(take, t), t, old) for t, old in ((trial, z), (new, r), (size, n)))
            better |= take
            if bool(better.all()):
                break
            length *= 0.5
        w, F, norm = (old.index_copy(0, rows, t) for old, t in ((w, z), (F, r), (norm, n)))
        wanted = wanted.index_copy(0, rows, better)
    return w, norm


def _like(mask: Tensor, t: Tensor) -> Tensor:
    return mask.unsqueeze(1) if t.ndim == 2 else mask
