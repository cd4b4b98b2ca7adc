"""What a user of cvxpylayers relies on, and its result here."""

from __future__ import annotations

import pytest
import torch

cp = pytest.importorskip("cvxpy")

from implicitkit_cvxpy import ConvexLayer  # noqa: E402

F64 = torch.float64
A = torch.tensor([[1.0, 2.0], [0.5, -1.0], [1.5, 0.3]], dtype=F64)
B = torch.tensor([1.0, 0.2, -0.4], dtype=F64)


def layer(**options: object) -> ConvexLayer:
    """``min |A x - b|^2, x >= 0``."""
    x, a, b = cp.Variable(2), cp.Parameter((3, 2)), cp.Parameter(3)
    return ConvexLayer(cp.Problem(cp.Minimize(cp.sum_squares(a @ x - b)), [x >= 0]), [a, b], [x], **options)


def test_values_and_gradients() -> None:
    solve = layer()
    inputs = A.clone().requires_grad_(), B.clone().requires_grad_()
    (x,) = solve(A, B)
    w = A.mT @ (A @ x - B)
    assert bool((x >= -1e-9).all()) and bool((w >= -1e-6).all()) and float((w * x).abs().max()) < 1e-6
    assert torch.autograd.gradcheck(lambda a, b: solve(a, b)[0], inputs, atol=1e-4)


def test_a_batch_and_a_shared_parameter() -> None:
    solve = layer()
    rows = torch.stack([B, 2 * B, -B])
    (x,) = solve(A, rows)
    torch.testing.assert_close(x, torch.stack([solve(A, b)[0] for b in rows]), rtol=1e-6, atol=1e-7)


def test_a_program_without_a_solution_is_a_solver_error() -> None:
    x, b = cp.Variable(1), cp.Parameter(1)
    solve = ConvexLayer(cp.Problem(cp.Minimize(x[0]), [x >= b, x <= b - 1]), [b], [x])
    with pytest.raises(cp.SolverError):
        solve(torch.ones(1, dtype=F64))


def test_a_missing_parameter_is_named() -> None:
    x, b = cp.Variable(1), cp.Parameter(1, name="weight")
    solve = ConvexLayer(cp.Problem(cp.Minimize(cp.square(x[0] - b[0]))), [b], [x])
    with pytest.raises((TypeError, ValueError), match="weight"):
        solve(None)


@pytest.mark.parametrize("word", ["maxiter", "tolerance", "no_such_option"])
def test_options_are_refused_by_name(word: str) -> None:
    with pytest.raises((TypeError, ValueError), match=word):
        layer()(A, B, solver_args={word: 1})


def test_options_of_any_solver_are_understood() -> None:
    torch.testing.assert_close(layer()(A, B, solver_args={"eps": 1e-9, "max_iter": 60})[0], layer()(A, B)[0])


@pytest.mark.parametrize(
    ("options", "text"),
    [({"eps": -1.0}, "eps must be a positive number"), ({"max_iter": "many"}, "max_iter must"), ({"tol": True}, "tol must")],
)  # fmt: skip
def test_values_of_options_are_checked(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layer()(A, B, solver_args=options)


def test_warm_start_is_an_argument_of_the_call() -> None:
    with pytest.raises(TypeError, match=r"layer\(\.\.\., warm_start=True\)"):
        layer()(A, B, solver_args={"warm_start": True})


def test_one_problem_makes_many_layers() -> None:
    x, b = cp.Variable(2), cp.Parameter(2)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - b)), [x >= 0])
    first, second = (ConvexLayer(problem, [b], [x])(torch.tensor([1.0, -1.0], dtype=F64))[0] for _ in range(2))
    torch.testing.assert_close(first, second)
