"""Minimisation with a penalty or within a set: Newton's steps through the proximal map, and what it leaves exactly zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.extend import Polyalgorithm, Stage

D = torch.float64
Data = tuple[Tensor, Tensor]


def regression(rows: int, columns: int, seed: int = 0) -> Data:
    """``X`` and ``y``, of which every fifth unknown has a part."""
    g = torch.Generator().manual_seed(seed)
    X = torch.randn(rows, columns, generator=g, dtype=D)
    truth = (torch.arange(columns) % 5 == 0).to(D)
    return X, X @ truth + 0.1 * torch.randn(rows, generator=g, dtype=D)


def fit(w: Tensor, X: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (X @ w - y).square().sum()


def by_coordinates(X: Tensor, y: Tensor, penalty: float) -> np.ndarray:
    """The lasso by coordinate descent (Friedman, Hastie & Tibshirani 2010), until nothing moves."""
    A, b = X.numpy(), y.numpy()
    w, size = np.zeros(A.shape[1]), (A * A).sum(0)
    for _ in range(20_000):
        old, rest = w.copy(), b - A @ w
        for j in range(len(w)):
            rho = A[:, j] @ rest + size[j] * w[j]
            new = np.sign(rho) * max(abs(rho) - penalty, 0) / size[j]
            rest, w[j] = rest - A[:, j] * (new - w[j]), new
        if np.abs(w - old).max() <= 1e-13:
            return w
    raise AssertionError("coordinate descent did not end")


@pytest.mark.parametrize(
    ("rows", "columns", "share", "most"),
    [
        pytest.param(20, 3, 0.1, 25, id="3 unknowns"),
        pytest.param(100, 20, 0.01, 60, id="20 unknowns, a small penalty"),
        pytest.param(60, 90, 0.1, 120, id="more unknowns than rows"),
        pytest.param(200, 100, 0.01, 120, id="100 unknowns"),
    ],
)
def test_a_lasso_by_defaults(rows: int, columns: int, share: float, most: int) -> None:
    """That of another method, zeros exactly zero, in few evaluations; the penalty's derivative is that of the formula."""
    X, y = regression(rows, columns)
    most_zero = float((X.T @ y).abs().max())
    penalty = torch.tensor(share * most_zero, dtype=D, requires_grad=True)
    found = ik.argmin(fit, torch.zeros(columns, dtype=D), (X, y), prox=ik.prox.l1(penalty))
    want = by_coordinates(X, y, float(penalty.detach()))
    w = found.value.detach()
    np.testing.assert_allclose(w.numpy(), want, atol=1e-9)
    assert ((w != 0).numpy() == (want != 0)).all()
    assert found.evaluations <= most, found
    (slope,) = torch.autograd.grad(found.value.sum(), penalty)
    S = w != 0
    formula = -torch.linalg.solve(X[:, S].T @ X[:, S], w[S].sign()).sum()
    torch.testing.assert_close(slope, formula, rtol=1e-8, atol=1e-10)


def test_thousands_of_unknowns_of_which_few_are_not_zero() -> None:
    """Newton's systems are those of the others."""
    X, y = regression(300, 6000)
    penalty = 0.3 * float((X.T @ y).abs().max())
    found = ik.argmin(fit, torch.zeros(6000, dtype=D), (X, y), prox=ik.prox.l1(penalty))
    w, g = found.value, X.T @ (X @ found.value - y)
    S = w != 0
    assert 10 < int(S.sum()) < 300
    assert float((g[S] + penalty * w[S].sign()).abs().max()) < 1e-8 * penalty
    assert float(g[~S].abs().max()) <= penalty
    assert found.solver == "auto (proximal_newton)" and found.evaluations <= 200, found


SETS: dict[str, dict[str, Any]] = {
    "a simplex": {"project": ik.project.simplex()},
    "an l1 penalty": {"prox": ik.prox.l1(0.3)},
    "a norm that makes all of it zero": {"prox": ik.prox.l2(50.0)},
    "a norm": {"prox": ik.prox.l2(0.5)},
    "an elastic net": {"prox": ik.prox.elastic_net(0.3, 0.5)},
}


@pytest.mark.parametrize("options", SETS.values(), ids=SETS)
def test_is_the_minimum_of_gradient_steps(options: dict[str, Any]) -> None:
    X, y = regression(40, 12)

    def loss(w: Tensor) -> Tensor:
        return torch.nn.functional.softplus(-y.sign() * (X @ w)).sum()

    z0 = torch.full((12,), 1 / 12, dtype=D)
    found = ik.argmin(loss, z0, **options)
    slow = ik.argmin(loss, z0, **options, solver="proximal_gradient", rtol=1e-11, max_steps=20_000)
    torch.testing.assert_close(found.value, slow.value, rtol=1e-7, atol=1e-8)
    assert found.evaluations <= slow.evaluations


class Square(torch.autograd.Function):
    """``x^2``, once differentiable: autograd sees no second derivative, and torch does not say so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, w: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * w


class InNumPy(Square):
    """The same with a backward in NumPy, which knows no derivative."""

    @staticmethod
    def backward(ctx: Any, w: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(2 * x.numpy() * w.numpy())


class SoftThreshold(torch.autograd.Function):
    """The proximal map of ``|x|``, without a derivative."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, t: Tensor) -> Tensor:
        return v.sign() * (v.abs() - 5.0 * t).clamp_min(0)


LESS: dict[str, tuple[Any, Any]] = {
    "no second derivative": (Square.apply, ik.prox.l1(5.0)),
    "a backward in NumPy": (InNumPy.apply, ik.prox.l1(5.0)),
    "a proximal map without a derivative": (torch.square, SoftThreshold.apply),
}


@pytest.mark.parametrize(("square", "prox"), LESS.values(), ids=LESS)
def test_gradient_steps_alone_where_there_is_no_derivative(square: Any, prox: Any) -> None:
    """With an evaluation or two more for every trial, of which there are few."""
    X, y = regression(100, 20)
    z0 = torch.zeros(20, dtype=D)
    found = ik.argmin(lambda w: 0.5 * square(X @ w - y).sum(), z0, prox=prox)
    want = ik.argmin(fit, z0, (X, y), prox=ik.prox.l1(5.0), solver="proximal_gradient")
    torch.testing.assert_close(found.value, want.value, rtol=1e-6, atol=1e-8)
    assert found.evaluations <= want.evaluations + 25, (found, want)


@pytest.mark.parametrize(("square", "prox"), LESS.values(), ids=LESS)
def test_stages_that_need_a_derivative_are_left_out_where_there_is_none(square: Any, prox: Any) -> None:
    """Newton's steps between two stages of gradient steps, of which the first does not get there."""
    X, y = regression(100, 20)
    first = Stage("proximal_gradient", max_steps=3)
    solver = Polyalgorithm((first, "newton", "proximal_gradient"))
    found = ik.argmin(lambda w: 0.5 * square(X @ w - y).sum(), torch.zeros(20, dtype=D), prox=prox, solver=solver)
    g = X.T @ (X @ found.value - y)
    torch.testing.assert_close(g.abs().clamp_max(5.0), g.abs(), rtol=1e-6, atol=0)
    assert bool(found.converged)


def test_samples_of_their_own() -> None:
    """Each is what it is alone, whatever the others need; one that is not finite spoils none."""
    problems = [regression(30, 10, seed) for seed in range(6)]
    X, y = (torch.stack(part) for part in zip(*problems, strict=True))
    y[2] = torch.nan
    penalties = torch.tensor([1.0, 0.1, 1.0, 50.0, 5.0, 1e4], dtype=D)

    def loss(w: Tensor, X: Tensor, y: Tensor) -> Tensor:
        return 0.5 * (torch.einsum("bij,bj->bi", X, w) - y).square().sum(1)

    prox = ik.prox.l1(penalties.unsqueeze(1))
    found = ik.argmin(loss, torch.zeros(6, 10, dtype=D), (X, y), prox=prox, batch_dims=1, on_failure="ignore")
    assert found.converged.tolist() == [True, True, False, True, True, True]
    for i in (0, 1, 3, 4, 5):
        want = by_coordinates(X[i], y[i], float(penalties[i]))
        np.testing.assert_allclose(found.value[i].numpy(), want, atol=1e-8)
        assert ((found.value[i] != 0).numpy() == (want != 0)).all()


def test_proximal_maps_are_no_evaluations_of_the_function() -> None:
    """Two a gradient step: at the extrapolated point, and at the new one, which serves the test of it, too."""
    calls = 0
    X, y = regression(60, 30)

    def counted(w: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return fit(w, X, y)

    found = ik.argmin(counted, torch.zeros(30, dtype=D), prox=ik.prox.l1(5.0), solver="proximal_gradient")
    assert found.steps > 20
    assert found.evaluations <= 2.6 * found.steps + 10, found
    assert abs(calls - found.evaluations) <= 8, (calls, found)


def test_steps_against_the_curvature_are_not_taken() -> None:
    """Between two wells Newton's steps lead to the hill; gradient steps lead down, and Newton's from where it is convex."""
    z0 = torch.linspace(0.001, 0.004, 7, dtype=D) * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0], dtype=D)
    found = ik.argmin(lambda z: 0.25 * (z * z - 1).square().sum(), z0, prox=ik.prox.l1(1e-4))
    assert bool((found.value * z0 > 0).all()), found.value
    root = found.value.abs()
    torch.testing.assert_close(root**3 - root + 1e-4, torch.zeros(7, dtype=D), rtol=0, atol=1e-9)
    assert bool((root > 0.9).all()) and found.evaluations <= 80, found


INSIDE: dict[str, dict[str, Any]] = {
    "bounds": {"bounds": (0.0, 0.3)},
    "a simplex": {"project": ik.project.simplex()},
    "an l1 penalty": {"prox": ik.prox.l1(1.0)},
}


@pytest.mark.parametrize("solver", ["newton", "trust_region", "newton_krylov"])
@pytest.mark.parametrize("options", INSIDE.values(), ids=INSIDE)
def test_solvers_of_equations_end_inside(options: dict[str, Any], solver: str) -> None:
    """Beside a bound, or a zero that a penalty makes, is no place to be by rounding: -1e-18 has no root."""
    X, y = regression(20, 10, seed=3)
    start = torch.full((10,), 0.1, dtype=D)
    found = ik.argmin(fit, start, (X, y), solver=solver, **options).value
    want = ik.argmin(fit, start, (X, y), **options).value
    assert ((found == 0) == (want == 0)).all() and ((found == 0.3) == (want == 0.3)).all(), (found, want)
    assert 1 <= int((want == 0).sum()) < 10
    assert "prox" in options or float(found.min()) == 0.0
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-11)


def test_of_no_active_bound_nothing_moves() -> None:
    """The slope is a residual there, and its step a step of nothing."""
    X, y = regression(20, 10)
    start = torch.zeros(10, dtype=D)
    within = ik.argmin(fit, start, (X, y), bounds=(-100.0, 100.0), solver="newton").value
    torch.testing.assert_close(within, torch.linalg.lstsq(X, y).solution, rtol=1e-13, atol=1e-14)


def test_what_puts_them_inside_is_counted() -> None:
    """Also where samples have ended at different times, and rows have been dropped."""
    calls = 0

    def loss(z: Tensor, a: Tensor) -> Tensor:
        nonlocal calls
        calls += len(z)
        return ((z - a).square() + 0.1 * (z - a) ** 4).sum(1)

    a = torch.cat([torch.full((15, 4), -0.5, dtype=D), torch.full((1, 4), 300.0, dtype=D)])
    start = torch.full((16, 4), 0.4, dtype=D)
    found = ik.argmin(loss, start, (a,), bounds=(0.0, None), solver="newton", batch_dims=1)
    assert int(found.steps.max()) > 2 * int(found.steps.min())
    assert 0 <= calls - found.sample_evaluations <= 16, (
        calls,
        found.sample_evaluations,
    )  # one look at the function before
    assert bool((found.value[:15] == 0).all())


ENDLESS: dict[str, tuple[Any, dict[str, Any]]] = {
    "nonnegative": (lambda z: -z.sum(), {"project": ik.project.nonnegative()}),
    "cone": (lambda z: -z[-1], {"project": ik.project.second_order_cone()}),
    "l1": (lambda z: -2 * z.sum(), {"prox": ik.prox.l1(1.0)}),
    "l1, one unknown at rest": (lambda z: z[0] ** 2 - 1.2 * z.sum(), {"prox": ik.prox.l1(1.0)}),
    "l1, curved": (lambda z: torch.logsumexp(-z, 0), {"prox": ik.prox.l1(0.1)}),
    "groups": (lambda z: -2 * z.sum(), {"prox": ik.prox.group_lasso(2, 1.0)}),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_falls_for_ever_is_seen_at_once(name: str) -> None:
    """Where there is no curvature a Newton step fails: steps went on to 1e16 (1,341 evaluations), or 20,000 times."""
    objective, options = ENDLESS[name]
    found = ik.argmin(objective, torch.ones(4, dtype=torch.float64), on_failure="ignore", **options)
    assert ik.Status(int(found.status)) is ik.Status.UNBOUNDED and found.evaluations < 100


@pytest.mark.parametrize("weight", [1.0, 1e-3])
def test_what_falls_for_long_has_an_end(weight: float) -> None:
    """``-2 z + |z| + w z^2 / 2``: at ``1 / w``."""
    z0 = torch.ones(4, dtype=torch.float64)
    found = ik.argmin(lambda z: -2 * z.sum(), z0, prox=ik.prox.elastic_net(1.0, weight))
    assert torch.allclose(found.value, z0 / weight)
    far = ik.argmin(lambda z: -2 * z.sum(), z0, project=ik.project.box(0.0, 1 / weight))
    assert torch.allclose(far.value, z0 / weight)


def _into_the_box_by_halves(z: Tensor) -> Tensor:
    """A projection, known to 1e-6 of itself."""
    for _ in range(20):
        z = 0.5 * (z + z.clamp(0, 1))
    return z


def test_a_projection_by_iterations_need_not_know_the_tip_of_a_cone() -> None:
    """At zero there is no ``|z|`` to know digits of: Dykstra's sweeps end beside it by digits of where they begin."""
    sides = torch.tensor([[1.0, 0.2, 0.0], [-1.0, 0.2, 0.0]], dtype=D)

    def wedge(z: torch.Tensor) -> torch.Tensor:
        left = [torch.zeros_like(z), torch.zeros_like(z)]
        for _ in range(40):
            for i, a in enumerate(sides):
                y = z + left[i]
                z = y - (y @ a).clamp(min=0).unsqueeze(-1) * a / (a @ a)
                left[i] = y - z
        return z

    found = ik.argmin(lambda z: z.square().sum() - 0.1 * z[1], torch.ones(3, dtype=D), project=wedge)
    assert float(found.value.norm()) < 1e-6


MAPS: dict[str, tuple[Any, bool]] = {
    "sigmoid": (torch.sigmoid, False),
    "softmax": (lambda z: torch.softmax(z, -1), False),
    "half": (lambda z: 0.5 * z, False),
    "one sample's": (lambda z: torch.stack([z[0].clamp(0, 1), z[1].sigmoid()]), False),
    "box": (lambda z: z.clamp(0, 1), True),
    "box, by halves": (_into_the_box_by_halves, True),
    "origin": (lambda z: 0 * z, True),
    "sphere": (lambda z: z / z.norm(dim=-1, keepdim=True), True),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_map_that_moves_its_own_points_is_no_projection(name: str) -> None:
    """``z = P(z - df)`` has a solution, which is no minimum: it was returned as one."""
    project, is_one = MAPS[name]
    target = torch.tensor([[0.3, 0.9], [2.0, 4.0]], dtype=D)
    how: dict[str, Any] = {"project": project, "batch_dims": 1, "on_failure": "ignore"}
    found = ik.argmin(lambda z, t: (z - t).square().sum(1), torch.ones_like(target), (target,), **how)
    assert bool(found.converged.all()) is is_one and ("is no projection" in found.message) is not is_one
    if name == "one sample's":
        assert found.status.tolist() == [int(ik.Status.CONVERGED), int(ik.Status.STALLED)]
