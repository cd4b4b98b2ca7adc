"""Plain steps that Anderson's method takes without a look, where nothing is mixed: fewer looks, no more evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.fixed_point import anderson

D = torch.float64
SAMPLES, N = 8, 96


def _maps(radii: list[float], seed: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Affine maps, one a sample, with spectra that fill disks of these radii, and their fixed points."""
    g = torch.Generator().manual_seed(seed)
    core = torch.randn(N, N, generator=g, dtype=D)
    core /= torch.linalg.eigvals(core).abs().max()
    A = torch.tensor(radii, dtype=D).view(-1, 1, 1) * core
    c = torch.randn(len(radii), N, generator=g, dtype=D)

    def step(z: Tensor) -> Tensor:
        out: Tensor = (A @ z.unsqueeze(2)).squeeze(2) + c
        return out

    return step, torch.linalg.solve(torch.eye(N, dtype=D) - A, c.unsqueeze(2)).squeeze(2)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each look was followed by."""
    found: list[int] = []
    step = ik.Anderson.step

    def look(self: Any, f: Any, z: Tensor, state: Any) -> Any:
        out = step(self, f, z, state)
        found.append(f.taken)
        return out

    monkeypatch.setattr(ik.Anderson, "step", look)
    return found


RADII = {
    "alike": [0.9] * SAMPLES,
    "faster ones": [0.9] * (SAMPLES - 1) + [0.5],
    "one slow": [0.8] * (SAMPLES - 1) + [0.93],
    "all rates": [0.6 + 0.04 * i for i in range(SAMPLES)],
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RADII)
def test_fewer_looks_and_no_more_evaluations(
    name: str, seed: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside looks after three steps at most, and steps one by one as soon as half of the samples are near."""
    step, right = _maps(RADII[name], seed)
    options: dict[str, Any] = {"batch_dims": 1, "solver": "anderson", "rtol": 1e-7, "atol": 0.0}
    z0 = torch.zeros(SAMPLES, N, dtype=D)
    found = ik.fixed_point(step, z0, **options)
    looks, most = len(taken), max(taken)
    taken.clear()
    monkeypatch.setattr(anderson, "dropping_pays", lambda f, share: True)
    often = ik.fixed_point(step, z0, **options)
    assert max(taken) == 3
    assert bool(found.converged.all())
    assert found.evaluations <= often.evaluations + 1, (found.evaluations, often.evaluations)
    assert looks <= len(taken), (looks, len(taken))
    assert most in (3, 6, 9)
    size = torch.linalg.vector_norm(right, dim=1)
    error = torch.linalg.vector_norm(found.value - right, dim=1)
    assert bool((error <= 1e-7 / (1 - 0.93) * 3 * size).all())


def test_a_third_of_the_looks_where_plain_steps_go_on(taken: list[int]) -> None:
    step, _ = _maps(RADII["alike"], 1)
    found = ik.fixed_point(step, torch.zeros(SAMPLES, N, dtype=D), batch_dims=1, solver="anderson", rtol=1e-7, atol=0.0)
    assert max(taken) == 9
    assert 9 * taken.count(9) >= 0.5 * found.evaluations, (taken, found.evaluations)


@pytest.mark.parametrize("seed", [3, 4])
def test_plain_steps_end_where_mixing_gained_much_more(seed: int) -> None:
    """One mixing that gains little does not mean that none does: they took twice the evaluations from there on."""
    step, _ = _maps(RADII["alike"], seed)
    options: dict[str, Any] = {"batch_dims": 1, "rtol": 1e-7, "atol": 0.0}
    z0 = torch.zeros(SAMPLES, N, dtype=D)
    found, mixed = (ik.fixed_point(step, z0, solver=s, **options) for s in ("anderson", ik.Anderson(period=3)))
    assert found.evaluations <= 1.2 * mixed.evaluations, (found.evaluations, mixed.evaluations)


def test_a_limit_on_steps_is_kept(taken: list[int]) -> None:
    step, _ = _maps(RADII["alike"], 0)
    z0 = torch.zeros(SAMPLES, N, dtype=D)
    for limit in range(18, 26):
        found = ik.fixed_point(
            step, z0, batch_dims=1, solver="anderson", rtol=1e-9, max_steps=limit, on_failure="ignore"
        )
        assert int(found.steps.max()) == limit
        assert found.evaluations <= limit + 1


def test_steps_are_made_unseen_for_the_slowest_sample_at_work_only() -> None:
    """A sample that has ended, and one that grows, ask for nothing; half of what is needed is made."""

    class F:
        batch, size, at_work, ahead, weighs = 3, N, 2, 100, False
        norm = torch.tensor([0.5, 4.0, 1e6], dtype=D)
        tolerance = torch.ones(3, dtype=D)
        active = torch.tensor([True, True, False])

    def unseen(mark: list[float], **changes: Any) -> int:
        f: Any = type("G", (F,), changes)()
        return anderson._unseen(f, torch.tensor(mark, dtype=D), True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anderson, "dropping_pays", lambda f, share: False)
        # log(4) / log(mark / 4) times three steps are needed, half of that is made
        assert unseen([1.0, 7.9, 1.1e6]) == 1
        assert unseen([1.0, 17.0, 1.1e6]) == 0
        assert unseen([1.0, 4.0 * 2**0.4, 1.1e6]) == 2
        assert unseen([1.0, 4.1, 1.1e6]) == 3
        assert unseen([1.0, 4.1, 1.1e6], ahead=8) == 2
        assert unseen([0.6, 3.0, 1.1e6]) == 0, "they grow"
        assert unseen([0.6, 4.0, 1.1e6]) == 0, "they stand"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anderson, "dropping_pays", lambda f, share: True)
        assert unseen([1.0, 4.1, 1.1e6]) == 1, "half of those at work are far from done"
        assert unseen([1.0, 1.6, 1.1e6], norm=torch.tensor([0.5, 1.5, 1e6], dtype=D)) == 0


def test_between_mixings_of_a_cheap_map_the_slowest_sample_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    class F:
        batch, size, at_work, ahead, weighs = 4, N, 3, 100, False
        norm = torch.tensor([0.5, 0.5, 10.0, 1e6], dtype=D)
        tolerance = torch.ones(4, dtype=D)
        active = torch.tensor([True, True, True, False])

    f: Any = F()
    far, near, grows = (torch.tensor([1.0, 1.0, mark, 1e7], dtype=D) for mark in (40.0, 60.0, 9.0))
    for cheap, expected in ((True, (1, 0, 0)), (False, (0, 0, 0))):
        monkeypatch.setattr(anderson, "dropping_pays", lambda f, share, cheap=cheap: not cheap)
        assert tuple(anderson._unseen(f, mark, False) for mark in (far, near, grows)) == expected
    f.norm = 1e155 * f.norm  # of which the square is no number
    monkeypatch.setattr(anderson, "dropping_pays", lambda f, share: False)
    assert anderson._unseen(f, 1e155 * far, False) == 1


def test_plain_steps_up_to_the_first_mixing_are_made_without_a_look(taken: list[int]) -> None:
    """Plain steps of a cheap map have ended somewhere between two mixings; far from the solution the next look is at one."""
    rates = torch.full((N,), 0.3, dtype=D)
    rates[:3] = torch.tensor([0.97, 0.96, 0.95], dtype=D)
    c = torch.randn(SAMPLES, N, generator=torch.Generator().manual_seed(0), dtype=D)
    found = ik.fixed_point(lambda z: rates * z + c, torch.zeros_like(c), batch_dims=1, solver="anderson", rtol=1e-9)
    assert bool(found.converged.all()) and taken[taken.index(3) - 1] == 2, taken  # the steps before three at once


# ---------------------------------------------------------------------------------------------------------------------
# Anderson's plain steps where a map contracts strongly: each sample decides for itself, and what they told is not lost.
UNKNOWNS = 20


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


def _right(count: int, n: int = UNKNOWNS) -> Tensor:
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
def test_each_sample_goes_its_way_as_if_alone(memory: int, taken: list[int]) -> None:
    """Beside one that mixes from the first step on: swift to the end, soon or late no longer swift.  Alone it is looked at
    less often, and stops where it would have stopped."""
    A = torch.stack(
        [_turned(UNKNOWNS, *rates) for rates in ((0.8,), (0.2,), (0.05, 0.6), (1e-4, 0.3, 0.5), (0.25, 0.3))]
    )
    b = _right(len(A))
    b[3] = b[3] + 1e4 * torch.ones(UNKNOWNS, dtype=D)
    solver = ik.Anderson(memory=memory)
    together = _solve(A, b, solver)
    looks = len(taken)
    assert set(taken) == {1}
    taken.clear()
    alone = [_solve(A[i : i + 1], b[i : i + 1], solver) for i in range(len(A))]
    assert bool(together.converged.all()) and max(taken) == 3
    assert len(taken) < 1.2 * looks
    assert together.steps.tolist() == [int(one.steps) for one in alone]
    torch.testing.assert_close(together.value, torch.cat([one.value for one in alone]), rtol=1e-12, atol=1e-12)
