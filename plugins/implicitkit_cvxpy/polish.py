r"""From a solver's answer to a solution: judge it, and take it to rounding by Newton's method.

The natural map is piecewise smooth and its active piece is found by any solver to low accuracy, so that one or two steps

    w <- w - J(w)^{-1} F(w)

reach rounding (Robinson 1992); a step that does not lower ``|F|`` is not taken.  For a sparse program it is ``J + delta I``,
regular also where multipliers are not unique: the proximal method of multipliers (Rockafellar 1976), whose steps leave about
``delta`` of what Newton's would take away; and where the solver's point does not tell which rows are active, quadratic
programs are solved by sets of active rows.

All in units in which the data are of ordinary size, so that tolerances mean the same whatever the user's units.  Cones are
cones, and a multiplier has the units of the objective: with ``t, s > 0``

    P' = t P,    q' = t q / s,    A' = A,    b' = b / s        x = s x',    y = s y' / t

is the same program.  Each sample has its own, powers of two, so that nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit import extend
from implicitkit_cvxpy.attained import runs_away
from implicitkit_cvxpy.backends import Data, Status, active_rows
from implicitkit_cvxpy.kkt import ConeKKT
from implicitkit_cvxpy.program import ConeProgram
from implicitkit_cvxpy.scaled_residual import UNEVEN, WRONG, roughness
from implicitkit_cvxpy.units import Units

_SOLVED = 1e-7  # |F| relative to the data
_ULPS = 4  # of what is added up in a row, that rounding leaves of it
_ENOUGH = 1e-11  # no further step for dense quadratic programs, whose derivative does not depend on the last digits
_ROUNDING = 1e-14
_NEAR = 1e-9  # delta
_ROUGH = 1e-12  # |F| relative to the data, above which the active rows of a sparse program are not the right ones
_ORDINARY = 2.0**10  # sizes from its inverse to this are left as they are


_Point = tuple[Tensor, Tensor, Tensor, Tensor]  # ``w``, status, ``|F|``, steps


class Told(NamedTuple):
    """``w (batch, n + m)``, zero where there is no solution, status, ``|F|`` and the solver's steps, each ``(batch,)``, of
    programs with the tensors ``data``, not solved where ``wrong`` is positive; for which samples other units are to be
    tried (:mod:`implicitkit_cvxpy.units`), and which run away (:mod:`implicitkit_cvxpy.attained`)."""

    w: Tensor
    status: Tensor
    norm: Tensor
    steps: Tensor
    data: tuple[Tensor, ...]
    wrong: Tensor
    uneven: Tensor
    away: Tensor


def finish(
    problem: ConeProgram, backend: Any, data: Data, wrong: Tensor, start: Tensor | None, units: Units | None = None
) -> Told:
    """Solve a batch of programs on plain tensors.

    Args:
        problem: the optimality conditions. backend: finds a point. wrong: ``(batch, k)``, positive where a sample's data are
            invalid; it is not solved. start: ``w`` to try first, ``(batch, n + m)``, where it is not zero.
        units: of the programs, if not the user's.
    """
    if units is not None:
        backend = backend.closely()
    w, status, norm, steps = _in_one_unit(problem, backend, data, wrong, start)
    solved = status == int(Status.CONVERGED)
    left = roughness(problem, data, w, units)
    status = torch.where(solved & (left > WRONG), int(Status.INACCURATE), status)
    uneven = (left > UNEVEN) & (status != int(Status.NONFINITE))
    away = runs_away(problem, w, data[:4]) & (status == int(Status.CONVERGED))
    return Told(w, status, norm, steps, tuple(data[:4]), wrong, uneven, away)


def _in_one_unit(problem: ConeProgram, backend: Any, data: Data, wrong: Tensor, start: Tensor | None) -> _Point:
    """The points of :func:`finish`, found in one unit for all unknowns and one for the objective."""
    plain, units = data, None
    if not problem.dual.smoothing:  # that is a number in the user's units
        data, units = in_units(data)
    if units is None:
        return _checked(problem, backend, data, wrong, start)
    start = None if start is None or start.shape != units.shape else start.to(units) / units
    w, status, norm, steps = _checked(problem, backend, data, wrong, start)
    w = w * units
    return w, status, torch.where(norm.isfinite(), _norm(problem.residual(w, *plain[:4])), norm), steps


def _checked(problem: ConeProgram, backend: Any, data: Data, wrong: Tensor, start: Tensor | None) -> _Point:
    """The points of programs whose data are of ordinary size: those that are ``wrong`` are left out, and a ``start`` is
    tried first."""
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
        tried = valid & (start != 0).any(1)
        w, norm = _newton(problem, data, start.to(w), scale, tried, 8)
        status = torch.where(tried & (norm <= _SOLVED * scale), int(Status.CONVERGED), status)
    rows = (valid & (status != int(Status.CONVERGED))).nonzero().squeeze(1)
    if not len(rows):
        return w, status, norm, steps
    return _with_rows((w, status, norm, steps), rows, _solve(problem, backend, data.rows(rows), scale[rows]))


def _with_rows(point: _Point, rows: Tensor, new: Sequence[Tensor]) -> _Point:
    w, status, norm, steps = (a.index_copy(0, rows, b) for a, b in zip(point, new, strict=True))
    return w, status, norm, steps


def _solve(problem: ConeProgram, backend: Any, data: Data, scale: Tensor) -> _Point:
    """The points of valid samples, from the solver's own start."""
    w, status, steps = backend(data)
    failed = (status == int(Status.INFEASIBLE)) | (status == int(Status.UNBOUNDED))
    w, norm = _newton(problem, data, w, scale, ~failed, 60 if problem.dual.smoothing else 4)
    if data.sparse and problem.dual.cones.polyhedral and not problem.dual.smoothing:
        rough = (~failed & ~(norm <= _ROUGH * scale)).nonzero().squeeze(1)
        if len(rough):
            again = active_rows(data.rows(rough))
            left = _norm(problem.residual(again.w, *data.rows(rough)[:4]))
            better = (again.status == int(Status.CONVERGED)) & ~(left >= norm[rough])
            w, norm = (t.index_copy(0, rough[better], new[better]) for t, new in ((w, again.w), (norm, left)))
    solved = ~failed & _is_solved(problem, data, w, norm, scale)
    if bool(solved.all()):
        return w, torch.zeros_like(status), norm, steps
    closer = backend.closely()
    rough = (~failed & ~solved).nonzero().squeeze(1)
    if len(rough) and closer is not backend:
        # near a kink the active piece is told by a point of more digits
        found = _solve(problem, closer, data.rows(rough), scale[rough])
        better = found[1] == int(Status.CONVERGED)
        w, status, norm, steps = _with_rows((w, status, norm, steps), rough[better], [t[better] for t in found])
        solved = ~failed & _is_solved(problem, data, w, norm, scale)
    verdict = torch.where(status == int(Status.CONVERGED), int(Status.INACCURATE), status)
    return w, torch.where(solved, int(Status.CONVERGED), verdict), norm, steps


def _is_solved(problem: ConeProgram, data: Data, w: Tensor, norm: Tensor, scale: Tensor) -> Tensor:
    """Where ``|F|`` is small beside the data, but for the rounding of what each row of ``A x - b`` adds up."""
    solved = norm <= _SOLVED * scale
    if bool(solved.all()):
        return solved
    along, across = problem.residual(w, *data[:4]).tensor_split((problem.n,), 1)
    size = data.b.abs() + data.A_held.times(data.A.abs(), w[:, : problem.n].abs())
    beyond = (across.abs() - _ULPS * torch.finfo(w.dtype).eps * size).clamp_min(0)
    return _norm(torch.cat([along, beyond], 1)) <= _SOLVED * scale


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
        J = problem.jacobian(z, P, A, b, _NEAR)[0]
        return torch.nan_to_num(J.sparse().solve(r)) if data.sparse else solver.answer(J, r)

    return extend.damped_newton(
        lambda z, rows: problem.residual(z, *part(rows)),
        direction,
        w,
        goal=(_ENOUGH if problem.dual.cones.polyhedral and not data.sparse else _ROUNDING) * scale,
        steps=limit,
        halvings=7 if problem.dual.smoothing else 0,
        wanted=wanted,
    )


def in_units(data: Data) -> tuple[Data, Tensor | None]:
    """The programs in units of their own, and the units of ``w``, ``(batch, n + m)``; ``None``: they are ordinary.

    Numbers of ordinary size stay so, however small or large others are: a bound far away, or a dear slack, is no unit.
    """
    P, q, b = (t.flatten(1).abs() for t in (data.P, data.q, data.b))
    linear = (P == 0).all(1, keepdim=True)
    s = _unit(torch.where(linear, 0, q), b)
    t = 1 / _unit(P, q / s)
    if bool(((s == 1) & (t == 1)).all()):
        return data, None
    curvature = t.reshape(-1, *[1] * (data.P.ndim - 1)) * data.P
    units = torch.cat([s.expand_as(data.q), (s / t).expand_as(data.b)], 1)
    return data._replace(P=curvature, q=t * data.q / s, b=data.b / s), units


def _unit(*parts: Tensor) -> Tensor:
    """A power of two near the largest of numbers that are all small, or the least of numbers that are all large; else 1,
    ``(batch, 1)``.  Zeros do not count.

    Args:
        parts: absolute values, ``(batch, k)`` each.
    """
    sizes = torch.cat(parts, 1)
    largest = sizes.amax(1, keepdim=True) if sizes.shape[1] else sizes.new_ones(len(sizes), 1)
    least = torch.where(sizes > 0, sizes, torch.inf).amin(1, keepdim=True) if sizes.shape[1] else largest
    small = (largest > 0) & (largest < 1 / _ORDINARY)
    large = least.isfinite() & (least > _ORDINARY)
    size = torch.where(small, largest, torch.where(large, least, 1.0))
    return torch.exp2(size.log2().round())
