"""Programs with cones whose numbers are many orders apart: values and derivatives against closed forms."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

cp = pytest.importorskip("cvxpy")
import implicitkit as ik  # noqa: E402
from implicitkit_cvxpy import ConvexLayer  # noqa: E402
from implicitkit_cvxpy.backends import Data  # noqa: E402
from implicitkit_cvxpy.cones import Cones, DualCone  # noqa: E402
from implicitkit_cvxpy.cones.automorphism import Automorphism  # noqa: E402
from implicitkit_cvxpy.cones.semidefinite import _positions  # noqa: E402
from implicitkit_cvxpy.equilibration import balanced  # noqa: E402

F64 = torch.float64
WEIGHTS = torch.tensor([0.5, 1.0, 0.2], dtype=F64)
Case = tuple[Callable[[Any, Any], tuple[Any, list[Any]]], Callable[[Tensor, Tensor], Tensor]]


def _shares(a: Tensor) -> Tensor:
    return a / a.sum()


#: program of ``(x, a, b)``, and its solution: logarithms, entropy and powers under a budget
CASES: dict[str, Case] = {
    "log": (
        lambda x, p: (cp.Maximize(p[0] @ cp.log(x)), [cp.sum(x) <= p[1]]),
        lambda a, b: b * _shares(a),
    ),
    "entropy": (
        lambda x, p: (cp.Minimize(p[0] @ x - cp.sum(cp.entr(x))), [cp.sum(x) == p[1]]),
        lambda a, b: b * (-a).softmax(0),
    ),
    "sqrt": (
        lambda x, p: (cp.Maximize(p[0] @ cp.sqrt(x)), [cp.sum(x) <= p[1]]),
        lambda a, b: b * _shares(a**2),
    ),
    "cube": (  # said to be infeasible
        lambda x, p: (cp.Minimize(p[0] @ cp.power(x, 3)), [cp.sum(x) == p[1]]),
        lambda a, b: b * _shares(a**-0.5),
    ),
    "inverse": (
        lambda x, p: (cp.Minimize(p[0] @ cp.inv_pos(x)), [cp.sum(x) <= p[1]]),
        lambda a, b: b * _shares(a**0.5),
    ),
    "log in a ball": (
        lambda x, p: (cp.Maximize(p[0] @ cp.log(x)), [cp.norm(x) <= p[1]]),
        lambda a, b: b * _shares(a) ** 0.5,
    ),
    "power cone": (
        lambda x, p: (cp.Maximize(x[2]), [cp.PowCone3D(x[0], x[1], x[2], 0.5), x[0] + p[0][0] * x[1] <= p[1]]),
        lambda a, b: b * torch.stack([0.5 + 0 * b, 0.5 / a[0], 0.5 / a[0] ** 0.5]),
    ),
}


def _layer(name: str, **options: Any) -> ConvexLayer:
    x, a, b = cp.Variable(3), cp.Parameter(3, nonneg=True), cp.Parameter(nonneg=True)
    return ConvexLayer(cp.Problem(*CASES[name][0](x, (a, b))), [a, b], [x], **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("b", [1e-6, 1.0, 1e5, 1e7])
@pytest.mark.parametrize("name", CASES)
def test_budgets_of_any_size(name: str, b: float) -> None:
    """Half of a budget of a million was spent wrongly, with a derivative of zero, and called converged."""
    layer, exact = _layer(name), CASES[name][1]
    budget = torch.tensor(b, dtype=F64)
    leaves = [t.clone().requires_grad_() for t in (WEIGHTS, budget)]
    value = layer(*leaves)[0]
    assert_close(value.detach(), exact(WEIGHTS, budget), rtol=1e-7, atol=0.0)
    found = torch.autograd.grad(value[0] / b, leaves)
    wanted = torch.autograd.grad(exact(*leaves)[0] / b, leaves)
    assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-7)
    assert_close(found[1] * b, wanted[1] * b, rtol=1e-5, atol=0.0)


#: programs whose matrices hold a price ``p``, beside right-hand sides, objectives and multipliers of one or less
PRICES: dict[str, Case] = {
    "linear": (lambda x, p: (cp.Minimize(WEIGHTS.numpy() @ x), [p * x >= 1]), lambda p: 1 / p.expand(3)),
    "ball": (
        lambda x, p: (cp.Maximize(WEIGHTS.numpy() @ x), [cp.norm(p * x) <= 1]),
        lambda p: WEIGHTS / WEIGHTS.norm() / p,
    ),
    "exponential": (
        lambda x, p: (cp.Minimize(x[1] + x[2]), [cp.exp(x[0]) <= p * x[1], x[0] >= 1, p * x[2] >= 1]),
        lambda p: torch.stack([1 + 0 * p, torch.e / p, 1 / p]),
    ),
    "semidefinite": (
        lambda x, p: (cp.Minimize(cp.sum(x)), [p * cp.diag(x) >> np.diag(WEIGHTS.numpy())]),
        lambda p: WEIGHTS / p,
    ),
}


#: quadratic programs with one row ``d'x``, large or small, beside a Hessian of one
ROWS: dict[str, Callable[[Any, Any], list[Any]]] = {
    "equality": lambda x, d: [d @ x == 1],
    "inequality": lambda x, d: [d @ x <= 1],
    "from below": lambda x, d: [d @ x >= 1],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("p", [1e-12, 1e-6, 1e6, 1e9, 1e12])
@pytest.mark.parametrize("name", ROWS)
def test_rows_of_any_size(name: str, p: float) -> None:
    """A slack that was made of rounding said which row is active, and a row of 1e12 that the KKT matrix is singular: values
    were right, and derivatives wrong; a small row was said to be infeasible."""
    x, row, given = cp.Variable(3), cp.Parameter(3), cp.Parameter(3)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(x - given)), ROWS[name](x, row)), [row, given], [x])
    sign = -1.0 if name == "from below" else 1.0
    centre = sign * torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    leaf = (p * torch.tensor([1.0, 2.0, 0.5], dtype=F64)).requires_grad_()
    gap = sign * (leaf @ centre - 1) / (leaf @ leaf)
    exact = centre - leaf * sign * (gap if name == "equality" else gap.clamp_min(0))
    for solve in (layer, torch.func.vmap(layer, in_dims=(0, None))):
        value = solve(leaf.unsqueeze(0), centre)[0][0]
        found, slope = (torch.autograd.grad(v[1], leaf, retain_graph=True)[0] for v in (value, exact))
        for got, want in ((value, exact), (found, slope)):
            size = want.abs().max() if bool(want.any()) else 1
            assert_close(got / size, want / size, rtol=1e-9, atol=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("p", [1e-8, 1e6, 1e8])
@pytest.mark.parametrize("name", PRICES)
def test_prices_of_any_size(name: str, p: float) -> None:
    """Only where the matrix is large is that to be seen: points four digits off were called converged, derivatives zero."""
    x, price = cp.Variable(3), cp.Parameter(nonneg=True)
    build, exact = PRICES[name]
    leaf = torch.tensor(p, dtype=F64, requires_grad=True)
    value, wanted = ConvexLayer(cp.Problem(*build(x, price)), [price], [x])(leaf)[0], exact(leaf)
    assert_close(value, wanted, rtol=1e-7, atol=0.0)
    found, slope = (torch.autograd.grad((v / wanted.detach()).sum(), leaf)[0] for v in (value, wanted))
    assert_close(found, slope, rtol=1e-6, atol=0.0)


def test_samples_have_units_of_their_own() -> None:
    """Beside each other, beside one without a solution, under transforms, of second order."""
    layer = _layer("log", on_failure="nan")
    budgets = torch.tensor([1.0, 1e6, 1e-6], dtype=F64)
    assert_close(layer(WEIGHTS, budgets)[0], budgets.unsqueeze(1) * _shares(WEIGHTS), rtol=1e-7, atol=0.0)
    assert_close(layer.solution.x[1].max(), 1e6 * _shares(WEIGHTS).max(), rtol=1e-7, atol=0.0)  # the user's units
    nowhere = torch.tensor([1.0, torch.nan, 1e6], dtype=F64)
    value = layer(WEIGHTS, nowhere)[0]
    assert_close(value, nowhere.unsqueeze(1) * _shares(WEIGHTS), rtol=1e-7, atol=0.0, equal_nan=True)
    curvature = torch.func.vmap(torch.func.hessian(lambda b: layer(WEIGHTS, b)[0].log().sum()))(budgets)
    assert_close(curvature * budgets**2, torch.full_like(budgets, -3.0), rtol=1e-5, atol=0.0)


def test_units_of_one_sample_spoil_no_other() -> None:
    """A neighbour in ordinary numbers was solved again in other units, in which it was solved worse."""
    x, a, b, least = cp.Variable(3), cp.Parameter(3, nonneg=True), cp.Parameter(), cp.Parameter(3)
    spending = cp.Problem(cp.Maximize(a @ cp.log(x)), [cp.sum(x) <= b, x >= least])
    layer, weights = ConvexLayer(spending, [a, b, least], [x]), torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    budgets = torch.tensor([1e6, 6.0, 1e-3], dtype=F64, requires_grad=True)
    bounds = torch.zeros(3, 3, dtype=F64)
    bounds[1, 0] = 2.0
    wanted = budgets.detach().unsqueeze(1) * _shares(weights)
    wanted[1] = torch.tensor([2.0, 1.6, 2.4], dtype=F64)
    for solve in (layer, torch.func.vmap(layer, in_dims=(None, 0, 0))):
        value = solve(weights, budgets, bounds)[0]
        assert_close(value, wanted, rtol=1e-9, atol=0.0)
        (found,) = torch.autograd.grad(value[:, 1].sum(), budgets)
        assert_close(found, torch.tensor([1 / 3, 0.4, 1 / 3], dtype=F64), rtol=1e-6, atol=0.0)


def test_round_cones_stay_in_the_units_that_they_are_given_in() -> None:
    """A program that is solved to 1e-16 was solved once more in units in which it was not."""
    x, c, r, A = cp.Variable(5), cp.Parameter(5), cp.Parameter(nonneg=True), cp.Parameter((3, 5))
    layer = ConvexLayer(
        cp.Problem(cp.Minimize(cp.norm(x - c) + 0.3 * cp.norm1(x)), [cp.norm(A @ x) <= r]), [c, r, A], [x]
    )
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-5, 1e-3, 1e-2):
        centre = torch.randn(5, generator=generator, dtype=F64) * torch.tensor([1, 1e-4, 1, 10, 1], dtype=F64)
        matrix = torch.randn(3, 5, generator=generator, dtype=F64) * torch.tensor([1, 1e-3, 1, 1, 20], dtype=F64)
        layer(centre, torch.tensor(scale, dtype=F64), matrix)
        assert float(layer.solution.residual_norm) < 1e-5


WELL = torch.tensor([[2.0, 0.3, 0.1], [0.3, 1.0, -0.2], [0.1, -0.2, 1.5]], dtype=F64)
MATRICES: dict[str, Case] = {
    "log_det": (
        lambda X, p: (cp.Maximize(cp.log_det(X)), [cp.trace(WELL.numpy() @ X) <= p]),
        lambda b: b / 3 * torch.linalg.inv(WELL),
    ),
    "tr_inv": (
        lambda X, p: (cp.Minimize(cp.tr_inv(X)), [cp.trace(X) <= p]),
        lambda b: b / 3 * torch.eye(3, dtype=F64),
    ),
    "schur": (  # [[W, b v], [b v', t]] is semidefinite: t = b^2 v' W^{-1} v
        lambda X, p: (
            cp.Minimize(cp.trace(X)),
            [
                cp.bmat([[WELL.numpy(), p * WEIGHTS.numpy()[:, None]], [p * WEIGHTS.numpy()[None], X[:1, :1]]]) >> 0,
                X[1, 1] >= 1,
                X[2, 2] >= 1,
            ],
        ),
        lambda b: torch.diag(
            torch.cat([(b**2 * (WEIGHTS @ torch.linalg.solve(WELL, WEIGHTS)))[None], torch.ones(2, dtype=F64)])
        ),
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("b", [1e-6, 1e-3, 1e6])
@pytest.mark.parametrize("name", MATRICES)
def test_matrices_of_any_size(name: str, b: float) -> None:
    """A small Schur complement was wrong in its first digit, derivatives of volumes that were right were wrong."""
    X, p = cp.Variable((3, 3), symmetric=True), cp.Parameter(nonneg=True)
    build, exact = MATRICES[name]
    layer, size = ConvexLayer(cp.Problem(*build(X, p)), [p], [X]), torch.tensor(b, dtype=F64, requires_grad=True)
    value, wanted = layer(size)[0][:1, :1], exact(size)[:1, :1]
    assert_close(value, wanted, rtol=1e-7, atol=0.0)
    (slope,) = torch.autograd.grad(value.sum(), size)
    assert_close(slope, torch.autograd.grad(wanted.sum(), size)[0], rtol=1e-6, atol=0.0)


def test_a_solution_of_zero_is_no_wrong_one() -> None:
    """Of noise around zero no units can be told: the prox of the nuclear norm was said to be inaccurate."""
    X, C = cp.Variable((3, 3)), cp.Parameter((3, 3))
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.normNuc(X) + cp.sum_squares(X - C) / 2)), [C], [X])
    assert_close(layer(1e-4 * WELL)[0], torch.zeros_like(WELL), rtol=0.0, atol=1e-15)


def test_failures_beside_large_numbers_stay_failures() -> None:
    """A certificate is asked for again in the units of the data."""
    x, b = cp.Variable(3), cp.Parameter()
    program = cp.Problem(cp.Maximize(cp.sum(cp.sqrt(x))), [cp.sum(x) <= b, x[0] >= 1])
    layer = ConvexLayer(program, [b], [x], on_failure="nan")
    assert layer(torch.tensor([3e6, -1e6], dtype=F64))[0].isfinite().all(1).tolist() == [True, False]
    assert layer.solution.status.tolist() == [int(ik.Status.CONVERGED), int(ik.Status.INFEASIBLE)]


def test_the_first_call_under_jacfwd_spoils_no_other() -> None:
    """Places of a matrix's entries were kept as tensors of a level that was gone."""
    _positions.cache_clear()
    X, C = cp.Variable((3, 3), PSD=True), cp.Parameter((3, 3), symmetric=True)
    layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(X - C))), [C], [X])
    for _ in range(2):
        slope = torch.func.jacfwd(lambda t: layer(t * WELL)[0])(torch.tensor(2.0, dtype=F64))
        assert_close(slope, WELL, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd])
def test_a_sample_that_needs_no_units_gets_none_from_its_neighbours(transform: Any) -> None:
    """Beside a row of 1e12 that is active, one of 1e9 that is not had a derivative 0.4 off."""
    c, row, x = cp.Parameter(3), cp.Parameter(3), cp.Variable(3)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c)), [row @ x <= 1, cp.norm(x) <= 2])
    layer = ConvexLayer(problem, [c, row], [x])
    centres = torch.tensor([[-0.6, -0.5, -0.7], [1.0, 0.5, 0.8]], dtype=F64)
    rows = torch.tensor([[1e9], [1e12]], dtype=F64) * torch.tensor([0.5, 0.8, 0.4], dtype=F64)
    found = torch.func.vmap(transform(lambda c, row: layer(c, row)[0]))(centres, rows)
    unit = rows[1] / rows[1].norm()
    eye = torch.eye(3, dtype=F64)
    assert_close(found, torch.stack([eye, eye - torch.outer(unit, unit)]), rtol=0, atol=1e-9)


def test_slacks_and_multipliers_turn_against_each_other() -> None:
    """``(T s)'y = s'(T'y)``, ``(T s)'(T'^-1 y) = s'y``; and ``T`` keeps second-order cones, up to a factor."""
    dual = DualCone(Cones(nonneg=1, soc=(3, 4), exp=2))
    s, y = torch.randn(2, 5, dual.cones.size, dtype=F64)
    turn = Automorphism.identity(dual, s)
    turn = turn._replace(rows=1 + torch.rand_like(s), boost=torch.full_like(turn.boost, 2.0), shift=1 + turn.shift)
    dot = torch.linalg.vecdot
    assert_close(dot(turn.times(s), y), dot(s, turn.transposed(y)))
    assert_close(dot(turn.times(s), turn.contragredient(y)), dot(s, y))
    form = lambda t: t[:, 1].square() - t[:, 2:4].square().sum(1)  # noqa: E731
    assert_close(form(turn._replace(rows=torch.ones_like(s)).times(s)), form(s))


@pytest.mark.parametrize("number", ["P", "q"])
def test_units_told_by_the_data_undo_units(number: str) -> None:
    """A program of ones, in units of its rows, its unknowns and its objective, the last told by ``P`` or by ``q``."""
    cones, generator = Cones(nonneg=3), torch.Generator().manual_seed(0)
    rows, columns = (torch.randint(-9, 9, (1, 3), generator=generator).to(F64).exp2() for _ in range(2))
    A, objective = 1 / (rows.unsqueeze(2) * columns.unsqueeze(1)), 2.0**11
    P, q = torch.diag_embed(columns**-2) / objective, 1 / columns / objective
    P, q = (P, torch.zeros_like(q)) if number == "P" else (torch.zeros_like(P), q)
    data = Data(P, q, A, 1 / rows, cones)
    inner = balanced(DualCone(cones), data).apply(data)
    for part in (inner.A, inner.b, inner.q if number == "q" else inner.P.diagonal(dim1=1, dim2=2)):
        assert_close(part, torch.ones_like(part), rtol=0, atol=0)


def test_an_infimum_that_is_not_attained_is_said() -> None:
    """``exp(-x)`` has none, and a logistic loss of data that a plane separates; a minimum far out, or flat, is one."""
    rng = np.random.default_rng(0)
    X, x, w, c = rng.standard_normal((8, 2)), cp.Variable(1), cp.Variable(2), cp.Parameter(1, nonneg=True)
    margins = cp.multiply(np.sign(X @ [1.0, -2.0]), X @ w)
    loss = cp.sum(cp.logistic(-margins))
    away = {"exp(-x)": (cp.exp(-x), x), "separable": (loss, w), "sqrt": (cp.norm(cp.hstack([x, 1])) - x, x)}
    stays = {"far": (1e-6 * x - cp.log(x), x), "bounded": (cp.exp(-x) + 1e-4 * x, x), "penalty": (
        loss + 1e-3 * cp.sum_squares(w), w)}  # fmt: skip
    for name, (objective, unknown) in (away | stays).items():
        solver = "SCS" if name == "sqrt" else None
        layer = ConvexLayer(cp.Problem(cp.Minimize(cp.sum(objective) + 0 * c)), [c], [unknown], solver=solver)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer(torch.ones(1, dtype=torch.float64))
        assert ["may not be attained" in str(w.message) for w in caught] == [True] * (name in away), name
    batch = ConvexLayer(cp.Problem(cp.Minimize(cp.sum(cp.exp(-x) + c @ x))), [c], [x])
    with pytest.warns(ik.ConvergenceWarning, match="^sample 1: .* may not be attained"):
        batch(torch.tensor([[0.1], [0.0]], dtype=torch.float64))
