"""Least squares with bounds and robust losses, curve fitting, auxiliary outputs: against SciPy and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import implicitkit as ik

F64 = torch.float64
X = torch.linspace(0, 4, 24, dtype=F64)
START = torch.ones(2, dtype=F64)
TIGHT = {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}


def data(seed: int = 0) -> Tensor:
    """A decay with noise and an outlier."""
    noise = torch.randn(24, dtype=F64, generator=torch.Generator().manual_seed(seed))
    y = 2.5 * torch.exp(-1.3 * X) + 0.05 * noise
    y[5] += 1.0
    return y


def model(x: Any, a: Any, k: Any) -> Any:
    return a * (torch if isinstance(x, Tensor) else np).exp(-k * x)


def residuals(p: Tensor, y: Tensor) -> Tensor:
    return model(X, p[0], p[1]) - y


def central(f: Callable[[Tensor], Tensor], y: Tensor, i: int, h: float = 1e-5) -> Tensor:
    e = torch.zeros_like(y)
    e[i] = h
    return (f(y + e) - f(y - e)) / (2 * h)


# ----------------------------------------------------------------------------------------------------------- robust losses
LOSSES = {
    "linear": "linear",
    "huber": "huber",
    "soft_l1": "soft_l1",
    "cauchy": "cauchy",
    "callable": lambda s: 2 * (torch.sqrt(1 + s) - 1),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [0.05, 0.3])
def test_robust_loss_is_that_of_scipy(name: str, scale: float) -> None:
    y, loss = data(), LOSSES[name]
    solve = lambda y: ik.least_squares(residuals, START, (y,), loss=loss, f_scale=scale, rtol=1e-12, atol=1e-12).value  # noqa: E731
    found = scipy.optimize.least_squares(
        lambda p: model(X.numpy(), *p) - y.numpy(), [1, 1], f_scale=scale, **TIGHT,
        loss="soft_l1" if name == "callable" else name,
    )  # fmt: skip
    leaf = y.clone().requires_grad_()
    value = solve(leaf)
    np.testing.assert_allclose(value.detach(), found.x, rtol=0, atol=3e-8)
    (g,) = torch.autograd.grad(value[1], leaf)
    for i in (0, 5, 9):
        torch.testing.assert_close(g[i], central(lambda t: solve(t)[1], y, i), rtol=1e-4, atol=1e-6)


def test_gauss_newton_still_serves() -> None:
    s = ik.least_squares(residuals, torch.tensor([2.5, 1.3], dtype=F64), (data(),), loss="soft_l1", f_scale=0.1,
                         solver="gauss_newton")  # fmt: skip
    assert bool(s.converged) and s.solver == "gauss_newton"


def test_the_scale_is_differentiable() -> None:
    y = data()

    def slope(scale: Tensor) -> Tensor:
        return ik.least_squares(residuals, START, (y,), loss="cauchy", f_scale=scale, rtol=1e-12, atol=1e-12).value[0]

    scale = torch.tensor(0.1, dtype=F64)
    g = grad(slope)(scale)
    h = 1e-5
    torch.testing.assert_close(g, (slope(scale + h) - slope(scale - h)) / (2 * h), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("upper", [2.0, 10.0], ids=["active", "inactive"])
def test_bounds(upper: float) -> None:
    y = data()

    def solve(y: Tensor) -> Tensor:
        bounds = (0.0, torch.tensor([upper, 5.0], dtype=F64))
        return ik.least_squares(residuals, START, (y,), bounds=bounds, rtol=1e-11, atol=1e-11).value

    found = scipy.optimize.least_squares(
        lambda p: model(X.numpy(), *p) - y.numpy(), [1, 1], **TIGHT, bounds=([0, 0], [upper, 5])
    )
    np.testing.assert_allclose(solve(y), found.x, rtol=0, atol=3e-8)
    g = grad(lambda t: solve(t)[1])(y)
    torch.testing.assert_close(g[3], central(lambda t: solve(t)[1], y, 3), rtol=1e-4, atol=1e-6)


def test_bounds_in_a_batch() -> None:
    y = torch.stack([data(0), data(1), 2 * data(2)])
    batched = lambda p, y: model(X, p[:, :1], p[:, 1:]) - y  # noqa: E731
    s = ik.least_squares(batched, torch.ones(3, 2, dtype=F64), (y,), batch_dims=1, bounds=(0.0, 2.2))
    for i in range(3):
        one = ik.least_squares(residuals, START, (y[i],), bounds=(0.0, 2.2)).value
        torch.testing.assert_close(s.value[i], one, rtol=1e-6, atol=1e-7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["plain", "huber", "a scale each", "bounds", "a conjugate", "mapped"])
def test_complex_residuals_are_two_real_ones(name: str) -> None:
    """Fitting an impedance: the same as with ``torch.view_as_real`` around the residuals, value and derivative."""
    omega = torch.logspace(-1, 3, 20, dtype=F64)
    misfit = lambda p, y: p[0] + p[1] / (1 + 0.01j * omega * p[2]) - torch.view_as_complex(y)  # noqa: E731
    noise = torch.randn(2, 20, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    Y = torch.view_as_real(misfit(torch.tensor([1.0, 2.0, 0.5]), torch.zeros(20, 2, dtype=F64))) + 0.1 * noise
    options = {
        "huber": {"loss": "huber", "f_scale": 0.03},
        "a scale each": {"loss": "soft_l1", "f_scale": torch.linspace(0.05, 0.1, 20, dtype=F64)},
        "bounds": {"bounds": (0.8, 1.7)},
    }.get(name, {})
    flip = torch.conj if name == "a conjugate" else lambda r: r
    halves = {**options, "f_scale": options["f_scale"].unsqueeze(1)} if name == "a scale each" else options
    fit = lambda r, o: lambda y: ik.least_squares(r, torch.ones(3, dtype=F64), (y,), rtol=1e-12, **o).value  # noqa: E731
    whole = fit(lambda p, y: flip(misfit(p, y)), options)
    parts = fit(lambda p, y: torch.view_as_real(misfit(p, y)), halves)
    over, y = (vmap, Y) if name == "mapped" else (lambda f: f, Y[0])
    for of in (lambda f: f, jacrev):
        torch.testing.assert_close(over(of(whole))(y), over(of(parts))(y), rtol=1e-8, atol=1e-9)


def test_complex_unknowns_in_least_squares() -> None:
    """Damped oscillations: the unknowns are complex, too."""
    t = torch.linspace(0, 4, 50, dtype=F64)
    model = lambda z: (z["amplitude"] * torch.exp(z["rate"] * t[:, None])).sum(-1)  # noqa: E731
    rate = torch.tensor([-0.3 + 6j, -0.5 + 9j], dtype=torch.complex128)
    truth = {"amplitude": torch.tensor([1 + 0.5j, 0.5 - 0.3j], dtype=torch.complex128), "rate": rate}
    start = {"amplitude": torch.ones(2, dtype=torch.complex128), "rate": rate + 0.1}
    found = ik.least_squares(lambda z, y: model(z) - y, start, (model(truth),)).value
    for key in truth:
        torch.testing.assert_close(found[key], truth[key], rtol=1e-8, atol=1e-8)


def test_wrong_losses_and_scales() -> None:
    with pytest.raises(ValueError, match="Did you mean 'cauchy'"):
        ik.LeastSquares(residuals, loss="cauchi")
    with pytest.raises(ValueError, match="f_scale must be positive"):
        ik.LeastSquares(residuals, f_scale=0.0)


# ------------------------------------------------------------------------------------------------------------ curve fitting
SIGMAS: dict[str, Tensor | None] = {
    "none": None,
    "deviations": 0.02 + 0.01 * X,
    "covariance": 0.01 * torch.eye(24, dtype=F64) + 0.002,
}


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("name", SIGMAS)
def test_fit_is_that_of_scipy(name: str, absolute: bool) -> None:
    y, sigma = data(), SIGMAS[name]
    fit = ik.curve_fit(model, X, y, START, sigma, absolute_sigma=absolute, rtol=1e-12, atol=1e-12)
    p, covariance = scipy.optimize.curve_fit(
        model, X.numpy(), y.numpy(), [1, 1], None if sigma is None else sigma.numpy(), absolute, **TIGHT
    )
    np.testing.assert_allclose(fit.parameters, p, rtol=1e-7)
    np.testing.assert_allclose(fit.covariance, covariance, rtol=1e-6)


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "callable"])
def test_covariance_of_a_robust_fit_is_that_of_scipy(name: str, absolute: bool) -> None:
    y, sigma = data(), 0.02 + 0.01 * X
    fit = ik.curve_fit(
        model, X, y, START, sigma, absolute_sigma=absolute, loss=name, f_scale=2.0, rtol=1e-12, atol=1e-12
    )
    options: dict[str, Any] = {"method": "trf", "loss": name, "f_scale": 2.0} | TIGHT
    p, covariance = scipy.optimize.curve_fit(model, X.numpy(), y.numpy(), [1, 1], sigma.numpy(), absolute, **options)
    np.testing.assert_allclose(fit.parameters, p, rtol=1e-7)
    np.testing.assert_allclose(fit.covariance, covariance, rtol=1e-6)


@pytest.mark.parametrize("name", SIGMAS)
def test_data_without_a_number_are_left_out_as_in_scipy(name: str) -> None:
    x, y, sigma = X.clone(), data(), SIGMAS[name]
    x[9], y[3], y[17] = (torch.nan,) * 3
    fit = ik.curve_fit(model, x, y, START, sigma, nan_policy="omit", rtol=1e-12, atol=1e-12)
    weights = None if sigma is None else sigma.numpy()
    options: dict[str, Any] = {"check_finite": False, "nan_policy": "omit"} | TIGHT
    p, covariance = scipy.optimize.curve_fit(model, x.numpy(), y.numpy(), [1, 1], weights, **options)
    np.testing.assert_allclose(fit.parameters, p, rtol=1e-7)
    np.testing.assert_allclose(fit.covariance, covariance, rtol=1e-6)
    both = torch.stack([y, data(1)])
    fits = ik.curve_fit(model, x, both, torch.ones(2, 2, dtype=F64), sigma, nan_policy="omit", batch_dims=1)
    np.testing.assert_allclose(fits.parameters[0], p, rtol=1e-7)
    np.testing.assert_allclose(fits.covariance[0], covariance, rtol=1e-6)


def test_derivatives_where_data_are_left_out() -> None:
    x, y = torch.stack([X, X.flip(0)]), data()
    x[1, 9], y[3] = torch.nan, torch.nan

    def figure(y: Tensor) -> Tensor:
        fit = ik.curve_fit(
            lambda x, a, b: a * x[0] + b / (1 + x[1]), x, y, START, nan_policy="omit", rtol=1e-12, atol=1e-12
        )
        return fit.parameters.sum() + fit.covariance.sum()

    backward = jacrev(figure)(y)
    torch.testing.assert_close(backward, jacfwd(figure)(y))
    torch.testing.assert_close(backward[4], central(figure, y, 4), rtol=1e-6, atol=1e-9)
    assert backward[3] == backward[9] == 0
    torch.testing.assert_close(vmap(figure)(torch.stack([y, y.flip(0)]))[0], figure(y))


def test_data_without_a_number_may_be_refused() -> None:
    y = data()
    y[3] = torch.nan
    with pytest.raises(ValueError, match="contain NaN"):
        ik.curve_fit(model, X, y, START, nan_policy="raise")


@pytest.mark.parametrize("unit", [1e-20, 1e-10, 1e12])
def test_covariance_in_any_unit(unit: float) -> None:
    fit, same = (ik.curve_fit(model, X, u * data(), torch.tensor([u, 1.0], dtype=F64)) for u in (unit, 1.0))
    units = torch.tensor([unit, 1.0], dtype=F64)
    torch.testing.assert_close(fit.covariance / units / units.unsqueeze(1), same.covariance, rtol=1e-6, atol=0)


@pytest.mark.parametrize("of", [torch.tensor, np.array, list], ids=["tensors", "arrays", "lists"])
def test_data_and_starts_may_be_integers(of: Any) -> None:
    fit = ik.curve_fit(lambda x, a, b: a * x + b, of([0, 1, 2, 3]), of([1, 3, 5, 7]), of([1, 1]), of([1, 1, 2, 2]))
    assert torch.allclose(fit.parameters, torch.tensor([2.0, 1.0]), atol=1e-4)


def test_fits_in_a_batch_are_the_fits_one_by_one() -> None:
    y = torch.stack([data(0), 2 * data(1)])
    fit = ik.curve_fit(model, X, y, torch.ones(2, 2, dtype=F64), 0.1 + X, batch_dims=1)
    for i in range(2):
        one = ik.curve_fit(model, X, y[i], START, 0.1 + X)
        torch.testing.assert_close(fit.parameters[i], one.parameters, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(fit.covariance[i], one.covariance, rtol=1e-6, atol=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loss", ["linear", "soft_l1"])
@pytest.mark.parametrize("what", ["parameters", "covariance"])
def test_fits_are_differentiable_in_every_mode(what: str, loss: str) -> None:
    def figure(y: Tensor) -> Tensor:
        return getattr(ik.curve_fit(model, X, y, START, loss=loss, f_scale=0.1, rtol=1e-12, atol=1e-12), what).sum()

    y = data()
    backward, forward = jacrev(figure)(y), jacfwd(figure)(y)
    torch.testing.assert_close(backward, forward, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(backward[4], central(figure, y, 4), rtol=1e-4, atol=1e-7)
    each = vmap(grad(figure))(torch.stack([y, data(3)]))
    torch.testing.assert_close(each[0], backward, rtol=1e-6, atol=1e-8)


def test_more_parameters_than_data() -> None:
    with pytest.warns(ik.ConvergenceWarning, match="infinite"):
        fit = ik.curve_fit(lambda x, a, b: a + b * x, X[:2], X[:2], START)
    assert bool(fit.covariance.isinf().all())


WRONG: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "a dict": ((X, {"y": X}, START), TypeError, "ydata must be a tensor"),
    "complex data": (
        (X, X + 0j, START),
        TypeError,
        "ydata is complex: pass real and imaginary parts, or minimise f - y",
    ),
    "a number to start from": ((X, X, torch.tensor(1.0)), ValueError, "p0 must have 1 dimension"),
    "sigma of another length": (
        (X, X, START, X[:3]),
        ValueError,
        "sigma must hold a standard deviation for each of the 24",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_named(name: str) -> None:
    args, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        ik.curve_fit(model, *args)


# ------------------------------------------------------------------------------------------------------- auxiliary outputs
KINDS: dict[str, tuple[Callable[..., ik.Solution], Callable[[Tensor, Tensor], Any], Callable[[Tensor], Tensor]]] = {
    # verb, function with an auxiliary output, solution in closed form
    "root": (ik.root, lambda z, x: (z**3 - x, {"twice": 2 * z * x}), lambda x: x ** (1 / 3)),
    "fixed_point": (ik.fixed_point, lambda z, x: (0.5 * (z + x / z), {"twice": 2 * z * x}), torch.sqrt),
    "argmin": (ik.argmin, lambda z, x: ((z.exp() - x * z).sum(), {"twice": 2 * z * x}), torch.log),
    "least_squares": (ik.least_squares, lambda z, x: (z.exp() - x, {"twice": 2 * z * x}), torch.log),
    "steady_state": (ik.steady_state, lambda z, x: (x - z**2, {"twice": 2 * z * x}), torch.sqrt),
}


@pytest.mark.parametrize("name", KINDS)
def test_auxiliary_outputs(name: str) -> None:
    """``aux`` is taken at the solution, and differentiated through it: ``d(2 z(x) x)`` in closed form, first and second."""
    verb, function, closed = KINDS[name]
    x = torch.tensor([1.7, 2.3], dtype=F64)
    ours = lambda x: verb(function, torch.ones(2, dtype=F64), (x,), has_aux=True).aux["twice"].sum()  # noqa: E731
    truth = lambda x: (2 * closed(x) * x).sum()  # noqa: E731
    for transform in (lambda f: f, grad, jacfwd, hessian):
        torch.testing.assert_close(transform(ours)(x), transform(truth)(x), rtol=1e-6, atol=1e-8)


def test_auxiliary_outputs_of_bounded_problems_and_compositions() -> None:
    f = lambda z, x: ((z - x).square().sum(), z * x)  # noqa: E731
    x = torch.tensor([0.5, 3.0], dtype=F64)
    s = ik.argmin(f, torch.zeros(2, dtype=F64), (x,), bounds=(None, 1.0), has_aux=True)
    torch.testing.assert_close(s.aux, torch.tensor([0.25, 3.0], dtype=F64))
    first = ik.FixedPoint(lambda z, x: (0.5 * z.cos() + x, z), has_aux=True)
    joint = first >> ik.FixedPoint(lambda z, y: 0.5 * z.sin() + y)
    assert bool(ik.solve(joint, dict.fromkeys(joint.graph, torch.zeros(2, dtype=F64)), (x,)).converged)


def test_a_function_without_a_pair() -> None:
    with pytest.raises(TypeError, match=r"must return a pair \(value, aux\); it returned a Tensor"):
        ik.root(lambda z: z - 1, torch.zeros(2), has_aux=True)
    assert ik.root(lambda z: z - 1, torch.zeros(2)).aux is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks for one
def test_a_transform_of_a_fit_may_be_compiled() -> None:
    """As any other solve: the compiler calls it, and traces nothing of it."""

    def fitted(y: Tensor) -> Tensor:
        found: Tensor = ik.curve_fit(lambda x, a, b: a * torch.exp(-b * x), X, y, START).parameters
        return found

    y = 2 * torch.exp(-X) + 0.01 * torch.cos(9 * X)
    for transform in (torch.func.jacfwd, torch.func.jacrev):
        got = torch.compile(transform(fitted), backend="eager")(y)
        torch.testing.assert_close(got, transform(fitted)(y), rtol=1e-9, atol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("inside", [False, True], ids=["tensors made outside", "tensors made inside"])
def test_covariance_in_inference_mode(inside: bool) -> None:
    """Autograd records nothing there: data that tell all were said not to."""
    x = torch.linspace(0, 1, 9, dtype=torch.float64)
    w = torch.tensor(2.0, dtype=torch.float64)
    exact = ik.curve_fit(lambda x, a, b: w * a * x + b, x, x**2, torch.ones(2, dtype=torch.float64)).covariance
    with torch.inference_mode():
        x, w = (x.clone(), w.clone()) if inside else (x, w)
        found = ik.curve_fit(lambda x, a, b: w * a * x + b, x, x**2, torch.ones(2, dtype=torch.float64)).covariance
    assert torch.allclose(found, exact, rtol=1e-9)


@pytest.mark.parametrize("loss", ["linear", "cauchy"])
def test_the_covariance_has_a_tangent_outside_transforms(loss: str) -> None:
    """It was that of a Jacobian whose own tangent had been detached."""
    x, t = torch.linspace(0, 2, 9, dtype=torch.float64), torch.tensor([0.3, 0.7], dtype=torch.float64)

    def covariance(t: Tensor) -> Tensor:
        y = (1 + t[0]) * torch.exp(-(0.5 + t[1]) * x) + 0.3 * torch.sin(9 * x)
        return ik.curve_fit(lambda x, a, b: a * torch.exp(-b * x), x, y, (1.0, 1.0), loss=loss, f_scale=0.2).covariance

    v = torch.tensor([1.0, -2.0], dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        dual = covariance(torch.autograd.forward_ad.make_dual(t, v))
        tangent = torch.autograd.forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(
        tangent, (covariance(t + 1e-5 * v) - covariance(t - 1e-5 * v)) / 2e-5, rtol=1e-6, atol=1e-8
    )
