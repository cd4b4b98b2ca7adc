"""Any other solver that cvxpy knows, through cvxpy's own front door: slow, and right."""

from __future__ import annotations

import warnings
from typing import Any

import cvxpy as cp
import numpy as np

from implicitkit_cvxpy.backends.base import Data, Found, Status, loop
from implicitkit_cvxpy.cones.form import Cones

_STATUS = {
    cp.OPTIMAL: Status.CONVERGED,
    cp.OPTIMAL_INACCURATE: Status.INACCURATE,
    cp.INFEASIBLE: Status.INFEASIBLE,
    cp.INFEASIBLE_INACCURATE: Status.INFEASIBLE,
    cp.UNBOUNDED: Status.UNBOUNDED,
    cp.UNBOUNDED_INACCURATE: Status.UNBOUNDED,
    cp.settings.USER_LIMIT: Status.MAX_STEPS,
}
_ROOT2 = 2.0**0.5


def _state(P: Any, q: Any, A: Any, b: Any, cones: Cones) -> tuple[cp.Problem, cp.Variable, list[Any]]:
    """The program in cvxpy's terms, and for each constraint how its dual fills the rows of ``y``."""
    x = cp.Variable(len(q))
    s = b - A @ x
    objective = q @ x + (0.5 * cp.quad_form(x, cp.psd_wrap((P + P.T) / 2)) if abs(P).max() else 0)
    row = cones.linear
    parts: list[tuple[Any, Any, Any]] = []
    if cones.zero:
        equality = A[: cones.zero] @ x == b[: cones.zero]
        parts.append((equality, slice(0, cones.zero), lambda c: c.dual_value))
    if cones.nonneg:
        inequality = A[cones.zero : row] @ x <= b[cones.zero : row]
        parts.append((inequality, slice(cones.zero, row), lambda c: c.dual_value))
    for k in cones.soc:
        parts.append((cp.SOC(s[row], s[row + 1 : row + k]), slice(row, row + k), _stacked))
        row += k
    for k in cones.psd:
        X, size = cp.Variable((k, k), symmetric=True), k * (k + 1) // 2
        where = [(i, j) for j in range(k) for i in range(j + 1)]
        entries = cp.hstack([X[i, j] if i == j else _ROOT2 * X[i, j] for i, j in where])
        parts.append((s[row : row + size] == entries, slice(row, row + size), lambda c: -c.dual_value))
        parts.append((X >> 0, None, None))
        row += size
    for _ in range(cones.exp):
        parts.append((cp.ExpCone(s[row], s[row + 1], s[row + 2]), slice(row, row + 3), _stacked))
        row += 3
    for a in cones.power:
        parts.append((cp.PowCone3D(s[row], s[row + 1], s[row + 2], a), slice(row, row + 3), _stacked))
        row += 3
    return cp.Problem(cp.Minimize(objective), [c for c, _, _ in parts]), x, parts


def _stacked(constraint: Any) -> Any:
    return np.concatenate([np.atleast_1d(np.asarray(v, dtype=float)).ravel() for v in constraint.dual_value])


def check(name: str, n: int, cones: Cones, quadratic: bool) -> None:
    """Raise ``cvxpy.error.SolverError`` unless the solver can take programs of this form."""
    P = np.eye(n) if quadratic else np.zeros((n, n))
    problem, _, _ = _state(P, np.ones(n), np.ones((cones.size, n)), np.zeros(cones.size), cones)
    problem.get_problem_data(name)


def solve(data: Data, options: dict[str, Any], name: str) -> Found:
    """Solve each sample with the solver cvxpy calls ``name``; ``options`` as for ``cvxpy.Problem.solve``."""

    def one(P: Any, q: Any, A: Any, b: Any) -> tuple[Any, Any, int, int]:
        problem, x, parts = _state(P, q, A, b, data.cones)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "may be inaccurate": judged by the residual
            try:
                problem.solve(solver=name, **options)
            except (cp.error.SolverError, TypeError, ValueError, KeyError, AttributeError) as error:
                if named := [option for option in options if option in str(error)]:
                    raise TypeError(f"solver {name!r} refused its option(s) {', '.join(named)}: {error}") from error
                if isinstance(error, cp.error.SolverError):
                    return None, None, int(Status.STALLED), 0
                raise
        status = _STATUS.get(problem.status, Status.STALLED)
        steps = int(problem.solver_stats.num_iters or 0) if problem.solver_stats else 0
        if x.value is None or status in (Status.INFEASIBLE, Status.UNBOUNDED):
            return None, None, int(status), steps
        y = np.zeros(data.cones.size)
        for constraint, rows, read in parts:
            if rows is not None and constraint.dual_value is not None:
                y[rows] = np.ravel(read(constraint))
        return np.asarray(x.value), y, int(status), steps

    return loop(one, data)
