"""Constrained minimisation of many unknowns: sparse SQP against the dense one, its quadratic programs, its factors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

import implicitkit as ik
from implicitkit.linear.conditions.sparse_saddle import SparseSaddle
from implicitkit.linear.factors import ordering, sparse_blocks
from implicitkit.solver import auto
from implicitkit.solver.constrained import model, sparse_step
from implicitkit.solver.qp import sparse as qp
from implicitkit.solver.qp.plain import solve_qp
from implicitkit.solver.qp.sparse_interior_point import interior_point
from implicitkit.sparsity import compression

F64 = torch.float64


# ------------------------------------------------------------------------------------------------------------ problems
def pendulum(points: int, count: int = 0) -> tuple[Any, Any, Tensor, tuple[Tensor, Tensor]]:
    """Optimal control of a damped pendulum: objective, dynamics, start and bounds; ``theta`` is (target, damping)."""
    h = 5.0 / points

    def split(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.unflatten(-1, (points, 3))
        return z[..., :2], z[..., 2]

    def objective(z: Tensor, theta: Tensor) -> Tensor:
        x, u = split(z)
        away = x[..., 0] - theta[..., :1]
        return 0.5 * h * (u.square() + 10 * away.square() + x[..., 1].square()).sum(-1)

    def dynamics(z: Tensor, theta: Tensor) -> Tensor:
        x, u = split(z)
        first = x.new_tensor([1.5, 0.0]).expand(*x.shape[:-2], 1, 2)
        before = torch.cat([first, x[..., :-1, :]], -2)
        force = -torch.sin(before[..., 0]) - theta[..., 1:] * before[..., 1] + u
        return x - before - h * torch.stack([before[..., 1], force], -1)

    low = torch.tensor([-torch.inf, -torch.inf, -0.6], dtype=F64).repeat(points)
    start = torch.zeros(*((count,) if count else ()), 3 * points, dtype=F64)
    return objective, dynamics, start, (low, -low)


THETA = torch.tensor([0.2, 0.1], dtype=F64)


def controlled(theta: Tensor, points: int = 52, **options: Any) -> Any:
    objective, dynamics, z0, bounds = pendulum(points)
    return ik.argmin(
        objective, z0, (theta,), constraints=[ik.Equality(dynamics)], bounds=bounds, solver="sqp", **options
    )


def densely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SPARSE", 10**9)


def membrane(m: int) -> tuple[Any, Tensor, Tensor]:
    """A membrane over an obstacle: energy, obstacle and load."""
    axis = torch.linspace(0, 1, m + 2, dtype=F64)[1:-1]
    X, Y = torch.meshgrid(axis, axis, indexing="ij")
    obstacle = 0.2 - 4 * ((X - 0.5) ** 2 + (Y - 0.4) ** 2)

    def energy(u: Tensor, load: Tensor) -> Tensor:
        U = torch.nn.functional.pad(u, (1, 1, 1, 1))
        return 0.5 * (U.diff(dim=0).square().sum() + U.diff(dim=1).square().sum()) - (load * u).sum() / (m + 1) ** 2

    return energy, obstacle, -torch.ones(m, m, dtype=F64)


# ---------------------------------------------------------------------------------------------------- the method itself
def test_the_sparse_step_is_the_dense_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = controlled(THETA)
    densely(monkeypatch)
    dense = controlled(THETA)
    torch.testing.assert_close(found.value, dense.value, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found.multipliers[0], dense.multipliers[0], rtol=1e-7, atol=1e-8)
    at_bound = found.value.view(-1, 3)[:, 2].abs() > 0.6 - 1e-12
    assert 5 < int(at_bound.sum()) < 48  # bounds matter
    assert int(found.steps) <= 2 * int(dense.steps)  # of one linear system each, where those are quadratic programs


def test_what_a_step_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """One evaluation, products for the constraints' Jacobian and a diagonal, one order of elimination for all matrices."""
    orders: list[bool] = []
    factor = ordering.superlu

    def counted(*args: Any, **options: Any) -> Any:
        orders.append("permc_spec" not in options)
        return factor(*args, **options)

    monkeypatch.setattr(ordering, "superlu", counted)
    objective, dynamics, z0, bounds = pendulum(90)
    calls: list[int] = []

    def watched(z: Tensor, theta: Tensor) -> Tensor:
        calls.append(0)
        return objective(z, theta)

    plans: list[Any] = []
    colour = compression.colour
    monkeypatch.setattr(compression, "colour", lambda *a, **k: plans.append(colour(*a, **k)) or plans[-1])
    after: list[int] = []
    options = {"constraints": [ik.Equality(dynamics)], "bounds": bounds, "solver": "sqp"}
    options["callback"] = lambda k, z, norm: after.append(len(calls))
    for again in (False, True):
        orders.clear()
        calls.clear(), after.clear()
        found = ik.argmin(watched, z0, (THETA,), **options)
        assert sum(orders) == (not again) and len(orders) >= int(found.steps) >= 4
    each = np.diff(after)
    assert len(each) >= 4 and (each == 1).all()
    assert min(plan.products for plan in plans) <= 5


def test_one_factorisation_a_step_where_that_halves_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    factored: list[int] = []

    class Counted(SparseSaddle):
        def __init__(self, K: sp.csc_matrix, *rest: Any) -> None:
            factored.append(K.shape[0])
            super().__init__(K, *rest)

    monkeypatch.setattr(qp, "SparseSaddle", Counted)
    found = controlled(THETA, points=100)
    fewer = len(factored)
    step = sparse_step.SparseDirection.begin

    def whole(self: Any, i: int, *rest: Any, **more: Any) -> bool:
        begun = step(self, i, *rest, **more)
        self.finish(torch.ones(i + 1, dtype=torch.bool))
        return begun

    monkeypatch.setattr(sparse_step.SparseDirection, "begin", whole)
    factored.clear()
    torch.testing.assert_close(controlled(THETA, points=100).value, found.value, rtol=1e-8, atol=1e-9)
    assert fewer <= len(factored) - 2 and fewer <= 2 * int(found.steps) + 1


def test_bounds_alone_take_sparse_steps_too() -> None:
    energy, obstacle, load = membrane(33)
    s = ik.argmin(energy, torch.zeros_like(obstacle), (load,), bounds=(obstacle, None))
    assert s.solver == "auto (sqp)" and int(s.steps) <= 2  # matrices that stay: the first program is solved to its end


@pytest.mark.parametrize("points", [48, 100])
def test_equations_whose_terms_cancel_far_out_are_no_way_to_infinity(points: int) -> None:
    """Swinging by nothing, conditions of optimality hold to rounding by two terms each that cancel along half of all ways
    away from there, and ``|z| = 53``."""
    objective, dynamics, z0, bounds = pendulum(points)
    constraints = [ik.Equality(dynamics)]
    found = ik.argmin(objective, z0, (torch.zeros_like(THETA),), constraints=constraints, bounds=bounds, solver="sqp")
    assert found.status == ik.Status.CONVERGED
    assert int(found.evaluations) <= 110


def test_no_dense_matrix_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("dense")

    monkeypatch.setattr(model.Model, "local", refused)
    monkeypatch.setattr(model.Model, "hessian", refused)
    assert bool(controlled(THETA).converged)


@pytest.mark.parametrize("solver", ["auto", "sqp"])
def test_more_than_a_thousand_unknowns(solver: str) -> None:
    objective, dynamics, z0, bounds = pendulum(400)
    theta = THETA.clone().requires_grad_()
    s = ik.argmin(objective, z0, (theta,), constraints=[ik.Equality(dynamics)], bounds=bounds, solver=solver)
    assert "sqp" in s.solver and bool(s.converged)
    z = s.value.detach().view(-1, 3)
    assert float(z[:, 2].abs().max()) <= 0.6
    (slope,) = torch.autograd.grad(s.value.square().sum(), theta)
    e = 1e-5 * torch.eye(2, dtype=F64)
    value = lambda t: float(  # noqa: E731
        ik.argmin(objective, s.value.detach(), (t,), constraints=[ik.Equality(dynamics)], bounds=bounds, solver="sqp")
        .value.square()
        .sum()
    )
    expected = torch.tensor([(value(THETA + d) - value(THETA - d)) / 2e-5 for d in e], dtype=F64)
    torch.testing.assert_close(slope, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("m", [12, 40])
def test_an_obstacle_by_bounds_and_by_inequalities(m: int) -> None:
    energy, obstacle, load = membrane(m)
    load.requires_grad_()
    z0 = torch.zeros(m, m, dtype=F64)
    within = ik.argmin(energy, z0, (load,), bounds=(obstacle, None))
    above = ik.argmin(energy, z0, (load,), constraints=[ik.Inequality(lambda u, load: obstacle - u)], solver="sqp")
    touching = int((within.value == obstacle).sum())
    assert touching > m
    torch.testing.assert_close(above.value, within.value, rtol=1e-8, atol=1e-9)
    assert int((above.multipliers[0] > 1e-12).sum()) == touching
    slopes = [torch.autograd.grad(s.value.square().sum(), load)[0] for s in (within, above)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)
    assert float(slopes[0].norm()) > 1e-4


def test_a_hessian_that_is_not_definite_leads_to_a_minimum() -> None:
    n = 300

    def objective(z: Tensor, c: Tensor) -> Tensor:
        return (0.25 * z**4 - 0.5 * z**2 + c * z).sum() + 0.05 * z.diff().square().sum()

    c = 0.1 * torch.sin(torch.arange(n, dtype=F64))
    s = ik.argmin(objective, torch.full((n,), 0.05, dtype=F64), (c,), bounds=(-3.0, 0.8), solver="sqp")
    free = s.value < 0.8
    H = hessian(lambda z: objective(z, c))(s.value)[free][:, free]
    assert bool(s.converged) and float(torch.linalg.eigvalsh(H).min()) > 0


def test_linearised_constraints_without_a_solution_become_penalties() -> None:
    target = torch.linspace(1, 2, 200, dtype=F64)

    def below(upper: float, **options: Any) -> ik.Solution:
        return ik.argmin(
            lambda z, t: 0.5 * (z - 0.1).square().sum() + 0.01 * z.diff().square().sum(),
            torch.full((200,), 1e-3, dtype=F64),
            (target,),
            constraints=[ik.Equality(lambda z, t: z**2 - t)],
            bounds=(0.0, upper),
            solver="sqp",
            **options,
        )

    # the root of 2 is 1.41: from t = 1.44 on no z meets the bound and the constraint
    assert not bool(below(1.2, on_failure="ignore", max_steps=12).converged)
    torch.testing.assert_close(below(3.0).value, target.sqrt(), rtol=1e-9, atol=0)


def paired(n: int, about: float) -> ik.Solution:
    """Pairs of unknowns with the sum ``2 about``, each near its target, from 0."""
    return ik.argmin(
        lambda z, t: (0.5 * (z - t).square() + 0.1 * torch.cosh(z - t)).sum() + 0.1 * z.diff().square().sum(),
        torch.zeros(n, dtype=F64),
        (about + torch.linspace(0, 1, n, dtype=F64),),
        constraints=[ik.Equality(lambda z, t: z[::2] + z[1::2] - 2 * about)],
        bounds=(0.0, None),
        solver="sqp",
        trace=True,
    )


def test_the_reach_of_a_step_does_not_depend_on_how_many_unknowns_there_are() -> None:
    assert [int(paired(n, 5).steps) for n in (20, 300, 3000)] == [3, 3, 3]  # dense, sparse, sparse


def test_a_short_last_step_has_digits_of_its_own() -> None:
    """|d| is 2e-12 there, and the multipliers are 0.5."""
    norms = paired(300, 1).trace
    assert norms is not None and len(norms) == 4
    assert 1e-9 < float(norms[2]) < 1e-7 and float(norms[3]) < 1e-14


def test_a_batch_and_a_sample_that_is_not_finite() -> None:
    objective, dynamics, z0, bounds = pendulum(52, 3)
    theta = torch.stack([THETA, torch.full_like(THETA, torch.nan), THETA + 0.1])
    s = ik.argmin(
        objective,
        z0,
        (theta,),
        constraints=[ik.Equality(dynamics)],
        bounds=bounds,
        solver="sqp",
        batch_dims=1,
        on_failure="ignore",
    )
    assert s.converged.tolist() == [True, False, True]
    for i in (0, 2):
        torch.testing.assert_close(s.value[i], controlled(theta[i]).value, rtol=1e-8, atol=1e-9)


def test_too_large_and_not_sparse_is_refused() -> None:
    n = 2100
    W = torch.cos(torch.arange(n * n, dtype=F64)).view(n, n)
    with pytest.raises(ik.CapabilityError, match="augmented_lagrangian"):
        ik.argmin(lambda z: (W @ z - 1).square().sum(), torch.zeros(n, dtype=F64), bounds=(0, 1), solver="sqp")


# ------------------------------------------------------------------------------------------------------- the derivative
def read(theta: Tensor) -> Tensor:
    value = controlled(theta).value.unflatten(-1, (-1, 3))
    return torch.stack([value[:20, 2].sum(), value[..., 0].square().sum(), (value[:, 1] * value[:, 2]).sum()])


TRANSFORMS = {
    "jacrev": lambda: jacrev(read)(THETA),
    "jacfwd": lambda: jacfwd(read)(THETA),
    "jvp": lambda: jvp(read, (THETA,), (torch.tensor([1.0, -2.0], dtype=F64),))[1],
    "hessian": lambda: hessian(lambda t: read(t).sum())(THETA),
    "vmap": lambda: vmap(read)(torch.stack([THETA, THETA + 0.05])),
    "vmap of jacrev": lambda: vmap(jacrev(read))(torch.stack([THETA, THETA + 0.05])),
    "jacrev twice": lambda: jacrev(jacrev(lambda t: read(t).prod()))(THETA),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_the_dense_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = TRANSFORMS[name]()
    densely(monkeypatch)
    monkeypatch.setattr("implicitkit.sparsity.patterns.SMALLEST", 10**9)  # nor is the derivative sparse
    torch.testing.assert_close(found, TRANSFORMS[name](), rtol=1e-6, atol=1e-7)
    assert bool((found != 0).any())


# ------------------------------------------------------------------------------------------------- quadratic programs
def random_program(seed: int, n: int = 40, m: int = 15, convex: bool = True) -> qp.SparseProgram:
    rng = np.random.default_rng(seed)
    H = sp.random(n, n, 0.08, random_state=seed)
    H = (H @ H.T + 0.1 * sp.identity(n)) if convex else (H + H.T - 0.2 * sp.identity(n))
    C = sp.random(m, n, 0.2, random_state=seed + 1, data_rvs=rng.standard_normal)
    K = sp.csc_matrix(sp.bmat([[H, C.T], [C, None]]) + sp.diags(np.full(n + m, 1e-300)))
    inside = rng.uniform(-1, 1, n)
    sided = np.arange(m) >= 5
    b = C @ inside + np.where(sided, rng.uniform(0, 0.3, m), 0)
    lower, upper = np.full(n, -np.inf), np.full(n, np.inf)
    lower[::3], upper[1::3] = inside[::3] - 0.2, inside[1::3] + 0.2
    lower[4] = upper[4] = inside[4]
    return qp.SparseProgram(K, 3 * rng.standard_normal(n), b, sided, lower, upper)


def by_dense(p: qp.SparseProgram) -> tuple[np.ndarray, np.ndarray]:
    n, m = p.size, len(p.b)
    M = p.K.toarray()
    has_low, has_high = np.isfinite(p.lower), np.isfinite(p.upper) & (p.lower != p.upper)
    pinned = p.lower == p.upper
    eye = np.eye(n)
    G = np.concatenate([M[n:, :n][p.one_sided], -eye[has_low & ~pinned], eye[has_high]])
    h = np.concatenate([p.b[p.one_sided], -p.lower[has_low & ~pinned], p.upper[has_high]])
    A = np.concatenate([M[n:, :n][~p.one_sided], eye[pinned]])
    b = np.concatenate([p.b[~p.one_sided], p.lower[pinned]])
    z, y, lam, status = solve_qp(*(torch.from_numpy(np.ascontiguousarray(t)) for t in (M[:n, :n], p.q, A, b, G, h)))
    assert int(status) == int(ik.Status.CONVERGED)
    out = np.zeros(m)
    out[~p.one_sided] = y[: int((~p.one_sided).sum())]
    out[p.one_sided] = lam[: int(p.one_sided.sum())]
    return z.numpy(), out


@pytest.mark.parametrize("seed", range(6))
def test_quadratic_programs_by_active_sets_and_by_the_interior_point(seed: int) -> None:
    p = random_program(seed)
    d, y = by_dense(p)
    inside = interior_point(p)
    assert inside is not None and inside.settled
    assert int((inside.active.bounds != 0).sum() + inside.active.rows.sum()) > 8
    for point in (inside, qp.active_set(p, inside.active), qp.active_set(p, qp.guess(p, np.zeros(len(p.b))))):
        if point is not None:
            np.testing.assert_allclose(point.d, d, rtol=1e-7, atol=1e-9)
            np.testing.assert_allclose(point.y, y, rtol=1e-6, atol=1e-8)


def test_a_program_that_is_not_convex_is_shifted_to_a_minimum() -> None:
    p = random_program(3, convex=False)
    point = interior_point(p)
    assert point is not None and point.shift > 0
    n = p.size
    M = p.K.toarray() + np.diag(np.r_[np.full(n, point.shift), np.zeros(len(p.b))])
    free = point.active.bounds == 0
    left = (M @ np.r_[point.d, point.y])[:n] + p.q
    assert np.abs(left[free]).max() < 1e-8
    assert (left[point.active.bounds < 0] >= -1e-9).all() and (point.y[p.one_sided] >= -1e-9).all()
    J = M[n:, :n][point.active.rows][:, free]
    null = np.linalg.svd(J)[2][np.linalg.matrix_rank(J) :]
    assert np.linalg.eigvalsh(null @ M[:n, :n][np.ix_(free, free)] @ null.T).min() > 0


def test_an_infeasible_program_has_no_active_set() -> None:
    p = random_program(0)
    C = p.K[p.size :, : p.size].toarray()
    wrong = np.where(p.one_sided, p.b, p.b + 1e3 * np.abs(C).sum(1))
    p = qp.SparseProgram(p.K, p.q, wrong, p.one_sided, np.full(p.size, -1.0), np.full(p.size, 1.0))
    assert interior_point(p) is None
    d, _ = qp.penalised(p, 10.0)
    assert (np.abs(d) <= 1).all()
    assert np.abs(C @ d - wrong)[~p.one_sided].max() < np.abs(wrong[~p.one_sided]).max()


def test_penalties_by_their_weight() -> None:
    p = random_program(1)
    p = qp.SparseProgram(p.K, p.q, p.b - 1, p.one_sided, np.full(p.size, -np.inf), np.full(p.size, np.inf))
    C = p.K[p.size :, : p.size]
    wrong = ~p.one_sided | (p.b < 0)
    assert wrong[p.one_sided].any()
    left = [np.abs(C @ qp.penalised(p, weight)[0] - p.b)[wrong].max() for weight in (1e-2, 1.0, 1e4)]
    assert left[1] < 0.5 * left[0] and left[2] < 1e-2 * left[1]


def test_multipliers_of_least_squares() -> None:
    p = random_program(2)
    rows = ~p.one_sided | (np.arange(len(p.b)) > 11)
    C = p.K[p.size :, : p.size].toarray()[rows]
    expected = np.linalg.lstsq(C.T, -p.q, rcond=None)[0]
    np.testing.assert_allclose(qp.least_squares_multipliers(p, rows)[rows], expected, rtol=1e-8)
    assert (qp.least_squares_multipliers(p, rows)[~rows] == 0).all()


# ---------------------------------------------------------------------------------------------------------- the factors
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e-6])
def test_factors_know_the_inertia(scale: float) -> None:
    rng = np.random.default_rng(0)
    n, m = 30, 10
    for shift in (-2.0, -0.5, 0.0, 3.0):
        H = sp.random(n, n, 0.1, random_state=1)
        H = (H + H.T + shift * sp.identity(n)) * scale
        C = sp.random(m, n, 0.4, random_state=2, data_rvs=rng.standard_normal)
        K = sp.csc_matrix(sp.bmat([[H, C.T], [C, None]]) + sp.diags(np.full(n + m, 1e-300)))
        saddle = SparseSaddle(K, n)
        assert saddle.negative == int((np.linalg.eigvalsh(K.toarray()) < 0).sum())
        b = rng.standard_normal(n + m)
        x, left = saddle.solve(b)
        assert left < 1e-13
        np.testing.assert_allclose(x, np.linalg.solve(K.toarray(), b), rtol=1e-6, atol=1e-8 * abs(x).max())


def test_factors_of_what_is_not_finite() -> None:
    K = sp.csc_matrix(np.diag([1.0, np.nan, -1.0]))
    saddle = SparseSaddle(K, 2)
    assert saddle.negative == -1 and saddle.solve(np.ones(3))[1] == np.inf


def circles(pairs: int) -> tuple[Any, Any, Tensor]:
    """``c'z`` on as many circles: the Hessian of the objective alone is zero, and the solution ``-c / |c|`` of each pair."""
    c = torch.stack([torch.linspace(1, 2, pairs, dtype=F64), torch.linspace(-1, 1, pairs, dtype=F64)], 1)
    return (lambda z, c: (c * z).sum()), (lambda z, c: z.square().sum(1) - 1), c


def test_multipliers_are_estimated_where_the_objective_alone_has_no_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    estimated: list[int] = []
    estimate = sparse_step._estimate
    monkeypatch.setattr(sparse_step, "_estimate", lambda program: estimated.append(0) or estimate(program))
    objective, rim, c = circles(100)
    start = 0.1 - 0.8 * c / c.norm(dim=1, keepdim=True)
    s = ik.argmin(objective, start, (c.requires_grad_(),), constraints=[ik.Equality(rim)], solver="sqp")
    expected = -c.detach() / c.detach().norm(dim=1, keepdim=True)
    torch.testing.assert_close(s.value.detach(), expected)
    assert int(s.steps) <= 8
    assert len(estimated) == 1
    (slope,) = torch.autograd.grad(s.value[:, 0].sum(), c)
    x, y = c.detach().unbind(1)
    torch.testing.assert_close(slope, torch.stack([-(y**2), x * y], 1) / (x**2 + y**2).unsqueeze(1) ** 1.5)


@pytest.mark.parametrize("seed", range(3))
def test_factors_of_an_active_set_as_those_of_the_optimality_conditions(seed: int) -> None:
    p = random_program(seed)
    point = interior_point(p)
    assert point is not None
    none = [torch.zeros(1, k, dtype=F64) for k in (p.size, len(p.b), p.K.nnz)]
    first = model.First(none[0].sum(1), none[0], none[1])
    direction = sparse_step.SparseDirection(first, torch.cat(none[:2], 1), none[2])
    direction.begin(0, p, point.y)
    direction._settled.clear()
    direction._keep(0, p, point)
    factors = direction.factors
    assert factors is not None and bool(factors.factor.ok.all())
    n, m = p.size, len(p.b)
    N, K = np.eye(n + m), p.K.toarray()
    for i in range(n):
        if point.active.bounds[i] == 0:
            N[i] = K[i]
    for j in range(m):
        if point.active.rows[j]:
            N[n + j] = (-1 if p.one_sided[j] else 1) * K[n + j]
    b = np.random.default_rng(seed).standard_normal((1, n + m, 2))
    for A, known in ((N, factors), (N.T, factors.T)):
        x = known.solve(torch.from_numpy(b)).numpy()[0]
        np.testing.assert_allclose(x, np.linalg.solve(A, b[0]), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(known.size(torch.from_numpy(x[None, :, 0])).numpy()[0], abs(A) @ abs(x[:, 0]))


def test_derivatives_by_the_last_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    theta = THETA.clone().requires_grad_()
    (expected,) = torch.autograd.grad(controlled(theta, points=100).value.square().sum(), theta)

    def refused(*_: Any) -> Any:
        raise AssertionError("factored again")

    found = controlled(theta, points=100).value
    monkeypatch.setattr(sparse_blocks.SparseBlocks, "factor", property(refused))
    (slope,) = torch.autograd.grad(found.square().sum(), theta)
    torch.testing.assert_close(slope, expected, rtol=1e-9, atol=0.0)
    with torch.no_grad():
        ahead, back = (controlled(theta + e * torch.tensor([1.0, 0.0]), points=100).value for e in (1e-5, -1e-5))
    difference = (ahead.square().sum() - back.square().sum()) / 2e-5
    torch.testing.assert_close(slope[0], difference, rtol=1e-5, atol=0.0)


def test_dependent_constraints_are_no_regular_factors() -> None:
    weights = torch.linspace(1, 2, 200, dtype=F64, requires_grad=True)

    def solved(rows: int, **options: Any) -> Any:
        return ik.argmin(
            lambda z, w: 0.5 * (z - w).square().sum() + 0.01 * z.pow(4).sum(),
            torch.zeros(200, dtype=F64),
            (weights,),
            constraints=[ik.Equality(lambda z, w: z[:-1:2] - z[1::2])] * rows,
            solver="sqp",
            **options,
        ).value

    twice = solved(2, degenerate="raise").square().sum()
    with pytest.raises(ik.ConvergenceError, match="degenerate"):
        twice.backward()
    (once,) = torch.autograd.grad(solved(1).square().sum(), weights)
    (least,) = torch.autograd.grad(solved(2).square().sum(), weights)
    torch.testing.assert_close(least, once, rtol=1e-6, atol=1e-8)


def test_steps_whose_programs_are_solved_from_inside_count_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic in a grid, costs that grow with the fourth power of what flows: each step's program takes as many systems as
    half of the interior point that is turned to then."""
    from implicitkit.solver.constrained.sqp import SQP

    taken: list[int] = []
    step = SQP.step
    monkeypatch.setattr(SQP, "step", lambda *a: taken.append(1) or step(*a))  # type: ignore[func-returns-value]
    side, kinds, rng = 10, 5, np.random.default_rng(0)
    at = np.arange(side * side).reshape(side, side)
    tail = torch.from_numpy(np.r_[at[:, :-1].ravel(), at[:-1].ravel(), at[:, 1:].ravel(), at[1:].ravel()])
    head = torch.from_numpy(np.r_[at[:, 1:].ravel(), at[1:].ravel(), at[:, :-1].ravel(), at[:-1].ravel()])
    demand = torch.from_numpy(rng.uniform(0.1, 1, (kinds, side * side)))
    for k, to in enumerate(rng.integers(0, side * side, kinds)):
        demand[k, to] -= demand[k].sum()
    room = torch.from_numpy(rng.uniform(5, 15, len(tail)))

    def balance(x: Tensor) -> Tensor:
        out = torch.zeros_like(demand)
        return (out.index_add(1, tail, x).index_add(1, head, -x) - demand)[:, :-1]

    solution = ik.argmin(
        lambda x: (x.sum(0) * (1 + 0.03 * (x.sum(0) / room) ** 4)).sum(),
        torch.ones(kinds, len(tail), dtype=torch.float64),
        (),
        constraints=[ik.Equality(balance)],
        bounds=(0.0, None),
    )
    assert bool(solution.converged) and float(balance(solution.value).abs().max()) < 1e-8
    assert len(taken) <= 3


@pytest.mark.parametrize("start, most", [(0.0, 3), (1.0, 2)])
def test_what_is_known_at_a_point_of_a_program_is_not_evaluated_again(start: float, most: int) -> None:
    # one step from where it begins to where it ends; at zero, where the gradient vanishes, one more asks whether z is hidden
    def objective(z: Tensor, c: Tensor) -> Tensor:
        return (0.5 * c * z * z).sum() + (z[1:] - z[:-1]).square().sum()

    c = torch.linspace(1, 2, 300, dtype=F64, requires_grad=True)
    z0 = torch.full((300,), start, dtype=F64)
    s = ik.argmin(objective, z0, (c,), constraints=[ik.Equality(lambda z, c: z[0] + z[1] - 1)])
    assert s.solver == "auto (sqp)" and int(s.steps) == 1 and s.evaluations == most
    H = 2 * torch.eye(300, dtype=F64).diff(dim=0).mT @ torch.eye(300, dtype=F64).diff(dim=0) + torch.diag(c.detach())
    a = torch.zeros(300, 1, dtype=F64)
    a[:2] = 1
    K = torch.cat([torch.cat([H, a], 1), torch.cat([a.mT, a.new_zeros(1, 1)], 1)])
    u = torch.linalg.solve(K, torch.cat([a.new_ones(300), a.new_zeros(1)]))[:300]
    (slope,) = torch.autograd.grad(s.value.sum(), c)
    torch.testing.assert_close(slope, -u * s.value.detach())


def test_stages_are_made_once_for_programs_of_one_form() -> None:
    made = []
    for weight in (1.0, 2.0):
        z0, bounds = torch.ones(3, dtype=F64), (0.0, None)
        problem = ik.Argmin(lambda z, w=weight: w * z.square().sum(), constraints=[ik.Equality(sum)], bounds=bounds)
        restated = problem.restate(z0, (), 0)
        assert restated is not None
        made.append(auto.choose(restated.problem, 1, 4))
    assert made[0] is made[1]
    free = ik.Argmin(lambda z: z.square().sum(), bounds=bounds).restate(z0, (), 0)
    assert free is not None and auto.choose(free.problem, 1, 4) is not made[0]
