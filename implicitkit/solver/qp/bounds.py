r"""Strictly convex programs whose inequalities are bounds, by sets of active bounds that change many at a time.

    min z'Pz/2 + q'z,    Az = b,    l <= z <= u

With some unknowns at their bounds and the others, ``F``, free, the optimality conditions are a linear system in ``z_F`` and
``y``, of ``|F|`` and not of ``n`` unknowns:

    P_FF z_F + A_F'y = -q_F - P_FB z_B,    A_F z_F = b - A_B z_B,        \mu = -(Pz + q + A'y)

Then every free unknown beyond a bound is put there, and every one at a bound with a multiplier of the wrong sign is freed,
at once.  Where the sets no longer change they are those of the solution.  Few changes of all are enough as a rule, however
many bounds are active (a method that adds them one by one takes that many steps); where they are not, or a matrix is not
definite, nothing is said.

Source: Bergounioux, Ito & Kunisch (1999), SIAM J. Control Optim. 37; Hintermueller, Ito & Kunisch (2003), SIAM J. Optim. 13,
"The primal-dual active set strategy as a semismooth Newton method".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.qp.polish import QPPoint

_MANY = 150  # unknowns from which active bounds are changed many at a time
_MET = 1e-10  # of a condition's parts: what may be left of it
_SWEEPS = 15  # seven or so are enough; a cycle of sets never ends


def are_bounds(data: QPData) -> bool:
    """Has every inequality one unknown, in every program?"""
    return data.G.shape[1] > 0 and bool((data.G.count_nonzero(2) == 1).all())


def bounds_first(data: QPData, solve: Callable[[QPData], QPPoint], from_inside: bool = False) -> QPPoint:
    """The solutions: where all inequalities are bounds, of 150 unknowns and more on the CPU, by :func:`within_bounds`; what
    that does not find, and all others, by ``solve``.  Where that is ``from_inside``, all programs at once, a program alone
    by :func:`within_bounds` whatever its size, in a half to a third of the operations."""
    if worth_sets(data.q, from_inside) and are_bounds(data):
        return within_bounds(data).with_rest(data, solve)
    return solve(data)


def worth_sets(q: Tensor, from_inside: bool = False) -> bool:
    """Are programs with ``q (batch, n)`` solved by sets of active bounds first, if they have no other inequality?"""
    return q.device.type == "cpu" and (q.shape[1] >= _MANY or (from_inside and len(q) == 1))


def within_boxes(boxes: Box) -> QPPoint:
    """The solutions of a batch that :func:`within_box` finds, ``CONVERGED``; the others are ``STALLED``, with zeros.
    ``lam`` is that of all upper bounds and then of all lower ones, ``(batch, 2 n)``."""
    batch = len(boxes.q)
    z, y, mu = torch.zeros_like(boxes.q), torch.zeros_like(boxes.b), torch.zeros_like(boxes.q)
    status = torch.full((batch,), int(Status.STALLED), dtype=torch.int64, device=z.device)
    steps = torch.zeros_like(status)
    for i in range(batch):
        found, steps[i] = within_box(Box(*(t[i] for t in boxes)))
        if found is not None:
            z[i], y[i], mu[i] = found
            status[i] = int(Status.CONVERGED)
    return QPPoint(z, y, torch.cat([mu.clamp_min(0), (-mu).clamp_min(0)], 1), status, steps)


def within_bounds(data: QPData) -> QPPoint:
    """The solution of every program that it is found for, ``CONVERGED``; the others are ``STALLED``, with zeros.

    Args:
        data: programs whose inequalities :func:`are_bounds`.
    """
    batch, n = data.q.shape
    z, y, lam = data.q.new_zeros(batch, n), torch.zeros_like(data.b), torch.zeros_like(data.h)
    status = torch.full((batch,), int(Status.STALLED), dtype=torch.int64, device=data.q.device)
    steps = torch.zeros_like(status)
    for i in range(batch):
        part = QPData(*(t[i] for t in data))
        if bool(part.G.isfinite().all()):  # what is no number elsewhere has no solution below
            found, steps[i] = _one(part)
            if found is not None:
                z[i], y[i], lam[i] = found
                status[i] = int(Status.CONVERGED)
    return QPPoint(z, y, lam, status, steps)


class _Side(NamedTuple):
    """Bounds on one side, ``(n,)``, infinite where there is none, and the rows of ``G`` that they are, ``(n,)``."""

    at: Tensor
    given_by: Tensor


def _sides(G: Tensor, h: Tensor) -> tuple[_Side, _Side]:
    """The largest lower and the least upper bounds."""
    n, (row, column) = G.shape[1], G.nonzero().unbind(1)
    slope = G[row, column]
    place = h[row] / slope
    sides = []
    for sign, tightest in ((-1.0, "amax"), (1.0, "amin")):
        mine = slope.sign() == sign
        at = G.new_full((n,), sign * torch.inf).scatter_reduce(0, column[mine], place[mine], tightest)
        mine = mine & (place == at[column])  # of several that are one number any will do, whichever is written last
        which = torch.zeros(n, dtype=torch.int64, device=G.device).scatter(0, column[mine], row[mine])
        sides.append(_Side(at, which))
    return sides[0], sides[1]


def _one(data: QPData) -> tuple[tuple[Tensor, Tensor, Tensor] | None, int]:
    """``z``, ``y`` and ``lam`` of one program, or nothing; and how often the sets have changed."""
    P, q, A, b, G, h = data
    lower, upper = _sides(G, h)
    found, sweeps = within_box(Box(P, q, A, b, lower.at, upper.at))
    if found is None:
        return None, sweeps
    z, y, mu = found
    lam = torch.zeros_like(h)
    for side, sign in ((lower, -1), (upper, 1)):
        here = sign * mu > 0
        rows, columns = side.given_by[here], here.nonzero().squeeze(1)
        lam[rows] = mu[columns] / G[rows, columns]
    return (z, y, lam), sweeps


class Box(NamedTuple):
    """A program whose inequalities are the bounds ``lower <= z <= upper`` ``(n,)``, infinite where there is none."""

    P: Tensor
    q: Tensor
    A: Tensor
    b: Tensor
    lower: Tensor
    upper: Tensor


def within_box(box: Box) -> tuple[tuple[Tensor, Tensor, Tensor] | None, int]:
    """``z``, ``y`` and the multipliers ``mu`` of the bounds, ``(n,)``, positive at upper ones and zero where none is active;
    or nothing; and how often the sets have changed."""
    P, q, A, _, lower, upper = box
    if not bool((lower <= upper).all()):
        return None, 0
    below = above = torch.zeros_like(q, dtype=torch.bool)
    held = lower == upper
    for sweep in range(_SWEEPS):
        z = torch.where(below, lower, torch.where(above, upper, 0))
        free = ~(below | above)
        solved = _on(box, z, free)
        if solved is None:
            return None, sweep
        z, y = solved
        mu = -(P @ z + q + A.T @ y)
        down = (mu < 0) & (below | held) | (free & ~held & (z < lower))
        up = ~down & ((mu > 0) & above | held | (free & (z > upper)))
        if bool((down == below).all()) and bool((up == above).all()):
            return ((z, y, torch.where(free, 0, mu)) if _holds(box, z, y, mu[free]) else None), sweep + 1
        below, above = down, up
    return None, _SWEEPS


def _holds(box: Box, z: Tensor, y: Tensor, left: Tensor) -> bool:
    """Are the conditions met to ten digits, stationarity of its largest part?  Not by factors of an ill-conditioned ``P``.
    ``left``: of stationarity, in the free unknowns."""
    P, q, A, b, _, _ = box
    force = (P @ z).abs().amax() + q.abs().amax() + (A.T @ y).abs().amax()
    met = (A @ z - b).abs() <= _MET * (A.abs() @ z.abs() + b.abs())
    return bool(met.all() and (left.abs() <= _MET * force).all())


def _on(box: Box, z: Tensor, free: Tensor) -> tuple[Tensor, Tensor] | None:
    """``z`` with its free unknowns at their best, and ``y``; ``None`` where that is not determined."""
    P, q, A, b, _, _ = box
    f = free.nonzero().squeeze(1)
    L, bad = torch.linalg.cholesky_ex(P.index_select(0, f).index_select(1, f))
    A_f, rhs = A.index_select(1, f), -(q + P @ z).index_select(0, f)
    if int(bad):
        return None
    x = torch.cholesky_solve(torch.cat([rhs.unsqueeze(1), A_f.T], 1), L)
    y = b.new_zeros(len(b))
    if len(b):
        S, bad = torch.linalg.cholesky_ex(A_f @ x[:, 1:])
        if int(bad):
            return None
        y = torch.cholesky_solve((A_f @ x[:, 0] + A @ z - b).unsqueeze(1), S).squeeze(1)
    z = z.index_copy(0, f, x[:, 0] - x[:, 1:] @ y)
    return (z, y) if bool(z.isfinite().all() and y.isfinite().all()) else None
