"""Points so far out that nothing in the residual says how far: no solutions.  And minima at large numbers, which are."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from tests.tables.ends import Ends

F64 = torch.float64
Function = Callable[[Tensor], Tensor]


def mccormck(z: Tensor) -> Tensor:
    """From four unknowns on it falls along ``(-1, ..., -1)`` for ever: ``|g| >= 0.088``."""
    a, b = z[:-1], z[1:]
    return (-1.5 * a + 2.5 * b + 1 + (a - b) ** 2 + torch.sin(a + b)).sum()


slopes: Function = torch.func.grad(mccormck)


def fit(z: Tensor) -> Tensor:
    """On its way to 5e11, over waves that have no minima."""
    return torch.stack([10 * (z[0] - z[1]), 1e3 + 1e-9 * (z[0] + z[1]), 1e-4 * torch.sin(z[0] + z[1])])


@functools.cache
def where_it_falls_least(n: int) -> Tensor:
    z, points = torch.zeros(n, dtype=F64), []
    for _ in range(500):
        points.append(z)
        z = z - 0.1 * slopes(z)
    return min(points, key=lambda z: float(slopes(z).norm()))


VERBS: dict[str, tuple[Callable[..., Any], str, Function]] = {
    "argmin": (ik.argmin, "minimise", mccormck),
    "root": (ik.root, "root", slopes),
    "fixed_point": (ik.fixed_point, "fixed_point", lambda z: z - 0.1 * slopes(z)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("far", (1e9, 1e10, 1e11, 1e15, 1e16, 1e20, 1e30))
@pytest.mark.parametrize("n", (4, 6, 70))
@pytest.mark.parametrize("verb", VERBS)
def test_a_wave_far_out_is_no_solution(verb: str, n: int, far: float) -> None:
    """At 1e10 the gradient is 1e-11 of what cancels in it, at 1e16 it is rounding."""
    solve, solves, function = VERBS[verb]
    end = where_it_falls_least(n) - math.pi * round(far / math.pi)
    found = solve(function, torch.zeros(n, dtype=F64), solver=Ends(solves, end), on_failure="ignore")
    assert not bool(found.converged), found


def test_nor_is_it_in_other_units() -> None:
    """Of 1e-12, in which all this is near."""
    end = 1e-12 * (where_it_falls_least(6) - math.pi * round(1e12 / math.pi))
    found = ik.argmin(
        lambda z: mccormck(1e12 * z), torch.zeros(6, dtype=F64), solver=Ends("minimise", end), on_failure="ignore"
    )
    assert not bool(found.converged), found


@pytest.mark.parametrize("far", (1e8, 1e9, 1e11))
def test_a_fit_on_waves(far: float) -> None:
    found = ik.least_squares(
        fit,
        torch.zeros(2, dtype=F64),
        solver=Ends("least_squares", torch.full((2,), -far, dtype=F64)),
        on_failure="ignore",
    )
    assert not bool(found.converged), found


def differences(z: Tensor) -> Tensor:
    return torch.cat([z[:1] - z[1:2], 2 * z[1:-1] - z[:-2] - z[2:], z[-1:] - z[-2:-1]])


FAMILIES: dict[str, tuple[str, Function, list[float]]] = {
    "a ray of zeros, but for rounding": ("root", differences, [1e5 + 0.01, 1e5, 1e5, 1e5 - 0.01]),
    "of degree zero": ("root", lambda z: torch.stack([z[0] / z[1] - 3, z[1] / z[0] - 1 / 3]), [3e6 + 0.5, 1e6]),
    "a number handed on": ("fixed_point", lambda z: torch.stack([z[0], 0.5 * z[1] + 1]), [1e12, 0.0]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_solutions_in_families_are_some_whatever_their_length(name: str) -> None:
    """Where no digit is left of ``F``, or of one of its equations, that shows how long ``z`` is."""
    verb, function, at = FAMILIES[name]
    solve, solves, _ = VERBS[verb]
    end = torch.tensor(at, dtype=torch.float32 if "rounding" in name or "degree" in name else F64)
    found = solve(function, end * (1 + 1e-3 * torch.arange(len(at))), solver=Ends(solves, end), on_failure="ignore")
    assert bool(found.converged), found


@pytest.mark.parametrize("far", (7.0, 100.0, 1e6))
def test_zeros_along_a_ray_need_no_length(far: float) -> None:
    """A chain that hands on half of what there is keeps its sum; a softmax sees differences alone, and of its slopes
    rounding leaves 1e-7 wherever it is."""
    chain = ik.fixed_point(lambda z: 0.5 * (z + z.roll(1)), far * torch.linspace(1, 2, 20, dtype=F64))
    torch.testing.assert_close(chain.value, torch.full((20,), 1.5 * far, dtype=F64))
    if far < 1e6:  # beyond, rounding is more than the tolerance
        level = ik.argmin(lambda z: z.logsumexp(0) - z.mean(), far + torch.tensor([0.0, 2.0, -1.0]))
        torch.testing.assert_close(level.value, level.value.mean().expand(3), rtol=0, atol=1e-5 * far)
        assert abs(float(level.value.mean()) - far) < 1 and level.evaluations < 150


def rosenbrock(z: Tensor) -> Tensor:
    return (100 * (z[1:] - z[:-1] ** 2) ** 2 + (1 - z[:-1]) ** 2).sum()


MINIMA: dict[str, tuple[Function, float]] = {  # objectives, and each z_i at the minimum
    "quadratic": (lambda z: ((z - 1e9) ** 2 * torch.arange(1, len(z) + 1)).sum() + (z[0] - z[-1]) ** 2, 1e9),
    "square roots": (lambda z: (1e18 + (z - 1e9) ** 2).sqrt().sum(), 1e9),
    "valley": (lambda z: rosenbrock(z / 1e9), 1e9),
    "times 1e20": (lambda z: 1e20 * rosenbrock(z), 1.0),
    "times 1e-20": (lambda z: 1e-20 * rosenbrock(z), 1.0),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("start", (0.0, 1e8))
@pytest.mark.parametrize("solver", ("auto", "bfgs", "lbfgs", "newton_cg", "nonlinear_cg"))
@pytest.mark.parametrize("name", MINIMA)
def test_minima_at_large_numbers_are_found(name: str, solver: str, start: float) -> None:
    objective, at = MINIMA[name]
    found = ik.argmin(objective, torch.full((3,), start if at > 1 else -1.2, dtype=F64), solver=solver)
    torch.testing.assert_close(found.value, torch.full((3,), at, dtype=F64), rtol=1e-6, atol=0)


def test_a_minimum_on_a_wave_far_out_is_one() -> None:
    """``2 cos z = -1`` to all digits that there are at 1e9."""
    start = torch.tensor([1e9, 1e9 + 2, -1e9], dtype=F64)
    found = ik.argmin(lambda z: z + 2 * torch.sin(z), start, batch_dims=1, solver="newton_cg")
    assert bool((found.value - start).abs().max() < 1e6)
    torch.testing.assert_close(found.value.cos(), torch.full((3,), -0.5, dtype=F64), rtol=0, atol=1e-6)


@pytest.mark.parametrize("radius", (1e3, 1e6, 1e9))
def test_a_ball_however_large_is_walked_through(radius: float) -> None:
    """Its multiplier is of size ``1 / radius``, and ``|F|`` the slope of the objective all the way to its surface."""
    ball = ik.Inequality(lambda z: z.square().sum() - radius**2)
    found = ik.argmin(lambda z: z.sum(), torch.zeros(3, dtype=F64), constraints=[ball])
    torch.testing.assert_close(found.value, torch.full((3,), -radius / 3**0.5, dtype=F64), rtol=1e-6, atol=0)
    assert found.evaluations <= 1000


def test_what_has_come_nearer_than_its_start_has_not_run_away() -> None:
    """Powell's singular function, whose minimum is at zero, from near there: what its solver gave up is a minimum."""
    powell = lambda x: (  # noqa: E731
        (x[0] + 10 * x[1]) ** 2 + 5 * (x[2] - x[3]) ** 2 + (x[1] - 2 * x[2]) ** 4 + 10 * (x[0] - x[3]) ** 4
    )
    start = 1e-4 * torch.tensor([3.0, -1.0, 0.0, 1.0], dtype=F64)
    found = ik.argmin(powell, start, solver="scipy.minimize.trust-exact", on_failure="ignore")
    assert bool(found.converged), found
