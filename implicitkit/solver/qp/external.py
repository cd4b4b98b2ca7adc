"""Solvers of quadratic programs from other packages, each an optional extra; one call a sample, then our polish."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.qp.base import QPSolver
from implicitkit.solver.qp.polish import QPPoint, convex
from implicitkit.solver.qp.statuses import CLARABEL_ENDS, DAQP_ENDS

Array = np.ndarray


class Program(NamedTuple):
    """The data of one program: minimise ``z'Pz/2 + q'z`` where ``Az = b`` and ``Gz <= h``."""

    P: Array
    q: Array
    A: Array
    b: Array
    G: Array
    h: Array


class Answer(NamedTuple):
    """One program's point, multipliers, status and steps."""

    z: Array
    y: Array
    lam: Array
    status: Status
    steps: int


@functools.cache
def installed(module: str) -> bool:
    """Can the package be imported?"""
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True)
class External(QPSolver):
    """One program at a time by another package, on float64 arrays; rows with ``h = inf`` are left out, and so are programs
    that are not convex.

    Raises:
        ImportError: the package is not installed; the message names it.
    """

    module: ClassVar[str] = ""
    package: ClassVar[str] = ""

    def one(self, solver: Any, program: Program, tol: float, max_steps: int) -> Answer:
        """Solve one program."""
        raise NotImplementedError(f"{type(self).__name__} has no method one")

    def find(self, data: QPData, tol: float, max_steps: int) -> QPPoint:
        solver = self._load()
        arrays = [np.ascontiguousarray(t.detach().cpu().numpy()) for t in data]
        batch, n = data.q.shape
        p, m = data.b.shape[1], data.h.shape[1]
        z, y, lam = np.zeros((batch, n)), np.zeros((batch, p)), np.zeros((batch, m))
        status = np.full(batch, int(Status.NONFINITE))
        steps = np.zeros(batch, dtype=np.int64)
        with_absent = not np.isfinite(arrays[5]).all()
        bowl = convex(data.P).tolist()  # most of these packages do not look
        for i in _usable(arrays):
            if not bowl[i]:
                status[i] = int(Status.NONCONVEX)
                continue
            P, q, A, b, G, h = (array[i] for array in arrays)
            rows: Any = np.isfinite(h) if with_absent else slice(None)
            answer = self.one(solver, Program(P, q, A, b, G[rows], h[rows]), tol, max_steps)
            z[i], y[i], status[i], steps[i] = answer.z, answer.y, int(answer.status), answer.steps
            lam[i, rows] = answer.lam
        return _point(data, z, y, lam, status, steps)

    def _load(self) -> Any:
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            raise ImportError(
                f"solver {self.name!r} needs the package {self.package!r}: pip install {self.package} "
                "(or pip install 'implicitkit[qp]' for all of them)"
            ) from error


def _usable(arrays: list[Array]) -> list[int]:
    """The programs without NaN or Inf in their data (``h`` may be ``inf``)."""
    if all(np.isfinite(array).all() for array in arrays):
        return list(range(len(arrays[1])))
    good = np.ones(len(arrays[1]), dtype=bool)
    for number, array in enumerate(arrays):
        bad = np.isnan(array) | (array == -np.inf) if number == 5 else ~np.isfinite(array)
        good &= ~bad.reshape(len(good), -1).any(1)
    return [int(i) for i in np.flatnonzero(good)]


def _point(data: QPData, z: Array, y: Array, lam: Array, status: Array, steps: Array) -> QPPoint:
    return QPPoint(*(torch.from_numpy(x).to(data.q.device) for x in (z, y, lam, status, steps)))


_DAQP_INF = 1e30


@register_solver("daqp", solves="quadratic_program")
@dataclass(frozen=True)
class DAQP(External):
    """DAQP: dual active set, the fastest for small, dense, strictly convex programs (Arnstrom, Bemporad & Axehill 2022).

    A program that is not strictly convex is solved by proximal iterations.  A step of ``max_steps=`` is a hundred changes of
    the active set, each of which costs that much less than a factorisation.

    Args:
        settings: further settings of ``daqp.solve``, by its names.

    Raises:
        TypeError: no such setting.
    """

    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    module: ClassVar[str] = "daqp"
    package: ClassVar[str] = "daqp"

    def find(self, data: QPData, tol: float, max_steps: int) -> QPPoint:
        solve = self._load().solve
        arrays = [np.ascontiguousarray(t.detach().cpu().numpy()) for t in data]
        P, q, A, b, G, h = arrays
        (batch, n), p, m = q.shape, b.shape[1], h.shape[1]
        rows = np.concatenate([A, G], 1) if p else G
        upper = np.minimum(np.concatenate([b, h], 1) if p else h, _DAQP_INF)
        lower = np.full_like(upper, -_DAQP_INF)
        lower[:, :p] = b
        sense = np.zeros(p + m, dtype=np.int32)
        sense[:p] = 5  # equality
        if p + m == 0:  # it wants a row
            rows, upper, lower = np.zeros((batch, 1, n)), np.ones((batch, 1)), np.full((batch, 1), -_DAQP_INF)
            sense = np.zeros(1, dtype=np.int32)
        z, dual = np.zeros((batch, n)), np.zeros((batch, max(p + m, 1)))
        status = np.full(batch, int(Status.NONFINITE))
        steps = np.zeros(batch, dtype=np.int64)
        settings: dict[str, Any] = {"primal_tol": 1e-9, "dual_tol": 1e-12, "iter_limit": 100 * max_steps}
        settings |= self.settings
        for i in _usable(arrays):
            z[i], _, flag, info = solve(P[i], q[i], rows[i], upper[i], lower[i], sense, **settings)
            status[i], steps[i] = DAQP_ENDS.get(flag, Status.STALLED), info["iterations"]
            if flag > 0:
                dual[i] = info["lam"]
        return _point(data, z, dual[:, :p].copy(), dual[:, p : p + m].copy(), status, steps)


@register_solver("piqp", solves="quadratic_program")
@dataclass(frozen=True)
class PIQP(External):
    """PIQP: proximal interior point, dense (Schwan, Jiang, Kuhn & Jones 2023)."""

    module: ClassVar[str] = "piqp"
    package: ClassVar[str] = "piqp"

    def one(self, solver: Any, program: Program, tol: float, max_steps: int) -> Answer:
        P, q, A, b, G, h = program
        qp = solver.DenseSolver()
        qp.settings.eps_abs = qp.settings.eps_rel = tol
        qp.settings.max_iter = max(250, max_steps)
        fortran = np.asfortranarray
        qp.setup(fortran(P), q, fortran(A), b, fortran(G), np.full(len(h), -np.inf), h)
        ends = {
            solver.PIQP_SOLVED: Status.CONVERGED,
            solver.PIQP_PRIMAL_INFEASIBLE: Status.INFEASIBLE,
            solver.PIQP_DUAL_INFEASIBLE: Status.UNBOUNDED,
        }
        end, found = qp.solve(), qp.result
        return Answer(found.x, found.y, found.z_u, ends.get(end, Status.MAX_STEPS), found.info.iter)


@register_solver("proxqp", solves="quadratic_program")
@dataclass(frozen=True)
class ProxQP(External):
    """ProxQP: proximal augmented Lagrangian, dense (Bambade, El-Kazdadi, Taylor & Carpentier 2022)."""

    module: ClassVar[str] = "proxsuite"
    package: ClassVar[str] = "proxsuite"

    def one(self, solver: Any, program: Program, tol: float, max_steps: int) -> Answer:
        P, q, A, b, G, h = program
        proxqp = solver.proxqp
        qp = proxqp.dense.QP(len(q), len(b), len(h))  # its function dense.solve is wrong for one unknown
        qp.settings.eps_abs, qp.settings.eps_rel = tol, 0.0
        qp.settings.eps_primal_inf = qp.settings.eps_dual_inf = tol  # at its 1e-4 it calls feasible programs infeasible
        qp.settings.max_iter = max(1000, 10 * max_steps)
        equality, inequality = (A, b) if len(b) else (None, None), (G, np.full(len(h), -1e20), h)
        qp.init(P, q, *equality, *(inequality if len(h) else (None, None, None)))
        qp.solve()
        found = qp.results
        names = proxqp.QPSolverOutput if hasattr(proxqp, "QPSolverOutput") else type(found.info.status)
        ends = {
            names.PROXQP_SOLVED: Status.CONVERGED,
            names.PROXQP_PRIMAL_INFEASIBLE: Status.INFEASIBLE,
            names.PROXQP_DUAL_INFEASIBLE: Status.UNBOUNDED,
        }
        return Answer(found.x, found.y, found.z, ends.get(found.info.status, Status.MAX_STEPS), found.info.iter)


@register_solver("osqp", solves="quadratic_program")
@dataclass(frozen=True)
class OSQP(External):
    """OSQP: ADMM on sparse matrices (Stellato, Banjac, Goulart, Bemporad & Boyd 2020)."""

    module: ClassVar[str] = "osqp"
    package: ClassVar[str] = "osqp"

    def one(self, solver: Any, program: Program, tol: float, max_steps: int) -> Answer:
        from scipy import sparse

        P, q, A, b, G, h = program
        p = len(b)
        qp = solver.OSQP()
        qp.setup(
            sparse.triu(sparse.csc_matrix(P), format="csc"),
            q,
            sparse.csc_matrix(np.concatenate([A, G])),
            np.concatenate([b, np.full(len(h), -np.inf)]),
            np.concatenate([b, h]),
            eps_abs=tol,
            eps_rel=tol,
            max_iter=max(20000, 100 * max_steps),
            polishing=False,
            verbose=False,
        )
        found = qp.solve(raise_error=False)
        codes = solver.SolverStatus
        ends = {
            int(codes.OSQP_SOLVED): Status.CONVERGED,
            int(codes.OSQP_PRIMAL_INFEASIBLE): Status.INFEASIBLE,
            int(codes.OSQP_DUAL_INFEASIBLE): Status.UNBOUNDED,
        }
        status = ends.get(int(found.info.status_val), Status.MAX_STEPS)
        z, dual = (np.nan_to_num(np.asarray(x, dtype=np.float64)) for x in (found.x, found.y))
        return Answer(z, dual[:p], dual[p:], status, int(found.info.iter))


@register_solver("clarabel", solves="quadratic_program")
@dataclass(frozen=True)
class Clarabel(External):
    """Clarabel: homogeneous interior point on sparse matrices (Goulart & Chen 2024)."""

    module: ClassVar[str] = "clarabel"
    package: ClassVar[str] = "clarabel"

    def one(self, solver: Any, program: Program, tol: float, max_steps: int) -> Answer:
        from scipy import sparse

        P, q, A, b, G, h = program
        p = len(b)
        settings = solver.DefaultSettings()
        settings.verbose = False
        settings.max_iter = max(200, max_steps)
        cones = ([solver.ZeroConeT(p)] if p else []) + ([solver.NonnegativeConeT(len(h))] if len(h) else [])
        found = solver.DefaultSolver(
            sparse.triu(sparse.csc_matrix(P), format="csc"),
            q,
            sparse.csc_matrix(np.concatenate([A, G])),
            np.concatenate([b, h]),
            cones,
            settings,
        ).solve()
        dual = np.asarray(found.z)
        status = CLARABEL_ENDS.get(str(found.status), Status.STALLED)
        return Answer(np.asarray(found.x), dual[:p], dual[p:], status, found.iterations)
