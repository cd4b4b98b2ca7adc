"""Derivatives of stiff trajectories of many unknowns, along what moves and what is at rest beside it: right, or told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.problem.trajectory import (
    given_steps,
    integrators,
    step_systems,
    steps_along_variations,
    steps_as_matrices,
    steps_for_derivatives,
)
from implicitkit.problem.trajectory.collocation import radau

DOUBLE = {"dtype": torch.float64}


def springs(n: int) -> np.ndarray:
    """``u' = v, v' = -w^2 u`` of ``n`` frequencies."""
    w = np.linspace(20.0, 50.0, n)
    return np.block([[np.zeros((n, n)), np.eye(n)], [-np.diag(w**2), np.zeros((n, n))]])


def heat(n: int) -> np.ndarray:
    return (np.diag(np.full(n, -2.0)) + np.diag(np.ones(n - 1), 1) + np.diag(np.ones(n - 1), -1)) * (n + 1.0) ** 2


def network(n: int) -> np.ndarray:
    """Dense, with eigenvalues from -1 to -1e6."""
    Q = np.linalg.qr(np.random.default_rng(3).normal(size=(n, n)))[0]
    return (Q * -np.logspace(0, 6, n)) @ Q.T


#: what moves, and what is at rest beside it, as matrices; with how many numbers steps may be matrices
LINEAR: dict[str, tuple[np.ndarray, np.ndarray, int]] = {
    "heat beside springs": (heat(30), springs(4), 0),
    "a long rod beside springs": (heat(100), springs(50), steps_as_matrices._NUMBERS),
    "heat beside what turns and grows": (heat(30), springs(4) + np.eye(8), 0),
    "a dense network beside springs": (network(6), springs(2), 0),
}
END = 1.0
SOON = 0.5  # what turns has turned four times


def along_diagonals(A: np.ndarray) -> Callable[[Tensor], Tensor]:
    """``y -> A y``, of which a pattern can be seen."""
    n, pad = len(A), torch.nn.functional.pad
    diagonals = [(k, torch.from_numpy(A.diagonal(k).copy())) for k in range(1 - n, n) if A.diagonal(k).any()]

    def product(y: Tensor) -> Tensor:
        terms = [pad(d * y[..., max(k, 0) : n + min(k, 0)], (max(-k, 0), max(k, 0))) for k, d in diagonals]
        return torch.stack(terms).sum(0)

    return product


def system(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Callable[..., Tensor], Tensor, np.ndarray, np.ndarray]:
    """Right-hand side of a time, a state and a parameter at zero, which pushes what is at rest, as a load does what moves;
    the start; and matrix and vectors of these."""
    moving, resting, size = LINEAR[name]
    monkeypatch.setattr(steps_as_matrices, "_NUMBERS", size)
    m, A = len(moving), scipy.linalg.block_diag(moving, resting)
    force = np.stack((np.arange(len(A)) < m, np.arange(len(A)) >= m), 1).astype(float)
    start = np.concatenate((np.sin(np.pi * np.arange(1, m + 1) / (m + 1)), np.zeros(len(resting))))
    product, (load, pushed) = along_diagonals(A), torch.from_numpy(force).unbind(1)
    return lambda t, y, p: product(y) + load + p * pushed, torch.from_numpy(start), A, force


def off(found: Any, true: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found) - true) / np.linalg.norm(true))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if "long rod" in n else n for n in LINEAR])
def test_derivatives_beside_what_is_at_rest(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the start, a parameter and the end time; by the steps of what moves they were off by up to themselves."""
    rhs, start, A, force = system(name, monkeypatch)
    y0, p = start.requires_grad_(), torch.zeros((), **DOUBLE, requires_grad=True)
    t = torch.tensor([0.0, END], **DOUBLE, requires_grad=True)
    last = ik.solve(ik.InitialValue(rhs, t), y0, (p,)).value[-1]
    w = np.random.default_rng(1).normal(size=len(A))
    slopes = torch.autograd.grad(last @ torch.from_numpy(w), (y0, p, t))
    whole = scipy.linalg.expm(END * np.block([[A, force], [np.zeros((2, len(A) + 2))]]))
    assert off(slopes[0], w @ whole[:-2, :-2]) < 5e-4
    typical = np.linalg.norm(w) * np.linalg.norm(whole[:-2, -1]) / len(A) ** 0.5  # terms may cancel
    assert abs(float(slopes[1]) - w @ whole[:-2, -1]) < 5e-4 * typical
    state = whole[:-2, :-2] @ start.detach().numpy() + whole[:-2, -2]
    assert off(slopes[2][1], w @ (A @ state + force[:, 0])) < 1e-4


@pytest.mark.parametrize("samples", ["a batch", "vmap"])
def test_samples_are_followed_beside_one_that_is_lost(samples: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ``torch.vmap`` mapped over them they were followed by the steps of what moves."""
    rhs, start, A, _ = system("heat beside what turns and grows", monkeypatch)
    y0, w = torch.stack((start, torch.full_like(start, torch.nan), 2 * start)), torch.arange(len(A)) / len(A) + 0.5

    def end(y0: Tensor) -> Tensor:
        dims = 1 if y0.ndim == 2 else 0
        return ik.solve(
            ik.InitialValue(lambda t, y: rhs(t, y, 0.0), (0.0, SOON)), y0, batch_dims=dims, on_failure="nan"
        ).value

    if samples == "vmap":
        slopes = torch.vmap(torch.func.grad(lambda y: end(y)[-1] @ w.double()))(y0[::2])
    else:
        y0.requires_grad_()
        slopes = torch.autograd.grad(end(y0)[::2, -1].sum(0) @ w.double(), y0)[0][::2]
    true = w.numpy() @ scipy.linalg.expm(SOON * A)
    for slope in slopes:
        assert off(slope, true) < 5e-4


def test_samples_that_vmap_maps_over_have_each_its_own_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What turns slowly in one turns fast in the other."""
    rhs, start, A, _ = system("heat beside what turns and grows", monkeypatch)
    w, turns = torch.arange(len(A)).double() / len(A) + 0.5, torch.arange(len(A)) < 8
    rates = torch.tensor([0.1, 1.0], **DOUBLE)

    def end(y0: Tensor, rate: Tensor) -> Tensor:
        moving = lambda t, y, rate: torch.where(turns, rate, 1.0) * rhs(t, y, 0.0)  # noqa: E731
        return ik.solve(ik.InitialValue(moving, (0.0, SOON)), y0, (rate,)).value[-1] @ w

    slopes = torch.vmap(torch.func.grad(end))(start.expand(2, -1), rates)
    for slope, rate in zip(slopes, rates, strict=True):
        scale = np.where(turns.numpy(), float(rate), 1.0)[:, None]
        assert off(slope, w.numpy() @ scipy.linalg.expm(SOON * scale * A)) < 5e-4


def test_what_cannot_be_followed_is_told_by_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One turns fast in one sample alone, too long for the parts there may be."""
    rhs, start, _, _ = system("heat beside what turns and grows", monkeypatch)
    rate = torch.tensor([[0.0], [1.0]], **DOUBLE)
    monkeypatch.setattr(steps_along_variations, "_ENTRIES", 1 << 15)
    moving = lambda t, y: torch.cat((rhs(t, y, 0.0)[..., :30], rate * rhs(t, y, 0.0)[..., 30:]), -1)  # noqa: E731
    with pytest.warns(ik.ConvergenceWarning, match="but not its derivatives, by .* of their size, in samples 1: "):
        ik.solve(ik.InitialValue(moving, (0.0, END)), start.expand(2, -1), batch_dims=1)
    with torch.no_grad(), warnings.catch_warnings():  # nobody asks for derivatives
        warnings.simplefilter("error")
        ik.solve(ik.InitialValue(moving, (0.0, END)), start.expand(2, -1), batch_dims=1)


#: what is given, and whether derivatives by it are those of the equation, for what turns three times and is damped at once
GIVEN: dict[str, tuple[dict[str, Any], bool]] = {
    "few steps": ({"steps": 10}, False),
    "many steps": ({"steps": 100}, True),
    "many steps of one point": ({"steps": 100, "stages": 1}, False),
    "few steps of many points": ({"steps": 10, "stages": 7}, True),
    "an integrator": ({"integrator": lambda f, t, y0, accuracy: (t, torch.stack((y0, y0)))}, False),
    "a pair of points, at rest": ({"stages": 2}, False),
}


@pytest.mark.parametrize("name", GIVEN)
def test_given_steps_that_do_not_follow_derivatives_are_told(name: str) -> None:
    given, right = GIVEN[name]
    A = torch.tensor([[0.0, 1.0, 0.0], [-400.0, 0.0, 0.0], [0.0, 0.0, -1e5]], **DOUBLE)
    y0 = torch.zeros(3, **DOUBLE, requires_grad=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        end = ik.solve(ik.InitialValue(lambda t, y: y @ A.T, (0.0, END), **given), y0).value[-1]
    (slope,) = torch.autograd.grad(end[:2].sum(), y0)
    wrong = off(slope[:2], torch.linalg.matrix_exp(END * A)[:2, :2].sum(0).numpy())
    assert (wrong < 1e-2) == right
    assert [("those of the given steps" in str(one.message)) for one in said] == [True] * (not right)


def test_given_steps_are_followed_now_and_then_and_told_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were at each solve, four times as long as that; the same function of another matrix is another."""
    counted, along = [0], given_steps.along

    def counting(*args: Any) -> Any:
        counted[0] += 1
        return along(*args)

    monkeypatch.setattr(given_steps, "along", counting)
    given_steps._known.clear()
    y0 = torch.ones(2, **DOUBLE, requires_grad=True)
    for matrix, told in ((np.diag([-400.0, -399.0]), False), (springs(1), True)):
        A = torch.tensor(matrix, **DOUBLE)
        for solves in range(5):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                ik.solve(ik.InitialValue(lambda t, y, A: A @ y, (0.0, END), steps=10), y0, (A * (1 + 1e-9 * solves),))
            assert [("those of the given steps" in str(one.message)) for one in said] == [True] * told
    assert 2 <= counted[0] <= 8


def test_where_the_others_are_lost_without_it_a_sample_that_ends_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followed once more without the one whose solution ends, another fails: what was found together stays."""
    t, y0 = torch.tensor([0.0, 1.0, 2.0], **DOUBLE), torch.tensor([[1.0], [2.0], [3.0]], **DOUBLE)

    def once(f: Any, t: Tensor, y0: Tensor, accuracy: float, look: Any = None) -> integrators.Followed:
        states = y0.expand(len(t), -1, -1).clone()
        if bool(torch.isnan(y0).any()):
            if raises:
                raise ik.ConvergenceError("too many steps")
            states[1:, 0] = torch.nan
        states[1:, 1] = torch.nan
        return integrators.Followed(t, states)

    for way in (True, False):
        raises = way
        found = integrators._led_by_others(once)(None, t, y0, 1e-6)
        assert torch.isfinite(found.states[-1]).flatten().tolist() == [True, False, True]


def test_steps_that_follow_derivatives_take_few_factors_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for two steps beside their own, once what is damped has gone: they were three a step and more."""
    counted, factored = [0], step_systems.StepSystems.factored
    monkeypatch.setattr(steps_as_matrices, "_NUMBERS", 0)

    def counting(self: Any, i: int) -> Any:
        counted[0] += 1
        return factored(self, i)

    monkeypatch.setattr(step_systems.StepSystems, "factored", counting)
    met: list[int] = []
    along = steps_for_derivatives.along

    def asked(*args: Any) -> Any:
        met.append(len(args[2].edges) - 1)
        return along(*args)

    monkeypatch.setattr(steps_for_derivatives, "along", asked)
    product, y0 = along_diagonals(heat(60)), torch.from_numpy(np.sin(np.arange(1, 61) * np.pi / 61)).requires_grad_()
    ik.solve(ik.InitialValue(lambda t, y: product(y) + 100 * torch.sin(20 * t), (0.0, END)), y0)
    assert len(met) == 1
    assert counted[0] < 2.5 * met[0]


@pytest.mark.parametrize("wide", [False, True])
def test_systems_of_steps_are_those_of_full_matrices(wide: bool) -> None:
    """Of numbers along a line that is given out of order, and of all with all."""
    rng, (A, _), m = np.random.default_rng(0), radau(3, torch.float64, torch.device("cpu")), 12
    J = rng.normal(size=(2, 3, m, m))
    if not wide:
        order = rng.permutation(m)
        J *= (abs(order[:, None] - order) <= 1) + 0.0
    where = np.nonzero(scipy.linalg.block_diag(*J.reshape(6, m, m)))
    entries = scipy.linalg.block_diag(*J.reshape(6, m, m))[where]
    h, A = np.array([0.1, 30.0]), A.numpy()
    systems = step_systems.StepSystems(entries, *where, h, A, m)
    assert (systems.order is None) == wide
    b = rng.normal(size=(3, m, 2))
    for i in range(2):
        whole = np.eye(3 * m) - h[i] * np.block([[A[k, j] * J[i, j] for j in range(3)] for k in range(3)])
        np.testing.assert_allclose(systems.factored(i)(b), np.linalg.solve(whole, b.reshape(3 * m, 2))[-m:], rtol=1e-9)
