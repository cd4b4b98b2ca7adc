r"""Quadratic programs whose matrices are sparse (:mod:`implicitkit.problem.sparse_conditions`), one sample after another.

    minimise  z'Pz/2 + q'z   subject to   Az = b,   Gz <= h,   -Gz <= -lower

The set of active conditions at the solution by Mehrotra's method on sparse factors, then the solution for that set
(:mod:`implicitkit.solver.qp.sparse`).  Rows of ``G`` that bound one unknown are no rows of these systems, but bounds
(:mod:`implicitkit.solver.qp.single_rows`): a program of control has them for all its states.  Where ``P`` is singular on
the active rows, as in a linear program, that solves the program with ``shift |z - z_k|^2 / 2`` added, from ``z_k``: the
proximal point method, which ends after a few of them (Rockafellar 1976, SIAM J. Control Optim. 14(5)).  Where that finds
nothing, a proof is looked for that there is no solution (:mod:`implicitkit.solver.qp.certificates`); what is left is for the
dense method, where it is small enough.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.conditions.active_factors import ActiveFactors, ActiveSystem
from implicitkit.linear.conditions.sparse_saddle import SparseSaddle
from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.qp import interior_point as dense
from implicitkit.solver.qp import sparse as qp
from implicitkit.solver.qp.certificates import prove
from implicitkit.solver.qp.single_rows import Bounds, Reduced
from implicitkit.solver.qp.sparse_interior_point import interior_point

_POINTS = 12  # of the proximal point method
_DENSE = 2000  # unknowns and rows up to which the dense method has the last word
_STATIONARY = 1e-3  # of its parts, what a solution may leave of it: more is a way to infinity
_CURVED = 1e-9  # of the largest entry of P, by which an eigenvalue may be negative


def find_sparse(
    f: Evaluations, part: dict[str, Tensor], tol: float, max_steps: int, own: bool
) -> tuple[Tensor, Tensor, Tensor, str]:
    """Packed points ``(batch, n + p + m)``, statuses and steps ``(batch,)``, of programs with the data ``part``; and what
    there is to say of those without a solution.  ``own``: it is that of ``f``, whose factors these are then."""
    found = [_solve_one(_matrices(f.problem, part, i), tol, max_steps) for i in range(f.batch)]
    z, y, lam = (torch.from_numpy(np.stack([one.point[k] for one in found])) for k in range(3))
    systems = [one.system for one in found if one.system is not None]
    if own and len(systems) == f.batch and not f.problem.kappa:  # of the relaxed program it is another
        f.system.factored = ActiveFactors(systems)
    device = part["q"].device
    status = torch.tensor([int(one.status) for one in found], device=device)
    steps = torch.tensor([one.steps for one in found], device=device)
    said = next((one.said for one in found if one.said), "")
    return f.problem.join(z, y, lam).to(part["q"]), status, steps, said


class _Found(NamedTuple):
    """``(z, y, lam)`` of one program, its end and the steps; why it has no solution, or the factors of its conditions."""

    point: tuple[np.ndarray, ...]
    status: Status
    steps: int
    said: str = ""
    system: ActiveSystem | None = None


class _Parts:
    """One program, ``Gz <= h`` and ``-Gz <= -lower`` (rows ``upper`` and more) together; in double precision."""

    def __init__(
        self, P: Any, q: np.ndarray, A: Any, b: np.ndarray, G: Any, h: np.ndarray, upper: int | None = None
    ) -> None:
        self.upper = len(h) if upper is None else upper
        self.P, self.q, self.A, self.b, self.G, self.h = P, q, A, b, G, h
        self.finite = (
            all(np.isfinite(t).all() for t in (P.data, q, A.data, b, G.data))
            and not (np.isnan(h) | (h == -np.inf)).any()
        )


def _matrices(problem: Any, part: dict[str, Tensor], i: int) -> _Parts:
    def entries(name: str) -> np.ndarray:
        return array(part[name][i])

    def matrix(name: str) -> sp.csr_matrix:
        if name not in part:
            return sp.csr_matrix((0, n))
        at = problem.places[name]
        return sp.csr_matrix((entries(name), (at.at_row.cpu().numpy(), at.at_column.cpu().numpy())), shape=at.extent)

    q = entries("q")
    n = len(q)
    P = matrix("P") if "P" in part else sp.csr_matrix((n, n))
    A, G = matrix("A"), matrix("G")
    rows, ends = ([G], [entries("h")]) if "h" in part else ([], [])
    if "lower" in part:
        rows, ends = [*rows, -G], [*ends, -entries("lower")]
    G = sp.csr_matrix(sp.vstack(rows)) if rows else G
    h = np.concatenate(ends) if ends else np.zeros(0)
    upper = len(ends[0]) if "h" in part else 0
    return _Parts(0.5 * (P + P.T), q, A, entries("b") if "b" in part else np.zeros(0), G, h, upper)


def _solve_one(p: _Parts, tol: float, max_steps: int, auxiliary: bool = False) -> _Found:
    """``auxiliary``: of a program that asks whether another has a solution, and has one itself."""
    n, equalities, rows = len(p.q), len(p.b), len(p.h)
    nothing = np.zeros(n), np.zeros(equalities), np.zeros(rows)
    if not p.finite:
        return _Found(tuple(np.full_like(x, np.nan) for x in nothing), Status.NONFINITE, 0)
    if not _is_convex(p.P):
        return _Found(nothing, Status.NONCONVEX, 0)
    there = np.isfinite(p.h)
    bounds = Bounds(p.G, p.h)
    rest = there & ~bounds.taken
    C = sp.csr_matrix(sp.vstack([p.A, p.G[rest]]))
    b = np.concatenate([p.b, p.h[rest]])
    one_sided = np.arange(len(b)) >= equalities
    K = _with_diagonal(sp.bmat([[p.P, C.T], [C, None]], format="csc") if len(b) else sp.csc_matrix(p.P))
    z, y, active = np.zeros(n), np.zeros(len(b)), None
    for step in range(1, min(_POINTS, max_steps) + 1):
        program = qp.SparseProgram(K, p.q + p.P @ z, b - C @ z, one_sided, bounds.lower - z, bounds.upper - z)
        point = _one_program(program, active)
        if point is None:
            return (None if auxiliary else _without(p, tol, max_steps)) or _Found(nothing, Status.STALLED, step)
        z, y, active = z + point.d, point.y, point.active
        moved = np.abs(point.d).max(initial=0.0) * point.shift
        if moved <= 1e-14 * (1 + np.abs(p.q).max(initial=0.0)):
            slope, held = p.P @ z + p.q + C.T @ y, active.bounds != 0
            lam = bounds.multipliers(np.where(held, -slope, 0.0))
            lam[rest] = y[equalities:]
            z = np.where(held, np.where(active.bounds > 0, bounds.upper, bounds.lower), z)  # to the last bit
            system = None if point.shift or auxiliary else _system(p, K, point, bounds, rest)
            found = _Found((z, y[:equalities], lam), Status.CONVERGED, step, system=system)
            left = np.abs(np.where(held, 0.0, slope)).max(initial=0.0)
            unit = sum(np.abs(part).max(initial=0.0) for part in (p.P @ z, p.q, C.T @ y))
            if left <= _STATIONARY * unit or auxiliary:
                return found
            return _without(p, tol, max_steps) or found
    return (None if auxiliary else _without(p, tol, max_steps)) or _Found(nothing, Status.MAX_STEPS, step)


def _system(p: _Parts, K: sp.csc_matrix, point: qp.SparsePoint, bounds: Bounds, rest: np.ndarray) -> ActiveSystem:
    """The conditions of the whole program, with the factors of its last active set, if it was that of the point."""
    every = np.arange(len(p.h))
    below = every >= p.upper  # rows -G z <= -lower
    row, sign = np.where(below, every - p.upper, every), np.where(below, -1.0, 1.0)
    held, others = bounds.rows(point.active), np.flatnonzero(rest)
    which = np.flatnonzero(held >= 0)
    holds, slopes = np.full(len(held), -1), np.ones(len(held))
    holds[which], slopes[which] = row[held[which]], (sign * bounds.slopes)[held[which]]
    reduced = Reduced(K, point, len(p.b), row[others], sign[others], holds, slopes)
    G = p.G[: p.upper] if p.upper else -p.G
    return reduced.system(p.P, p.A, sp.csr_matrix(G))


def _one_program(program: qp.SparseProgram, active: qp.Active | None) -> qp.SparsePoint | None:
    if active is not None:
        point = qp.active_set(program, active)
        if point is not None:
            return point
    if program.one_sided.any() or np.isfinite(program.lower).any() or np.isfinite(program.upper).any():
        return interior_point(program, convex=True)
    return qp.active_set(program, qp.guess(program, np.zeros(len(program.b))))


def _is_convex(P: sp.csr_matrix) -> bool:
    """Is ``P`` positive semidefinite, to rounding: has its factorisation no negative pivot?"""
    size = np.abs(P.data).max(initial=0.0)
    if not size:
        return True
    n = P.shape[0]
    return SparseSaddle(_with_diagonal(sp.csc_matrix(P + _CURVED * size * sp.identity(n))), n).negative == 0


def _with_diagonal(K: sp.csc_matrix) -> sp.csc_matrix:
    """With every entry of the diagonal there, be it zero."""
    coo = K.tocoo()
    n = K.shape[0]
    places = np.concatenate([coo.row, np.arange(n)]), np.concatenate([coo.col, np.arange(n)])
    full = sp.csc_matrix((np.concatenate([coo.data, np.zeros(n)]), places), shape=K.shape)
    full.sort_indices()
    return full


def _without(p: _Parts, tol: float, max_steps: int) -> _Found | None:
    """A program that these steps have not solved: the proof that nothing can, else what the dense method finds."""
    there = np.isfinite(p.h)

    def solve(P: Any, q: np.ndarray, A: Any, b: np.ndarray, G: Any, h: np.ndarray) -> np.ndarray | None:
        parts = _Parts(sp.csr_matrix(P), q, sp.csr_matrix(A), b, sp.csr_matrix(G), h)
        found = _solve_one(parts, tol, max_steps, auxiliary=True)
        return found.point[0] if found.status == Status.CONVERGED else None

    which = np.flatnonzero(there)

    def name(row: int) -> str:
        if row < len(p.b):
            return f"A[{row}]"
        place = int(which[row - len(p.b)])
        return f"lower[{place - p.upper}]" if place >= p.upper else f"G[{place}]"

    proof = prove(p.P, p.q, p.A, p.b, p.G[there], p.h[there], solve, name)
    if proof is None:
        return _dense(p, tol, max_steps)
    lam = np.zeros(len(p.h))
    lam[there] = proof.lam
    return _Found((proof.z, proof.y, lam), proof.status, 1, proof.said)


def _dense(p: _Parts, tol: float, max_steps: int) -> _Found | None:
    """What the dense method finds, or its verdict; ``None`` where there are too many unknowns and rows."""
    if len(p.q) + len(p.b) + len(p.h) > _DENSE:
        return None
    parts = (p.P.toarray(), p.q, p.A.toarray(), p.b, p.G.toarray(), p.h)
    data = QPData(*(torch.from_numpy(np.asarray(t)).unsqueeze(0) for t in parts))
    point = dense.interior_point(data, tol=tol, max_steps=max_steps)
    z, y, lam = (t[0].numpy() for t in point[:3])
    return _Found((z, y, lam), Status(int(point.status[0])), int(point.steps[0]))
