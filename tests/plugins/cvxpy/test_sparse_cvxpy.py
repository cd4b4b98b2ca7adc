"""Sparse programs: matrices by their entries, the same values and derivatives, and no dense matrix anywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from matrices import randn
from torch import Tensor

import implicitkit as ik

cp = pytest.importorskip("cvxpy")
from implicitkit_cvxpy import ConvexLayer, DegenerateError, layer  # noqa: E402
from implicitkit_cvxpy.assembly import SparseAssembly  # noqa: E402

F64 = torch.float64


def differences(n: int) -> Any:
    return sp.diags([np.ones(n - 1), -np.ones(n - 1)], [0, 1], shape=(n - 1, n)).tocsr()


Program = tuple[Any, list[Any], list[Any], list[Tensor]]


def total_variation(n: int = 200) -> Program:
    x, c, weight = cp.Variable(n), cp.Parameter(n), cp.Parameter(nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c) + weight * cp.norm1(differences(n) @ x)))
    return problem, [c, weight], [x], [0.1 * randn(n).cumsum(0), torch.tensor(0.7, dtype=F64)]


def groups(n: int = 200) -> Program:
    x, c, weight = cp.Variable(n), cp.Parameter(n), cp.Parameter(nonneg=True)
    norms = sum(cp.norm(x[i : i + 5], 2) for i in range(0, n, 5))
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c) + weight * norms))
    return problem, [c, weight], [x], [randn(n), torch.tensor(0.7, dtype=F64)]


def entropy(n: int = 120) -> Program:
    x, c = cp.Variable(n), cp.Parameter(n)
    rough = cp.sum_squares(differences(n) @ x)
    return cp.Problem(cp.Minimize(c @ x - cp.sum(cp.entr(x)) + rough), [cp.sum(x) == 1]), [c], [x], [randn(n)]


def spectra(k: int = 6, number: int = 12) -> Program:
    X = [cp.Variable((k, k), PSD=True) for _ in range(number)]
    C = [cp.Parameter((k, k), symmetric=True) for _ in range(number)]
    fit = sum(cp.sum_squares(x - c) for x, c in zip(X, C, strict=True))
    problem = cp.Problem(cp.Minimize(fit), [sum(cp.trace(x) for x in X) == number])
    return problem, C, X, [(a + a.mT) for a in randn(number, k, k)]


def powers(n: int = 100) -> Program:
    x, c = cp.Variable(n), cp.Parameter(n, nonneg=True)
    return cp.Problem(cp.Minimize(cp.sum(cp.power(x, 3)) - c @ x), [x <= 1.2]), [c], [x], [1 + 4 * randn(n).abs()]


def diagonal(n: int = 150) -> Program:
    x, W, b = cp.Variable(n), cp.Parameter((n, n), diag=True), cp.Parameter(n)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(W @ x - b) + cp.norm1(x)), [x <= 0.3])
    return problem, [W, b], [x], [torch.diag(0.5 + randn(n).abs()), randn(n, seed=1)]


def control(steps: int = 60) -> Program:
    A, B = torch.tensor([[1.0, 0.1], [0.0, 1.0]]).numpy(), np.array([[0.0], [0.1]])
    start, X, U = cp.Parameter(2), cp.Variable((steps + 1, 2)), cp.Variable((steps, 1))
    rows = [X[0] == start, X[1:] == X[:-1] @ A.T + U @ B.T, cp.abs(U) <= 1]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(X) + 0.1 * cp.sum_squares(U)), rows)
    return problem, [start], [X, U], [torch.tensor([2.0, 0.0], dtype=F64)]


def transport(m: int = 12) -> Program:
    """A linear program with as many redundant rows as it can have, one."""
    X, C, a, b = cp.Variable((m, m)), cp.Parameter((m, m)), cp.Parameter(m), cp.Parameter(m)
    rows = [cp.sum(X, axis=1) == a, cp.sum(X, axis=0) == b, X >= 0]
    costs, u, v = randn(m, m).abs(), 0.2 + randn(m, seed=1).abs(), 0.2 + randn(m, seed=2).abs()
    problem = cp.Problem(cp.Minimize(cp.sum(cp.multiply(C, X)) + 0.05 * cp.sum_squares(X)), rows)
    return problem, [C, a, b], [X], [costs, u / u.sum(), v / v.sum()]


PROGRAMS: list[Callable[[], Program]] = [
    total_variation, groups, entropy, spectra, powers, diagonal, control, transport,
]  # fmt: skip


def layers(monkeypatch: pytest.MonkeyPatch, program: Program, **options: Any) -> dict[str, ConvexLayer]:
    problem, parameters, variables, _ = program
    made = {}
    for name, sparse in (("sparse", True), ("dense", False)):
        monkeypatch.setattr(layer, "is_sparse", lambda _, sparse=sparse: sparse)
        made[name] = ConvexLayer(problem, parameters, variables, **options)
    monkeypatch.undo()
    assert isinstance(made["sparse"]._assembly, SparseAssembly)
    assert not isinstance(made["dense"]._assembly, SparseAssembly)
    return made


def pulled(convex: ConvexLayer, args: list[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], list[Tensor]]:
    leaves = [a.clone().requires_grad_() for a in args]
    found = convex(*leaves)
    weights = [randn(*t.shape, seed=7) for t in found]
    loss = sum((t * w).sum() for t, w in zip(found, weights, strict=True))
    return found, torch.autograd.grad(loss, leaves), weights


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", PROGRAMS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_the_dense_form_and_of_differences(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Program]
) -> None:
    program = make()
    args = program[3]
    made = layers(monkeypatch, program)
    found, gradients, weights = pulled(made["sparse"], args)
    wanted, exact, _ = pulled(made["dense"], args)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    scale = max(float(g.abs().max()) for g in exact)
    if make is not transport:  # where the sum of supplies must be that of demands, and derivatives are of least norm
        for a, b in zip(gradients, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8 * scale)
    directions = [randn(*a.shape, seed=3 + i) for i, a in enumerate(args)]
    directions = [torch.diag(d.diagonal()) if make is diagonal and d.ndim == 2 else d for d in directions]
    if make is spectra:
        directions = [d + d.mT for d in directions]
    if make is transport:
        directions = [directions[0]] + [d - d.mean() for d in directions[1:]]

    def loss(step: float) -> float:
        moved = made["sparse"](*[a + step * d for a, d in zip(args, directions, strict=True)])
        return float(sum((t * w).sum() for t, w in zip(moved, weights, strict=True)))

    numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
    mine = float(sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)))
    assert mine == pytest.approx(numeric, rel=1e-5, abs=1e-6 * scale)


def test_a_large_sparse_program_is_sparse_by_itself() -> None:
    """60,000 unknowns and 60,000 rows: as a dense matrix 29 GB for ``A`` alone."""
    n = 20_000
    problem, parameters, variables, args = total_variation(n)
    convex = ConvexLayer(problem, parameters, variables)
    leaves = [a.requires_grad_() for a in args]
    (x,) = convex(*leaves)
    x.square().sum().backward()
    assert float(convex.solution.residual_norm) < 1e-10
    # where x is constant on pieces the sum of x is that of c
    torch.testing.assert_close(x.detach().sum(), args[0].detach().sum(), rtol=1e-9, atol=0)
    torch.testing.assert_close(args[0].grad.sum(), 2 * x.detach().sum(), rtol=1e-8, atol=0)


@pytest.mark.parametrize("make", [groups, total_variation, entropy], ids=lambda f: f.__name__)
def test_transforms(make: Callable[[], Program]) -> None:
    problem, parameters, variables, args = make()
    convex = ConvexLayer(problem, parameters, variables)
    assert isinstance(convex._assembly, SparseAssembly)

    def solve(c: Tensor) -> Tensor:
        return convex(c, *args[1:])[0]

    def gradient(c: Tensor) -> Tensor:
        return torch.func.grad(lambda c: solve(c).pow(3).sum())(c)

    c, v = args[0], randn(*args[0].shape, seed=5)
    h = 1e-5
    for function in (solve, gradient):
        slope = torch.func.jvp(function, (c,), (v,))[1]
        numeric = (function(c + h * v) - function(c - h * v)) / (2 * h)
        torch.testing.assert_close(slope, numeric, rtol=1e-5, atol=1e-6 * float(numeric.abs().max()))
    batch = c + 0.1 * randn(3, *c.shape, seed=6)
    torch.testing.assert_close(torch.vmap(solve)(batch), torch.stack([solve(b) for b in batch]), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        torch.vmap(gradient)(batch), torch.stack([gradient(b) for b in batch]), rtol=1e-7, atol=1e-9
    )
    torch.testing.assert_close(convex(batch, *args[1:])[0], torch.vmap(solve)(batch), rtol=1e-9, atol=1e-11)


def test_one_infeasible_sample_leaves_the_others() -> None:
    n = 300
    x, b = cp.Variable(n), cp.Parameter(n)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x)), [x >= b, differences(n) @ x <= 0.5, cp.sum(x) <= 0])
    given = -randn(3, n).abs()
    given[1] = 1.0
    with pytest.raises(RuntimeError, match=r"infeasible.*sample 1"):
        ConvexLayer(problem, [b], [x])(given)
    convex = ConvexLayer(problem, [b], [x], on_failure="nan")
    assert isinstance(convex._assembly, SparseAssembly)
    leaf = given.clone().requires_grad_()
    (found,) = convex(leaf)
    assert found.isnan().any(1).tolist() == [False, True, False]
    (found[0] * randn(n)).sum().backward()
    alone = given[0].clone().requires_grad_()
    (convex(alone)[0] * randn(n)).sum().backward()
    torch.testing.assert_close(leaf.grad[0], alone.grad)
    assert float(leaf.grad[1].abs().max()) == 0


def test_multipliers_that_are_not_unique(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solved to rounding all the same, by factors alone; whether it has a derivative is for ``degenerate``."""
    import networkx as nx

    graph = nx.grid_2d_graph(10, 10).to_directed()
    incidence = sp.csr_matrix(nx.incidence_matrix(graph, oriented=True))[:-1]
    costs, flow = cp.Parameter(incidence.shape[1]), cp.Variable(incidence.shape[1])
    supply = np.zeros(incidence.shape[0])
    supply[0] = -1.0
    objective = cp.Minimize(costs @ flow + 0.5 * cp.sum_squares(flow))
    problem = cp.Problem(objective, [incidence @ flow == supply, flow >= 0])
    given = randn(incidence.shape[1]).abs().requires_grad_()
    convex = ConvexLayer(problem, [costs], [flow])
    with monkeypatch.context() as without:
        without.delattr("implicitkit_cvxpy.polish.active_rows")
        without.delattr("implicitkit.linear.conditions.kkt.KKT._least_norm")
        (found,) = convex(given)
    assert isinstance(convex._assembly, SparseAssembly)
    assert float(convex.solution.residual_norm) < 1e-11
    costs.value = given.detach().numpy()
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    assert np.abs(flow.value - found.detach().numpy()).max() < 1e-6
    strict = ConvexLayer(problem, [costs], [flow], degenerate="raise")
    (found,) = strict(given)
    with pytest.raises(DegenerateError, match="sample"):
        found.sum().backward()


def test_dual_variables_and_other_solvers() -> None:
    n = 300
    x, c = cp.Variable(n), cp.Parameter(n)
    rows = [x <= 0.1, cp.sum(x) == 1]
    problem = cp.Problem(cp.Minimize(cp.sum_squares(differences(n) @ x) + cp.sum_squares(x - c)), rows)
    wanted = [x, rows[0].dual_variables[0], rows[1].dual_variables[0]]
    given = randn(n)
    c.value = given.numpy()
    problem.solve(solver="CLARABEL", tol_gap_abs=1e-11, tol_gap_rel=1e-11, tol_feas=1e-11)
    values = [np.copy(v) for v in (x.value, rows[0].dual_value, rows[1].dual_value)]
    for solver in (None, "SCS", "OSQP", "interior_point"):
        convex = ConvexLayer(problem, [c], wanted, solver=solver)
        assert isinstance(convex._assembly, SparseAssembly) == (solver != "interior_point"), solver
        for found, value in zip(convex(given), values, strict=True):
            assert np.abs(found.numpy() - value).max() < 1e-6, solver


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore:the gradient with respect to:implicitkit_cvxpy.StructurallyZeroGradientWarning")
@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("s", [1e-10, 1e-6, 1e6, 1e10])
@pytest.mark.parametrize(
    ("make", "scaled", "moves"),
    [
        (lambda: total_variation(30), (True, True), True),
        (lambda: groups(20), (True, True), True),
        (lambda: cheapest(), (True, False), False),
        (lambda: cheapest(), (False, True), True),
        (lambda: weighed(), (True, True), False),
    ],
    ids=["total variation", "groups", "prices", "demand", "objective"],
)
def test_units_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Program],
    scaled: tuple[bool, ...],
    moves: bool,
    s: float,
    form: str,
) -> None:
    program = make()
    convex = layers(monkeypatch, program)[form]
    args = program[3]
    (plain,), wanted, _ = pulled(convex, args)
    by = [s if changed else 1.0 for changed in scaled]
    (found,), gradients, _ = pulled(convex, [a * unit for a, unit in zip(args, by, strict=True)])
    size = s if moves else 1.0
    torch.testing.assert_close(found / size, plain, rtol=1e-8, atol=1e-9 * float(plain.detach().abs().max()))
    for g, unit, exact in zip(gradients, by, wanted, strict=True):
        torch.testing.assert_close(g * unit / size, exact, rtol=1e-6, atol=1e-7 * float(exact.abs().max()) + 1e-12)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("s", [1e-10, 1e10])
def test_multipliers_have_the_units_of_the_objective(monkeypatch: pytest.MonkeyPatch, s: float, form: str) -> None:
    x, c, weight = cp.Variable(5), cp.Parameter(5), cp.Parameter(nonneg=True)
    row = x <= 0.4
    problem = cp.Problem(cp.Minimize(weight * cp.sum_squares(x) - c @ x), [row])
    convex = layers(monkeypatch, (problem, [c, weight], [x, row.dual_variables[0]], []))[form]
    given, one = randn(5), torch.tensor(0.3, dtype=F64)
    point, multipliers = convex(s * given, s * one)
    torch.testing.assert_close(point, (given / 0.6).clamp_max(0.4), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(multipliers / s, (given - 0.24).clamp_min(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("far", [1e6, 1e8])
def test_one_number_far_from_the_rest_is_no_unit(monkeypatch: pytest.MonkeyPatch, far: float, form: str) -> None:
    """A dear slack; a bound that is none; and what is infeasible beside one stays so."""
    x, s, p = cp.Variable(2), cp.Variable(2), cp.Parameter(2)
    given = torch.tensor([1.0, -1.0], dtype=F64)
    dear = cp.Problem(cp.Minimize(cp.norm1(x - p) + far * cp.sum(s)), [x <= 0.2 + s, s >= 0])
    (found,), (gradient,), (weights,) = pulled(layers(monkeypatch, (dear, [p], [x], []))[form], [given])
    torch.testing.assert_close(found, torch.tensor([0.2, -1.0], dtype=F64), rtol=0, atol=1e-6)
    torch.testing.assert_close(gradient, torch.stack([0 * weights[0], weights[1]]), rtol=0, atol=1e-6)
    wide = cp.Problem(cp.Minimize(cp.sum_squares(x) + 0 * cp.sum(p)), [cp.sum(x) >= 1, x <= far])
    (found,) = layers(monkeypatch, (wide, [p], [x], []))[form](given)
    torch.testing.assert_close(found, torch.tensor([0.5, 0.5], dtype=F64), rtol=0, atol=1e-6)
    none = cp.Problem(cp.Minimize(cp.sum_squares(x) + p @ x), [x >= 0, x <= far, x[0] <= -1])
    with pytest.raises(RuntimeError, match="infeasible"):
        layers(monkeypatch, (none, [p], [x], []))[form](given)


def test_active_rows_that_the_point_of_the_solver_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """``|x| <= b`` with ``b`` a millionth of the rest."""
    x, c, b = cp.Variable(5), cp.Parameter(5), cp.Parameter(nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [cp.abs(x) <= b])
    given, narrow = randn(5), torch.tensor(3e-7, dtype=F64)
    convex = layers(monkeypatch, (problem, [c, b], [x], []))["sparse"]
    torch.testing.assert_close(convex(given, narrow)[0], given.clamp(-narrow, narrow), rtol=1e-8, atol=0)


def cheapest(n: int = 5) -> Program:
    x, prices, demand = cp.Variable(n), cp.Parameter(n), cp.Parameter()
    problem = cp.Problem(cp.Minimize(prices @ x), [cp.sum(x) == demand, x >= 0])
    return problem, [prices, demand], [x], [torch.arange(1.0, n + 1, dtype=F64), torch.tensor(2.0, dtype=F64)]


def weighed(n: int = 5) -> Program:
    x, c, weight = cp.Variable(n), cp.Parameter(n), cp.Parameter(nonneg=True)
    problem = cp.Problem(cp.Minimize(weight * cp.sum_squares(x) - c @ x), [x <= 0.4])
    return problem, [c, weight], [x], [randn(n), torch.tensor(0.3, dtype=F64)]


@pytest.mark.parametrize(("low", "high"), [(-3, 6), (0, 9), (0, 12), (-6, 0)])
def test_rows_of_a_sparse_program_have_units_of_their_own(low: float, high: float) -> None:
    """Slacks of rows of 1e9 were rounding errors, by which active rows were told: derivatives were wrong; and rows of 1e-6
    were said to be infeasible."""
    n = 600
    x, p, s, most = cp.Variable(n), cp.Parameter(n), cp.Parameter(n // 2), cp.Parameter()
    rows = [cp.multiply(s, x[::2] + 2 * x[1::2]) >= 1, x[0] <= most, x[0] >= -most]
    solve = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - p)), rows), [p, s, most], [x], on_failure="nan")
    generator = torch.Generator().manual_seed(0)
    point = (2 * torch.rand(n, dtype=F64, generator=generator) - 1).requires_grad_()
    sizes = (10 ** (low + (high - low) * torch.rand(n // 2, dtype=F64, generator=generator))).requires_grad_()
    gap = (1 / sizes - point[::2] - 2 * point[1::2]).clamp_min(0) / 5
    exact = point + torch.stack([gap, 2 * gap], 1).flatten()
    value = solve(point, sizes, torch.tensor(1e8, dtype=F64))[0]
    torch.testing.assert_close(value, exact, rtol=1e-9, atol=1e-9)
    found, wanted = (torch.autograd.grad(v.sum(), [point, sizes]) for v in (value, exact))
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1] * sizes, wanted[1] * sizes, rtol=1e-9, atol=1e-9)
    mixed = solve(point, sizes, torch.tensor([1e8, -1.0], dtype=F64))[0]
    assert mixed.isfinite().all(1).tolist() == [True, False]
    assert solve.solution.status.tolist() == [int(ik.Status.CONVERGED), int(ik.Status.INFEASIBLE)]
