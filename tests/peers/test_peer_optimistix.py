"""What a user of Optimistix relies on, and its result here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jvp

import implicitkit as ik

F64 = torch.float64
C = torch.tensor([2.0, 0.5], dtype=F64)
Z0 = torch.ones(2, dtype=F64)


def f(z: Tensor, c: Tensor) -> Tensor:
    """Zero at ``sqrt(c)``."""
    return z**2 - c


@pytest.mark.parametrize(
    "solver", ["newton", "chord", "broyden", "trust_region", "levenberg_marquardt", "gauss_newton", "dogleg"]
)
def test_roots_in_both_modes(solver: str) -> None:
    solve = lambda c: ik.root(f, Z0, (c,), solver=solver, rtol=1e-12).value  # noqa: E731
    z, dz = jvp(solve, (C,), (Z0,))
    torch.testing.assert_close(z, C.sqrt(), rtol=1e-9, atol=0)
    torch.testing.assert_close(dz, 0.5 / C.sqrt(), rtol=1e-8, atol=0)


def test_a_root_found_by_least_squares_is_differentiated_as_a_root() -> None:
    second = hessian(lambda c: ik.root(f, Z0, (c,), solver="levenberg_marquardt", rtol=1e-12).value.sum())(C)
    torch.testing.assert_close(second, torch.diag(-0.25 * C**-1.5), rtol=1e-7, atol=1e-9)


def test_what_is_said_beside_the_value() -> None:
    s = ik.root(lambda z, c: (f(z, c), {"twice": 2 * z}), Z0, (C,), has_aux=True)
    torch.testing.assert_close(s.aux["twice"], 2 * C.sqrt())


def test_a_failure_is_raised_or_reported_per_sample() -> None:
    rows = torch.tensor([[1.0], [-1.0]], dtype=F64)  # the second has no root
    with pytest.raises(ik.ConvergenceError):
        ik.root(f, torch.ones(2, 1, dtype=F64), (rows,), batch_dims=1)
    s = ik.root(f, torch.ones(2, 1, dtype=F64), (rows,), batch_dims=1, on_failure="ignore")
    assert s.converged.tolist() == [True, False]


@pytest.mark.parametrize("norm", ["max", "l2"])
def test_norms(norm: str) -> None:
    torch.testing.assert_close(ik.root(f, Z0, (C,), norm=norm).value, C.sqrt())


@pytest.mark.parametrize("solver", ["nelder_mead", "bfgs", "lbfgs", "nonlinear_cg", "gradient_descent", "auto"])
def test_minima(solver: str) -> None:
    """A bowl that is no sum of squares: the minimum is at 1 and -2."""
    bowl = lambda z: torch.cosh(z[0] - 1) + (z[1] + 2).square() + 0.1 * (z[1] + 2) ** 4  # noqa: E731
    z = ik.argmin(bowl, torch.zeros(2, dtype=F64), solver=solver, on_failure="ignore").value
    torch.testing.assert_close(z, torch.tensor([1.0, -2.0], dtype=F64), rtol=1e-5, atol=1e-5)


def test_pytrees_in_and_out() -> None:
    z0 = {"a": torch.ones((), dtype=F64), "b": [Z0]}
    s = ik.root(lambda z, c: {"a": z["a"] * 2 - z["b"][0].sum(), "b": [f(z["b"][0], c)]}, z0, (C,))
    torch.testing.assert_close(s.value["a"], 0.5 * C.sqrt().sum())


def test_floats_are_starts() -> None:
    assert ik.root(lambda z: z**2 - 2.0, 1.0).value.item() == pytest.approx(2**0.5, rel=1e-5)
