"""Evaluations are looked at, operation by operation, only where one may be replaced (``foundation/faithful.py``)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.while_loop import while_loop
from torch.func import grad

import implicitkit as ik
from implicitkit import system

D = torch.float64
X = torch.tensor([0.2, -0.3, 0.5], dtype=D)


def branches(z: Tensor, x: Tensor) -> Tensor:
    """Another function far from zero."""
    return 0.3 * F.layer_norm(z + x, (3,)) + x if bool(z.abs().sum() > 0.5) else x + torch.sin(z)


def asks(what: Callable[[Tensor], bool]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that takes the norm where ``z`` is tracked only, and another way to the same numbers elsewhere."""

    def function(z: Tensor, x: Tensor) -> Tensor:
        y = z + x
        there = (y - y.mean()) * (y.var(correction=0) + 1e-5).rsqrt()
        return 0.3 * (F.layer_norm(y, (3,)) if what(z) else there) + x

    return function


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(3, dtype=D)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        out: Tensor = 0.3 * self.norm(z + x) + x
        return out


#: functions, and whether nothing that they do is replaced
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "operations": (lambda z, x: 0.3 * torch.tanh(z) + x, True),
    "a norm": (lambda z, x: 0.3 * F.layer_norm(z + x, (3,)) + x, False),
    "a module's": (Normed(), False),
    "a method": (lambda z, x: 0.3 * z.logcumsumexp(0) + x, False),
    "a branch": (branches, False),
    "requires_grad": (asks(lambda z: z.requires_grad), False),
    "grad_fn": (asks(lambda z: z.requires_grad or z.grad_fn is not None), False),
    "is_leaf": (asks(lambda z: not z.is_leaf), False),
}


@pytest.mark.parametrize("name", list(CASES))
def test_whose_operations_are_looked_at(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, needless = CASES[name]
    said: list[bool] = []
    plain = system.faithful
    monkeypatch.setattr(system, "faithful", lambda **how: said.append(True) or plain(**how))
    x = X.clone().requires_grad_()
    ik.fixed_point(function, torch.zeros(3, dtype=D), (x,)).value.sum().backward()
    assert bool(said) is not needless


@pytest.mark.parametrize("name", ["a branch", "requires_grad", "grad_fn"])
def test_a_norm_that_is_met_on_the_way_has_its_third_derivatives(name: str) -> None:
    """The first evaluation, at zero and where nothing is tracked, does not show it."""

    def third(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        def along(t: Tensor) -> Tensor:
            x = X + t * torch.tensor([1.0, -0.5, 0.25], dtype=D)
            found: Tensor = ik.fixed_point(function, torch.zeros(3, dtype=D), (x,)).value[0]
            return found

        return grad(grad(grad(along)))(torch.zeros((), dtype=D))

    torch.testing.assert_close(third(CASES[name][0]), third(CASES["a norm"][0]), rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Control flow as an operation of torch (``torch.cond`` and others of its kind) inside the function of a solve.
#
# z = g(z) + x,  g(z) = z W by an operation that is a branch, a map over rows or a loop:   z = x (I - W)^{-1}
W = torch.tensor([[0.2, -0.1], [0.3, 0.1]], dtype=torch.float64)
POINTS = torch.tensor([[1.0, 2.0], [-0.5, 0.3]], dtype=torch.float64)

FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "cond": lambda z, x, w: torch.cond(z.sum() < 1e9, lambda z: z @ w, lambda z: 2 * z, (z,)) + x,
    "map": lambda z, x, w: map_rows(lambda row: row @ w, z) + x,
    "while_loop": lambda z, x, w: (
        while_loop(lambda i, u: i < 1, lambda i, u: (i + 1, u @ w), (torch.tensor(0, device="cpu"), z))[1] + x
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("row", [pytest.param(n, marks=[pytest.mark.slow] * (n == "while_loop")) for n in FUNCTIONS])
def test_a_captured_tensor_has_its_derivative(row: str) -> None:
    w, x, f = W.clone().requires_grad_(), POINTS.clone().requires_grad_(), FUNCTIONS[row]
    z = ik.fixed_point(lambda z, x: f(z, x, w), torch.zeros_like(POINTS), (x,), solver="newton").value
    exact = torch.linalg.solve(torch.eye(2, dtype=torch.float64) - w, x, left=False)
    torch.testing.assert_close(z, exact, rtol=1e-8, atol=1e-8)
    for found, asked in zip(
        torch.autograd.grad(z.square().sum(), (w, x)), torch.autograd.grad(exact.square().sum(), (w, x)), strict=True
    ):
        torch.testing.assert_close(found, asked, rtol=1e-7, atol=1e-7)
