"""Derivatives of fixed points on a graph without layers: products for as long as factors cost more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors import sparse_blocks

D = torch.float64


def test_a_slow_map_on_a_random_graph_has_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 unknowns whose factors fill: 120 products are not enough, and factors took seconds every time."""
    n, rng, generator = 2500, np.random.default_rng(0), torch.Generator().manual_seed(0)
    i, j = (torch.from_numpy(rng.integers(0, n, 4 * n)) for _ in range(2))
    degree = torch.ones(n, dtype=D).index_add(0, i, torch.ones(4 * n, dtype=D))

    def layer(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.93 * (z.index_add(0, i, z[j])) / degree[:, None] + x)

    def never(*arguments: object) -> object:
        raise AssertionError("factors")

    x = 0.05 * torch.randn(n, 4, generator=generator, dtype=D)
    weights = torch.cos(torch.arange(4 * n, dtype=D)).view(n, 4)

    def value(x: Tensor) -> tuple[Tensor, ik.Solution]:
        solution = ik.fixed_point(layer, torch.zeros(n, 4, dtype=D), (x,), rtol=1e-12, atol=0.0)
        return (weights * solution.value).sum(), solution

    leaf = x.clone().requires_grad_()
    torch.autograd.grad(value(leaf)[0], leaf)  # after which it is known what factors fill
    monkeypatch.setattr(sparse_blocks, "factors", never)
    loss, solution = value(leaf)
    (slope,) = torch.autograd.grad(loss, leaf)
    assert int(solution.backward.steps) > 120 and bool(solution.backward.converged)
    way, step = torch.randn(n, 4, generator=generator, dtype=D), 1e-5
    change = (value(x + step * way)[0] - value(x - step * way)[0]) / (2 * step)
    assert torch.allclose((slope * way).sum(), change, rtol=1e-5)
