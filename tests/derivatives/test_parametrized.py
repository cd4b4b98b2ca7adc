"""Parametrised modules inside ``parametrize.cached()``: a solve neither reads what is kept there nor adds to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import implicitkit as ik

D = torch.float64
NORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}
ORDERS = ("the solve alone", "the module before", "the module after", "two solves")


def loss(module: nn.Module, x: Tensor, order: str) -> Tensor:
    def solved(x: Tensor) -> Tensor:
        f = lambda z: torch.tanh(0.4 * module(z) + x)  # noqa: E731
        return ik.fixed_point(f, torch.zeros_like(x), batch_dims=1, rtol=1e-12, atol=0.0).value

    before = module(x).sum() if order == "the module before" else 0.0
    z = solved(x)
    after = {"the module after": module, "two solves": solved}.get(order, lambda z: z)(z)
    return after.square().sum() + before


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_those_without_the_cache(norm: str, order: str, inside: bool) -> None:
    torch.manual_seed(0)
    module, x = NORMS[norm](nn.Linear(3, 3).to(D)), torch.randn(4, 3, dtype=D)
    parameters = list(module.parameters())
    exact = torch.autograd.grad(loss(module, x, order), parameters)
    with parametrize.cached():
        value = loss(module, x, order)
        found = torch.autograd.grad(value, parameters, retain_graph=True) if inside else ()
    found = found or torch.autograd.grad(value, parameters)
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-12)


def test_what_was_kept_before_the_solve_is_kept_after_it() -> None:
    torch.manual_seed(0)
    module, x = parametrizations.weight_norm(nn.Linear(3, 3).to(D)), torch.randn(4, 3, dtype=D)
    with parametrize.cached():
        kept = module.weight
        loss(module, x, "the solve alone")
        assert module.weight is kept
