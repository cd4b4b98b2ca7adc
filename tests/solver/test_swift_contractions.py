"""Anderson's plain steps where a map contracts strongly: each sample decides for itself, and what they told is not lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

D = torch.float64
N = 20


def _turned(n: int, *rates: float) -> Tensor:
    """A normal matrix with a spectrum on circles of these radii, the first on all but one plane each."""
    radii = torch.full((n,), rates[0], dtype=D)
    for j, rate in enumerate(rates[1:]):
        radii[2 * j : 2 * j + 2] = rate
    generator = torch.Generator().manual_seed(n)
    Q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=D))[0]
    angles = torch.linspace(0.3, 2.8, n // 2, dtype=D)
    turn = torch.block_diag(
        *(torch.stack([torch.stack([a.cos(), -a.sin()]), torch.stack([a.sin(), a.cos()])]) for a in angles)
    )
    return Q @ (radii.unsqueeze(1) * turn) @ Q.T


def _solve(A: Tensor, b: Tensor, solver: Any) -> ik.Solution:
    return ik.fixed_point(
        lambda z, A, b: (A @ z.unsqueeze(-1)).squeeze(-1) + b, torch.zeros_like(b), (A, b), solver=solver, batch_dims=1
    )


def _right(count: int, n: int = N) -> Tensor:
    return torch.randn(count, n, generator=torch.Generator().manual_seed(7), dtype=D)


@pytest.mark.parametrize(
    ("n", "rate", "plain"),
    [
        (20, 0.2, True),
        (20, 0.33, True),
        (10, 0.2, True),
        (20, 0.6, False),
        (6, 0.2, False),
        (8, 0.2, True),
        (100, 0.2, True),
    ],
    ids=str,
)
def test_strong_contractions_are_iterated_as_they_are(n: int, rate: float, plain: bool) -> None:
    A, b = _turned(n, rate).unsqueeze(0), _right(1, n)
    found, picard = (_solve(A, b, solver) for solver in ("anderson", "picard"))
    assert int(found.steps) <= int(picard.steps)
    assert torch.equal(found.value, picard.value) is plain
    exact = torch.linalg.solve(torch.eye(n, dtype=D) - A[0], b[0])
    torch.testing.assert_close(found.value[0], exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("memory", [8, 3, 1])
def test_each_sample_goes_its_way_as_if_alone(memory: int) -> None:
    """Beside one that mixes from the first step on: swift to the end, soon or late no longer swift."""
    A = torch.stack([_turned(N, *rates) for rates in ((0.8,), (0.2,), (0.05, 0.6), (1e-4, 0.3, 0.5), (0.25, 0.3))])
    b = _right(len(A))
    b[3] = b[3] + 1e4 * torch.ones(N, dtype=D)
    solver = ik.Anderson(memory=memory)
    together = _solve(A, b, solver)
    alone = [_solve(A[i : i + 1], b[i : i + 1], solver) for i in range(len(A))]
    assert bool(together.converged.all())
    assert together.steps.tolist() == [int(one.steps) for one in alone]
    torch.testing.assert_close(together.value, torch.cat([one.value for one in alone]), rtol=1e-12, atol=1e-12)
