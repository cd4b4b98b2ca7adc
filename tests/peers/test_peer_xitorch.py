"""What a user of xitorch relies on, and its result here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64
A = torch.tensor([[1.5, 0.2], [-0.3, 2.0]], dtype=F64)
B = torch.tensor([0.5, -1.0], dtype=F64)


def f(y: Tensor, A: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(A @ y + b) + 0.5 * y


@pytest.mark.parametrize("solver", ["broyden", "scipy.root.broyden1", "scipy.root.linearmixing", "newton_krylov"])
def test_rootfinders_pass_gradgradcheck(solver: str) -> None:
    solve = lambda A, b: ik.root(f, torch.zeros(2, dtype=F64), (A, b), solver=solver, rtol=1e-12, atol=1e-13).value  # noqa: E731
    inputs = A.clone().requires_grad_(), B.clone().requires_grad_()
    assert torch.autograd.gradcheck(solve, inputs) and torch.autograd.gradgradcheck(solve, inputs)


def test_equilibrium_of_complex_numbers() -> None:
    b = torch.tensor([0.3 + 0.4j, -0.2 + 0.1j], dtype=torch.complex128)
    z = ik.fixed_point(lambda z, b: 0.3 * z * z + b, torch.zeros_like(b), (b,)).value
    torch.testing.assert_close(z, (1 - torch.sqrt(1 - 1.2 * b)) / 0.6)


def test_parameters_of_modules_have_their_derivative() -> None:
    torch.manual_seed(0)
    cell = torch.nn.Linear(2, 2, dtype=F64)
    ik.fixed_point(lambda z: 0.3 * torch.tanh(cell(z)), torch.zeros(2, dtype=F64)).value.sum().backward()
    assert cell.weight.grad is not None and float(cell.bias.grad.abs().sum()) > 0


def test_no_tolerance_is_so_many_steps() -> None:
    s = ik.fixed_point(
        lambda z, b: 0.5 * z.cos() + b, torch.zeros(2, dtype=F64), (B,), solver="picard", rtol=0, atol=0, max_steps=7
    )
    assert int(s.steps) == 7 and s.status == ik.Status.MAX_STEPS


def test_linear_mixing_is_gradient_descent_of_a_minimum() -> None:
    """With a fixed step: ``z <- z - alpha g``."""
    H = A.mT @ A
    s = ik.argmin(
        lambda z: 0.5 * z @ (H @ z) - B @ z, torch.zeros(2, dtype=F64), solver=ik.GradientDescent(step_size=0.3)
    )
    torch.testing.assert_close(s.value, torch.linalg.solve(H, B), rtol=1e-7, atol=1e-9)
