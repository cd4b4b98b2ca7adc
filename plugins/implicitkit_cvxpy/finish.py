"""From a solver's answer to a solution: judge it, and take it to rounding by Newton's method.

The natural map is piecewise smooth and its active piece is found by any solver to low accuracy, so that one or two steps

    w <- w - J(w)^{-1} F(w)

reach rounding (Robinson 1992); a step that does not lower ``|F|`` is not taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit import extend
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
    """Newton steps while they help (damped for a smoothed program); ``w`` and ``|F|``."""
    batch, solver = len(w), ConeKKT()

    def part(rows: Tensor) -> Sequence[Tensor]:
        return data[:4] if len(rows) == batch else data.rows(rows)[:4]

    def direction(z: Tensor, r: Tensor, rows: Tensor) -> Tensor:
        P, _, A, b = part(rows)
        return solver.answer(problem.jacobian(z, P, A, b)[0], r)

    return extend.damped_newton(
        lambda z, rows: problem.residual(z, *part(rows)),
        direction,
        w,
        goal=(_ENOUGH if problem.dual.cones.polyhedral else _ROUNDING) * scale,
        steps=limit,
        halvings=7 if problem.dual.smoothing else 0,
        wanted=wanted,
    )
