"""Sparse quadratic programs by interior points: few steps, in any unit of the objective."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp

from implicitkit.solver.qp import sparse_interior_point
from implicitkit.solver.qp.sparse import SparsePoint, SparseProgram


def program(P: sp.csr_matrix, q: np.ndarray, A: sp.csr_matrix, b: np.ndarray, low: float, high: float) -> SparseProgram:
    """``A d = b`` and the same bounds for every unknown."""
    n, m = len(q), len(b)
    K = sp.csc_matrix(sp.bmat([[P, A.T], [A, None]]) + sp.diags(np.full(n + m, 1e-300)))
    return SparseProgram(K, q, b, np.zeros(m, dtype=bool), np.full(n, low), np.full(n, high))


def control(steps: int = 60, states: int = 4) -> SparseProgram:
    """A linear system is to come to rest from a state that it is held at: what keeps to the equalities leaves the bounds."""
    rng = np.random.default_rng(0)
    forward = np.eye(states) + 0.2 * rng.standard_normal((states, states)) / states**0.5
    push = rng.standard_normal((states, 2))
    m = (steps + 1) * states
    later = sp.eye(steps + 1, steps, k=-1)
    A = sp.hstack([sp.kron(sp.eye(steps + 1, k=-1), forward) - sp.identity(m), sp.kron(later, push)]).tocsr()
    P = sp.diags(np.r_[np.tile(rng.uniform(0.1, 10, states), steps + 1), np.full(2 * steps, 0.1)]).tocsr()
    b = np.r_[-rng.uniform(-1, 1, states), np.zeros(m - states)]
    p = program(P, np.zeros(P.shape[0]), A, b, -2.0, 2.0)
    p.lower[m:], p.upper[m:] = -0.1, 0.1
    return p


def obstacle(side: int = 24) -> SparseProgram:
    """A membrane that is pushed on an obstacle."""
    L = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(side, side))
    P = sp.csr_matrix(sp.kronsum(L, L))
    p = program(P, np.full(side**2, 1.0 / side**2), sp.csr_matrix((0, side**2)), np.zeros(0), -0.05, np.inf)
    p.lower[: side**2 // 2] = -0.02
    return p


PROGRAMS: dict[str, tuple[Callable[[], SparseProgram], int]] = {"control": (control, 6), "obstacle": (obstacle, 6)}


def counted(p: SparseProgram, monkeypatch: pytest.MonkeyPatch, convex: bool = True) -> tuple[SparsePoint | None, int]:
    """The point, and how many steps from inside it took."""
    steps, one = [], sparse_interior_point._mehrotra

    def counting(*given: object) -> object:
        steps.append(1)
        return one(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(sparse_interior_point, "_mehrotra", counting)
    found = sparse_interior_point.interior_point(p, convex)
    monkeypatch.undo()
    return found, len(steps)


def errors(p: SparseProgram, point: SparsePoint, unit: float) -> tuple[float, float, float]:
    """Of stationarity where no bound holds, of the sign of what a bound pushes with, of the rows and bounds."""
    n = p.size
    product = p.K @ np.concatenate([point.d, point.y])
    slope, side = (p.q + product[:n]) / unit, point.active.bounds
    outside = np.maximum(point.d - p.upper, p.lower - point.d).max()
    missed = max(np.abs((p.K @ np.concatenate([point.d, 0 * point.y]))[n:] - p.b).max(initial=0.0), outside)
    return float(np.abs(slope[side == 0]).max()), float((slope * side)[side != 0].max(initial=0.0)), float(missed)


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("name", PROGRAMS)
def test_few_steps_in_any_unit_of_the_objective(name: str, unit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    make, most = PROGRAMS[name]
    p = make()
    n = p.size
    scaled = sp.csc_matrix(p.K)
    columns = np.repeat(np.arange(scaled.shape[0]), np.diff(scaled.indptr))
    of_objective = (scaled.indices < n) & (columns < n)
    scaled.data = np.where(of_objective, unit * scaled.data, scaled.data)
    p = dataclasses.replace(p, K=scaled, q=unit * p.q)
    point, steps = counted(p, monkeypatch)
    assert point is not None and point.settled and int((point.active.bounds != 0).sum()) > 4, (name, unit)
    free, pushed, missed = errors(p, point, unit)
    assert free <= 1e-10 and pushed <= 1e-10 and missed <= 1e-12, (name, unit, free, pushed, missed)
    assert most - 2 <= steps <= most, (name, unit, steps)


def test_what_is_convex_need_not_be_asked() -> None:
    """The first shift that is tried is none."""
    p = control()
    free = np.concatenate([p.lower < p.upper, np.ones(len(p.b), dtype=bool)])
    assert sparse_interior_point._convex_shift(p, free) == 0.0


def test_on_a_way_to_infinity_there_is_no_point() -> None:
    n = 60
    A = sp.csr_matrix(sp.hstack([sp.identity(n // 2), -sp.identity(n // 2)]))
    assert (
        sparse_interior_point.interior_point(
            program(sp.csr_matrix((n, n)), -np.ones(n), A, np.zeros(n // 2), 0.0, np.inf)
        )
        is None
    )


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_the_start_violates(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their slacks begin positive all the same, and what is missed goes with the steps."""
    rng = np.random.default_rng(seed)
    n, m = 60, 30
    rows = sp.random(m, n, 0.1, random_state=rng, data_rvs=rng.standard_normal).tocsr()
    inside_of = 10 * rng.standard_normal(n)
    p = program(sp.identity(n, format="csr"), rng.standard_normal(n), rows, rows @ inside_of, -np.inf, np.inf)
    p = dataclasses.replace(p, one_sided=np.ones(m, dtype=bool))
    assert (p.b < -1).any(), seed
    point, steps = counted(p, monkeypatch)
    assert point is not None and point.settled, seed
    value = rows @ point.d
    assert (value <= p.b + 1e-9).all() and (point.y >= 0).all(), seed
    np.testing.assert_allclose(point.d + p.q + rows.T @ point.y, 0, atol=1e-9, err_msg=str(seed))
    np.testing.assert_allclose(point.y * (value - p.b), 0, atol=1e-8, err_msg=str(seed))
    assert steps <= 4, (seed, steps)
