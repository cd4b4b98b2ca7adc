"""The truncated series as a rule for minima: its own partial sums by hand, its limit, and steps that are too long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, vmap

import implicitkit as ik

F64 = torch.float64
H = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]], dtype=F64)
T = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
START = torch.zeros(3, dtype=F64)


def objective(z: Tensor, t: Tensor) -> Tensor:
    """Its minimum has the Hessian ``H``, and the mixed derivative ``-1``."""
    return 0.5 * z @ (H @ z) - (z * t).sum()


def solve(t: Tensor, problem: str = "argmin", **options: Any) -> Tensor:
    rule = ik.Neumann(**options)
    if problem == "argmin":
        value: Tensor = ik.argmin(objective, START, (t,), rule=rule).value
        return value
    L = torch.linalg.cholesky(H)
    residuals = lambda z, t: L.mT @ z - torch.linalg.solve_triangular(L, t.unsqueeze(1), upper=False).squeeze(1)  # noqa: E731
    value = ik.least_squares(residuals, START, (t,), rule=rule).value
    return value


def partial(terms: int, step: float) -> Tensor:
    M = torch.eye(3, dtype=F64) - step * H
    return step * sum((torch.linalg.matrix_power(M, i) for i in range(1, terms + 1)), torch.eye(3, dtype=F64))


@pytest.mark.parametrize("problem", ["argmin", "least_squares"])
@pytest.mark.parametrize("terms", [0, 1, 5])
@pytest.mark.parametrize("step", [0.1, 0.5])
def test_partial_sums(problem: str, terms: int, step: float) -> None:
    for jacobian in (jacrev, jacfwd):
        found = jacobian(lambda t: solve(t, problem, terms=terms, step=step))(T)
        torch.testing.assert_close(found, partial(terms, step), rtol=1e-7, atol=1e-9)


def test_the_whole_series_is_exact() -> None:
    for options in ({"terms": 200, "step": 0.4}, {"terms": 200}):
        torch.testing.assert_close(
            jacrev(lambda t, o=options: solve(t, **o))(T), torch.linalg.inv(H), rtol=1e-9, atol=1e-9
        )


def test_a_step_of_its_own_is_no_longer_than_it_may_be() -> None:
    """Each term of the series brings the derivative nearer."""
    errors = [float((jacrev(lambda t, k=k: solve(t, terms=k))(T) - torch.linalg.inv(H)).norm()) for k in (0, 2, 8, 32)]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.05 * errors[0]


def test_batches_and_second_derivatives() -> None:
    rows = torch.stack([T, 2 * T])
    found = vmap(jacrev(lambda t: solve(t, terms=4, step=0.3)))(rows)
    torch.testing.assert_close(found, partial(4, 0.3).expand(2, 3, 3), rtol=1e-7, atol=1e-9)

    def quartic(t: Tensor, rule: Any) -> Tensor:
        f = lambda z, t: objective(z, t) + 0.1 * (z**4).sum()  # noqa: E731
        total: Tensor = ik.argmin(f, START, (t,), rule=rule, rtol=1e-13).value.sum()
        return total

    found = hessian(lambda t: quartic(t, ik.Neumann(300, 0.2)))(T)
    torch.testing.assert_close(found, hessian(lambda t: quartic(t, "auto"))(T), rtol=1e-6, atol=1e-8)


def test_steps_that_are_too_long_are_said() -> None:
    t = T.clone().requires_grad_()
    with pytest.raises(ik.ConvergenceError, match="the series grows: step is longer than"):
        solve(t, terms=10, step=0.8).sum().backward()


def test_fixed_points_are_as_before() -> None:
    f = lambda z, t: 0.3 * H @ z * 0.5 + t  # noqa: E731
    J = 0.15 * H
    found = jacrev(lambda t: ik.fixed_point(f, START, (t,), rule=ik.Neumann(3)).value)(T)
    torch.testing.assert_close(
        found, sum((torch.linalg.matrix_power(J, i) for i in range(1, 4)), torch.eye(3, dtype=F64))
    )
    damped = jacrev(lambda t: ik.fixed_point(f, START, (t,), rule=ik.Neumann(3, step=0.5)).value)(T)
    M = 0.5 * torch.eye(3, dtype=F64) + 0.5 * J
    expected = 0.5 * sum((torch.linalg.matrix_power(M, i) for i in range(1, 4)), torch.eye(3, dtype=F64))
    torch.testing.assert_close(damped, expected)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no step": (lambda: ik.Neumann(step=0.0), ValueError, "step must be positive"),
    "an equation": (
        lambda: ik.root(lambda z, t: H @ z - t, START, (T,), rule=ik.Neumann()), ik.CapabilityError, "made for problems"),
    "constraints": (
        lambda: ik.argmin(objective, START, (T,), bounds=(0, 1), rule="neumann"), ik.CapabilityError, "kind constrained"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_for(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()
