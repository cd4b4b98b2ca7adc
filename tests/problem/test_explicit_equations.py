"""Trajectories by explicit steps, which are their own equations: what they cost, their adjoint, and events on the way."""

from __future__ import annotations

import cmath
import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.trees import Layout
from implicitkit.linear.steps_pattern import coloured_steps
from implicitkit.problem.trajectory import steps_along_variations, steps_as_matrices
from implicitkit.problem.trajectory.collocation import Mesh
from implicitkit.problem.trajectory.events import first_crossing
from implicitkit.problem.trajectory.explicit_equations import ExplicitEquations, Substitution
from implicitkit.problem.trajectory.explicit_steps import March, follow, quartic
from implicitkit.problem.trajectory.integrators import SCIPY, get_integrator
from implicitkit.problem.trajectory.steps_as_matrices import Propagation
from implicitkit.problem.trajectory.steps_for_derivatives import Variation

DOUBLE = {"dtype": torch.float64}


def net(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(n, n, generator=generator, **DOUBLE) / n**0.5
    return W, torch.randn(8, n, generator=generator, **DOUBLE)


def by_steps(rhs: Callable[..., Tensor], t: Tensor, y0: Tensor, accuracy: float = 1e-6) -> Tensor:
    """The same steps, differentiated one after another, ``(len(t), batch, n)``."""
    with torch.no_grad():
        march = March(rhs, t, y0, accuracy)
        march.run()
    edges = march.path[0]
    return follow(rhs, edges, y0)[torch.isin(edges, t)]


@pytest.mark.parametrize("n", [2, 32])
def test_what_was_followed_is_the_solution_and_its_derivative_that_of_the_steps(n: int) -> None:
    W, y0 = net(n)
    W.requires_grad_()
    y0.requires_grad_()
    rhs = lambda t, y: torch.tanh(y @ W.T) + torch.cos(t)  # noqa: E731
    t = torch.tensor([0.0, 0.5, 2.0], **DOUBLE)
    solution = ik.solve(ik.InitialValue(rhs, t), y0, batch_dims=1)
    assert solution.steps.tolist() == [0] * 8 and solution.evaluations <= 2
    wanted = by_steps(rhs, t, y0).movedim(0, 1)
    torch.testing.assert_close(solution.value, wanted, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(
        torch.autograd.grad(solution.value.square().sum(), (W, y0)),
        torch.autograd.grad(wanted.square().sum(), (W, y0)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("n", "solved_by"), [(32, [True]), (2, [])])
def test_a_wide_state_has_its_adjoint_by_substitution(
    n: int, solved_by: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And many samples of a narrow one by factors, all steps at once."""
    solved, sums = [], Substitution._sums

    def counted(self: Substitution, b: Tensor) -> Tensor:
        solved.append(self.exact)
        return sums(self, b)

    monkeypatch.setattr(Substitution, "_sums", counted)
    W, y0 = net(n)
    W.requires_grad_()
    y0 = y0.repeat(1 if n > 2 else 20, 1)
    end = ik.solve(ik.InitialValue(lambda t, y: torch.tanh(y @ W), (0.0, 2.0)), y0, batch_dims=1).value[:, -1]
    torch.autograd.grad(end.sum(), W)
    assert [exact for exact in solved if exact] == solved_by


def test_several_derivatives_and_second_ones_of_a_wide_state() -> None:
    W, y0 = net(40)
    k = torch.tensor([0.5, 0.7], **DOUBLE)

    def loss(k: Tensor) -> Tensor:
        rhs = lambda t, y, k: torch.tanh(k[0] * y @ W) - k[1] * y  # noqa: E731
        return ik.solve(ik.InitialValue(rhs, (0.0, 1.0)), y0, (k,), batch_dims=1).value[:, -1].square().sum(1)[:2]

    jacobian = torch.func.jacrev(loss)(k)
    torch.testing.assert_close(torch.func.jacfwd(loss)(k), jacobian, rtol=1e-8, atol=0)
    k.requires_grad_()
    rows = [torch.autograd.grad(loss(k)[i], k)[0] for i in range(2)]
    torch.testing.assert_close(torch.stack(rows), jacobian, rtol=1e-8, atol=0)


def test_what_is_asked_of_a_right_hand_side_is_asked_once() -> None:
    """Whether it hides something from autograd, and whether its samples are independent: not at each solve."""
    W, y0 = net(32)
    tally = itertools.count()  # which is not among what tells one function from another, as a number would be

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        next(tally)
        return torch.tanh(y @ W)

    def derivative() -> int:
        begun = next(tally)
        start = y0.clone().requires_grad_()
        path = ik.solve(ik.InitialValue(rhs, (0.0, 0.5)), start, batch_dims=1).value
        torch.autograd.grad(path.sum(), start)
        return next(tally) - begun - 1

    first, second = derivative(), derivative()
    assert second < first
    assert derivative() == second


@pytest.mark.parametrize("accuracy", [1e-6, 1e-8, 1e-12])
def test_an_accuracy_beyond_that_of_the_numbers(accuracy: float) -> None:
    """Is that of rounding: steps were as long as one by an accuracy of 1e-3."""
    march = March(lambda t, y: torch.stack((y[:, 1], -y[:, 0]), 1), torch.tensor([0.0, 10.0]), torch.eye(2), accuracy)
    march.run()
    exact = torch.tensor([[math.cos(10), -math.sin(10)], [math.sin(10), math.cos(10)]])
    torch.testing.assert_close(march.path[1][-1], exact, rtol=0, atol=5e-5)


@pytest.mark.parametrize("moves", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 40])
def test_derivatives_from_a_state_at_rest(n: int, moves: float) -> None:
    """Along what decays, or turns, in a thousandth of the time, though nothing of that is in the trajectory."""

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        a, b, c = y.unbind(-1)
        return torch.stack((-0.1 * a, -200.0 * b + 100.0 * c, -100.0 * b - 200.0 * c), -1)

    def end(y0: Tensor) -> Tensor:
        return ik.solve(ik.InitialValue(rhs, (0.0, 5.0)), y0, batch_dims=1).value[:, -1]

    y0 = torch.tensor([moves, 0.0, 0.0], **DOUBLE).repeat(n, 1)
    slopes = torch.func.vjp(end, y0)[1](torch.ones_like(y0))[0]
    wanted = torch.tensor([math.exp(-0.5), 0.0, 0.0], **DOUBLE).expand_as(y0)
    torch.testing.assert_close(slopes, wanted, rtol=1e-5, atol=1e-3)


#: right-hand side, its Jacobian at rest, and the requested times.
AT_REST: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[list[float]], list[float]]] = {
    "what grows": (lambda t, y: 5 * y.sin(), [[5.0]], [0.0, 3.0]),
    "what turns": (lambda t, y: torch.stack((y[1], -100 * y[0].sin())), [[0.0, 1.0], [-100.0, 0.0]], [0.0, 3.0]),
    "what turns, looked at often": (
        lambda t, y: torch.stack((y[1], -100 * y[0].sin())), [[0.0, 1.0], [-100.0, 0.0]], [0.1 * k for k in range(31)],
    ),
    "away from zero": (lambda t, y: -3 * (y - 2) + (y - 2) ** 3, [[-3.0]], [1.0, 2.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", AT_REST)
def test_derivatives_from_rest_are_those_of_the_linear_equation(name: str) -> None:
    """Nothing moves, and the steps were one or as many as requested times: 556 for ``exp(15)``."""
    rhs, jacobian, times = AT_REST[name]
    t, A = torch.tensor(times, **DOUBLE), torch.tensor(jacobian, **DOUBLE)
    y0 = torch.full((len(A),), 2.0 if name == "away from zero" else 0.0, **DOUBLE)
    end = lambda y0: ik.solve(ik.InitialValue(rhs, t), y0).value[-1]  # noqa: E731
    wanted = torch.linalg.matrix_exp((t[-1] - t[0]) * A)
    torch.testing.assert_close(torch.func.jacrev(end)(y0), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.func.jacfwd(end)(y0), wanted, rtol=1e-5, atol=1e-5)
    both = torch.vmap(torch.func.jacrev(end))(torch.stack((y0, y0 + 1e-9)))
    torch.testing.assert_close(both[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("rate", [2.0, -5.0])
@pytest.mark.parametrize("off", [1e-9, 1e-7, 1e-5, 1e-3])
def test_derivatives_near_a_state_of_rest(off: float, rate: float) -> None:
    """By ``z = y - 2``, ``z' = r z - z^3``: ``1 / z^2 = (1 / z_0^2 - 1 / r) e^{-2 r t} + 1 / r``."""
    rhs = lambda t, y: rate * (y - 2) - (y - 2) ** 3  # noqa: E731
    end = lambda y0: ik.solve(ik.InitialValue(rhs, (0.0, 3.0)), y0).value[-1]  # noqa: E731
    found = torch.func.jacrev(end)(torch.tensor([2.0 + off], **DOUBLE))
    grown = math.exp(2 * rate * 3.0)
    wanted = math.exp(rate * 3.0) / (1 + off**2 * (grown - 1) / rate) ** 1.5
    torch.testing.assert_close(found, torch.tensor([[wanted]], **DOUBLE), rtol=1e-3, atol=0)


#: right-hand side, state, and the integral of its Jacobian: what is at zero grows or turns, beside what hardly moves.
BESIDE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], list[list[float]]]] = {
    "what grows": (lambda t, y: torch.stack((-0.02 * y[0], 5 * y[1])), [1.0, 0.0], [[-0.02, 0.0], [0.0, 5.0]]),
    "what grows for a while": (
        lambda t, y: torch.stack((-0.1 * y[0], 10 * torch.cos(2 * t) * y[1])), [1.0, 0.0],
        [[-0.1, 0.0], [0.0, 5 * math.sin(2)]],
    ),
    "what turns": (
        lambda t, y: torch.stack((-0.02 * y[0], 5 * y[2], -5 * y[1])), [1.0, 0.0, 0.0],
        [[-0.02, 0.0, 0.0], [0.0, 0.0, 5.0], [0.0, -5.0, 0.0]],
    ),
    "what grows by what hardly moves": (
        lambda t, y: torch.stack((-0.02 * y[0], 5 * y[0] * y[1].sin())), [1.0, 0.0],
        [[-0.02, 0.0], [0.0, 250 * (1 - math.exp(-0.02))]],
    ),
    "what grows at rest, and is stiff": (
        lambda t, y: torch.stack((4 * y[0], y[0] - 500 * y[1])), [0.0, 0.0], [[4.0, 0.0], [1.0, -500.0]],
    ),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", BESIDE)
def test_derivatives_beside_what_hardly_moves(
    name: str, dtype: torch.dtype, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the variational equation, by the few steps of the trajectory they were off by percents."""
    if not few:  # steps are no matrices
        monkeypatch.setattr("implicitkit.problem.trajectory.steps_as_matrices._NUMBERS", 0)
    rhs, start, whole = BESIDE[name]
    y0 = torch.tensor(start, dtype=dtype, requires_grad=True)
    end = ik.solve(ik.InitialValue(rhs, (0.0, 1.0)), y0).value[-1]
    weights = torch.arange(1.0, len(start) + 1, **DOUBLE)
    found = torch.autograd.grad(end @ weights.to(dtype), y0)[0].double()
    wanted = weights @ torch.linalg.matrix_exp(torch.tensor(whole, **DOUBLE))
    assert float((found - wanted).norm() / wanted.norm()) < (1e-5 if dtype == torch.float64 else 3e-4)


#: right-hand side, state, end, and the integral of its Jacobian in all but the first number, which is stiff and alone.
BESIDE_STIFF: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], list[list[float]]]] = {
    "what turns": (
        lambda t, y: torch.stack((-1000 * (y[0] - 1), y[2], -25 * y[1])), [0.0, 0.0, 0.0], [[0.0, 3.0], [-75.0, 0.0]],
    ),
    "what turns, at rest": (
        lambda t, y: torch.stack((-1000 * (y[0] - 1), y[2], -25 * y[1])), [1.0, 0.0, 0.0], [[0.0, 3.0], [-75.0, 0.0]],
    ),
    "what turns beside long steps": (
        lambda t, y: torch.stack((-1000 * (y[0] - 1), y[2], -1600 * y[1])), [0.0, 0.0, 0.0], [[0.0, 3.0], [-4800.0, 0.0]],
    ),
    "what grows": (lambda t, y: torch.stack((-1e4 * (y[0] - torch.cos(t)), 5 * y[1])), [0.0, 0.0], [[15.0]]),
    "a species that feeds on itself": (
        lambda t, y: torch.stack((-1e4 * (y[0] - 1), 4 * y[0] * y[1] - y[1] - y[1] ** 2)), [0.0, 0.0],
        [[9.0 - 4e-4]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE_STIFF)
def test_derivatives_beside_what_is_stiff(name: str) -> None:
    """Those of the variational equation; by its long implicit steps they were off by as much as they are."""
    rhs, start, whole = BESIDE_STIFF[name]
    calls = 0

    def counted(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return rhs(t, y)

    y0 = torch.tensor(start, **DOUBLE, requires_grad=True)
    end = ik.solve(ik.InitialValue(counted, (0.0, 3.0)), y0).value[-1]
    found = torch.autograd.grad(end[1:].sum(), y0)[0][1:]
    wanted = torch.linalg.matrix_exp(torch.tensor(whole, **DOUBLE)).sum(0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * float(wanted.norm()))
    assert calls < (200 if "at rest" in name else 1_200)


#: what is too many, and what is said then.
TOO_MANY = {"steps to keep": ("_ENTRIES", 1 << 10, "by 1 of"), "parts": ("_MORE", 30, "cannot be told")}


@pytest.mark.parametrize("what", [None, *TOO_MANY])
def test_derivatives_that_steps_do_not_follow_are_told(what: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps short enough are too many to look at: off by as much as they are, without a word.  What is too much as
    matrices is not along variations."""
    rhs, start, _ = BESIDE_STIFF["what turns"]
    monkeypatch.setattr(steps_as_matrices, "_NUMBERS", 1 << 13)
    solve = lambda end: ik.solve(ik.InitialValue(rhs, (0.0, end)), torch.tensor(start, **DOUBLE))  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solve(0.1)
        if what is None:
            solve(8.0)
            return
    name, value, says = TOO_MANY[what]
    monkeypatch.setattr(steps_along_variations, name, value)
    with pytest.warns(ik.ConvergenceWarning, match="but not its derivatives.*" + says):
        solve(8.0)


@pytest.mark.parametrize("rtol", [None, 1e-7])
def test_rounding_asks_for_no_shorter_steps(rtol: float | None) -> None:
    """Of an epidemic that begins with one in a million, in single precision: 9199 steps, whose equations were not met."""
    slopes: list[int] = []

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        slopes.append(1)
        new, well = 0.5 * y[0] * y[1] / 1e6, 0.1 * y[1]
        return torch.stack((-new, new - well, well))

    end = lambda y0, **given: ik.solve(ik.InitialValue(rhs, (0.0, 30.0, 100.0)), y0, **given).value[-1]  # noqa: E731
    y0 = torch.tensor([1e6 - 1, 1.0, 0.0])
    found, wanted = torch.func.jacrev(partial(end, rtol=rtol))(y0), torch.func.jacrev(end)(y0.double())
    assert float((found - wanted).norm() / wanted.norm()) < 2e-3
    assert len(slopes) < 4_000


def test_derivatives_of_what_is_damped_ask_for_no_shorter_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Robertson's kinetics: its own steps do."""
    rhs = lambda t, y: torch.stack((  # noqa: E731
        -0.04 * y[0] + 1e4 * y[1] * y[2], 0.04 * y[0] - 1e4 * y[1] * y[2] - 3e7 * y[1] ** 2, 3e7 * y[1] ** 2
    ))  # fmt: skip
    monkeypatch.setattr(Propagation, "_with", lambda self, added: pytest.fail("halved") if added else self.edges)
    ik.solve(ik.InitialValue(rhs, (0.0, 1.0)), torch.tensor([1.0, 0.0, 0.0], **DOUBLE))


@pytest.mark.parametrize("other", [math.nan, -3.0])
def test_forcing_is_followed_beside_a_sample_that_is_lost(other: float) -> None:
    """``y' = -0.2 y + p sin(20 t)`` at ``p = 0``; the other one is no number, or runs away before the end."""
    rhs = lambda t, y: torch.where(y < 0, -y * y, -0.2 * y) + p * torch.sin(20 * t)  # noqa: E731
    p = torch.zeros((), requires_grad=True, **DOUBLE)
    y0 = torch.tensor([[1.0], [other]], **DOUBLE)
    found = ik.solve(ik.InitialValue(rhs, (0.0, 3.0)), y0, batch_dims=1, on_failure="nan")
    assert found.converged.tolist() == [True, False]
    (slope,) = torch.autograd.grad(found.value[0, -1].sum(), p)
    wanted = (20 * math.exp(-0.6) + 0.2 * math.sin(60) - 20 * math.cos(60)) / (0.2**2 + 20**2)
    assert float(slope) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("integrator", ["auto", "dormand_prince"])
@pytest.mark.parametrize("end", [3.0, -3.0])
def test_one_whose_solution_ends_leaves_the_others_their_steps(integrator: str, end: float) -> None:
    """``y' = +-y^2`` from 3 ends at a third, after hundreds of ever shorter steps: trajectories of ``y' = -y / 10`` are as
    they are alone, by as many steps, and what ends is known up to there at the times that are asked for."""
    sign = 1 if end > 0 else -1
    rhs = lambda t, y: torch.where(y > 2, sign * y * y, -0.1 * sign * y)  # noqa: E731
    t = torch.tensor([0.0, 0.1, 0.2, 3.0], **DOUBLE) * sign
    follow, y0 = get_integrator(integrator), torch.tensor([[1.0], [3.0], [2.0]], **DOUBLE)
    alone, beside = follow(rhs, t, y0[[0, 2]], 1e-6), follow(rhs, t, y0, 1e-6)
    assert torch.equal(beside.edges, alone.edges)
    assert torch.equal(beside.states[:, [0, 2]], alone.states)
    asked = beside.states[torch.isin(beside.edges, t), 1, 0]
    torch.testing.assert_close(asked[:3], 1 / (1 / 3 - t.abs()[:3]), rtol=1e-5, atol=0)
    assert asked[3].isnan()


def test_derivatives_at_rest_beside_a_sample_that_is_lost() -> None:
    """By the few steps of the trajectory they were off by more than themselves."""
    rhs = lambda t, y: torch.stack((y[:, 1], -4 * y[:, 0]), 1)  # noqa: E731
    y0 = torch.tensor([[0.0, 0.0], [math.nan, 0.0]], **DOUBLE).requires_grad_()
    found = ik.solve(ik.InitialValue(rhs, (0.0, 3.0)), y0, batch_dims=1, on_failure="nan")
    assert found.converged.tolist() == [True, False]
    slope = torch.autograd.grad(found.value[0, -1].sum(), y0)[0][0]
    turned = torch.linalg.matrix_exp(3 * torch.tensor([[0.0, 1.0], [-4.0, 0.0]], **DOUBLE))
    torch.testing.assert_close(slope, turned.sum(0), rtol=1e-5, atol=0)


#: right-hand side and state: what moves comes to rest, and what decays there is hardly left in any derivative.
SETTLING: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], float]] = {
    "an epidemic": (
        lambda t, y: torch.stack((-1.5 * y[0] * y[1], (1.5 * y[0] - 0.5) * y[1], 0.5 * y[1])), [0.99, 0.01, 0.0], 30.0,
    ),
    "kinetics": (
        lambda t, y: torch.stack((-y[0] + 0.5 * y[1], y[0] - 1.2 * y[1], 0.7 * y[1])), [1.0, 0.0, 0.0], 20.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTLING)
def test_what_comes_to_rest_is_followed_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its derivatives are right by its own steps; they were followed by others, at four times the cost."""
    rhs, start, end = SETTLING[name]
    monkeypatch.setattr(Variation, "begin", lambda *_: pytest.fail("it is followed once more"))
    monkeypatch.setattr(Propagation, "_with", lambda self, added: pytest.fail("halved") if added else self.edges)
    y0 = torch.tensor(start, **DOUBLE)
    by = lambda **given: lambda y0: ik.solve(ik.InitialValue(rhs, (0.0, end), **given), y0).value[-1]  # noqa: E731
    found, wanted = torch.func.jacrev(by())(y0), torch.func.jacrev(by(steps=100))(y0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=3e-4 * float(wanted.norm()))


def _pieces(t: Tensor, u: Tensor) -> Tensor:
    """``u_i`` between ``i / 4`` and ``(i + 1) / 4``."""
    return ((t >= torch.arange(4) / 4) & (t < torch.arange(1, 5) / 4)).to(u) @ u


_W = torch.linspace(-1.0, 1.0, 12, **DOUBLE).reshape(6, 2)
#: the forcing ``g(t, p)`` of ``y' = -0.2 y + g``, which is zero, ``p``, and the times asked for.
UNSEEN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], list[float]]] = {
    "what turns": (lambda t, p: (p * torch.sin(20 * t)).sum(), [0.0], [0.0, 4.0]),
    "what turns, beside what is seen": (lambda t, p: p[0] * torch.sin(20 * t) + p[1], [0.0, 0.1], [0.0, 4.0]),
    "a pulse": (lambda t, p: (p * torch.exp(-(((t - 3.3) / 0.1) ** 2))).sum(), [0.0], [0.0, 6.0]),
    "pieces": (_pieces, [0.0] * 4, [0.0, 0.25, 0.5, 0.75, 1.0]),
    "pieces between times": (_pieces, [0.0] * 4, [0.0, 1.0]),
    "a control": (lambda t, p: torch.sin(12 * torch.arange(1, 5) * t) @ p, [0.0] * 4, [0.0, 2.0]),
    "a last layer": (
        lambda t, p: torch.tanh(_W @ torch.stack((torch.sin(15 * t), torch.cos(15 * t)))) @ p, [0.0] * 6, [0.0, 2.0],
    ),
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in UNSEEN for how in ("args", "captured")]
    + [("a pulse", "jvp"), ("pieces", "captured, jvp")],
)
def test_derivatives_in_what_the_trajectory_does_not_see(name: str, how: str) -> None:
    """``dy(T)/dp = int exp(-0.2 (T - t)) dg/dp dt``, by a fine midpoint rule; they were off by
    a tenth or more."""
    forcing, start, times = UNSEEN[name]
    p, t, y0 = torch.tensor(start, **DOUBLE), torch.tensor(times, **DOUBLE), torch.ones(1, **DOUBLE)

    def end(p: Tensor) -> Tensor:
        if how.startswith("captured"):
            return ik.solve(ik.InitialValue(lambda t, y: -0.2 * y + forcing(t, p), t), y0).value[-1, 0]
        return ik.solve(ik.InitialValue(lambda t, y, p: -0.2 * y + forcing(t, p), t), y0, (p,)).value[-1, 0]

    fine = (torch.arange(5_000, **DOUBLE) + 0.5) * t[-1] / 5_000
    slopes = torch.vmap(torch.func.jacrev(forcing, argnums=1), in_dims=(0, None))(fine, p)
    wanted = (torch.exp(-0.2 * (t[-1] - fine)) @ slopes) * t[-1] / 5_000
    if "jvp" in how:
        way = torch.arange(1.0, len(p) + 1, **DOUBLE)
        found, wanted = torch.func.jvp(end, (p,), (way,))[1], wanted @ way
    else:
        given = p.clone().requires_grad_()
        p = given
        found = torch.autograd.grad(end(given), given)[0]
    assert float((found - wanted).norm() / wanted.norm()) < 5e-4


@pytest.mark.parametrize("captured", [False, True])
def test_second_derivatives_in_a_square_that_nothing_sees(captured: bool) -> None:
    """``y' = -0.2 y + p^2 sin(40 t)^2`` at ``p = 0``, whose first derivative is zero: the second was off by a fifth."""
    p, y0 = torch.zeros((), **DOUBLE, requires_grad=True), torch.zeros(1, **DOUBLE)
    rhs = lambda t, y, q: -0.2 * y + q**2 * torch.sin(40 * t) ** 2  # noqa: E731
    problem = ik.InitialValue((lambda t, y: rhs(t, y, p)) if captured else rhs, (0.0, 5.0))
    end = ik.solve(problem, y0, () if captured else (p,)).value[-1, 0]
    (slope,) = torch.autograd.grad(end, p, create_graph=True)
    (bend,) = torch.autograd.grad(slope, p)
    fine = (torch.arange(20_000, **DOUBLE) + 0.5) * 5 / 20_000
    wanted = 2 * (torch.exp(-0.2 * (5 - fine)) * torch.sin(40 * fine) ** 2).mean() * 5
    assert float(slope.detach()) == 0 and float(bend) == pytest.approx(float(wanted), rel=1e-3)


@pytest.mark.parametrize("given", [{}, {"stages": 2}])
def test_implicit_steps_follow_what_the_trajectory_does_not_see(given: dict[str, Any]) -> None:
    """Those of a stiff equation, and of collocation."""
    rhs = lambda t, y, p: torch.stack((-0.2 * y[0] + p * torch.sin(20 * t), y[0] - 2000 * y[1]))  # noqa: E731
    if given:
        rhs = lambda t, y, p: torch.stack((-0.2 * y[0] + p * torch.sin(20 * t), y[0] - y[1]))  # noqa: E731
    p, y0 = torch.zeros((), **DOUBLE, requires_grad=True), torch.tensor([1.0, 0.0], **DOUBLE)
    end = ik.solve(ik.InitialValue(rhs, (0.0, 5.0), **given), y0, (p,)).value[-1, 0]
    a = 0.2 + 20j  # int exp(-0.2 (T - t)) sin(20 t)
    wanted = ((cmath.exp(20j * 5.0) - cmath.exp(-0.2 * 5.0)) / a).imag
    assert float(torch.autograd.grad(end, p)[0]) == pytest.approx(wanted, rel=5e-4)


def test_a_step_is_known_in_between_to_order_four() -> None:
    def error(steps: int) -> float:
        edges = torch.linspace(0, 3, steps + 1, **DOUBLE)
        exact, halves = edges.exp()[:, None, None], (edges[:-1] + edges.diff() / 2).exp()[:, None, None]
        between = quartic(edges, exact, exact.unbind(), halves.unbind())
        step, x = torch.arange(steps), torch.full((steps,), 0.2, **DOUBLE)
        return float((between(step, x)[:, 0, 0] - (edges[:-1] + x * edges.diff()).exp()).abs().max())

    assert math.log2(error(10) / error(20)) == pytest.approx(5, abs=0.3)


def test_the_pattern_of_explicit_steps_is_that_of_their_jacobian() -> None:
    """A chain of which each number looks at the next: six stages reach six numbers further."""
    n, steps = 10, 4
    chain = sp.csr_matrix(sp.eye(n, k=1, dtype=bool))
    ready = coloured_steps(chain, 8, 1, False, True)
    problem = ExplicitEquations(
        lambda t, y: 2 * y.roll(-1, -1) * (torch.arange(n) < n - 1), Mesh.even(1, steps, torch.float64, torch.device("cpu")),
        Layout(torch.zeros(n, **DOUBLE), 0), 1,
    )  # fmt: skip
    Y, t = torch.ones(steps, 1, n, **DOUBLE), torch.tensor([0.0, 1.0], **DOUBLE)
    J = torch.func.jacrev(lambda Y: problem.residual(Y, torch.ones(n, **DOUBLE), t))(Y).reshape(steps * n, steps * n)
    assert ready is not None
    pattern = torch.from_numpy(ready.pattern.toarray())[: steps * n, : steps * n]
    assert torch.equal(J != 0, pattern)


# ---------------------------------------------------------------------------------------------------------------- events
@pytest.mark.parametrize("depth", [0.3, 0.01])
@pytest.mark.parametrize("steps", [None, 60])
def test_two_changes_about_a_turn(depth: float, steps: int | None) -> None:
    """``sin t`` is above ``cos(depth)`` for so short a time about ``pi / 2`` that no point need be there."""
    event = lambda t, y: math.cos(depth) - y[0]  # noqa: E731
    problem = ik.InitialValue(lambda t, y: torch.cos(t) + 0 * y, (0.0, 10.0), event, steps=steps, accuracy=1e-8)
    time = ik.solve(problem, torch.zeros(1, **DOUBLE)).value["time"]
    tolerance = 1e-6 if steps is None else 2e-3
    assert float(time) == pytest.approx(math.pi / 2 - depth, abs=tolerance)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    ("shape", "wide"),
    [(torch.cosh, 1e-5), (lambda s: s.abs() ** 1.5, 5e-4), (lambda s: torch.where(s < 0, 9, 1) * s * s, 5e-4)],
)
def test_a_turn_between_two_points(shape: Callable[[Tensor], Tensor], wide: float, mapped: bool) -> None:
    """Beyond zero by less than a thousandth of a step, of which 32 points are looked at; the first of two such turns."""
    edges = torch.arange(9.0, **DOUBLE)
    least = shape(torch.zeros((), **DOUBLE))
    depth = shape(torch.tensor(wide, **DOUBLE)) - least

    def time(centre: Tensor) -> Tensor:
        event = lambda t, y: torch.minimum(shape(t - centre), shape(t - centre - 3)) - least - depth  # noqa: E731
        return first_crossing(event, edges, lambda step, x: torch.zeros(len(x), 1, 1, **DOUBLE)).time

    centres = 2 + torch.tensor([0.1, 0.237, 0.777, 0.5 + 1 / 64], **DOUBLE)
    found = torch.func.vmap(time)(centres) if mapped else torch.stack([time(c) for c in centres])
    assert bool((found <= centres).all() and (found > centres - 1e-3).all())


def test_a_turn_under_vmap() -> None:
    def time(level: Tensor) -> Tensor:
        event = lambda t, y: level - y[0]  # noqa: E731
        problem = ik.InitialValue(lambda t, y: torch.cos(t) + 0 * y, (0.0, 4.0), event, steps=16)
        return ik.solve(problem, torch.zeros(1, **DOUBLE)).value["time"]

    levels = torch.tensor([0.5, 0.9999], **DOUBLE)
    torch.testing.assert_close(torch.func.vmap(time)(levels), torch.asin(levels), rtol=1e-3, atol=0)


def test_an_event_that_first_goes_away_from_zero() -> None:
    """Its line through the first two values leads to times before the beginning: nothing is looked at there."""
    rhs = lambda t, y: torch.stack((y[1], 0.02 * y[1] - y[0]))  # noqa: E731
    found = ik.solve(
        ik.InitialValue(rhs, (0.0, 200.0), lambda t, y: y[0] - 2), torch.tensor([1.0, 0.0], **DOUBLE)
    ).value
    w = math.sqrt(1 - 1e-4)
    time = found["time"]
    exact = torch.exp(0.01 * time) * (torch.cos(w * time) - 0.01 / w * torch.sin(w * time))
    assert float(exact) == pytest.approx(2, abs=1e-3) and 60 < float(time) < 80
    with pytest.raises(ik.ConvergenceError, match="wherever it was looked at: it is nan and nan there"):
        ik.solve(ik.InitialValue(rhs, (0.0, 50.0), lambda t, y: torch.log(-1 - t)), torch.ones(2, **DOUBLE))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("integrator", ["auto", "dormand_prince", *(f"scipy.{name}" for name in SCIPY)])
def test_an_event_by_each_integrator(integrator: str) -> None:
    """``cos(w t) = c``: on the long steps of a method of order eight, implicit ones of order five were off by 1e-4."""

    def time(p: Tensor) -> Tensor:
        rhs = lambda t, y: torch.stack((y[1], -p[0] * y[0]))  # noqa: E731
        problem = ik.InitialValue(rhs, (0.0, 20.0), lambda t, y: y[0] - p[1], integrator=integrator)
        return ik.solve(problem, torch.tensor([1.0, 0.0], **DOUBLE)).value["time"]

    exact = lambda p: torch.acos(p[1]) / p[0].sqrt()  # noqa: E731
    p = torch.tensor([1.0, -0.3], requires_grad=True, **DOUBLE)
    a, b = time(p), exact(p)
    for ours, theirs in ((a, b), (torch.autograd.grad(a, p)[0], torch.autograd.grad(b, p)[0])):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_event_whose_time_the_steps_are_too_long_for_is_doubted() -> None:
    rhs = lambda t, y: torch.stack((y[1], -y[0]))  # noqa: E731
    problem = ik.InitialValue(rhs, (0.0, 20.0), lambda t, y: y[0], integrator="scipy.DOP853", stages=1)
    with pytest.warns(ik.ConvergenceWarning, match="differ by"):
        ik.solve(problem, torch.tensor([1.0, 0.0], **DOUBLE))


@pytest.mark.parametrize("end", [20.0, -20.0])
def test_a_trajectory_is_followed_to_its_event_and_not_far_beyond(end: float) -> None:
    latest = 0.0

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        nonlocal latest
        latest = max(latest, abs(float(t))) if not torch._C._functorch.is_batchedtensor(t) else latest
        return torch.stack((y[1], -y[0]))

    found = ik.solve(ik.InitialValue(rhs, (0.0, end), lambda t, y: y[0]), torch.tensor([1.0, 0.0], **DOUBLE)).value
    assert float(found["time"]) == pytest.approx(math.copysign(math.pi / 2, end), abs=1e-6)
    assert latest < 5
    assert abs(float(found["state"][1])) == pytest.approx(1.0, abs=1e-6)


def test_an_event_just_behind_a_step() -> None:
    """The last step, which would be very short, is made one with the step before it."""
    edges: list[Tensor] = []

    def event(t: Tensor, y: Tensor) -> Tensor:
        return t - edges[0]

    rhs = lambda t, y: -y * torch.cos(t)  # noqa: E731
    y0 = torch.ones(1, **DOUBLE)
    march = March(lambda t, y: rhs(t, y), torch.tensor([0.0, 9.0], **DOUBLE), y0[None], 1e-6)
    march.run()
    edges.append(march.path[0][3] + 1e-9)
    found = ik.solve(ik.InitialValue(rhs, (0.0, 9.0), event), y0).value
    torch.testing.assert_close(found["time"], edges[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(found["state"][0], torch.exp(-torch.sin(edges[0])), rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------------------------------ fits
def test_a_fit_of_rates_takes_few_trajectories() -> None:
    """40 if it is doubted that a clear minimum is one: differences of gradients far beside it look as of an inflection."""

    def rhs(t: Tensor, y: Tensor, p: Tensor) -> Tensor:
        return torch.stack([p[0] * y[0] - p[1] * y[0] * y[1], -p[2] * y[1] + p[3] * y[0] * y[1]])

    t, y0 = torch.linspace(0, 10, 20, **DOUBLE), torch.tensor([1.0, 0.5], **DOUBLE)
    path: Any = lambda p: ik.solve(ik.InitialValue(rhs, t), y0, (p,)).value  # noqa: E731
    true = torch.tensor([1.0, 0.5, 0.8, 0.3], **DOUBLE)
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(20, 2)))
    data = path(true) + 0.01 * noise
    found = ik.least_squares(lambda p: (path(p) - data).flatten(), torch.tensor([1.2, 0.4, 0.7, 0.4], **DOUBLE))
    assert found.evaluations <= 20
    torch.testing.assert_close(found.value, true, rtol=0.05, atol=0)


def test_defaults_in_single_precision_leave_three_digits_and_more() -> None:
    """Of a trajectory and its derivative, over one and a half rounds of Lotka and Volterra's equations."""

    def end(y0: Tensor) -> Tensor:
        rhs = lambda t, y: torch.stack((1.1 * y[0] - 0.4 * y[0] * y[1], 0.1 * y[0] * y[1] - 0.4 * y[1]))  # noqa: E731
        accuracy = 1e-10 if y0.dtype == torch.float64 else None
        return ik.solve(ik.InitialValue(rhs, (0.0, 10.0), accuracy=accuracy), y0).value[-1]

    y0 = torch.tensor([10.0, 5.0])
    for f in (end, torch.func.jacrev(end)):
        found, wanted = f(y0).double(), f(y0.double())
        assert float((found - wanted).norm() / wanted.norm()) < 5e-4


@pytest.mark.parametrize(
    ("transform", "captured"),
    [("backward", True), ("grad", False), ("grad", True), ("jvp", True), ("vmap(grad)", True)],
)
def test_shooting_from_inside_a_transform(transform: str, captured: bool) -> None:
    """Two numbers, so that the stages are sums that autograd records: ``y' = -r y^2`` from ``s`` to ``y(1) = end``."""
    t = torch.tensor([0.0, 1.0], **DOUBLE)

    def missed(s: Tensor, r: Tensor) -> Tensor:
        if captured:
            path = ik.solve(ik.InitialValue(lambda t, y: -r * y * y, t), torch.stack((s, 0 * s)))
        else:
            path = ik.solve(ik.InitialValue(lambda t, y, r: -r * y * y, t), torch.stack((s, 0 * s)), (r,))
        return path.value[-1, 0] - 0.3

    def start(r: Tensor) -> Tensor:
        begin = torch.tensor(0.5, **DOUBLE)
        return (ik.root(lambda s: missed(s, r), begin) if captured else ik.root(missed, begin, (r,))).value

    r = torch.tensor(1.0, **DOUBLE)
    if transform == "backward":
        leaf = r.clone().requires_grad_()
        (found,) = torch.autograd.grad(start(leaf), leaf)
    elif transform == "grad":
        found = torch.func.grad(start)(r)
    elif transform == "jvp":
        found = torch.func.jvp(start, (r,), (torch.ones_like(r),))[1]
    else:
        found = torch.func.vmap(torch.func.grad(start))(torch.stack((r, r)))[1]
    torch.testing.assert_close(found, torch.tensor(0.09 / 0.49, **DOUBLE), rtol=1e-3, atol=0)  # s = end / (1 - r end)
