"""Discretised equations with thousands of unknowns: no dense Jacobian."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.systems.base import TestSystem, system, vector
from benchmarks.systems.engineering import _chandrasekhar
from benchmarks.systems.mgh import broyden_banded, broyden_tridiagonal, discrete_bvp, discrete_integral

for make, n in ((broyden_tridiagonal, 1000), (broyden_banded, 1000), (discrete_bvp, 1000), (discrete_integral, 1000)):
    system("large", n)(make)


@system("large", 100)
def bratu2d(side: int) -> TestSystem:
    """``-Laplace u = c exp(u)`` on the unit square, ``u = 0`` on its boundary: ``side^2`` interior points, times ``h^2``."""
    h = 1 / (side + 1)

    def f(z: Tensor, c: Tensor) -> Tensor:
        u = z.view(side, side)
        p = torch.nn.functional.pad(u, (1, 1, 1, 1))
        neighbours = p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:]
        return (4 * u - neighbours - c * h**2 * torch.exp(u)).flatten()

    return TestSystem("", f, torch.zeros(side**2, dtype=torch.float64), vector(6.0), source="Bratu's problem")


@system("large", 1000)
def chandrasekhar(n: int) -> TestSystem:
    return _chandrasekhar(n, 0.9)


@system("large", 24)
def brusselator2d(side: int) -> TestSystem:
    """The Brusselator with diffusion on a square, no flux at its boundary: ``2 side^2`` unknowns."""

    def laplace(u: Tensor) -> Tensor:
        p = torch.nn.functional.pad(u[None, None], (1, 1, 1, 1), mode="replicate")[0, 0]
        return (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * u) * side**2

    def f(z: Tensor, b: Tensor) -> Tensor:
        x, y = z.view(2, side, side)
        reaction = x**2 * y
        return torch.stack(
            [1 + reaction - (b + 1) * x + 0.02 * laplace(x), b * x - reaction + 0.02 * laplace(y)]
        ).flatten()  # fmt: skip

    grid = (torch.arange(side, dtype=torch.float64) + 0.5) / side
    wave = 0.2 * torch.cos(torch.pi * grid).unsqueeze(1) * torch.cos(2 * torch.pi * grid)
    start = torch.stack([1 + wave, 1.7 - wave]).flatten()
    return TestSystem(
        "", f, start, vector(1.7), kind="steady_state", source="Prigogine & Lefever (1968), with diffusion"
    )
