"""Fixed points that repel slowly cost no thousand steps, nor do contractions that first stretch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point import attracting

F64 = torch.float64
_TURN = torch.tensor([[0.78, -0.657], [0.657, 0.78]], dtype=F64)  # by 0.7, times 1.02

#: map, unknowns, and how many evaluations it may take
_AWAY: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "-1.02 z + 1": (lambda z: -1.02 * z + 1, 1, 36),
    "-1.02 z + 1, three": (lambda z: -1.02 * z + 1, 3, 36),
    "1.02 z + 1": (lambda z: 1.02 * z + 1, 1, 50),
    "-1.02 z + 1 and a little of a sine": (lambda z: -1.02 * z + 1 + 0.01 * torch.sin(z), 2, 50),
    "one of three": (lambda z: torch.tensor([1.02, 0.5, -0.3], dtype=z.dtype) * z + 1, 3, 54),
    "a rotation": (lambda z: _TURN.to(z) @ z + 1, 2, 125),
}


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", list(_AWAY))
def test_what_leads_away_is_known_without_going_there(name: str, dtype: torch.dtype) -> None:
    step, n, most = _AWAY[name]
    found = ik.fixed_point(step, torch.zeros(n, dtype=dtype))
    close = 1e-7 if dtype == F64 else 1e-3
    torch.testing.assert_close(step(found.value), found.value, rtol=close, atol=close)
    assert found.evaluations <= most, found


#: maps that are affine near the fixed point that repels, and lead to another one, ``(map, start, where to)``
_ELSEWHERE: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float]]] = {
    "cut off further out": (lambda z: torch.clamp(1.02 * z + 0.01, -40, 40), [0.0], [40.0]),
    "bent a hundred times as far": (lambda z: 100 * torch.tanh(0.012 * z + 1e-4), [0.5], [65.86]),
    "contracts at the start": (
        lambda z: torch.stack([(1.3 - 0.8 * z[1] ** 2) * z[0], z[1] + 0.1 * z[1] * (1 - z[1] ** 2)]),
        [1.0, 0.4],
        [0.0, 1.0],
    ),
}


@pytest.mark.parametrize("name", list(_ELSEWHERE))
def test_what_leads_elsewhere_is_followed(name: str) -> None:
    step, start, there = _ELSEWHERE[name]
    found = ik.fixed_point(step, torch.tensor(start, dtype=F64))
    torch.testing.assert_close(found.value, torch.tensor(there, dtype=F64), rtol=1e-3, atol=1e-3)


def test_each_sample_of_a_batch_by_itself() -> None:
    """One that leads away beside one that leads elsewhere, and one that contracts."""
    kinds = torch.tensor([[-1.02, 1e9], [1.02, 40.0], [0.5, 1e9]], dtype=F64)

    def step(z: Tensor, kind: Tensor) -> Tensor:
        return torch.maximum(torch.minimum(kind[:, :1] * z + 0.01, kind[:, 1:]), -kind[:, 1:])

    start = torch.zeros(3, 1, dtype=F64)
    found = ik.fixed_point(step, start, kinds, batch_dims=1, in_dims=0)
    torch.testing.assert_close(found.value.squeeze(1), torch.tensor([0.01 / 2.02, 40.0, 0.02], dtype=F64))


def _triangular(seed: int, n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    A = torch.triu(torch.randn(n, n, generator=generator, dtype=F64), 1) * (3 / n**0.5)
    A = A + torch.diag(torch.rand(n, generator=generator, dtype=F64) * 0.9)
    return A, torch.randn(n, generator=generator, dtype=F64)


@pytest.mark.parametrize("seed", range(4))
def test_what_stretches_before_it_contracts_is_no_false_alarm(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triangular, with a diagonal below 0.9: powers of it grow for some twenty steps."""
    A, b = _triangular(seed, 20)
    alarms = []
    run = attracting.stretches

    def watched(f: Evaluations, z: Tensor, which: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        repels, v = run(f, z, which, direction)
        alarms.append(bool(repels.any()))
        return repels, v

    monkeypatch.setattr(attracting, "stretches", watched)
    found = ik.fixed_point(lambda z: A @ z + b, torch.zeros(20, dtype=F64))
    exact = torch.linalg.solve(torch.eye(20, dtype=F64) - A, b)
    torch.testing.assert_close(found.value, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))
    assert not any(alarms)
    assert found.evaluations < 120
