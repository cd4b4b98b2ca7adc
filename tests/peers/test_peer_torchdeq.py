"""What a user of TorchDEQ relies on, and its result here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

import implicitkit as ik

F64 = torch.float64
W = 0.5 * torch.tensor([[0.3, -0.8, 0.1], [0.5, 0.2, -0.4], [-0.2, 0.6, 0.3]], dtype=F64)
X = torch.tensor([0.2, -0.7, 1.1], dtype=F64)
Z0 = torch.zeros(3, dtype=F64)


def cell(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(W @ z + x)


def exact(x: Tensor) -> Tensor:
    z = Z0
    for _ in range(200):
        z = cell(z, x)
    return z


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_every_solver_finds_the_same_state_and_gradient(solver: str) -> None:
    solve = lambda x: ik.fixed_point(cell, Z0, (x,), solver=solver, rtol=1e-12).value  # noqa: E731
    torch.testing.assert_close(solve(X), exact(X), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(jacrev(solve)(X), jacrev(exact)(X), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("steps, damping", [(1, 1.0), (5, 0.5)])
def test_phantom_gradients_are_those_of_damped_steps(steps: int, damping: float) -> None:
    def by_hand(x: Tensor) -> Tensor:
        z = star
        for _ in range(steps):
            z = (1 - damping) * z + damping * cell(z, x)
        return z

    star = exact(X)
    rule = ik.Phantom(steps=steps, damping=damping)
    found = jacrev(lambda x: ik.fixed_point(cell, Z0, (x,), rule=rule, rtol=1e-12).value)(X)
    torch.testing.assert_close(found, jacrev(by_hand)(X), rtol=1e-8, atol=1e-9)


def test_the_state_after_so_many_steps() -> None:
    s = ik.fixed_point(cell, Z0, (X,), solver="picard", rtol=0, atol=0, max_steps=3)
    torch.testing.assert_close(s.value, cell(cell(cell(Z0, X), X), X))
    assert int(s.steps) == 3


def test_spectral_radius_of_a_linear_cell() -> None:
    from implicitkit_deq import spectral_radius

    M = torch.diag(torch.tensor([0.9, -0.5, 0.1], dtype=F64))
    radius = spectral_radius(lambda z, x: z @ M + x, torch.zeros(1, 3, dtype=F64), (torch.ones(1, 3, dtype=F64),))
    torch.testing.assert_close(radius, torch.tensor([0.9], dtype=F64), rtol=1e-6, atol=0)
