"""Activation checkpoints inside a function: what they compute once more in a backward is what was computed at first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import implicitkit as ik

D = torch.float64
N = 4
G = torch.Generator().manual_seed(0)
X = torch.randn(2, N, dtype=D, generator=G)
CAPTURED = (0.3 * torch.randn(N, dtype=D, generator=G)).requires_grad_()
EXACT = {"batch_dims": 1, "rtol": 1e-12, "atol": 1e-12}


class Scales(nn.Module):
    """Saves as many numbers as it has parameters: one shape, so that torch may take one of them for another."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(0.5 * torch.randn(2, N, dtype=D, generator=G))
        self.b = nn.Parameter(0.5 * torch.randn(2, N, dtype=D, generator=G))

    def forward(self, y: Tensor) -> Tensor:
        return 0.4 * torch.sin(self.a * torch.tanh(self.b * y) * y)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(N, dtype=D)

    def forward(self, y: Tensor) -> Tensor:
        return torch.tanh(0.3 * self.norm(y))


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "scales": Scales(),
    "a norm of a module": Normed(),
    "a norm": lambda y: torch.tanh(0.3 * F.layer_norm(y, (N,))),
    "one in another": lambda y: 0.5 * kept(PARTS["a norm of a module"])(y),
    "a captured tensor": lambda y: torch.tanh(CAPTURED * y),
    "a captured tensor in a norm": lambda y: torch.tanh(0.3 * F.layer_norm(y, (N,), CAPTURED)),
}
SOLVES: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "fixed point": lambda part, x: ik.fixed_point(lambda z, x: part(z + x), torch.zeros_like(x), x, **EXACT),
    "unrolled": lambda part, x: ik.fixed_point(
        lambda z, x: part(z + x), torch.zeros_like(x), x, rule="unroll", batch_dims=1
    ),
    "root": lambda part, x: ik.root(lambda z, x: z - part(z + x) + 0.1 * z**3, torch.zeros_like(x), x, **EXACT),
    "argmin": lambda part, x: ik.argmin(
        lambda z, x: (z - x).square().sum(1) + 0.1 * part(z).square().sum(1), torch.zeros_like(x), x, batch_dims=1
    ),
}


def kept(part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda y: checkpoint(part, y, use_reentrant=False)


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("solve", SOLVES)
def test_derivatives_through_checkpoints_are_those_without(solve: str, name: str) -> None:
    part = PARTS[name]
    weights = [CAPTURED, *(p for f in PARTS.values() if isinstance(f, nn.Module) for p in f.parameters())]

    def derivatives(function: Callable[[Tensor], Tensor], order: int) -> tuple[Tensor | None, ...]:
        x = X.clone().requires_grad_()
        found: Any = (SOLVES[solve](function, x).value,)
        for k in range(order):
            total = sum(t.square().sum() for t in found if t is not None)
            found = torch.autograd.grad(total, [x, *weights], create_graph=k < order - 1, allow_unused=True)
        return tuple(found)

    for order in (1,) if solve == "unrolled" else (1, 2):
        for one, other in zip(derivatives(kept(part), order), derivatives(part, order), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12, msg=lambda m: f"order {order}: {m}")  # noqa: B023


def test_third_derivatives_of_a_norm_in_a_checkpoint() -> None:
    def third(part: Callable[[Tensor], Tensor]) -> Tensor:
        x = found = X.clone().requires_grad_()
        found = SOLVES["fixed point"](part, x).value.square().sum()
        for _ in range(3):
            (found,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
        return found.detach()

    torch.testing.assert_close(third(kept(PARTS["a norm"])), third(PARTS["a norm"]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("solve", ["root", "argmin"])
def test_solvers_that_differentiate_without_gradients(solve: str, mode: Any) -> None:
    with mode():
        found = SOLVES[solve](kept(PARTS["a norm of a module"]), X).value
        expected = SOLVES[solve](PARTS["a norm of a module"], X).value
    assert torch.equal(found, expected)
