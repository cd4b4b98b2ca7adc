"""Programs with exponential cones whose numbers are many orders apart: values and derivatives against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

cp = pytest.importorskip("cvxpy")
from implicitkit_cvxpy import ConvexLayer  # noqa: E402

F64 = torch.float64
WEIGHTS = torch.tensor([0.5, 1.0, 0.2], dtype=F64)
Case = tuple[Callable[[Any, Any], tuple[Any, list[Any]]], Callable[[Tensor, Tensor], Tensor]]


def _shares(a: Tensor) -> Tensor:
    return a / a.sum()


#: program of ``(x, a, b)``, and its solution: logarithms and entropy under a budget
CASES: dict[str, Case] = {
    "log": (
        lambda x, p: (cp.Maximize(p[0] @ cp.log(x)), [cp.sum(x) <= p[1]]),
        lambda a, b: b * _shares(a),
    ),
    "entropy": (
        lambda x, p: (cp.Minimize(p[0] @ x - cp.sum(cp.entr(x))), [cp.sum(x) == p[1]]),
        lambda a, b: b * (-a).softmax(0),
    ),
}


def _layer(name: str, **options: Any) -> ConvexLayer:
    x, a, b = cp.Variable(3), cp.Parameter(3, nonneg=True), cp.Parameter(nonneg=True)
    return ConvexLayer(cp.Problem(*CASES[name][0](x, (a, b))), [a, b], [x], **options)


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


def test_samples_have_units_of_their_own() -> None:
    """Beside each other, beside one without a solution, under transforms, of second order."""
    layer = _layer("log", on_failure="nan")
    budgets = torch.tensor([1.0, 1e6, 1e-6], dtype=F64)
    assert_close(layer(WEIGHTS, budgets)[0], budgets.unsqueeze(1) * _shares(WEIGHTS), rtol=1e-7, atol=0.0)
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
