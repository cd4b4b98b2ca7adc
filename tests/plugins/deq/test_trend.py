"""Calls on the same samples begin where the last ones lead: equilibria, and the linear systems of their derivatives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ
from implicitkit_deq.starting.extrapolation import Onward, Trend, told
from implicitkit_deq.starting.start import Again
from implicitkit_deq.starting.warm_start import Last

F64 = torch.float64
BATCH, N = 6, 40
WIDE = 24  # unknowns of layers; factors would solve their systems at once


def _steps(kind: str, count: int = 5) -> list[Tensor]:
    """States of every sample along a line, a parabola, a noise, or at rest."""
    g = torch.Generator().manual_seed(0)
    start, speed, bend = torch.randn(3, BATCH, N, generator=g, dtype=F64)
    noise = torch.randn(count, BATCH, N, generator=g, dtype=F64)
    if kind == "noise":
        return [start + e for e in noise]
    far = {"line": (1.0, 0.0), "parabola": (1.0, 0.05), "rest": (0.0, 0.0)}[kind]
    return [start + far[0] * k * speed + far[1] * k * k * bend for k in range(count)]


@pytest.mark.parametrize(
    ("kind", "share"), [("line", 1e-12), ("parabola", 2e-2), ("noise", 1.05), ("rest", 0.0)], ids=lambda v: str(v)
)
def test_what_is_expected_is_near_where_changes_last(kind: str, share: float) -> None:
    """Beside how far the last state is from the next."""
    *seen, new = _steps(kind)
    trend = Trend()
    for state in seen:
        trend.keep(state)
    missed = (new - trend.expected()).norm(dim=1)
    assert bool((missed <= share * (new - seen[-1]).norm(dim=1)).all()), missed


def test_changes_that_shrink_are_expected_to_shrink_on() -> None:
    """Each half of the one before, its direction turning: neither term alone tells where that leads."""
    line, turn = _steps("line")[1] - _steps("line")[0], _steps("parabola")[2]
    seen = [0.5**k * (line * (1 + k) + turn) for k in range(6)]
    trend = Trend()
    for state in seen[:-1]:
        trend.keep(state)
    missed, moved = (seen[-1] - trend.expected()).norm(dim=1), (seen[-1] - seen[-2]).norm(dim=1)
    assert bool((missed <= 0.3 * moved).all()), missed / moved


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_as_many_states_as_there_were_are_used(count: int) -> None:
    """One says where, two that there was a change, the third that it lasts."""
    seen, trend = _steps("line")[:count], Trend()
    for state in seen:
        trend.keep({"a": state, "b": (state[:, 0],)})
    wanted = seen[-1] if count < 3 else 2 * seen[-1] - seen[-2]
    found = trend.expected()
    torch.testing.assert_close(found["a"], wanted)
    torch.testing.assert_close(found["b"][0], wanted[:, 0])


def test_samples_have_trends_of_their_own() -> None:
    """One that is not finite, one that turned and one that leaps change nothing for the others, and start where they are."""
    a, b, c, d = (t.clone() for t in _steps("line")[:4])
    c[0], d[0] = torch.nan, 1.0
    d[1] = c[1] - (c[1] - b[1])  # back
    d[2] = c[2] + 1e6 * (c[2] - b[2])
    trend = Trend()
    for state in (a, b, c, d):
        trend.keep(state)
    found = trend.expected()
    torch.testing.assert_close(found[:2], d[:2])
    assert 0 < float((found[2] - d[2]).norm()) <= 1.01 * float((c[2] - b[2]).norm()), "no second leap"
    torch.testing.assert_close(found[3:], (2 * d - c)[3:])


def test_positions_have_trends_of_their_own() -> None:
    """What comes later in a sequence tells nothing of what comes before, to the last bit; without that it would."""
    found = []
    for by_position in (True, False):
        for later in (0.0, 1.0):
            trend = Trend(by_position=by_position)
            for k, state in enumerate(_steps("parabola")):
                sequence = state.view(BATCH, 4, 10).clone()
                sequence[:, 2:] += later * k**3
                trend.keep(sequence)
            found.append(trend.expected()[:, :2])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[2], found[3])
    assert not torch.equal(found[0], found[2])


def test_what_was_not_told_before_is_not_expected() -> None:
    """Of four rows only the last is told to half of its change: one turned, two went on by less than was expected."""
    before = torch.tensor([[1.0, 0.0]] * 4, dtype=F64)
    change = torch.tensor([[0.0, 1.0], [0.4, 0.0], [0.625, 0.0], [0.7, 0.0]], dtype=F64)
    assert told(False, change, before).flatten().tolist() == [False, False, False, True]
    assert told(True, change.view(1, 4, 2), before.view(1, 4, 2)).flatten().tolist() == [False, False, False, True]
    for careful in (True, False):
        trend = Trend(careful=careful)
        for state in (0.0, 1.0, 2.0, 2.4):
            trend.keep(torch.full((1, 2), state, dtype=F64))
        assert torch.equal(trend.expected(), trend.last) == careful


class Written(nn.Module):
    """A cell whose one parameter is written to by every step of an optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def step(self) -> None:
        with torch.no_grad():
            self.weight.add_(1)


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize("batches", [[[0, 1, 2, 3, 4, 5]], [[5, 1], [0, 3, 2, 4]], [[2, 0, 5], [1, 4, 3]]], ids=str)
def test_samples_with_numbers_start_as_full_batches_do(batches: list[list[int]], by_position: bool) -> None:
    """In whatever batches they come: to the last bit where all come at once."""
    cell, last, trend = (
        Written(),
        Last(leads=True, by_position=by_position),
        Trend(by_position=by_position, careful=True),
    )
    cell.step()  # numbers of writes begin anywhere
    template = torch.zeros(BATCH, 4, 10, dtype=F64)
    for count, state in enumerate(_steps("parabola", 7)):
        sequence = state.view(BATCH, 4, 10)
        trend.keep(sequence)
        for numbers in batches:
            index = torch.tensor(numbers)
            last.keep(sequence[index], index, cell)
            again = last(template[index], index, cell)  # repeated: with the parameters of that equilibrium
            assert count == 0 or torch.equal(again, sequence[index])
        cell.step()
        for numbers in batches:
            index = torch.tensor(numbers)
            expected = last(template[index], index, cell)
            torch.testing.assert_close(expected, trend.expected()[index], rtol=1e-12, atol=1e-12)
            assert len(numbers) < BATCH or torch.equal(expected, trend.expected())
            assert torch.equal(last(template[index], index), sequence[index]), "in evaluation"


def test_the_first_equilibrium_with_a_number_is_no_change_and_leads_nowhere() -> None:
    """``s``, ``2 s``, ``3 s``: a change was told once it came twice, as of full batches; zero was none of the states."""
    s = _steps("line")[1]
    cell, last, trend = Written(), Last(leads=True), Trend(careful=True)
    cell.step()
    for k in range(1, 5):
        last.keep(k * s, torch.arange(BATCH), cell)
        trend.keep(k * s)
        cell.step()
        found = last(torch.zeros_like(s), torch.arange(BATCH), cell)
        assert torch.equal(found, trend.expected()), k
        assert torch.allclose(found, (k if k < 4 else 5) * s), k


def test_what_is_repeated_or_not_finite_or_never_seen_leads_nowhere() -> None:
    a, b, c, d = (t[:, :3] for t in _steps("line")[:4])
    cell, last, numbers = Written(), Last(leads=True), torch.arange(BATCH) + 7
    for state in (a, b, c, d, d):  # the last one again, at the same parameters
        last.keep(state, numbers, cell)
        if state is not d:
            cell.step()
    cell.step()
    zero = torch.zeros(BATCH, 3, dtype=F64)
    torch.testing.assert_close(last(zero, numbers, cell), 2 * d - c)
    assert torch.equal(last(zero, torch.arange(BATCH), cell), zero), "of rooms that were made, and are empty"
    broken = d.clone()
    broken[1] = torch.nan
    last.keep(broken, numbers, cell)
    cell.step()
    found = last(zero, numbers, cell)
    assert torch.equal(found[1], zero[1]) and bool(found.isfinite().all())


def test_the_future_of_full_batches_tells_nothing_of_the_past() -> None:
    """Positions from the third on are another world's."""
    worlds = []
    for future in ("parabola", "noise"):
        again, cell, settings, x = Again(True, by_position=True), Written(), object(), torch.zeros(BATCH, 4)
        template = torch.zeros(BATCH, 4, 10, dtype=F64)
        for past, later in zip(_steps("parabola", 6), _steps(future, 6), strict=True):
            state = torch.cat([past.view(BATCH, 4, 10)[:, :2], later.view(BATCH, 4, 10)[:, 2:]], 1)
            again((x,), template, settings)
            again.keep((x,), cell, state, settings)
            cell.step()
        worlds.append(again((x,), template, settings))
    a, b = worlds
    assert torch.equal(a[:, :2], b[:, :2]) and not torch.equal(a[:, 2:], b[:, 2:])
    assert not torch.equal(a[:, :2], _steps("parabola", 6)[-1].view(BATCH, 4, 10)[:, :2]), "they lead somewhere"


def test_complex_states_and_other_batches_begin_anew() -> None:
    trend = Trend()
    assert trend.expected() is None and trend.last is None
    for state in _steps("line")[:4]:
        trend.keep(torch.complex(state, 2 * state))
    seen = _steps("line")[4]
    torch.testing.assert_close(trend.expected(), torch.complex(seen, 2 * seen))
    trend.keep(seen[:2])
    assert trend.expected() is trend.last and len(trend.last) == 2
    assert copy.deepcopy(trend).last is None


# ------------------------------------------------------------------------------------------------------------ systems
def _system(scale: float = 0.5, seed: int = 0) -> tuple[ik.linear.Operator, Tensor]:
    """Blocks, and right-hand sides."""
    g = torch.Generator().manual_seed(seed)
    J = scale * torch.randn(BATCH, N, N, generator=g, dtype=F64) / N**0.5 - torch.eye(N, dtype=F64)
    b = torch.randn(BATCH, N, generator=g, dtype=F64)
    mv = lambda v: torch.einsum("bij,bj->bi", J, v)  # noqa: E731
    rmv = lambda v: torch.einsum("bji,bj->bi", J, v)  # noqa: E731
    return ik.linear.Operator(mv, rmv, lambda: J, batch=BATCH, size=N, like=b), b


LIMITS: dict[str, Any] = {"rtol": 1e-8, "atol": 0.0, "max_steps": None}


@pytest.mark.parametrize(
    ("what", "saved"),
    [
        ("same", True),
        ("scaled", True),
        ("near", True),
        ("other", False),
        ("tiny", False),
        ("zero", False),
        ("inf", False),
    ],
)
def test_a_system_that_begins_elsewhere_meets_the_same_tolerance(what: str, saved: bool) -> None:
    """``|A x - b| <= rtol |b|`` for every sample, in fewer steps where the last solution says something."""
    A, b = _system()
    trend = Trend()
    Onward(ik.linear.GMRES(), trend).solve(A, b, **LIMITS)
    later = {
        "near": _system(0.5001)[1] + 1e-3,
        "other": _system(seed=1)[1],
        "scaled": -1e6 * b,
        "tiny": 1e-200 * b,
    }.get(what, b)
    if what in ("zero", "inf"):
        later = b.clone()
        later[1] = 0.0 if what == "zero" else torch.inf
    cold = ik.linear.GMRES().solve(A, later, **LIMITS)
    warm = Onward(ik.linear.GMRES(), trend).solve(A, later, **LIMITS)
    assert torch.equal(warm.converged, cold.converged)
    good = warm.converged
    norm = (A.mv(warm.x) - later).norm(dim=1)
    assert bool((norm <= 1.01e-8 * later.norm(dim=1))[good].all())
    torch.testing.assert_close(warm.residual_norm[good], norm[good], rtol=1e-3, atol=1e-10 * float(later[good].norm()))
    assert bool((warm.steps < cold.steps).all()) == saved and bool((warm.steps <= cold.steps + 2).all())
    assert what != "same" or warm.steps.tolist() == [1] * BATCH, "the product that shows it"


def test_a_sample_that_failed_is_none_for_the_next_system() -> None:
    """What is not finite is not expected."""
    A, b = _system()
    trend, bad = Trend(), b.clone()
    bad[1], bad[2] = torch.nan, 0.0
    failed = Onward(ik.linear.GMRES(), trend).solve(A, bad, **LIMITS)
    assert failed.converged.tolist() == [True, False, *[True] * (BATCH - 2)]
    found = Onward(ik.linear.GMRES(), trend).solve(A, b, **LIMITS)
    assert bool(found.converged.all()) and int(found.steps[3:].max()) <= 2 < int(found.steps[1:3].min())
    torch.testing.assert_close(A.mv(found.x), b, rtol=1e-6, atol=1e-7)


def test_nothing_is_kept_of_systems_that_factors_solve() -> None:
    """One product more would be for nothing."""
    A, b = _system()
    trend = Trend()
    Onward(ik.linear.LU(), trend).solve(A, b, **LIMITS)
    assert trend.last is None


def test_only_the_first_system_of_a_call_is_begun_elsewhere_and_kept() -> None:
    A, b = _system()
    trend = Trend()
    solver = Onward(ik.linear.GMRES(), trend)
    first = solver.solve(A, b, **LIMITS)
    solver.solve(A, -3 * b + 1, **LIMITS)
    torch.testing.assert_close(trend.last, first.x / b.norm(dim=1, keepdim=True))


# ------------------------------------------------------------------------------------------------------------- layers
class Tanh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.W, self.U = nn.Linear(WIDE, WIDE, dtype=F64), nn.Linear(4, WIDE, dtype=F64)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


def _train(steps: int, way: str, **options: Any) -> tuple[list[int], list[float], float]:
    """Evaluations and products of every step, and the worst error of a gradient beside that of a solve from zero."""
    cell, exact = Tanh(), {"rtol": 1e-10, "atol": 0.0, "rule": ik.Implicit(rtol=1e-10)}
    layer, cold = DEQ(cell, (WIDE,), **options), DEQ(cell, (WIDE,), init="zeros", **exact)
    optimiser = torch.optim.Adam(cell.parameters(), 3e-3)
    x = torch.randn(12, 4, dtype=F64)
    y = torch.sin(x.sum(1, keepdim=True))
    evaluations, products, worst = [], [], 0.0
    for k in range(steps):
        given = x.clone() if way == "copied" else x
        scale = 1000.0 if way == "scaled" and k % 2 else 1.0
        keyword: dict[str, Any] = {"z0": "last"} if way == "z0" else {}
        loss = scale * (layer(given, **keyword) - y).square().mean()
        optimiser.zero_grad()
        loss.backward()
        if k % 5 == 4 and way != "copied":
            wanted = torch.autograd.grad(scale * (cold(x) - y).square().mean(), list(cell.parameters()))
            pairs = zip(cell.parameters(), wanted, strict=True)
            worst = max(worst, *(float((p.grad - g).norm() / g.norm()) for p, g in pairs))
        for p in cell.parameters():
            p.grad /= scale
        assert layer.solution is not None and layer.solution.backward is not None
        evaluations.append(layer.solution.evaluations)
        products.append(float(layer.solution.backward.steps.double().mean()))
        optimiser.step()
    return evaluations, products, worst


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("way", "options", "share"),
    [
        ("full batches", {}, 0.8),
        ("scaled", {}, 0.8),
        ("full batches", {"init": "last"}, 1.0),
        ("full batches", {"on_failure": "raise"}, 0.8),
        ("z0", {}, 1.0),
    ],
    ids=["default", "a loss in turns of scale", "init=last", "strict", "z0=last"],
)
def test_training_on_the_same_samples_takes_fewer_evaluations_and_products(
    way: str, options: dict[str, Any], share: float
) -> None:
    """With gradients as exact as from zero; alone, other samples take what they take from zero.  ``share``: of the
    evaluations from zero; of what starts at the last equilibrium it is smaller, too."""
    tight = {"rtol": 1e-7, "atol": 0.0, "rule": ik.Implicit("gmres", rtol=1e-7), **options}
    evaluations, products, worst = _train(15, way, **tight)
    apart, alone, _ = _train(15, "copied", **tight | {"init": "zeros"})
    assert worst < 1e-5
    assert sum(evaluations[6:]) < share * sum(apart[6:]), (evaluations, apart)
    assert sum(products[6:]) < 0.8 * sum(alone[6:]), (products, alone)


def test_copies_of_the_samples_are_other_samples() -> None:
    """With defaults nothing is expected of tensors that are not those of the last call."""
    evaluations, products, _ = _train(6, "copied", rtol=1e-7, rule=ik.Implicit("gmres", rtol=1e-7))
    apart, alone, _ = _train(6, "copied", rtol=1e-7, rule=ik.Implicit("gmres", rtol=1e-7), init="zeros")
    assert evaluations == apart and products == alone


def test_second_derivatives_of_calls_that_follow_each_other() -> None:
    """A penalty on the gradient: several linear systems in a call, of which the first follows those of the calls before."""
    tight: dict[str, Any] = {"rtol": 1e-11, "rule": ik.Implicit("gmres", rtol=1e-11)}
    cell = Tanh()
    layer, cold = DEQ(cell, (WIDE,), **tight), DEQ(cell, (WIDE,), init="zeros", **tight)
    x = torch.randn(5, 4, dtype=F64, requires_grad=True)

    def penalty(layer: DEQ) -> Tensor:
        (g,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        return g.square().sum()

    for _ in range(4):
        found, wanted = (torch.autograd.grad(penalty(each), list(cell.parameters())) for each in (layer, cold))
        for f, w in zip(found, wanted, strict=True):
            torch.testing.assert_close(f, w, rtol=1e-6, atol=1e-8)
        with torch.no_grad():
            for p in cell.parameters():
                p.mul_(0.99)


def test_what_is_expected_of_bent_changes() -> None:
    """By hand: of a change (1, 1) after (1, 0) and (1/2, -1), half goes on, and its own change no further than that."""
    trend = Trend()
    for state in ([0.0, 0.0], [0.5, -1.0], [1.5, -1.0], [2.5, 0.0]):
        trend.keep(torch.tensor([state], dtype=F64))
    added = trend.expected() - trend.last
    assert torch.allclose(added, torch.tensor([[0.5, 0.5 + 0.5**0.5]], dtype=F64)), added
