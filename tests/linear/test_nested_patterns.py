"""Patterns of functions with a solve inside: by its equations, not by the steps that it took."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik
from implicitkit.sparsity.detection import detect

N = 160


def _grid(u: Tensor, q: Tensor) -> Tensor:
    U = pad(u, (1, 1))
    return 2.5 * u + u**3 - U[2:] - U[:-2] - q


def _whole(q: Tensor) -> Tensor:
    return ik.root(_grid, torch.zeros(len(q), dtype=q.dtype), (q,)).value


def _cells(q: Tensor) -> Tensor:
    """A law in each cell, ``s + s^3 = q_{i+1} - q_i``."""
    strain = q.diff()[:, None]
    start = torch.zeros_like(strain)
    return ik.root(lambda s, e: s + s**3 - e, start, (strain,), batch_dims=1).value[:, 0]


def _gradient(function):
    return lambda q: torch.func.grad(lambda x: function(x).square().sum())(q)


CASES = {
    "one system": _whole,
    "its gradient": _gradient(_whole),
    "its tangent": lambda q: torch.func.jvp(_whole, (q,), (torch.ones_like(q),))[1],
    "rows of its Jacobian": lambda q: torch.func.jacrev(lambda x: _whole(x)[:3])(q).sum(0),
    "a law in each cell": _cells,
    "its gradient, cells": _gradient(_cells),
    "cells by vmap": torch.func.vmap(lambda q: _whole(q.expand(1))[0]),
    "one beside a band": lambda q: torch.cat([_whole(q[:40]), q[40:-1] * q[41:]]),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("at", ["solution", "elsewhere"])
def test_a_solve_depends_on_what_its_equations_depend_on(name: str, at: str) -> None:
    """From a start that is a solution, too, where there are no steps to be seen."""
    generator = torch.Generator().manual_seed(0)
    function = CASES[name]
    z = torch.zeros(1, N, dtype=torch.float64)
    if at == "elsewhere":
        z = torch.randn(1, N, generator=generator, dtype=torch.float64)
    found = detect(lambda rows: torch.stack([function(row) for row in rows]), z)
    assert found.pattern is not None, found.reason
    pattern = torch.from_numpy(found.pattern.toarray())
    shown = torch.zeros_like(pattern)
    for _ in range(2):
        point = torch.randn(N, generator=generator, dtype=torch.float64)
        shown |= torch.func.jacrev(function)(point).ne(0)
    assert not bool((shown & ~pattern).any())
    if "cells" in name or "cell" in name:
        assert int(pattern.sum()) <= 3 * N
    if "band" in name:
        assert int(pattern.sum()) <= 40 * 40 + 2 * N


@pytest.mark.filterwarnings("error")
def test_an_objective_with_a_large_root_inside() -> None:
    """Control of an equation: found once, its pattern was taken for that of the solve's first guess, and failed."""
    target = torch.linspace(0, 1, N, dtype=torch.float64)

    def solve(goal: Tensor) -> Tensor:
        def objective(q: Tensor, goal: Tensor) -> Tensor:
            return (_whole(q) - goal).square().sum() + 0.1 * q.square().sum()

        return ik.argmin(objective, torch.zeros(N, dtype=torch.float64), (goal,)).value

    weights = torch.cos(torch.arange(N, dtype=torch.float64))
    goal = target.clone().requires_grad_()
    q = solve(goal)
    u = _whole(q.detach())
    a = torch.linalg.solve(torch.func.jacrev(lambda u: _grid(u, q.detach()))(u).T, 2 * (u - target))
    assert torch.allclose(a + 0.2 * q.detach(), torch.zeros(N, dtype=torch.float64), atol=1e-7)
    (slope,) = torch.autograd.grad((weights * q).sum(), goal)
    way = torch.sin(7 * target)
    step = 1e-4
    with torch.no_grad():
        change = (weights * (solve(target + step * way) - solve(target - step * way))).sum() / (2 * step)
    assert torch.allclose((slope * way).sum(), change, rtol=1e-5)
