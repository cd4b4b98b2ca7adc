"""Trajectories as roots: values, orders, derivatives and events against closed forms."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.nn import functional as F

import implicitkit as ik
from implicitkit.linear.jacobian import JacobianMatrix
from implicitkit.linear.steps_pattern import coloured_steps
from implicitkit.problem.trajectory.collocation import radau
from implicitkit.problem.trajectory.explicit_steps import follow
from implicitkit.problem.trajectory.integrators import dormand_prince
from implicitkit.problem.trajectory.running_sums import RunningSums
from implicitkit.sparsity.patterns import SMALLEST

T = torch.tensor([0.0, 0.3, 1.0, 1.7], dtype=torch.float64)


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def oscillate(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
    return torch.stack([y[..., 1], -k * y[..., 0]], -1)


def oscillation(t: Tensor, y0: Tensor, k: Tensor) -> Tensor:
    w = k.sqrt()
    c, s = (w * t).cos(), (w * t).sin()
    return torch.stack([y0[0] * c + y0[1] * s / w, y0[1] * c - y0[0] * w * s], -1)


# name: rhs, start, parameter, closed form of the first component (or of the whole state)
ROWS: dict[str, tuple[Callable[..., Any], Any, float, Callable[[Tensor, Tensor], Any]]] = {
    "decay": (lambda t, y, k: -k * y, double(2.0), 0.7, lambda t, k: 2 * (-k * t).exp()[:, None]),
    "logistic": (
        lambda t, y, k: k * y * (1 - y),
        double(0.2),
        2.0,
        lambda t, k: (0.2 / (0.2 + 0.8 * (-k * t).exp()))[:, None],
    ),
    "time in it": (lambda t, y, k: k * t * y, double(1.0), 0.5, lambda t, k: (k * t**2 / 2).exp()[:, None]),
    "oscillator": (oscillate, double(1.0, 0.5), 2.0, lambda t, k: oscillation(t, double(1.0, 0.5), k)),
    "a number": (lambda t, y, k: k * y, torch.tensor(1.0, dtype=torch.float64), 0.5, lambda t, k: (k * t).exp()),
    "complex": (lambda t, y, k: 1j * k * y, double(1.0) + 0j, 1.5, lambda t, k: (1j * k * t).exp()[:, None]),
    "tree": (
        lambda t, y, k: {"a": -k * y["a"], "b": y["a"].sum(-1)},
        {"a": double(1.0, 3.0), "b": torch.tensor(0.0, dtype=torch.float64)},
        0.7,
        lambda t, k: {"a": double(1.0, 3.0) * (-k * t).exp()[:, None], "b": 4 * (1 - (-k * t).exp()) / k},
    ),
}


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("name", ROWS)
def test_closed_forms(name: str, steps: int | None) -> None:
    rhs, y0, k, exact = ROWS[name]
    value = double(k)[0].requires_grad_()
    found = ik.solve(ik.InitialValue(rhs, T, steps=steps), y0, (value,)).value
    torch.testing.assert_close(found, exact(T, value), rtol=2e-5, atol=1e-6)
    ours, theirs = (
        torch.autograd.grad(sum(leaf.real.square().sum() for leaf in ik.extend.trees.tree_flatten(tree)[0]), value)[0]
        for tree in (found, exact(T, value))
    )
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("integrator", ["auto", "scipy.Radau", "scipy.DOP853"])
def test_the_tolerance_of_a_solve_is_that_of_its_trajectory(integrator: str) -> None:
    """``rtol=``, as SciPy and torchdiffeq have it; ``accuracy=`` goes before."""
    y0, k = double(1.0, 0.5), torch.tensor(3.0, dtype=torch.float64)
    problem = ik.InitialValue(oscillate, T, integrator=integrator)
    fixed = ik.InitialValue(oscillate, T, integrator=integrator, accuracy=1e-6)
    off = {
        rtol: [
            float((ik.solve(p, y0, (k,), rtol=rtol).value - oscillation(T, y0, k)).abs().max())
            for p in (problem, fixed)
        ]
        for rtol in (1e-3, None, 1e-10)
    }
    assert off[1e-10][0] < 1e-9 and 10 * off[1e-10][0] < off[None][0] < off[1e-3][0] / 10 < 1e-3, off
    assert off[None][0] == off[None][1] and off[1e-10][1] > 5 * off[1e-10][0]


def test_two_stages_are_those_of_the_book() -> None:
    A, c = radau(2, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(A, torch.tensor([[5 / 12, -1 / 12], [3 / 4, 1 / 4]], dtype=torch.float64))
    torch.testing.assert_close(c, double(1 / 3, 1))


@pytest.mark.filterwarnings(
    "ignore:InitialValue. derivatives are those of the given steps"
)  # of one point: off by a tenth
@pytest.mark.parametrize("stages", range(1, 5))
def test_the_order_is_twice_the_stages_minus_one(stages: int) -> None:
    def error(steps: int) -> float:
        problem = ik.InitialValue(lambda t, y: y.cos() * (1 + t), T[::3], steps=steps, stages=stages)
        exact = ik.InitialValue(problem.rhs, T[::3], steps=40, stages=6)
        start = double(0.3)
        return float((ik.solve(problem, start).value - ik.solve(exact, start).value).abs().max())

    steps = {1: 16, 2: 16, 3: 8, 4: 3}[stages]
    assert math.log2(error(steps) / error(2 * steps)) == pytest.approx(2 * stages - 1, abs=0.4)


def test_what_the_trajectory_is_restated_as_is_no_problem_of_the_list() -> None:
    assert "initial_value" in ik.problems() and "collocation" not in ik.problems()


@pytest.mark.parametrize("stages", [1, 7])
def test_collocation_integrates_polynomials_exactly(stages: int) -> None:
    A, c = radau(stages, torch.float64, torch.device("cpu"))
    for power in range(stages):
        torch.testing.assert_close(A @ c**power, c ** (power + 1) / (power + 1), rtol=1e-10, atol=1e-12)
    for power in range(2 * stages - 1):
        torch.testing.assert_close(A[-1] @ c**power, double(1 / (power + 1))[0], rtol=1e-9, atol=0)


def test_the_integrator_has_order_five_and_keeps_its_tolerance() -> None:
    rhs = lambda t, y: torch.stack([y[:, 1], -y[:, 0]], 1)  # noqa: E731
    y0 = double(1.0, 0.0)[None]

    def error(steps: int) -> float:
        t = torch.linspace(0, 3, steps + 1, dtype=torch.float64)
        return float((follow(rhs, t, y0)[-1, 0, 0] - t[-1].cos()).abs())

    assert math.log2(error(10) / error(20)) == pytest.approx(5, abs=0.6)
    for accuracy in (1e-4, 1e-8):
        edges, states = dormand_prince(rhs, double(0.0, 3.0), y0, accuracy)
        assert accuracy * 1e-3 < float((states[:, 0, 0] - edges.cos()).abs().max()) < 30 * accuracy


def test_times_may_fall() -> None:
    found = ik.solve(ik.InitialValue(oscillate, T.flip(0)), double(0.4, -0.2), (double(2.0)[0],)).value
    back = ik.solve(ik.InitialValue(oscillate, T), found[-1], (double(2.0)[0],)).value
    torch.testing.assert_close(back.flip(0), found, rtol=1e-5, atol=1e-6)


def test_batches_are_independent() -> None:
    y0 = torch.randn(2, 3, 2, dtype=torch.float64)
    k = torch.tensor(1.3, dtype=torch.float64)
    solution = ik.solve(ik.InitialValue(oscillate, T), y0, (k,), batch_dims=2)
    assert solution.value.shape == (2, 3, 4, 2) and solution.converged.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(solution.value[i, j], oscillation(T, y0[i, j], k), rtol=1e-5, atol=1e-5)


def test_single_precision() -> None:
    found = ik.solve(ik.InitialValue(oscillate, T.float()), torch.tensor([1.0, 0.0]), (torch.tensor(2.0),)).value
    assert found.dtype == torch.float32
    exact = oscillation(T, double(1.0, 0.0), double(2.0)[0])
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("integrator", ["scipy.Radau", "scipy.LSODA", "scipy.DOP853", dormand_prince])
def test_integrators(integrator: Any) -> None:
    k = double(2.0)[0].requires_grad_()
    y0 = double(1.0, 0.5)
    stages = 5 if integrator == "scipy.DOP853" else 3  # whose steps are long
    found = ik.solve(ik.InitialValue(oscillate, T, integrator=integrator, stages=stages), y0, (k,)).value
    exact = oscillation(T, y0, k)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(v[-1, 0], k)[0] for v in (found, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_stiff_equation() -> None:
    """Robertson's: the sum is kept, and at t = 40 the values are known (Hairer & Wanner 1996, table IV.10)."""

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        a, b, c = y.unbind(-1)
        r1, r2, r3 = 0.04 * a, 3e7 * b * b, 1e4 * b * c
        return torch.stack([-r1 + r3, r1 - r2 - r3, r2], -1)

    y0 = double(1.0, 0.0, 0.0).requires_grad_()
    path = ik.solve(ik.InitialValue(rhs, (0.0, 40.0), integrator="scipy.Radau"), y0).value
    torch.testing.assert_close(path[-1], double(0.7158270688, 0.9185534764e-5, 0.2841637457), rtol=1e-5, atol=1e-9)
    (slope,) = torch.autograd.grad(path[-1].sum(), y0)  # what is put in is there, whatever it has become
    torch.testing.assert_close(slope, torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=1e-6)


# ----------------------------------------------------------------------------------------------- without a word on how
def relax(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
    """``y' = -k (y - cos t)``, stiff for large ``k``."""
    return -k * (y - t.cos())


def relaxed(t: float, k: Tensor) -> Tensor:
    """What is left of it when the start is forgotten."""
    return (k * k * math.cos(t) + k * math.sin(t)) / (k * k + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_stiff_equations_by_default(dtype: torch.dtype) -> None:
    k = torch.tensor([1e3, 1e4, 1e6], dtype=dtype).unsqueeze(1).requires_grad_()
    path = ik.solve(ik.InitialValue(relax, (0.0, 1.0)), torch.zeros(3, 1, dtype=dtype), (k,), batch_dims=1).value
    exact = relaxed(1.0, k)
    tight = dtype == torch.float64
    torch.testing.assert_close(path[:, -1], exact, rtol=1e-5 if tight else 1e-4, atol=0)
    ours, theirs = (torch.autograd.grad(v.sum(), k)[0] for v in (path[:, -1], relaxed(1.0, k)))
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-10 if tight else 1e-7)


@pytest.mark.parametrize("transform", ["jacrev", pytest.param("jacfwd", marks=pytest.mark.slow), "hessian"])
def test_stiff_equations_under_transforms(transform: str) -> None:
    def ours(k: Tensor) -> Tensor:
        return ik.solve(ik.InitialValue(relax, (0.0, 1.0)), double(0.0), (k,)).value[-1, 0]

    apply = getattr(torch.func, transform)
    found, exact = (apply(f)(double(200.0)[0]) for f in (ours, lambda k: relaxed(1.0, k)))
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacfwd])
def test_a_large_jacobian_under_transforms(transform: Callable[..., Any]) -> None:
    """A pattern is looked for where all tensors are wrapped: then there is none."""
    z, seen = torch.ones(1, SMALLEST, dtype=torch.float64), []

    def asked(k: Tensor) -> Tensor:
        seen.append(JacobianMatrix(relax).at(lambda y: relax(k, y, k), z * torch.ones_like(k)))
        return k.square()

    transform(asked)(double(2.0)[0])
    assert (seen[0] == -2 * np.eye(SMALLEST)).all()


def test_stiff_equations_under_hooks_of_saved_tensors() -> None:
    """As activations are moved to the host, or compressed, elsewhere."""
    k = double(200.0)[0].requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        end = ik.solve(ik.InitialValue(relax, (0.0, 1.0), integrator="scipy.Radau"), double(0.0), (k,)).value[-1, 0]
    torch.testing.assert_close(end, relaxed(1.0, k), rtol=1e-6, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(v, k)[0] for v in (end, relaxed(1.0, k))), rtol=1e-3, atol=1e-12)


def heat(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
    P = torch.nn.functional.pad(y, (1, 1, 1, 1))
    n = y.shape[-1] + 1
    neighbours = P[..., 2:, 1:-1] + P[..., :-2, 1:-1] + P[..., 1:-1, 2:] + P[..., 1:-1, :-2]
    return k * n * n * (neighbours - 4 * y)


def test_heat_in_a_square_by_default() -> None:
    """Its slowest wave on m x m points decays by exp(-8 k n^2 sin^2(pi / 2 n) t)."""
    m = 14
    line = torch.sin(torch.linspace(0, math.pi, m + 2, dtype=torch.float64)[1:-1])
    k = double(0.3)[0].requires_grad_()
    rate = 8 * (m + 1) ** 2 * math.sin(math.pi / (2 * (m + 1))) ** 2
    y0 = torch.outer(line, line)
    path = ik.solve(ik.InitialValue(heat, (0.0, 0.1, 0.5)), y0, (k,)).value
    exact = y0 * torch.exp(-rate * k * 0.5)
    torch.testing.assert_close(path[-1], exact, rtol=1e-5, atol=1e-8)
    ours, theirs = (torch.autograd.grad(v.sum(), k)[0] for v in (path[-1], exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("ratio", [1.0, 1e-6])
def test_units_do_not_decide(size: float, ratio: float) -> None:
    """An oscillation whose velocity is in other units than its position."""
    rhs = lambda t, y: torch.stack([y[1] / ratio, -9 * ratio * y[0]])  # noqa: E731
    t = torch.linspace(0, 10, 5, dtype=torch.float64)
    path = ik.solve(ik.InitialValue(rhs, t), double(size, 0.0)).value
    torch.testing.assert_close(path[:, 0] / size, torch.cos(3 * t), rtol=0, atol=1e-5)
    torch.testing.assert_close(path[:, 1] / (size * ratio), -3 * torch.sin(3 * t), rtol=0, atol=3e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stiff", [False, True])
def test_one_bad_sample_does_not_spoil_its_batch(stiff: bool) -> None:
    """``y' = y^2`` has no solution from 1 beyond t = 1, and beside it relaxes something stiff."""

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack((y[:, 0] ** 2, (-1e5 if stiff else -1.0) * (y[:, 1] - 1)), 1)

    y0 = torch.tensor([[0.1, 0.0], [1.0, 0.0], [0.2, 0.0]], dtype=torch.float64, requires_grad=True)
    problem = ik.InitialValue(rhs, (0.0, 2.0))
    solution = ik.solve(problem, y0, batch_dims=1, on_failure="nan")
    assert solution.converged.tolist() == [True, False, True]
    end = solution.value[:, -1, 0]
    exact = 1 / (1 / y0[[0, 2], 0] - 2)
    assert end[1].isnan()
    torch.testing.assert_close(end[[0, 2]], exact, rtol=1e-6, atol=0)
    (slopes,) = torch.autograd.grad(end[[0, 2]].sum(), y0)
    torch.testing.assert_close(slopes[[0, 2], 0], (1 / (1 - 2 * y0[[0, 2], 0]) ** 2).detach(), rtol=1e-5, atol=0)
    with pytest.raises(ik.ConvergenceError, match=r"1 of 3 samples.*followed to t = (1|0\.[89]\d*) only"):
        ik.solve(problem, y0, batch_dims=1)


def test_a_sample_that_ends_under_vmap() -> None:
    """Refused in words about times that cannot be mapped over; then a variation of it was followed for ever."""
    problem = ik.InitialValue(lambda t, y, p: p * y * y, T[::2])

    def last(p: Tensor) -> tuple[Tensor, Tensor]:
        return (ik.solve(problem, torch.ones_like(p), (p,), on_failure="ignore").value[-1],) * 2

    slope, value = torch.func.vmap(torch.func.jacrev(last, has_aux=True))(double(0.5, 2, 0.1)[:, None])
    torch.testing.assert_close(value.ravel(), double(2, torch.nan, 1 / 0.9), equal_nan=True, rtol=1e-5, atol=0)
    torch.testing.assert_close(slope.ravel()[::2], double(4, 1 / 0.81), rtol=1e-4, atol=0)


_HINGE = ik.InitialValue(lambda t, y, p: -p * (y - 0.3).relu() - 0.1, double(0.0, 2.0, 6.0))


def _hinge(p: Tensor) -> Tensor:
    """By formula: until it meets the kink at ``T`` it decays, and falls by 0.1 from there."""
    return 0.3 - 0.1 * (6 - ((0.7 * p + 0.1) / 0.1).log() / p)


@pytest.mark.parametrize("mapped", [False, True])
def test_first_and_second_derivatives_across_kinks(mapped: bool) -> None:
    """``y' = -p max(y - 0.3, 0) - 0.1``: the first off by 0.03, by the steps of the trajectory alone; the second by 0.9."""
    found = lambda p: ik.solve(_HINGE, double(1.0), (p,)).value[-1].squeeze()  # noqa: E731
    each = torch.func.vmap if mapped else (lambda f: f)
    p, grad = (double(0.8, 1.0, 1.3) if mapped else torch.tensor(1.0, dtype=torch.float64)), torch.func.grad
    for order, bound in ((grad, 1e-5), (lambda f: grad(grad(f)), 1e-4)):
        torch.testing.assert_close(each(order(found))(p), each(order(_hinge))(p), rtol=bound, atol=0)


def _sticks(t: Tensor, y: Tensor, p: Tensor) -> Tensor:
    return torch.stack([-1e4 * (y[0] - y[1]), -p * (y[1] - 0.3).relu() - 0.1])


@pytest.mark.parametrize(
    ("rhs", "y0", "accuracy", "exact"),
    [
        (_sticks, (1.0, 1.0), None, _hinge),
        (lambda t, y, p: torch.maximum(1 - y, p * torch.cos(t)), (0.0,), 1e-9, None),
        (lambda t, y, p: -p * torch.where(y < p, 0 * y, y - p) - 0.1, (1.0,), None, None),
        (lambda t, y, p: -p * F.selu(y - p + 0.5) - 0.5, (1.0,), None, None),
        (lambda t, y, p: -p * F.elu(y - p + 0.5, alpha=3.0) - 0.5, (1.0,), None, None),
        (lambda t, y, p: -p * F.l1_loss(y, p.expand(1), reduction="none") - 0.1, (1.0,), None, None),
        (lambda t, y, p: -p * torch.linalg.vector_norm(y - p, 1).view(1) - 0.1, (1.0,), None, None),
        (lambda t, y, p: -p * torch.cat([y - p, 0 * y, y + 9]).median().view(1) - 0.1, (1.0,), None, None),
    ],
    ids=["stiff", "accurate", "chosen", "selu", "elu", "l1_loss", "length", "median"],
)
def test_second_derivatives_across_kinks_of_others(rhs: Any, y0: Any, accuracy: float | None, exact: Any) -> None:
    """Noise of what is stiff is no kink, and no step across a kink is divided; all were off by a tenth or more, unsaid."""
    problem = ik.InitialValue(rhs, double(0.0, 6.0 if exact else 1.3), accuracy=accuracy)
    slope = torch.func.grad(lambda p: ik.solve(problem, double(*y0), (p,)).value[-1, -1])
    p, h = torch.tensor(0.9, dtype=torch.float64), 1e-3
    second = torch.func.grad(slope)(p)
    difference = torch.func.grad(torch.func.grad(exact))(p) if exact else (slope(p + h) - slope(p - h)) / (2 * h)
    torch.testing.assert_close(second, difference, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("order", "says", "options"),
    [
        (3, "of order 3 and higher lack", {}),
        (2, "steps= are given", {"steps": 20}),
        (2, "more than 128 crossings", {"samples": 140}),
        (2, "cannot be seen", {"rhs": lambda t, y, p: -p * torch.func.vmap(torch.relu)(y - 0.3) - 0.1}),
        (2, "", {"steps": 20, "rhs": lambda t, y, p: -p * torch.where(t < 2, y, y * y)}),
        (2, "", {"samples": 70}),
    ],
    ids=["third", "given steps", "many", "hidden", "at a time asked for", "few"],
)
def test_what_derivatives_across_kinks_lack_is_said_when_they_are_taken(order: int, says: str, options: Any) -> None:
    """They were off by half, unsaid; and above 64 crossings the first ones by a fiftieth."""
    p = torch.linspace(0.6, 1.2, options.pop("samples", 1), dtype=torch.float64).unsqueeze(1).requires_grad_()
    problem = ik.InitialValue(options.pop("rhs", _HINGE.rhs), _HINGE.t, **options)
    solve = lambda p: ik.solve(problem, torch.ones_like(p), (p,), batch_dims=1).value[:, -1]  # noqa: E731
    g, told = solve(p), list[list[str]]()
    for k in range(order):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", ik.ConvergenceWarning)
            (g,) = torch.autograd.grad(g.sum(), p, create_graph=k < order - 1)
        told.append([str(w.message) for w in said])
        if k == 0 and len(p) > 1:
            exact = torch.func.vmap(torch.func.grad(_hinge))(p.detach().ravel())
            torch.testing.assert_close(g.detach().ravel(), exact, rtol=6e-3, atol=0)
    assert not any(told[:-1]) and len(told[-1]) == (says != "") and says in " ".join(told[-1])
    if options.get("steps") and says:  # by a derivative of what is linear in a cotangent: a first one
        torch.autograd.functional.jvp(solve, p.detach(), torch.ones_like(p))


def test_second_derivatives_across_a_kink_before_an_event() -> None:
    """Steps move with the end, and it was known to the accuracy of steps across the kink: off by a tenth, unsaid."""
    problem = ik.InitialValue(_HINGE.rhs, double(0.0, 20.0), event=lambda t, y, p: y[0] - 0.1)
    found = lambda p: ik.solve(problem, double(1.0), (p,)).value["time"]  # noqa: E731
    exact = lambda p: ((0.7 * p + 0.1) / 0.1).log() / p + 2  # noqa: E731
    p, grad = torch.tensor(0.9, dtype=torch.float64), torch.func.grad
    for order, bound in ((grad, 1e-5), (lambda f: grad(grad(f)), 1e-4)):
        torch.testing.assert_close(order(found)(p), order(exact)(p), rtol=bound, atol=0)


def test_kinks_are_looked_for_by_few_steps() -> None:
    """First by steps that end at each of them, not by those across: 39 kinks took 2196 evaluations."""
    calls, at = [0], torch.linspace(0.05, 0.95, 20, dtype=torch.float64)

    def rhs(t: Tensor, y: Tensor, p: Tensor) -> Tensor:
        calls[0] += 1
        return torch.stack([4 * y[1], -4 * y[0] + p * ((y[0] - at).relu() - (-y[0] - at).relu()).mean()])

    p = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    ik.solve(ik.InitialValue(rhs, double(0.0, 0.7)), double(1.0, 0.0), (p,)).value[-1].sum().backward()
    assert calls[0] <= 1700


def test_times_asked_for_beyond_a_kink_are_differentiated() -> None:
    """Kinks were met where parameters or the start were: by times alone off by a hundredth, and by half in second ones."""
    rhs = lambda t, y: -(y - 0.3).relu() - 0.1  # noqa: E731
    end = lambda t: ik.solve(ik.InitialValue(rhs, torch.stack([0 * t, t])), double(1.0), ()).value[-1, 0]  # noqa: E731
    t = torch.tensor(2.5, dtype=torch.float64)
    torch.testing.assert_close(torch.func.grad(end)(t), -0.1 + 0 * t, rtol=1e-4, atol=0)


def _legs(p: Tensor) -> Tensor:
    """To the jump of ``_step``, and on from there."""
    event = lambda t, y, p: (y - p[1])[0]  # noqa: E731
    first = ik.solve(ik.InitialValue(_step, double(0.0, 5.0), event=event), double(0.0), (p,)).value
    later = torch.stack([first["time"], torch.full_like(first["time"], 3.0)])
    return ik.solve(ik.InitialValue(_step, later), first["state"] + 1e-12, (p,)).value[-1]


def _step(t: Tensor, y: Tensor, p: Tensor) -> Tensor:
    return torch.where(y < p[1], 1.0, p[0])


@pytest.mark.parametrize(
    ("rhs", "at"),
    [
        (_step, r"t = 1,|t = 1\.0|t = 0\.99"),
        (lambda t, y, p: torch.where(t < p[1], 1.0, p[0]) + 0 * y, "t = 1,"),
        (lambda t, y, p: p[0] + (y - p[1]).long(), r"t = 0\.66|t = 0\.33"),
        (lambda t, y, p: p[0] + torch.signbit(y - p[1]), r"t = 0\.\d"),
        (lambda t, y, p: p[0] + torch.div(y, 2 * p[1], rounding_mode="floor"), r"t = 0\.66"),
        (lambda t, y, p: p[0] + 2 + (y - p[1]) / (y - p[1]).square().sqrt(), r"t = 0\.25|t = 0\.24"),
        (lambda t, y, p: p[0] + torch.copysign(torch.ones_like(y), y - p[1]), r"t = 0\.5|t = 0\.49"),
        (lambda t, y, p: torch.where(t < 1.3, p[0], p[1]) - y, ""),
        (lambda t, y, p: -p[0] * torch.where(y == 0, 1.0, y.sin() / torch.where(y == 0, 1.0, y)), ""),
        (lambda t, y, p: -p[0] * (500 * (y - 0.5).abs()).tanh() + p[1] * (t - 1).relu(), ""),
    ],
    ids=["state", "parameter", "integer", "bit", "quotient", "root", "copied", "time", "guard", "steep"],
)
def test_jumps_whose_time_moves_are_said(rhs: Any, at: str) -> None:
    """Their derivatives lack how it does: those in ``p[1]`` were zero for -2, unsaid; an event has all of them."""
    problem, p = ik.InitialValue(rhs, double(0.0, 3.0)), double(3.0, 1.0)
    solve = lambda p: ik.solve(problem, double(0.0), (p,), on_failure="ignore").value[-1]  # noqa: E731
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", ik.ConvergenceWarning)
        solve(p)
        assert not [str(w.message) for w in said if "rhs jumps" in str(w.message)], "of values nothing is said"
        torch.func.grad(lambda p: solve(p).sum())(p)
    jumps = " ".join(str(w.message) for w in said if "rhs jumps" in str(w.message))
    assert bool(jumps) == (at != "") and re.search(at, jumps), jumps
    if rhs is _step:  # under torch.vmap, too
        with pytest.warns(ik.ConvergenceWarning, match=r"rhs jumps at t = (1|1\.0|0\.99)\d*, (2|2\.0|1\.99)"):
            torch.func.vmap(torch.func.grad(lambda p: solve(p).sum()))(double(3.0, 1.0, 3.0, 2.0).view(2, 2))
        given = ik.InitialValue(lambda t, y, p: torch.where(t < p[1], 1.0, p[0]) + 0 * y, problem.t, steps=8)
        with pytest.warns(ik.ConvergenceWarning, match="rhs jumps at t = 1"):
            torch.func.grad(lambda p: ik.solve(given, double(0.0), (p,)).value[-1].sum())(p)
        # at their ends nothing is said: an event's may be a little beyond
        short = ik.InitialValue(_step, double(0.0, 1 + 1e-8))
        torch.func.grad(lambda p: ik.solve(short, double(0.0), (p,)).value[-1].sum())(p)
        torch.testing.assert_close(torch.func.jacrev(_legs)(p), double(2.0, -2.0)[None], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("power", [1, 2])
def test_what_begins_to_move_at_a_kink(power: int) -> None:
    """From rest at zero its error is as large as itself, however short the step: no trajectory was found."""
    p = double(1.0).requires_grad_()
    t = double(0.0, 0.5, 2.0)
    y = ik.solve(ik.InitialValue(lambda t, y, p: (t - p).relu() ** power, t), double(0.0), (p,)).value[:, 0]
    torch.testing.assert_close(y.detach(), double(0, 0, 1 / (1 + power)), rtol=1e-6, atol=0)
    torch.testing.assert_close(torch.autograd.grad(y[-1], p)[0], double(-1.0), rtol=1e-5, atol=0)


def test_a_sample_that_ends_before_others_are_stiff() -> None:
    def rhs(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack((y[:, 0] ** 2, -1e4 * (y[:, 1] - 1)), 1)

    y0 = torch.tensor([[0.1, 0.0], [1e6, 0.0]], dtype=torch.float64)
    solution = ik.solve(ik.InitialValue(rhs, (0.0, 2.0)), y0, batch_dims=1, on_failure="nan")
    assert solution.converged.tolist() == [True, False] and solution.status[1] == ik.Status.NONFINITE
    torch.testing.assert_close(solution.value[0, -1], double(1 / (10 - 2), 1.0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("where", ["start", "parameter"])
@pytest.mark.parametrize("integrator", ["auto", "scipy.Radau"])
def test_a_sample_that_is_not_finite_beside_a_stiff_one(where: str, integrator: str) -> None:
    k, y0 = double(5000.0, 1.0, 2.0).unsqueeze(1), torch.zeros(3, 1, dtype=torch.float64)
    (y0 if where == "start" else k)[1] = math.nan
    problem = ik.InitialValue(relax, (0.0, 1.0), integrator=integrator)
    solution = ik.solve(problem, y0, (k,), batch_dims=1, on_failure="nan")
    assert solution.converged.tolist() == [True, False, True]
    exact = relaxed(1.0, k) - k * k / (k * k + 1) * torch.exp(-k)
    torch.testing.assert_close(solution.value[[0, 2], -1], exact[[0, 2]], rtol=1e-5, atol=0)


@pytest.mark.parametrize("steps", [50, 200])
@pytest.mark.parametrize("k", [1e3, 1e5])
def test_given_steps_of_a_stiff_equation(k: float, steps: int) -> None:
    """Explicit steps of these lengths overflow, or come to 1e180: no start."""
    rate = double(k)[0]
    path = ik.solve(ik.InitialValue(relax, (0.0, 1.0), steps=steps), double(0.0), (rate,)).value
    torch.testing.assert_close(path[-1, 0], relaxed(1.0, rate), rtol=1e-9, atol=0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("begin", [0.0, 1000.0])
def test_a_stiff_equation_far_from_time_zero_in_single_precision(begin: float) -> None:
    """Where the clock tells ten steps of the explicit method from each other."""
    t = torch.tensor([begin, begin + 1, begin + 2], dtype=torch.float32)
    path = ik.solve(ik.InitialValue(lambda t, y: -1000 * (y - t.cos()), t), torch.zeros(1, dtype=torch.float32)).value
    assert float(path[-1]) == pytest.approx(math.cos(begin + 2), abs=2e-3)


@pytest.mark.parametrize(("rate", "end"), [(300.0, 10.0), (1000.0, 1.0), (1e4, 10.0)])
def test_what_rests_on_something_slow_has_derivatives(rate: float, end: float) -> None:
    """In ``p`` they are a part in ``rate`` of the state: explicit steps, thousands that just stayed stable, were as accurate
    for that as was asked and left them off by up to 4e-3 of themselves."""
    p = torch.ones((), dtype=torch.float64, requires_grad=True)
    problem = ik.InitialValue(lambda t, y, p: -rate * p * (y - t.cos()), (0.0, end))
    (slope,) = torch.autograd.grad(ik.solve(problem, double(0.5), (p,)).value[-1, 0], p)

    def exact(L: Tensor) -> Tensor:
        return (L**2 * math.cos(end) + L * math.sin(end)) / (L**2 + 1)

    assert float(slope) == pytest.approx(float(rate * torch.func.grad(exact)(double(rate)[0])), rel=4e-4)


def test_times_in_a_list_are_not_rounded() -> None:
    problem = ik.InitialValue(lambda t, y: -y, [0.0, 0.1, 0.3], accuracy=1e-12, stages=5)
    path = ik.solve(problem, double(1.0)).value
    torch.testing.assert_close(path[:, 0], double(1.0, math.exp(-0.1), math.exp(-0.3)), rtol=1e-12, atol=0)


def test_a_switch_at_a_time_asked_for() -> None:
    """``y' = 1 - y / 10`` between 5 and 6, from rest."""

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        return -0.1 * y + ((t > 5) & (t < 6))

    path = ik.solve(ik.InitialValue(rhs, (0.0, 5.0, 6.0, 24.0)), double(0.0)).value
    exact = 10 * (1 - math.exp(-0.1)) * math.exp(-1.8)
    torch.testing.assert_close(path[-1], double(exact), rtol=1e-4, atol=0)


def test_a_pattern_of_other_arguments_is_not_taken() -> None:
    """One function, first of a sparse matrix, then of a dense one: nothing is said of patterns that nobody gave."""
    rhs = lambda t, y, K: -(K @ y)  # noqa: E731
    eye, ones = torch.eye(40, dtype=torch.float64), torch.ones(40, dtype=torch.float64)
    dense = eye + 0.01 * torch.randn(40, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for K in (eye, dense, eye):
            end = ik.solve(ik.InitialValue(rhs, (0.0, 1.0)), ones, (K,)).value[-1]
            torch.testing.assert_close(end, torch.linalg.matrix_exp(-K) @ ones, rtol=1e-6, atol=0)


def test_jacobians_are_not_differences() -> None:
    """Those of SciPy's take an evaluation for each of 60 unknowns, time and again: 1,400 in all."""
    calls = 0

    def rhs(t: Tensor, y: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return -1e4 * (y - t.cos()) - y.sum() / 60

    ik.solve(ik.InitialValue(rhs, (0.0, 1.0), integrator="scipy.Radau"), torch.zeros(60, dtype=torch.float64))
    assert calls < 700


def test_vmap_over_starts_and_parameters() -> None:
    y0, k = torch.randn(4, 2, dtype=torch.float64), double(0.5, 1.0, 2.0, 3.0)

    def ours(y0: Tensor, k: Tensor) -> Tensor:
        return ik.solve(ik.InitialValue(oscillate, T), y0, (k,)).value

    found = torch.func.vmap(ours)(y0, k)
    exact = torch.stack([oscillation(T, y, w) for y, w in zip(y0, k, strict=True)])
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)
    slopes = torch.func.vmap(torch.func.grad(lambda k, y: ours(y, k)[-1, 0]))(k, y0)
    theirs = torch.func.vmap(torch.func.grad(lambda k, y: oscillation(T, y, k)[-1, 0]))(k, y0)
    torch.testing.assert_close(slopes, theirs, rtol=1e-4, atol=1e-5)


def test_arguments_that_are_shared_may_be_said() -> None:
    k, c = double(1.0, 2.0, 3.0).unsqueeze(1), double(0.5)
    rhs = lambda t, y, k, c: -k * c * y  # noqa: E731
    y0 = torch.ones(3, 1, dtype=torch.float64)
    path = ik.solve(ik.InitialValue(rhs, (0.0, 1.0)), y0, (k, c), batch_dims=1, in_dims=(0, None)).value
    torch.testing.assert_close(path[:, -1], torch.exp(-k * c), rtol=1e-5, atol=0)


def test_what_is_not_determined_is_said() -> None:
    """Lorenz's equations double small errors every time unit or so: after 20 of them nothing is known."""

    def lorenz(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack([10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]])

    start = double(1.0, 1.0, 1.0)
    for stages in (None, 3):
        with pytest.warns(ik.ConvergenceWarning, match="differ by"):
            ik.solve(ik.InitialValue(lorenz, (0.0, 20.0), stages=stages), start)
    with pytest.raises(ik.ConvergenceError, match="chaotic"):
        ik.solve(ik.InitialValue(lorenz, (0.0, 22.0), stages=3), start)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ik.solve(ik.InitialValue(lorenz, (0.0, 3.0)), start)


@pytest.mark.parametrize("policy", ["nan", "raise"])
def test_no_event_goes_by_the_policy(policy: str) -> None:
    problem = ik.InitialValue(lambda t, y: -y, (0.0, 1.0), lambda t, y: y[0] + 1)
    if policy == "raise":
        with pytest.raises(ik.ConvergenceError, match="does not change its sign"):
            ik.solve(problem, double(1.0))
    else:
        assert ik.solve(problem, double(1.0), on_failure=policy).value["time"].isnan()


# ----------------------------------------------------------------------------------------------------------- derivatives
def solve_steps(y0: Tensor, k: Tensor, t: Tensor) -> Tensor:
    return ik.solve(ik.InitialValue(lambda t, y, k: k * (t + y.sin()), t, steps=2), y0, (k,)).value


def test_derivatives_in_start_parameter_and_times() -> None:
    inputs = [
        double(0.3, 1.0).requires_grad_(),
        double(1.4)[0].requires_grad_(),
        double(0.1, 0.5, 1.2).requires_grad_(),
    ]
    assert torch.autograd.gradcheck(solve_steps, inputs)
    assert torch.autograd.gradgradcheck(solve_steps, inputs)


def test_times_without_steps_have_derivatives() -> None:
    t, y0 = T.clone().requires_grad_(), double(1.0, 0.0)
    found = ik.solve(ik.InitialValue(oscillate, t), y0, (double(2.0)[0],)).value
    ours, theirs = (torch.autograd.grad(v[2, 0] + v[3, 1], t)[0] for v in (found, oscillation(t, y0, double(2.0)[0])))
    assert theirs.abs().max() > 0.5
    torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-5)


def test_captured_parameters() -> None:
    net = torch.nn.Linear(2, 2, bias=False, dtype=torch.float64)
    y0 = double(1.0, -1.0)
    end = ik.solve(ik.InitialValue(lambda t, y: net(y), T), y0).value[-1]
    exact = torch.linalg.matrix_exp(T[-1] * net.weight) @ y0
    ours, theirs = (torch.autograd.grad(v.sum(), net.weight)[0] for v in (end, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian", "vmap(grad)", "grad captured"])
def test_transforms(transform: str) -> None:
    y0 = double(1.0, 0.5)
    ks = double(0.8, 2.0)

    def ours(k: Tensor) -> Tensor:
        return ik.solve(ik.InitialValue(oscillate, T, steps=4), y0, (k,)).value[-1, 0]

    def captures(k: Tensor) -> Tensor:
        return ik.solve(ik.InitialValue(lambda t, y: oscillate(t, y, k), T, steps=4), y0).value[-1, 0]

    def exact(k: Tensor) -> Tensor:
        return oscillation(T, y0, k)[-1, 0]

    func = torch.func
    apply: dict[str, Callable[[Any], Tensor]] = {
        "grad": lambda f: func.grad(f)(ks[0]),
        "jacrev": lambda f: func.jacrev(f)(ks[0]),
        "jacfwd": lambda f: func.jacfwd(f)(ks[0]),
        "hessian": lambda f: func.hessian(f)(ks[0]),
        "vmap(grad)": lambda f: func.vmap(func.grad(f))(ks),
        "grad captured": lambda f: func.grad(captures if f is ours else f)(ks[0]),
    }
    torch.testing.assert_close(apply[transform](ours), apply[transform](exact), rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------------------------------------------------------- events
@pytest.mark.parametrize("steps", [None, 8])
def test_a_ball_comes_down(steps: int | None) -> None:
    """h = v t - g t^2 / 2 is zero again at t = 2 v / g: the zero at the start is none."""

    def fall(t: Tensor, y: Any, g: Tensor) -> Any:
        return {"h": y["v"], "v": -g * torch.ones_like(y["v"])}

    v, g = double(3.0)[0].requires_grad_(), double(9.81)[0].requires_grad_()
    problem = ik.InitialValue(fall, (0.0, 2.0), lambda t, y, g: y["h"], steps=steps)
    found = ik.solve(problem, {"h": double(0.0)[0], "v": v}, (g,)).value
    torch.testing.assert_close(found["time"], 2 * v / g)
    torch.testing.assert_close(found["state"]["v"], -v)
    dv, dg = torch.autograd.grad(found["time"], (v, g))
    torch.testing.assert_close(dv, 2 / g.detach())
    torch.testing.assert_close(dg, -2 * v.detach() / g.detach() ** 2)


def test_an_event_after_a_start_that_is_not_zero() -> None:
    """y' = t from y(1) = 0 is (t^2 - 1) / 2, and 4 at t = 3; the times are given as they are, not from the start on."""
    level = double(4.0)[0].requires_grad_()
    problem = ik.InitialValue(lambda t, y, c: t * torch.ones_like(y), (1.0, 5.0), lambda t, y, c: y[0] - c, steps=8)
    time = ik.solve(problem, torch.zeros(1, dtype=torch.float64), (level,)).value["time"]
    torch.testing.assert_close(time, double(3.0)[0])
    torch.testing.assert_close(torch.autograd.grad(time, level)[0], double(1 / 3)[0])


@pytest.mark.parametrize(
    ("rhs", "level", "closed"),
    [
        (lambda t, y, c: y**2, 10.0, lambda c: 1 - 1 / c),  # ends at t = 1, beyond all bounds
        (
            lambda t, y, c: -y.sqrt(),
            0.01,
            lambda c: 2 - 2 * c.sqrt(),
        ),  # a tank runs dry at t = 2, and leaves the domain
    ],
    ids=["explosion", "domain"],
)
def test_an_event_before_the_trajectory_ends(rhs: Any, level: float, closed: Callable[[Tensor], Tensor]) -> None:
    """What comes after the event need not exist."""
    problem = ik.InitialValue(rhs, (0.0, 9.0), lambda t, y, c: y[0] - c)
    time = lambda c: ik.solve(problem, double(1.0), (c,)).value["time"]  # noqa: E731
    near = {"rtol": 1e-5, "atol": 0.0}
    torch.testing.assert_close(time(double(level)[0]), closed(double(level)[0]), **near)
    torch.testing.assert_close(
        torch.func.grad(time)(double(level)[0]), torch.func.grad(closed)(double(level)[0]), **near
    )


def test_many_events_by_vmap() -> None:
    speeds = double(1.0, 2.5, 4.0)

    def time(v: Tensor) -> Tensor:
        start = torch.stack([torch.zeros_like(v), v])
        problem = ik.InitialValue(
            lambda t, y: torch.stack([y[1], -10 + 0 * y[1]]), (0.0, 3.0), lambda t, y: y[0], steps=24
        )
        return ik.solve(problem, start).value["time"]

    torch.testing.assert_close(torch.func.vmap(time)(speeds), speeds / 5)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(time))(speeds), torch.full_like(speeds, 0.2))


@pytest.mark.parametrize("steps", [None, 10])
def test_the_first_event_is_found_between_long_steps(steps: int | None) -> None:
    """sin(5 t) = 1/2 for the first time at t = asin(1/2) / 5, where the trajectory takes steps ten times as long."""
    problem = ik.InitialValue(lambda t, y: -0.01 * y, (0.0, 10.0), lambda t, y: torch.sin(5 * t) - 0.5, steps=steps)
    found = ik.solve(problem, double(1.0)).value
    torch.testing.assert_close(found["time"], double(math.asin(0.5) / 5)[0])


def test_no_event_under_vmap_is_no_solution() -> None:
    def time(rate: Tensor) -> Tensor:
        problem = ik.InitialValue(lambda t, y: -rate * y, (0.0, 1.0), lambda t, y: y[0] - 0.5, steps=4)
        return ik.solve(problem, torch.ones(1, dtype=torch.float64), on_failure="nan").value["time"]

    found = torch.func.vmap(time)(double(0.1, 1.0))
    assert found[0].isnan()
    torch.testing.assert_close(found[1], double(math.log(2))[0], rtol=1e-5, atol=0)


# ---------------------------------------------------------------------------------------------------------------- errors
def decay(t: Tensor, y: Tensor) -> Tensor:
    return -y


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: ik.InitialValue(3.0, T), TypeError, "callable rhs"),  # type: ignore[arg-type]
        (lambda: ik.InitialValue(decay, T[:1]), ValueError, "two times or more"),
        (lambda: ik.InitialValue(decay, T, lambda t, y: y), ValueError, "got 4 times"),
        (lambda: ik.InitialValue(decay, T, stages=8), ValueError, "7 at most"),
        (lambda: ik.InitialValue(decay, T, integrator="euler"), ValueError, "scipy.Radau"),
        (lambda: ik.InitialValue(decay, T, integrator=3), TypeError, "or a function"),
        (lambda: ik.solve(ik.InitialValue(decay, T[[0, 2, 1]]), double(1.0)), ValueError, "strictly increasing"),
        (
            lambda: ik.solve(ik.InitialValue(decay, T[:2], lambda t, y: 1 + y[0]), double(1.0)),
            ik.ConvergenceError,
            "sign",
        ),
        (
            lambda: ik.solve(ik.InitialValue(decay, T[:2], lambda t, y: 1 + y[0], steps=3), double(1.0)),
            ik.ConvergenceError,
            "does not change its sign",
        ),
        (
            lambda: ik.solve(ik.InitialValue(lambda t, y: y**0, (0.0, 2.0), lambda t, y: y[0].tan()), double(1.0)),
            ik.ConvergenceError,
            r"t = 0\.5707.*jumps, or has a pole",
        ),
        (
            lambda: ik.solve(ik.InitialValue(lambda y: -y, T), double(1.0)),
            TypeError,
            r"rhs is called as rhs\(t, y\)[^.]*$",
        ),
        (
            lambda: ik.solve(ik.InitialValue(torch.nn.Linear(1, 1), T), double(1.0)),
            TypeError,
            r"rhs is called as rhs\(t, y\)[^.]*$",
        ),
        (
            lambda: ik.solve(ik.InitialValue(lambda t, y: y**2, (0.0, 2.0)), double(1.0)),
            ik.ConvergenceError,
            r"followed to t = (1|0\.99\d*) only",
        ),
        (
            lambda: ik.solve(ik.InitialValue(lambda t, y: y.sum(), T), double(1.0, 2.0)),
            ValueError,
            r"rhs\(t, y, \.\.\.\) returned shape",
        ),
        (
            lambda: ik.solve(ik.InitialValue(decay, T[:2], lambda t, y: y[0]), double(1.0)[None], batch_dims=1),
            ik.CapabilityError,
            "torch.vmap",
        ),
        (
            lambda: torch.func.vmap(lambda t: ik.solve(ik.InitialValue(decay, t), double(1.0)).value)(T.view(2, 2)),
            ik.CapabilityError,
            "cannot be mapped over without steps=",
        ),
        (
            lambda: ik.solve(ik.InitialValue(lambda t, y: -y if t < 1 else y, T), double(1.0)),
            ik.CapabilityError,
            r"^InitialValue: rhs cannot be mapped over points of time: torch\.where",
        ),
        (
            lambda: ik.solve(ik.InitialValue(lambda t, y: torch.nan * y, (0, 1), lambda t, y: y[0]), double(1.0)),
            ik.ConvergenceError,
            "followed to t = 0 only",
        ),
    ],
)
def test_errors(make: Callable[[], Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


@pytest.mark.parametrize("size", [1.0, 0.3, 1e-6, 1e6])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_single_precision_is_judged_in_the_units_of_the_state(n: int, size: float) -> None:
    """The integrator's start is so near that its residual is no measure of what is small."""
    y0 = torch.full((n,), size)
    path = ik.solve(ik.InitialValue(lambda t, y: -0.5 * y, torch.linspace(0, 2, 5)), y0).value
    exact = y0 * torch.exp(-0.5 * torch.linspace(0, 2, 5)).unsqueeze(1)
    torch.testing.assert_close(path, exact, rtol=1e-4, atol=0)


@pytest.mark.parametrize("rate", [1.0, 2.0, 4.0, 6.0, 10.0])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_trajectory_that_grows_has_not_run_away(rate: float, backwards: bool) -> None:
    """Its equations are sums whose change along a direction may all but cancel, so that rounding looks large beside it."""
    t = torch.linspace(0.0, 1.0, 3, dtype=torch.float64)
    rates = torch.tensor([rate / 2, rate], dtype=torch.float64).unsqueeze(1)
    t, rates = (t.flip(0), -rates) if backwards else (t, rates)
    problem = ik.InitialValue(lambda t, y, k: k * y, t)
    found = ik.solve(problem, torch.ones(2, 1, dtype=torch.float64), (rates,), batch_dims=1)
    torch.testing.assert_close(found.value[:, -1], rates.abs().exp(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_event_in_another_dtype_than_the_default(default, dtype):
    """A number of Python's times an integer tensor has torch's default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        fall = ik.InitialValue(lambda t, y, g: torch.stack((y[1], -g)), (0.0, 10.0), event=lambda t, y, g: y[0] + 0.5)
        g = torch.tensor(9.81, dtype=dtype)
        found = ik.solve(fall, torch.tensor([0.0, 7.0], dtype=dtype), (g,)).value["time"]
        assert found.dtype is dtype
        torch.testing.assert_close(found, (7 + torch.sqrt(49 + g)) / g, rtol=1e-4, atol=0)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("samples", [1, 2])
def test_stiff_samples_under_vmap(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are followed by SciPy's Radau, all as one system: they took 20,000 explicit steps, and were refused then."""
    monkeypatch.setattr("implicitkit.problem.trajectory.explicit_steps.STEPS", 300)
    rate, start = torch.tensor([1e4, 3e5], dtype=torch.float64)[:samples], torch.zeros(1, dtype=torch.float64)

    def end(k: Tensor, **options: Any) -> Tensor:
        follow_cosine = ik.InitialValue(lambda t, y, k: -k[..., None] * (y - torch.cos(t)), (0.0, 5.0), **options)
        return ik.solve(follow_cosine, start, (k,)).value[1, 0]

    want = (rate**2 * math.cos(5.0) + rate * math.sin(5.0)) / (rate**2 + 1)
    torch.testing.assert_close(torch.vmap(end)(rate), want, rtol=1e-6, atol=0)
    slope = torch.func.vmap(torch.func.grad(end))(rate)
    torch.testing.assert_close(slope, -math.sin(5.0) / rate**2, rtol=1e-2, atol=0)
    with pytest.raises(ik.ConvergenceError, match=r"integrator='scipy\.Radau' meets that"):
        torch.vmap(lambda k: end(k, integrator="dormand_prince"))(rate)


@pytest.mark.parametrize("integrator", ["scipy.Radau", "scipy.LSODA"])
def test_vmap_over_integrators_of_scipy(integrator: str) -> None:
    """Over starts, parameters and both: one system of all that is mapped over."""
    y0, k = double(1.0, 0.2, -0.5, 0.3).view(2, 2), double(0.5, 1.2)

    def end(k: Tensor, y0: Tensor) -> Tensor:
        swing = lambda t, y, k: torch.stack([y[..., 1], -k * y[..., 0] - y[..., 1] ** 3], -1)  # noqa: E731
        return ik.solve(ik.InitialValue(swing, (0.0, 1.0), integrator=integrator, accuracy=1e-8), y0, (k,)).value[-1]

    want = torch.stack([torch.stack([end(p, y) for y in y0]) for p in k])
    over_starts = torch.func.vmap(end, (None, 0))
    torch.testing.assert_close(torch.func.vmap(over_starts, (0, None))(k, y0), want, rtol=1e-6, atol=0)
    columns = torch.func.vmap(torch.func.vmap(end, (0, None)), (None, 1), out_dims=1)(k, y0.T)
    torch.testing.assert_close(columns, want, rtol=1e-6, atol=0)
    slopes = torch.func.vmap(torch.func.jacrev(end), (0, None))(k, y0[0])
    torch.testing.assert_close(slopes[1], torch.func.jacrev(end)(k[1], y0[0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("extra", [0, 1])
def test_running_sums_invert_the_equations_of_a_right_hand_side_without_state(extra: int) -> None:
    steps, stages, n = 4, 3, 2
    size = steps * stages * n
    before = torch.zeros(steps, stages, n, steps, stages, n, dtype=torch.float64)
    for k in range(1, steps):
        for i in range(stages):
            before[k, i, :, k - 1, stages - 1, :] = torch.eye(n)
    A = torch.eye(size + extra, dtype=torch.float64)
    A[:size, :size] -= before.reshape(size, size)
    M, b = RunningSums(steps, stages, n), torch.randn(5, size + extra, dtype=torch.float64)
    torch.testing.assert_close(M.solve(b), torch.linalg.solve(A, b.T).T)
    torch.testing.assert_close(M.T.solve(b), torch.linalg.solve(A.T, b.T).T)
    torch.testing.assert_close(M.T.T.solve(b), M.solve(b))
    several = torch.randn(5, size + extra, 3, dtype=torch.float64)
    torch.testing.assert_close(M.solve(several), torch.stack([M.solve(b) for b in several.unbind(2)], 2))


@pytest.fixture
def without_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody shall factor it")

    monkeypatch.setattr("implicitkit.linear.factors.sparse_blocks.factors", refuse)
    monkeypatch.setattr("implicitkit.foundation.operators.Operator.dense", refuse)


def neural(samples: int, n: int) -> tuple[Any, Tensor, Tensor]:
    W = (torch.randn(n, n, dtype=torch.float64) / n**0.5).requires_grad_()
    rhs = lambda t, y: torch.tanh(y @ W.T) + torch.cos(t)  # noqa: E731
    return rhs, torch.randn(*([samples] * bool(samples)), n, dtype=torch.float64), W


@pytest.mark.usefixtures("without_factors")
@pytest.mark.parametrize("samples", [0, 8])
def test_a_large_state_that_is_not_stiff_takes_no_factors(samples: int) -> None:
    rhs, y0, W = neural(samples, 60)
    t = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    path = ik.solve(ik.InitialValue(rhs, t), y0, batch_dims=min(samples, 1)).value
    ends = path.select(1 if samples else 0, -1)
    (found,) = torch.autograd.grad(ends.square().sum(), W)
    with torch.no_grad():
        edges = dormand_prince(lambda t, y: rhs(t, y), t, y0.reshape(-1, 60), 1e-8)[0]
    by_steps = follow(lambda t, y: rhs(t, y), edges, y0.reshape(-1, 60))[-1]
    torch.testing.assert_close(ends.reshape(-1, 60), by_steps, rtol=1e-5, atol=1e-5)
    (wanted,) = torch.autograd.grad(by_steps.square().sum(), W)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.usefixtures("without_factors")
def test_an_event_of_a_large_state_takes_no_factors() -> None:
    rhs, y0, _ = neural(0, 40)
    y0 = y0.abs() + 0.1

    def end(y0: Tensor) -> Tensor:
        problem = ik.InitialValue(lambda t, y: rhs(t, y) - 2.0, (0.0, 9.0), lambda t, y: y.mean() + 1, steps=20)
        return ik.solve(problem, y0).value["time"]

    y0.requires_grad_()
    d = torch.randn(40, dtype=torch.float64)
    (found,) = torch.autograd.grad(end(y0), y0)
    with torch.no_grad():
        wanted = (end(y0 + 1e-4 * d) - end(y0 - 1e-4 * d)) / 2e-4
    torch.testing.assert_close(found @ d, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("error::implicitkit.SparsityWarning")
@pytest.mark.parametrize("event", [False, True])
def test_the_pattern_of_all_steps_is_that_of_their_jacobian(event: bool) -> None:
    n, steps, s = 3, 5, 2
    coupling = sp.csr_matrix(np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]], dtype=bool))
    ready = coloured_steps(coupling, steps, s, event)
    assert ready is not None
    A, h, size = torch.rand(s, s), torch.rand(steps), steps * s * n

    def residual(z: Tensor) -> Tensor:
        Y = z[:size].unflatten(0, (steps, s, n))
        f = torch.stack([Y[..., 0] * Y[..., 1], Y[..., 2].sin(), torch.ones_like(Y[..., 0])], -1)
        before = torch.cat((torch.zeros(1, n), Y[:-1, -1]))
        out = (Y - before[:, None] - (z[size] if event else h[:, None, None]) * (A @ f)).flatten()
        return torch.cat((out, (Y[-1, -1].sum() - z[size])[None])) if event else out

    J = torch.func.jacrev(residual)(torch.rand(size + event) + 1)
    assert not bool(J[~torch.from_numpy(ready.pattern.toarray())].any())
    colouring, rows = ready.colouring, np.setdiff1d(np.arange(size + event), ready.colouring.apart)
    for colour in range(colouring.count):  # no row is in two columns of one colour
        assert ready.pattern[rows][:, colouring.groups == colour].sum(1).max() <= 1
    assert colouring.products <= (s + 1) * 3 + 2 * event


def test_a_state_that_takes_many_products_is_factored_after_few(monkeypatch: pytest.MonkeyPatch) -> None:
    n, products, solve = 16, [0], RunningSums.solve

    def counted(self: RunningSums, b: Tensor) -> Tensor:
        products[0] += 1
        return solve(self, b)

    def heat(t: Tensor, y: Tensor) -> Tensor:
        u = y.unflatten(-1, (n, n))
        sides = u.roll(1, -1) + u.roll(-1, -1) + u.roll(1, -2) + u.roll(-1, -2)
        return 0.2 * n**2 * (sides - 4 * u).flatten(-2) - y**3

    monkeypatch.setattr(RunningSums, "solve", counted)
    start = torch.randn(n * n, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    solution = ik.solve(ik.InitialValue(heat, (0.0, 1.0), steps=30), start)
    solution.value.square().sum().backward()
    assert bool(solution.converged) and 0 < products[0] <= 150


@pytest.mark.parametrize("steps", [60, pytest.param(120, marks=pytest.mark.slow)])
def test_many_steps_of_a_state_whose_numbers_all_depend_on_each_other(steps: int) -> None:
    Q = torch.randn(32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    Q = 3 * (Q - Q.T) / torch.linalg.matrix_norm(Q - Q.T, 2)
    y0, T = torch.ones(32, dtype=torch.float64), 40.0
    solution = ik.solve(ik.InitialValue(lambda t, y: y @ Q, (0.0, T), steps=steps, stages=6), y0)
    torch.testing.assert_close(solution.value[-1], y0 @ torch.linalg.matrix_exp(Q * T), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.grad, torch.vmap])
def test_wide_states_under_transforms(transform: Any, captured: bool) -> None:
    """From some unknowns on a pattern is looked for, also where all tensors are wrapped."""
    rates = torch.linspace(0.5, 1.5, 32, dtype=torch.float64)

    def final(k: Tensor) -> Tensor:
        given = (lambda t, y: -k * y, ()) if captured else (lambda t, y, k: -k * y, (k,))
        return ik.solve(ik.InitialValue(given[0], (0.0, 1.0), steps=4), torch.ones_like(rates), given[1]).value[-1]

    end = torch.exp(-rates)
    if transform is torch.vmap:
        torch.testing.assert_close(torch.vmap(final)(torch.stack((rates, rates)))[1], end, rtol=1e-5, atol=0)
    elif transform is torch.func.grad:
        torch.testing.assert_close(torch.func.grad(lambda k: final(k).sum())(rates), -end, rtol=1e-5, atol=0)
    else:
        torch.testing.assert_close(transform(final)(rates), torch.diag(-end), rtol=1e-5, atol=1e-9)


# --------------------------------------------------------------------------------------------------- half precision
HALVES: dict[str, tuple[Callable[..., Any], tuple[float, ...], float]] = {
    "stiff": (lambda t, y, k: -1e3 * k * (y - torch.cos(t)), (0.0,), 1.0),
    "many steps": (oscillate, (1.0, 0.0), 10.0),
    "growth": (lambda t, y, k: k * y * (1 + torch.sin(t)), (1.0,), 4.0),
    "products of matrices": (lambda t, y, k: k * torch.tanh(y @ ROTATION.to(k.dtype)), (1.0, -0.5), 5.0),
    "predators": (
        lambda t, y, k: torch.stack([k * y[0] - y[0] * y[1] / 2, -0.8 * y[1] + 0.3 * y[0] * y[1]]),
        (1.0, 0.5),
        10.0,
    ),
}
ROTATION = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_has_its_own_digits(name: str, dtype: torch.dtype) -> None:
    """Rounding of the state at each of many steps would leave few of them, or none; so would that of the times."""
    rhs, start, end = HALVES[name]

    def found(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k = torch.tensor(1.0, dtype=dtype, requires_grad=True)
        path = ik.solve(ik.InitialValue(rhs, (0.0, end / 2, end)), torch.tensor(start, dtype=dtype), (k,)).value
        assert path.dtype == dtype
        (slope,) = torch.autograd.grad(path[1:].sum(), k)
        return path.detach().double(), slope.double()

    (path, slope), (wanted, wanted_slope) = found(dtype), found(torch.float64)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(path, wanted, rtol=0, atol=2 * eps * float(wanted.abs().max()))
    torch.testing.assert_close(slope, wanted_slope, rtol=10 * eps, atol=1e-3)


def test_the_time_of_an_event_in_half_precision() -> None:
    y0 = torch.tensor([1.0, 0.0], dtype=torch.bfloat16)
    fall = ik.InitialValue(lambda t, y: torch.stack((y[1], -10 + 0 * y[1])), (0.0, 2.0), lambda t, y: y[0])
    found = ik.solve(fall, y0).value
    assert found["time"].dtype == found["state"].dtype == torch.bfloat16
    torch.testing.assert_close(found["time"].double(), double(math.sqrt(0.2))[0], rtol=0.01, atol=0)


def test_an_event_before_the_trajectory_takes_too_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dry friction stops a body at t = 1 / c; from there on its sign is on both sides at once, in ever shorter steps."""
    monkeypatch.setattr("implicitkit.problem.trajectory.explicit_steps.STEPS", 300)
    slide = ik.InitialValue(
        lambda t, y, c: torch.stack([y[1], -c * torch.sign(y[1])]), (0.0, 3.0), lambda t, y, c: y[1]
    )
    c = double(1.0)[0].requires_grad_()
    found = ik.solve(slide, double(0.0, 1.0), (c,)).value
    torch.testing.assert_close(found["time"], double(1.0)[0], rtol=1e-6, atol=0)
    (slope,) = torch.autograd.grad(found["time"], c)
    torch.testing.assert_close(slope, double(-1.0)[0], rtol=1e-6, atol=0)
