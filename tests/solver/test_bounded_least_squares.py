"""Least squares within bounds: against SciPy's reflective trust region, against the problem without the held unknowns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize as so
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.operators import Operator
from implicitkit.solver.evaluating.bounded_fits import Fits
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps import normal_equations

D = torch.float64
TIMES = torch.linspace(0, 3, 40, dtype=D)
NOISE = 0.05 * torch.sin(37 * torch.arange(40, dtype=D) ** 2)
DECAY = 2 * torch.exp(-1.3 * TIMES) + 0.5 + NOISE
DECAY[5] += 3  # an outlier

BOUNDS = {
    "one active": ([0.0, 0.0, 0.0], [1.5, 5.0, 5.0]),
    "the other side": ([0.0, 0.0, 0.6], [10.0, 5.0, 5.0]),
    "two active": ([0.0, 1.6, 0.0], [1.7, 5.0, 5.0]),
    "none active": ([-9.0, -9.0, -9.0], [9.0, 9.0, 9.0]),
    "one is fixed": ([0.0, 1.1, 0.0], [9.0, 1.1, 9.0]),
}


def decay(p: Tensor, y: Tensor) -> Tensor:
    return p[..., :1] * torch.exp(-p[..., 1:2] * TIMES) + p[..., 2:] - y


def fit(name: str, loss: str, y: Tensor, **options: Any) -> Any:
    lower, upper = (torch.tensor(b, dtype=D) for b in BOUNDS[name])
    start = torch.ones(3, dtype=D).expand(*y.shape[:-1], 3)
    return ik.least_squares(decay, start, (y,), bounds=(lower, upper), loss=loss, f_scale=0.1, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", ["linear", "soft_l1", "huber", "cauchy"])
@pytest.mark.parametrize("name", BOUNDS)
def test_the_point_is_scipys_and_the_method_is_of_residuals(name: str, loss: str) -> None:
    s = fit(name, loss, DECAY)
    assert s.solver == "auto (projected_levenberg_marquardt)" and int(s.steps) <= 60
    lower, upper = (np.array(b) for b in BOUNDS[name])
    want = so.least_squares(
        lambda p: decay(torch.from_numpy(p), DECAY).numpy(),
        np.clip(np.ones(3), lower + 1e-3, upper + 1e-3 - 2e-3 * (upper > lower)) if name != "one is fixed" else [1, 1.1, 1],
        bounds=(lower, upper + 1e-12),
        loss=loss,
        f_scale=0.1,
        xtol=1e-15,
        ftol=1e-15,
        gtol=1e-13,
    )  # fmt: skip
    np.testing.assert_allclose(s.value.numpy(), want.x, rtol=0, atol=2e-6)
    assert (s.value.numpy() >= lower).all() and (s.value.numpy() <= upper).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", ["linear", "cauchy"])
@pytest.mark.parametrize("name", BOUNDS)
def test_the_derivative_against_differences(name: str, loss: str) -> None:
    y = DECAY.clone().requires_grad_()
    weights = torch.tensor([1.0, -2.0, 3.0], dtype=D)
    (g,) = torch.autograd.grad((weights * fit(name, loss, y).value).sum(), y)
    way, h = torch.cos(torch.arange(40, dtype=D)), 1e-5
    ends = [(weights * fit(name, loss, DECAY + sign * h * way).value).sum() for sign in (1, -1)]
    torch.testing.assert_close((g * way).sum(), (ends[0] - ends[1]) / (2 * h), rtol=1e-4, atol=1e-6)


def test_samples_do_not_see_each_other() -> None:
    y = torch.stack([DECAY, DECAY.roll(1), 0.3 * DECAY, DECAY + 2])
    together = fit("one active", "linear", y, batch_dims=1, in_dims=0)
    alone = [fit("one active", "linear", row) for row in y]
    torch.testing.assert_close(together.value, torch.stack([s.value for s in alone]), rtol=1e-8, atol=1e-9)
    mapped = torch.func.vmap(lambda row: fit("one active", "linear", row).value)(y)
    torch.testing.assert_close(mapped, together.value, rtol=1e-8, atol=1e-9)


def in_unit(unit: Any, loss: str, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """The fit of :func:`fit` with residuals ``unit`` times as large, in the user's unit and precision."""
    unit = torch.as_tensor(unit, dtype=dtype)
    lower, upper = (torch.tensor(b, dtype=dtype) for b in BOUNDS["one active"])
    model = lambda p, y: unit * (decay(p, 0 * TIMES).to(p) - y)  # noqa: E731
    options = {"bounds": (lower, upper), "loss": loss, "f_scale": 0.1 * float(unit.flatten()[0])}

    def solve(y: Tensor) -> Tensor:
        start = torch.ones(*y.shape[:-1], 3, dtype=dtype)
        s = ik.least_squares(model, start, (y.to(dtype),), batch_dims=y.ndim - 1, **options)
        assert s.evaluations <= 60 and s.solver == "auto (projected_levenberg_marquardt)"
        value: Tensor = s.value.to(D)
        return value

    return solve


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("unit", [1e-6, 1e8])
@pytest.mark.parametrize("loss", ["linear", "cauchy"])
def test_residuals_in_any_unit(loss: str, unit: float, dtype: torch.dtype) -> None:
    """Pascals or bars: the fit and its derivative are the same."""
    solve, tolerance = in_unit(unit, loss, dtype), 1e-7 if dtype == D else 3e-3
    want = lambda y: fit("one active", loss, y).value  # noqa: E731
    for f, g in ((solve, want), (torch.func.jacrev(solve), torch.func.jacrev(want))):
        torch.testing.assert_close(f(DECAY), g(DECAY), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_samples_have_units_of_their_own(dtype: torch.dtype) -> None:
    y = DECAY.expand(4, 40)
    together = in_unit([[1e-6], [1.0], [1e3], [1e8]], "linear", dtype)(y)
    tolerance = 1e-7 if dtype == D else 3e-3
    torch.testing.assert_close(
        together, fit("one active", "linear", y, batch_dims=1).value, rtol=tolerance, atol=tolerance
    )


def test_unknowns_in_units_of_their_own() -> None:
    """A height of 1e-6 and a rate of 1e9 a second within bounds."""
    unit = torch.tensor([1e-6, 1e9, 1e-6], dtype=D)
    lower, upper = (torch.tensor(b, dtype=D) for b in BOUNDS["one active"])
    s = ik.least_squares(lambda p, y: decay(p / unit, y), unit, (DECAY,), bounds=(lower * unit, upper * unit))
    torch.testing.assert_close(s.value / unit, fit("one active", "linear", DECAY).value, rtol=1e-8, atol=1e-8)


def test_from_outside_the_bounds() -> None:
    lower, upper = (torch.tensor(b, dtype=D) for b in BOUNDS["one active"])
    start = torch.tensor([4.0, -3.0, 7.0], dtype=D)
    s = ik.least_squares(decay, start, (DECAY,), bounds=(lower, upper))
    torch.testing.assert_close(s.value, fit("one active", "linear", DECAY).value, rtol=1e-7, atol=1e-8)


def chain(z: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Each unknown near its neighbours and its datum."""
    return {"links": 3 * (z[1:] - z[:-1]) + 0.1 * z[1:] ** 2, "data": z - y}


@pytest.mark.parametrize("how", ["sparse", "dense", "products"])
def test_many_unknowns(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The held unknowns are at their bounds; the others, and the derivative, are those of the problem over them alone."""
    n = 400
    y = torch.sin(torch.linspace(0, 20, n, dtype=D)).requires_grad_()
    options: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}

    def refuse(*_: Any) -> Any:
        raise AssertionError("a dense matrix is formed")

    if how != "sparse":
        monkeypatch.setattr(Evaluations, "residuals_sparse", lambda *_: None)
    if how == "products":
        monkeypatch.setattr(normal_equations, "_DENSE", 100)
    if how != "dense":
        monkeypatch.setattr(Evaluations, "residuals_jacobian", refuse)
        monkeypatch.setattr(Operator, "dense", refuse)
    s = ik.least_squares(chain, torch.zeros(n, dtype=D), (y,), bounds=(-0.5, 0.7), **options)
    assert s.solver == "auto (projected_levenberg_marquardt)"
    weights = torch.cos(torch.arange(n, dtype=D))
    (g,) = torch.autograd.grad((weights * s.value).sum(), y)
    monkeypatch.undo()
    z = s.value.detach()
    held = (z == -0.5) | (z == 0.7)
    assert 50 < int(held.sum()) < 350
    others = (~held).nonzero().squeeze(1)

    def free_only(part: Tensor, y: Tensor) -> dict[str, Tensor]:
        return chain(z.index_copy(0, others, part), y)

    alone = ik.least_squares(free_only, z[~held] + 0.01, (y,), solver="levenberg_marquardt", **options)
    torch.testing.assert_close(alone.value, z[~held], rtol=0, atol=1e-8)
    (want,) = torch.autograd.grad((weights[~held] * alone.value).sum(), y)
    torch.testing.assert_close(g, want, rtol=1e-6, atol=1e-7)


def test_only_of_residuals() -> None:
    from implicitkit.solver.constrained.projected import ProjectedLevenbergMarquardt

    with pytest.raises(ik.CapabilityError, match="least squares within bounds"):
        ik.argmin(lambda z: z.square().sum(), torch.ones(2), bounds=(0.5, 2), solver=ProjectedLevenbergMarquardt())


# ---------------------------------------------------------------------------------------------------------------------
# Least squares within bounds evaluates its residuals about once at each point, whoever asks for what.
T = torch.linspace(0, 4, 40, dtype=D)
NOISE_OF_80 = torch.randn(80, dtype=D, generator=torch.Generator().manual_seed(0))
A = torch.randn(80, 30, dtype=D, generator=torch.Generator().manual_seed(1))
NOISY_DECAY = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.02 * NOISE_OF_80[:40]
BUMP = 3 * torch.exp(-((T - 2.4) ** 2)) + 0.05 * NOISE_OF_80[:40]


def two_point_decay(z: Tensor) -> Tensor:
    return z[0] * torch.exp(-z[1] * T) + z[2] - NOISY_DECAY


def bump(z: Tensor) -> Tensor:
    return z[0] * torch.exp(-((T - z[1]) ** 2) / z[2] ** 2) + z[3] - BUMP


def valley(z: Tensor) -> Tensor:
    return torch.stack([10 * (z[1] - z[0] ** 2), 1 - z[0]])


# residuals, start, bounds, loss
FITS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], tuple[float, float], str]] = {
    "a bound holds": (two_point_decay, [1.0, 1.0, 0.0], (0.0, 1.0), "linear"),
    "no bound holds": (two_point_decay, [1.0, 1.0, 0.0], (0.0, 10.0), "linear"),
    "four unknowns": (bump, [1.0, 2.0, 1.0, 0.1], (0.0, 4.0), "linear"),
    "a robust loss": (two_point_decay, [1.0, 1.0, 0.0], (0.0, 10.0), "soft_l1"),
    "a bent valley": (valley, [-1.2, 1.0], (-2.0, 0.5), "linear"),
    "a linear fit": (lambda z: A @ z - NOISE_OF_80, [0.0] * 30, (0.0, 0.1), "linear"),
}


@pytest.mark.parametrize("size", (1e7, 1e8))
def test_an_amplitude_beside_a_rate_is_not_hidden_by_the_unit_of_the_objective(size: float) -> None:
    """The slope of the rate is ``size`` times that of the amplitude, and its curvature overflows a step of ``size``."""
    start, want = (torch.tensor(z, dtype=D) for z in ([size, 1.0], [3 * size, 2.0]))
    y = want[0] * torch.exp(-want[1] * TIMES)
    found = ik.least_squares(
        lambda p: p[0] * torch.exp(-p[1] * TIMES) - y, start, bounds=(torch.zeros_like(start), None)
    )
    torch.testing.assert_close(found.value, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", FITS)
def test_residuals_are_evaluated_once_at_a_point(name: str) -> None:
    residuals, start, bounds, loss = FITS[name]
    points: set[tuple[float, ...]] = set()
    calls = 0

    def counted(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        points.add(tuple(torch.func.debug_unwrap(z.detach()).reshape(-1).tolist()))
        return residuals(z)

    solution = ik.least_squares(counted, torch.tensor(start, dtype=D), bounds=bounds, loss=loss)
    before = 3  # those that look at the function before the solve
    assert calls <= max(1.5 * len(points), len(points) + before + 1), (calls, len(points))
    assert calls - before <= solution.evaluations <= calls


def test_two_points_are_remembered_by_what_they_are() -> None:
    calls: list[Tensor] = []

    def residuals(z: Tensor) -> Tensor:
        calls.append(z)
        return torch.cat([z.square(), 3 * z], 1)

    fits = Fits(residuals)
    first, second = torch.tensor([[1.0, 2.0]], dtype=D), torch.tensor([[-1.0, 0.5]], dtype=D)
    slope = lambda z: 2 * z**3 + 9 * z  # noqa: E731
    assert torch.equal(fits.at(first).slope, slope(first)) and torch.equal(fits.at(second).slope, slope(second))
    assert fits.at(first.clone()) is fits.at(first) and fits.at(first).slope is fits.at(first.clone()).slope
    assert len(calls) == 2
    vector, leaf = fits.at(first).graph  # which was let go
    assert len(calls) == 3 and torch.equal(vector, fits.at(first).residuals) and torch.equal(leaf, first)
    fits.at(second + 1)
    assert torch.equal(fits.at(first).value, 0.5 * residuals(first).square().sum(1)) and len(calls) == 6


def test_residuals_that_hide_z_are_refused() -> None:
    with pytest.raises(RuntimeError, match="autograd sees no z"):
        Fits(lambda z: z.detach() - 1).at(torch.zeros(1, 2, dtype=D)).slope  # noqa: B018


def test_the_largest_eigenvalue_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how the damping begins; that it does not vanish beside the matrix, a diagonal says as well."""
    asked, largest = [], normal_equations._Dense.largest
    monkeypatch.setattr(normal_equations._Dense, "largest", lambda self: asked.append(1) or largest(self))
    found = fit("one active", "linear", DECAY)
    assert int(found.steps) > 2 and len(asked) == 1


def test_a_linear_fit_takes_one_step_and_a_bent_one_of_its_batch_its_own() -> None:
    """The linear model's minimiser within the bounds is tried first: three of them hold, and some are left again."""
    design = A[:, :6].clone()
    target = design @ torch.tensor([2.0, -1.0, 0.3, 0.5, 0.2, 0.9], dtype=D) + 0.1 * NOISE_OF_80
    bent = torch.tensor([0.0, 1.0], dtype=D)
    start = torch.tensor([0.0, 1, 0, 1, 0, 1], dtype=D)

    def residuals(z: Tensor, bent: Tensor) -> Tensor:
        return (z + bent * (2 * z).sin()) @ design.T - target

    fits = ik.least_squares(residuals, start.expand(2, 6), (bent.unsqueeze(1),), bounds=(0, 1), batch_dims=1)
    assert int(fits.steps[0]) == 1 and int(fits.steps[1]) > 1
    z, slope = fits.value[0], design.T @ (design @ fits.value[0] - target)
    torch.testing.assert_close(z - (z - slope).clamp(0, 1), torch.zeros(6, dtype=D), rtol=0, atol=1e-10)
    assert z[0] == 1 and z[1] == z[4] == 0 and z[[2, 3, 5]].min() > 0 and z[[2, 3, 5]].max() < 1
    alone = ik.least_squares(residuals, start, (bent[1],), bounds=(0, 1))
    torch.testing.assert_close(alone.value, fits.value[1], rtol=1e-7, atol=1e-8)
