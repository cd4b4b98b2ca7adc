"""``x_scale=``: unknowns of least squares in units of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacfwd, jacrev, vmap

import implicitkit as ik

F64 = torch.float64
T = torch.linspace(0, 1, 20, dtype=F64)
Z0 = torch.tensor([1.0, 500.0], dtype=F64)
UNITS = torch.tensor([1.0, 1000.0], dtype=F64)


def residuals(z: Tensor, c: Tensor) -> Tensor:
    """Zero at ``(c, 1500 c / 2)``."""
    return z[..., :1] * torch.exp(-z[..., 1:2] * 1e-3 * T) - c * torch.exp(-0.75 * c * T)


def fit(c: Tensor, **options: Any) -> Tensor:
    return ik.least_squares(residuals, Z0, (c,), rtol=1e-12, **{"x_scale": UNITS, **options}).value


C = torch.tensor([2.0], dtype=F64)
SOLVERS = ("auto", "levenberg_marquardt", "dogleg", "gauss_newton", "bfgs", "newton_cg", "scipy.least_squares.trf")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scale", ["auto", 1.0, 7, UNITS], ids=["auto", "one", "seven", "units"])
def test_the_solution_and_its_derivative_do_not_depend_on_units(solver: str, scale: Any) -> None:
    exact = torch.tensor([2.0, 1500.0], dtype=F64)
    torch.testing.assert_close(fit(C, solver=solver, x_scale=scale), exact, rtol=1e-8, atol=0)
    slope = jacrev(lambda c: fit(c, solver=solver, x_scale=scale))(C)
    torch.testing.assert_close(slope, torch.tensor([[1.0], [750.0]], dtype=F64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("solver", SOLVERS)
def test_the_scales_of_the_jacobian_are_those_of_methods_that_have_them(solver: str) -> None:
    if solver in ("gauss_newton", "bfgs", "newton_cg"):
        with pytest.raises(ik.CapabilityError, match=f'x_scale="jac".*{solver}'):
            fit(C, solver=solver, x_scale="jac")
    else:
        torch.testing.assert_close(fit(C, solver=solver, x_scale="jac"), fit(C), rtol=1e-8, atol=0)


def test_every_transform() -> None:
    expected = torch.tensor([[1.0], [750.0]], dtype=F64)
    torch.testing.assert_close(jacfwd(fit)(C), expected, rtol=1e-7, atol=0)
    torch.testing.assert_close(
        hessian(lambda c: fit(c)[1] ** 2)(C), torch.full((1, 1), 2 * 750.0**2, dtype=F64), rtol=1e-6, atol=0
    )
    rows = torch.tensor([[1.0], [2.0], [3.0]], dtype=F64)
    torch.testing.assert_close(vmap(fit)(rows), rows * torch.tensor([1.0, 750.0], dtype=F64), rtol=1e-8, atol=0)
    torch.testing.assert_close(vmap(jacrev(fit))(rows), expected.expand(3, 2, 1), rtol=1e-6, atol=1e-6)


def test_batches_drop_rows_and_show_z() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0]], dtype=F64)
    seen: list[Tensor] = []
    per_sample = UNITS * torch.tensor([[1.0], [0.3], [2.0]], dtype=F64)
    options: dict[str, Any] = {"callback": lambda step, z, norm: seen.append(z)}
    s = ik.least_squares(residuals, Z0.repeat(3, 1), (rows,), batch_dims=1, in_dims=(0,), x_scale=per_sample, **options)
    torch.testing.assert_close(seen[-1], s.value)
    z = vmap(lambda c, u: ik.least_squares(residuals, Z0, (c,), x_scale=u, **options).value)(rows, per_sample)
    torch.testing.assert_close(seen[-1], z, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(z, rows * torch.tensor([1.0, 750.0], dtype=F64), rtol=1e-6, atol=0)


def test_bounds_are_in_the_units_of_z() -> None:
    tight = (None, torch.tensor([1.5, 3000.0], dtype=F64))
    free = ik.least_squares(residuals, Z0, (C,), bounds=tight).value
    torch.testing.assert_close(fit(C, bounds=tight), free, rtol=1e-7, atol=0)
    assert free[0] == 1.5
    torch.testing.assert_close(fit(C, bounds=(0, 3000)), torch.tensor([2.0, 1500.0], dtype=F64))


def test_pytrees() -> None:
    z0 = {"a": Z0[0], "k": Z0[1]}
    r = lambda z: residuals(torch.stack([z["a"], z["k"]]), C)  # noqa: E731
    s = ik.least_squares(r, z0, x_scale={"a": 1.0, "k": 1000.0})
    assert s.value["k"].item() == pytest.approx(1500)


def test_a_trust_region_is_in_those_units() -> None:
    """With units of one the first step of Levenberg-Marquardt is short beside an unknown of a thousand."""
    steps = {
        name: int(ik.least_squares(residuals, Z0, (C,), x_scale=scale, solver="levenberg_marquardt").steps)
        for name, scale in (("own", UNITS), ("one", 1.0), ("jac", "jac"))
    }
    assert steps["own"] <= steps["jac"] + 1 and steps["one"] > 2 * steps["own"]


def test_a_failure_shows_z() -> None:
    with pytest.raises(ik.ConvergenceError) as error:
        ik.least_squares(lambda z: z * torch.nan, Z0, x_scale=UNITS)
    assert torch.equal(error.value.solution.value, Z0)


def test_curve_fit_and_aux() -> None:
    y = 2 * torch.exp(-3 * T)
    model = lambda t, a, k: a * torch.exp(-k * t)  # noqa: E731
    found = ik.curve_fit(model, T, y, torch.ones(2, dtype=F64), x_scale=torch.tensor([1.0, 3.0], dtype=F64))
    torch.testing.assert_close(found.parameters, torch.tensor([2.0, 3.0], dtype=F64))
    for options in ({"x_scale": UNITS}, {"loss": "huber"}):
        s = ik.least_squares(lambda z, c: (residuals(z, c), 2 * z), Z0, (C,), has_aux=True, **options)
        torch.testing.assert_close(s.aux, 2 * s.value)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "negative": (-1.0, ValueError, "x_scale must be positive and finite"),
    "an unknown word": ("jacobian", ValueError, "x_scale must be 'auto' or 'jac'"),
    "another shape": (
        torch.ones(3, dtype=F64),
        ValueError,
        r"x_scale has shape \(3,\), which does not fit z0's \(2,\)",
    ),
    "another structure": ({"a": 1.0, "b": 2.0}, ValueError, "another structure than z0"),
    "no number": (None, TypeError, "x_scale must be 'jac', a positive number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scales_that_are_none(name: str) -> None:
    scale, error, message = REFUSED[name]
    solve: Callable[[], Any] = lambda: fit(C, x_scale=scale)  # noqa: E731
    with pytest.raises(error, match=message):
        solve()
