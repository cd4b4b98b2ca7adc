"""What a user of TorchOpt relies on, and its result here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad

import implicitkit as ik

F64 = torch.float64
G = torch.Generator().manual_seed(2)
A, Y = torch.randn(10, 3, generator=G, dtype=F64), torch.randn(10, generator=G, dtype=F64)
META = torch.tensor([0.5, -1.0, 2.0], dtype=F64)


def inner(w: Tensor, meta: Tensor) -> Tensor:
    """iMAML's: a task's loss and the distance from the meta-parameters."""
    return 0.5 * (A @ w - Y).square().sum() + 0.5 * (w - meta).square().sum()


def adapted(meta: Tensor) -> Tensor:
    return torch.linalg.solve(A.mT @ A + torch.eye(3, dtype=F64), A.mT @ Y + meta)


RULES = {
    "cg": (ik.Implicit(linear_solver="cg"), 1e-7),
    "normal equations": (ik.Implicit(linear_solver="lsmr"), 1e-7),
    "inverse": (ik.Implicit(linear_solver="lu"), 1e-9),
    "Neumann series": (ik.Neumann(terms=400), 1e-6),
    "Neumann series with a step": (ik.Neumann(terms=400, step=0.05), 1e-6),
}


@pytest.mark.parametrize("name", RULES)
def test_meta_gradients(name: str) -> None:
    rule, tolerance = RULES[name]
    outer = lambda w: w.pow(3).sum()  # noqa: E731
    found = grad(lambda m: outer(ik.argmin(inner, torch.zeros(3, dtype=F64), (m,), rule=rule, rtol=1e-12).value))(META)
    torch.testing.assert_close(found, grad(lambda m: outer(adapted(m)))(META), rtol=tolerance, atol=tolerance)


def test_an_optimiser_of_torch_is_a_solver() -> None:
    solver = ik.TorchOptim(torch.optim.SGD, lr=0.05)
    w = ik.argmin(inner, torch.zeros(3, dtype=F64), (META,), solver=solver, rtol=1e-7).value
    torch.testing.assert_close(w, adapted(META), rtol=1e-5, atol=1e-6)


def test_a_solver_with_more_to_say() -> None:
    @ik.implicit(ik.Argmin(inner), has_aux=True)
    def solve(w0: Tensor, meta: Tensor) -> tuple[Tensor, float]:
        return adapted(meta), 0.25

    w, info = solve(torch.zeros(3, dtype=F64), META.clone().requires_grad_())
    assert info == 0.25 and w.requires_grad
