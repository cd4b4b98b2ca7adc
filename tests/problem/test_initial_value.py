"""Trajectories as roots: values, orders, derivatives and events against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.sparse_form import pattern_of_samples
from implicitkit.problem.collocation import radau
from implicitkit.problem.integration import dormand_prince, explicit_or_stiff, follow

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


def test_two_stages_are_those_of_the_book() -> None:
    A, c = radau(2, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(A, torch.tensor([[5 / 12, -1 / 12], [3 / 4, 1 / 4]], dtype=torch.float64))
    torch.testing.assert_close(c, double(1 / 3, 1))


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


def heat(n: int, k: Tensor) -> tuple[Any, Tensor, Tensor]:
    """The heat equation on a rod, from its third sine: right-hand side, start, and the rate at which that decays."""
    x = torch.arange(1, n + 1, dtype=torch.float64) / (n + 1)
    mode = torch.sin(3 * torch.pi * x)

    def rhs(t: Tensor, y: Tensor, k: Tensor) -> Tensor:
        z = torch.zeros_like(y[..., :1])
        left, right = torch.cat([z, y[..., :-1]], -1), torch.cat([y[..., 1:], z], -1)
        return k * (left - 2 * y + right) * (n + 1) ** 2

    return rhs, mode, 4 * k * (n + 1) ** 2 * torch.sin(torch.tensor(1.5 * torch.pi / (n + 1), dtype=torch.float64)) ** 2


def test_a_stiff_equation_is_noticed() -> None:
    """Explicit steps would be 5,000 and the trajectory 3 million numbers, of which there was no derivative."""
    k = double(0.1)[0].requires_grad_()
    rhs, mode, rate = heat(200, k)
    solution = ik.solve(ik.InitialValue(rhs, (0.0, 0.05, 0.1)), mode, (k,))
    exact = torch.exp(-rate * double(0.0, 0.05, 0.1)).unsqueeze(1) * mode
    torch.testing.assert_close(solution.value, exact, rtol=0, atol=1e-6)
    ours, theirs = (torch.autograd.grad(v[-1, 30], k)[0] for v in (solution.value, exact))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)
    assert solution._record.outcome.z.numel() < 100 * 3 * 200


@pytest.mark.parametrize("row", ["pendulum", "mild decay"])
def test_what_is_not_stiff_keeps_its_explicit_steps(row: str) -> None:
    y0 = double(1.0, 0.3).unsqueeze(0)
    f = (lambda t, y: torch.stack([y[:, 1], -y[:, 0].sin()], 1)) if row == "pendulum" else (lambda t, y: -y)
    t = double(0.0, 60.0 if row == "pendulum" else 5.0)
    explicit = dormand_prince(f, t, y0, 1e-8)
    edges, states = explicit_or_stiff(f, t, y0, 1e-8)
    torch.testing.assert_close((edges, states), explicit, rtol=0, atol=0)
    assert len(edges) > 50


@pytest.mark.parametrize("batch", [1, 3])
def test_jacobians_of_stiff_methods_are_sparse(batch: int) -> None:
    rhs, mode, _ = heat(40, double(1.0)[0])
    pattern = pattern_of_samples(lambda y: rhs(double(0.0)[0], y, double(1.0)[0]), mode.expand(batch, -1))
    assert pattern is not None and pattern.shape == (40 * batch, 40 * batch) and pattern.nnz == batch * (3 * 40 - 2)
    assert pattern_of_samples(lambda y: y.sum(1, keepdim=True) * y, mode.expand(batch, -1)) is None


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
            lambda: ik.solve(ik.InitialValue(lambda t, y: y**2, (0.0, 2.0)), double(1.0)),
            ik.ConvergenceError,
            "scipy.Radau",
        ),
        (
            lambda: ik.solve(ik.InitialValue(lambda t, y: y.sum(), T), double(1.0, 2.0)),
            ValueError,
            "rhs returned shape",
        ),
        (
            lambda: ik.solve(ik.InitialValue(decay, T[:2], lambda t, y: y[0]), double(1.0)[None], batch_dims=1),
            ik.CapabilityError,
            "torch.vmap",
        ),
        (
            lambda: torch.func.vmap(lambda y: ik.solve(ik.InitialValue(decay, T), y).value)(double(1.0, 2.0)[:, None]),
            ik.CapabilityError,
            "pass steps=",
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
