"""Control flow as an operation of torch (``torch.cond`` and others of its kind) inside the function of a solve.

z = g(z) + x,  g(z) = z W by an operation that is a branch, a map over rows or a loop:   z = x (I - W)^{-1}
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop

import implicitkit as ik

W = torch.tensor([[0.2, -0.1], [0.3, 0.1]], dtype=torch.float64)
X = torch.tensor([[1.0, 2.0], [-0.5, 0.3]], dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cond": lambda z, x, w: torch.cond(z.sum() < 1e9, lambda z: z @ w, lambda z: 2 * z, (z,)) + x,
    "map": lambda z, x, w: map_rows(lambda row: row @ w, z) + x,
    "while_loop": lambda z, x, w: (
        while_loop(lambda i, u: i < 1, lambda i, u: (i + 1, u @ w), (torch.tensor(0, device="cpu"), z))[1] + x
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("row", FUNCTIONS)
def test_a_captured_tensor_has_its_derivative(row: str) -> None:
    w, x, f = W.clone().requires_grad_(), X.clone().requires_grad_(), FUNCTIONS[row]
    z = ik.fixed_point(lambda z, x: f(z, x, w), torch.zeros_like(X), (x,), solver="newton").value
    exact = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - w, x, left=False)
    torch.testing.assert_close(z, exact, rtol=1e-8, atol=1e-8)
    for found, asked in zip(
        torch.autograd.grad(z.square().sum(), (w, x)), torch.autograd.grad(exact.square().sum(), (w, x)), strict=True
    ):
        torch.testing.assert_close(found, asked, rtol=1e-7, atol=1e-7)
