"""Operators of fixed points know the products with the Jacobian of the map, ``J = A + I``, and those with A by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator

D = torch.float64
BATCH, N = 5, 4
G = torch.Generator().manual_seed(0)
W = torch.randn(N, N, generator=G, dtype=D)
MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": lambda z: torch.tanh(z @ W),
    "itself": lambda z: z,
    "a view": lambda z: z.view_as(z),
    "a constant": lambda z: torch.ones_like(z),
    "linear": lambda z: 0.5 * z @ W,
    "flipped": lambda z: z.flip(1),
}


def _dense(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    J = torch.func.vmap(torch.func.jacrev(lambda x: function(x.unsqueeze(0)).squeeze(0)))(z)
    return J.detach()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_products_of_a_map(name: str, transposed: bool) -> None:
    z, v = (torch.randn(BATCH, N, generator=torch.Generator().manual_seed(s), dtype=D) for s in (1, 2))
    before = v.clone()
    out, A = autodiff.linearise(MAPS[name], z, fixed_point=True, of_map=True)
    J = _dense(MAPS[name], z)
    if transposed:
        A, J = A.T, J.mT
    right = (J @ v.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(out.detach(), MAPS[name](z) - z)
    torch.testing.assert_close(A.stepped(v), right)
    torch.testing.assert_close(A.mv(v), right - v)
    torch.testing.assert_close(A.rmv(v), (J.mT @ v.unsqueeze(2)).squeeze(2) - v)
    torch.testing.assert_close(A.dense(), J - torch.eye(N, dtype=D))
    assert torch.equal(v, before)


def test_a_step_without_products_of_the_map_is_made_of_those_with_A() -> None:
    A = Operator(lambda v: 2 * v, lambda v: 3 * v, lambda: torch.zeros(1), batch=BATCH, size=N, like=torch.zeros(1))
    v = torch.ones(BATCH, N)
    assert not A.asked
    torch.testing.assert_close(A.stepped(v), 3 * v)
    torch.testing.assert_close(A.T.stepped(v), 4 * v)
    assert A.asked


def test_symmetric_maps_have_one_product_each_way() -> None:
    S = W + W.mT
    z = torch.zeros(BATCH, N, dtype=D)
    _, A = autodiff.linearise(lambda z: torch.sin(z @ S), z, symmetric=True, fixed_point=True, of_map=True)
    v = torch.randn(BATCH, N, generator=torch.Generator().manual_seed(3), dtype=D)
    for B in (A, A.T):
        torch.testing.assert_close(B.stepped(v), v @ S)
        torch.testing.assert_close(B.mv(v), v @ S - v)


@pytest.mark.parametrize("solver", ["neumann", "gmres", "auto"])
def test_the_derivative_of_a_fixed_point(solver: str) -> None:
    x = torch.randn(BATCH, N, generator=torch.Generator().manual_seed(4), dtype=D, requires_grad=True)
    A = 0.4 * W / torch.linalg.matrix_norm(W, 2)
    rule = ik.Implicit(linear_solver=solver, rtol=1e-12)
    z = ik.fixed_point(lambda z, x: torch.tanh(z @ A + x), torch.zeros_like(x), x, batch_dims=1, rule=rule, rtol=1e-12)
    (found,) = torch.autograd.grad(z.value.sum(), x)
    slope = 1 - z.value.detach() ** 2
    J = slope.unsqueeze(2) * A.mT
    u = torch.linalg.solve(torch.eye(N, dtype=D) - J.mT, torch.ones(BATCH, N, 1, dtype=D)).squeeze(2)
    torch.testing.assert_close(found, slope * u, rtol=1e-9, atol=1e-9)


class HalfAStep(ik.FixedPoint):
    """A fixed point with another residual than its map less ``z``."""

    def flat_residual(self, kernel: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        return 0.5 * (kernel(z) - z)


@pytest.mark.parametrize(("problem", "share"), [(HalfAStep, 0.5), (ik.FixedPoint, 1.0)])
def test_a_class_with_a_residual_of_its_own_has_its_derivative(problem: type[ik.FixedPoint], share: float) -> None:
    A, v = 0.4 * W / torch.linalg.matrix_norm(W, 2), torch.linspace(-1, 1, N, dtype=D).unsqueeze(0)
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    class Watched(problem):  # type: ignore[valid-type, misc]
        def linearise(self, system: Any, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, Operator]:
            _, B = super().linearise(system, z, theta)
            found.append((z, B.mv(v), B.dense()))
            return super().linearise(system, z, theta)

    x = torch.ones(1, N, dtype=D, requires_grad=True)
    ik.solve(Watched(lambda z, x: torch.tanh(z @ A + x)), torch.zeros_like(x), x, batch_dims=1).value.sum().backward()
    z, product, dense = found[-1]
    J = share * (_dense(lambda z: torch.tanh(z @ A + 1), z) - torch.eye(N, dtype=D))
    torch.testing.assert_close(product, (J @ v.unsqueeze(2)).squeeze(2))
    torch.testing.assert_close(dense, J)
