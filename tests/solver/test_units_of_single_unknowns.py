"""Unknowns with units of their own, 1e-12 beside 1e9 or 1e-30 beside 1e30: what is found, and its derivative, are those of
the same problem in units of one, at the same price; and nothing is claimed that is hidden by the unknown in large units."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation.trees import Layout
from implicitkit.problem.scaling import units_of_start

F32, F64 = torch.float32, torch.float64
_X = torch.linspace(0, 1, 10, dtype=F64)


def _rosenbrock(z: Tensor) -> Tensor:
    return 50 * (z[1] - z[0] ** 2) ** 2 + 0.5 * (1 - z[0]) ** 2


def _beale(z: Tensor) -> Tensor:
    return sum(((c - z[0] * (1 - z[1] ** k)) ** 2 for k, c in ((1, 1.5), (2, 2.25), (3, 2.625))), z.new_zeros(()))


def _exponential(z: Tensor) -> Tensor:
    x = _X.to(z)
    return (z[0] * torch.exp(z[1] * x) - 2 * torch.exp(-1.5 * x) - 0.01 * torch.sin(9 * x)).square().sum()


def _logistic(z: Tensor) -> Tensor:
    return torch.nn.functional.softplus(z[0] + z[1] * _X.to(z)).sum() - 4 * z[0] - 3 * z[1]


_OBJECTIVES: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "Rosenbrock": (_rosenbrock, [-1.2, 1.0]),
    "Beale": (_beale, [1.0, 0.8]),
    "exponential": (_exponential, [1.0, -1.0]),
    "logistic": (_logistic, [0.1, 0.1]),
}
_PROBLEMS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "free": lambda u: {},
    "within bounds": lambda u: {"bounds": (-5 * u, 0.9 * u)},
    "on a line": lambda u: {"constraints": [ik.Equality(lambda z: (z / u).sum() - 1.8)]},
}
_UNITS = {F64: [[1e-12, 1e9], [1e9, 1e-12], [1.0, 1e-20], [1e-30, 1e30]], F32: [[1e-6, 1e6], [1e9, 1e-9]]}


def _solved(name: str, problem: str, u: Tensor) -> ik.Solution:
    objective, start = _OBJECTIVES[name]
    return ik.argmin(lambda z: objective(z / u), torch.tensor(start, dtype=u.dtype) * u, **_PROBLEMS[problem](u))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [F64, F32])
@pytest.mark.parametrize("problem", list(_PROBLEMS))
@pytest.mark.parametrize("name", list(_OBJECTIVES))
def test_units_of_single_unknowns_do_not_matter(name: str, problem: str, dtype: torch.dtype) -> None:
    plain = _solved(name, problem, torch.ones(2, dtype=dtype))
    for units in _UNITS[dtype]:
        u = torch.tensor(units, dtype=dtype)
        found = _solved(name, problem, u)
        close = 1e-6 if dtype == F64 else 2e-3
        torch.testing.assert_close(found.value / u, plain.value, rtol=close, atol=close, msg=f"in units of {units}")
        assert found.evaluations <= 2 * plain.evaluations + 20, (units, found.evaluations, plain.evaluations)


def _moved(a: Tensor, u: Tensor, problem: str) -> Tensor:
    """In units of one, as a function of parameters."""
    kept = {
        "free": {},
        "within bounds": {"bounds": (0 * u, 0.4 * u)},
        "on a line": {"constraints": [ik.Equality(lambda z, a: (z / u).sum() - a[1])]},
    }[problem]

    def objective(z: Tensor, a: Tensor) -> Tensor:
        y = z / u
        return (y - a).square().sum() + (y**4).sum() + a[0] * y.prod()

    return ik.argmin(objective, u.clone(), (a,), **kept).value / u


@pytest.mark.parametrize("problem", list(_PROBLEMS))
def test_nor_do_they_matter_to_derivatives(problem: str) -> None:
    one, u, a = torch.ones(2, dtype=F64), torch.tensor([1e-12, 1e9], dtype=F64), torch.tensor([1.0, 2.0], dtype=F64)
    for transform in (
        lambda f: f,
        torch.func.jacrev,
        torch.func.jacfwd,
        lambda f: torch.func.hessian(lambda a: f(a).sum()),
    ):
        found, plain = (transform(lambda a, u=u: _moved(a, u, problem))(a) for u in (u, one))
        torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-9)
    several = torch.stack([a, 1.1 * a, 0.9 * a])
    mapped = torch.func.vmap(lambda a: _moved(a, u, problem))(several)
    torch.testing.assert_close(mapped, torch.stack([_moved(a, one, problem) for a in several]), rtol=1e-9, atol=1e-9)


def test_each_sample_has_its_own() -> None:
    u = torch.tensor([[1e-12, 1e9], [1.0, 1.0], [1e9, 1e-12]], dtype=F64)
    a = torch.tensor([[1.0, 2.0], [1.1, 2.2], [0.9, 1.8]], dtype=F64)
    alone = torch.stack([_moved(row, own, "free") for row, own in zip(a, u, strict=True)])
    mapped = torch.func.vmap(lambda a, u: _moved(a, u, "free"))(a, u)
    torch.testing.assert_close(mapped, alone, rtol=1e-9, atol=1e-9)

    def objective(z: Tensor) -> Tensor:
        y = z / u
        return (y - a).square().sum(1) + (y**4).sum(1) + a[:, 0] * y.prod(1)

    torch.testing.assert_close(ik.argmin(objective, u.clone(), batch_dims=1).value / u, alone, rtol=1e-9, atol=1e-9)


def test_small_entries_that_are_no_units() -> None:
    """Of a mixture what is there in traces at the start is not so at the end; two solutions by two starts are the same."""
    mu = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=F64)
    found = ik.argmin(
        lambda n: (n * (mu + torch.log(n / n.sum()))).sum(),
        torch.tensor([1.0, 1e-10, 1e-12, 0.5], dtype=F64),
        constraints=[ik.Equality(lambda n: n.sum() - 2)],
        bounds=(1e-30, None),
    )
    torch.testing.assert_close(found.value, 2 * torch.softmax(-mu, 0), rtol=1e-8, atol=1e-8)
    assert found.evaluations < 400, found.evaluations


_P = torch.tensor([0.2, 0.3, 0.5], dtype=F64)
_TRACES: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float], dict[str, Any]]] = {
    "-log z": (lambda z: (z - z.log()).sum(), [1e-12, 2.0, 3.0], [1, 1, 1], {}),
    "counts": (lambda z: (z - _P * z.log()).sum(), [1e-12, 0.4, 0.6], [0.2, 0.3, 0.5], {"bounds": (0.0, None)}),
    "1 / z": (lambda z: (1 / z + z).sum(), [1e-9, 2.0], [1, 1], {"bounds": (1e-12, None)}),
    "z log z": (lambda z: (z * z.log()).sum(), [0.5, 1e-10, 2.0], 3 * [math.exp(-1)], {"bounds": (1e-30, None)}),
    "a weight": (lambda z: 1e9 * (z[0] - 0.5) ** 2 + (z[1] - 2) ** 2, [1e-10, 1.0], [0.5, 2], {"bounds": (0.0, None)}),
    "a price": (
        lambda z: 1e10 * z[0] + z[1],
        [1e-10, 1.0],
        [-1, -1e-10],
        {"constraints": [ik.Inequality(lambda z: z.square().sum() - 1)]},
    ),
    "a gradient of zero": (
        lambda z: (z[0] - 2) ** 2 + (z[1] - 5 * (z[0] - 1) - 1e-10) ** 2,
        [1.0, 1e-10],
        [2, 5],
        {"solver": "gradient_descent"},
    ),
    "a gradient of one unknown": (
        lambda z: z[2],
        [1e-10, 1.0, 5.0],
        [0.5, 0.25, 0],
        {"constraints": [ik.Inequality(lambda z: (z[0] - 0.5) ** 2 + (z[1] - 0.25) ** 2 - z[2])]},
    ),
}


@pytest.mark.parametrize("name", list(_TRACES))
def test_nor_are_small_entries_of_a_start_that_the_gradient_does_not_bear_out(name: str) -> None:
    """Some look like units at the start only, or in the gradient alone."""
    objective, start, end, given = _TRACES[name]
    z0 = torch.tensor(start, dtype=F64)
    assert units_of_start(objective, z0, (), Layout(z0, 0)) is None
    found = ik.argmin(objective, z0, **given)
    torch.testing.assert_close(found.value, torch.tensor(end, dtype=F64), rtol=1e-7, atol=1e-7)


def _apart(z: Tensor) -> Tensor:
    a, b = z[0] * 1e12 - 2, z[1] * 1e-9 - 3
    return a**2 + b**2 * (1 + a**2)


@pytest.mark.parametrize("dtype", [F64, F32])
def test_a_start_at_zero_shows_no_units(dtype: torch.dtype) -> None:
    found = ik.argmin(_apart, torch.zeros(2, dtype=dtype))
    torch.testing.assert_close(
        found.value * torch.tensor([1e12, 1e-9], dtype=dtype), torch.tensor([2.0, 3.0], dtype=dtype)
    )


def test_newtons_steps_know_no_units() -> None:
    """Nothing but the Hessian shows them: a start with a zero."""
    u = torch.tensor([1e-14, 1e-7, 1.0], dtype=F64)
    start = torch.zeros(3, dtype=F64)

    def objective(y: Tensor) -> Tensor:
        return torch.cosh(y - 1).sum() + y.sum() ** 2 + (y[0] * y[2] + y[1]) ** 2 / 50

    found, plain = ik.argmin(lambda z: objective(z / u), start), ik.argmin(objective, start)
    torch.testing.assert_close(found.value / u, plain.value, rtol=1e-8, atol=1e-8)
    assert found.evaluations <= 2 * plain.evaluations + 30, (found.evaluations, plain.evaluations)


_HIDDEN = [
    ("exponential", "auto", [1e-30, 1e30]),
    ("exponential", "newton", [1e9, 1e-12]),
    ("exponential", "newton", [1e9, 1e-15]),
    ("Beale", "newton", [1e9, 1e-15]),
    ("Rosenbrock", "newton", [1e9, 1e-12]),
    ("Rosenbrock", "newton", [1e-12, 1e9]),
    ("Rosenbrock", "proximal_gradient", [1e-12, 1e9]),
]


@pytest.mark.parametrize(("name", "solver", "units"), _HIDDEN)
def test_what_a_large_unknown_hides_is_not_claimed(name: str, solver: str, units: list[float]) -> None:
    """Within a set that is given as such the unknowns stay as they are, and the natural map compares one with the other."""
    u, (objective, start) = torch.tensor(units, dtype=F64), _OBJECTIVES[name]
    box, z0 = ik.project.box(-5 * u, 0.9 * u), torch.tensor(start, dtype=F64) * u
    found = ik.argmin(
        lambda z: 0.5 * objective(z / u), z0, project=box, solver=solver, on_failure="ignore", max_steps=100
    )
    plain = _solved(name, "within bounds", torch.ones(2, dtype=F64))
    if bool(found.converged):
        torch.testing.assert_close(found.value / u, plain.value, rtol=1e-5, atol=1e-5)
