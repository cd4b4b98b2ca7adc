"""What is found with default tolerances does not depend on the units of the unknowns or of the equations.

Each row solves ``F(z) = 0`` as ``s F(z / t) = 0`` (a map as ``t f(z / t)``) for ``s`` and ``t`` over up to 21 orders of
magnitude, and compares ``z / t`` with the solution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

TIMES = torch.linspace(0, 1, 10, dtype=torch.float64)
DATA = 2 * torch.exp(-1.5 * TIMES)


def rosenbrock(z: Tensor) -> Tensor:
    return torch.stack([10 * (z[1] - z[0] ** 2), 1 - z[0]])


def vec(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


#: name -> kind, function, start, solution
PROBLEMS: dict[str, tuple[str, Callable[[Tensor], Tensor], Tensor, Tensor]] = {
    "exponential": ("root", lambda z: torch.exp(z) - 2, vec(1.0), vec(2.0).log()),
    "Rosenbrock's equations": ("root", rosenbrock, vec(-1.2, 1.0), vec(1.0, 1.0)),
    "zero at the origin": ("root", lambda z: torch.sin(z) + z**2, vec(0.3), vec(0.0)),
    "cosine": ("fixed_point", lambda z: 0.5 * torch.cos(z), vec(0.0), vec(0.45018361129487355)),
    "contraction to the origin": ("fixed_point", lambda z: 0.5 * torch.tanh(z), vec(0.3, -0.2), vec(0.0, 0.0)),
    "quartic": ("argmin", lambda z: ((z - 1) ** 4 + (z - 1) ** 2).sum(), vec(3.0, 0.0), vec(1.0, 1.0)),
    "Rosenbrock's function": ("argmin", lambda z: (rosenbrock(z) ** 2).sum(), vec(-1.2, 1.0), vec(1.0, 1.0)),
    "fit": ("least_squares", lambda z: z[0] * torch.exp(z[1] * TIMES) - DATA, vec(1.0, -1.0), vec(2.0, -1.5)),
}
SOLVERS = {
    "root": ("auto", "newton", "broyden", "newton_krylov", "trust_region", "scipy.root.hybr"),
    "fixed_point": ("auto", "anderson", "picard", "newton"),
    "argmin": ("auto", "bfgs", "lbfgs", "newton_cg", "scipy.minimize.BFGS"),
    "least_squares": ("auto", "levenberg_marquardt", "gauss_newton", "dogleg", "scipy.least_squares.trf"),
}
#: whose own steps have units (lengths, radii): they may fail, and say so, but not claim what is wrong
WITH_UNITS = {"root": ("df_sane",), "argmin": ("gradient_descent", "scipy.minimize.trust-exact")}
UNITS = [(1e-12, 1.0), (1e6, 1.0), (1.0, 1e-9), (1.0, 1e9)]
ROWS = [(n, s) for n, row in PROBLEMS.items() for s in SOLVERS[row[0]]]
DOUBTFUL = [(n, s) for n, row in PROBLEMS.items() for s in WITH_UNITS.get(row[0], ())]


def in_units(name: str, s: float, t: float, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor, Tensor]:
    """``(verb, start, solution)`` in these units; the verb is called with the start and options."""
    kind, f, start, solution = PROBLEMS[name]
    s = t if kind == "fixed_point" else s

    def scaled(z: Tensor) -> Tensor:
        return (s * f((z / t).double())).to(dtype)

    verb = getattr(ik, kind)
    return lambda z0, **options: verb(scaled, z0, **options), (start * t).to(dtype), solution


@pytest.mark.parametrize(("name", "solver"), ROWS)
def test_units_do_not_matter(name: str, solver: str) -> None:
    for s, t in UNITS:
        solve, z0, solution = in_units(name, s, t)
        found = solve(z0, solver=solver).value / t
        error = float((found - solution).abs().max())
        assert error < 1e-8, f"{name} by {solver}, s={s:g}, t={t:g}: off by {error:.1e}"


@pytest.mark.parametrize(("name", "solver"), DOUBTFUL)
def test_no_claim_is_wrong_in_any_units(name: str, solver: str) -> None:
    for s, t in UNITS:
        solve, z0, solution = in_units(name, s, t)
        outcome = solve(z0, solver=solver, on_failure="ignore", max_steps=60)
        error = float((outcome.value / t - solution).abs().max())
        assert error < 1e-7 or not bool(outcome.converged), f"{name} by {solver}, s={s:g}, t={t:g}: off by {error:.1e}"


def test_units_do_not_matter_in_single_precision() -> None:
    for (name, row), (s, t) in itertools.product(PROBLEMS.items(), [(1e-9, 1.0), (1.0, 1e-6), (1.0, 1e6)]):
        solve, z0, solution = in_units(name, s, t, torch.float32)
        found = solve(z0).value.double() / t
        error = float((found - solution).abs().max())
        assert error < 5e-3 and row, f"{name}, s={s:g}, t={t:g}: off by {error:.1e}"


def test_units_do_not_matter_to_a_composition() -> None:
    for solver, t in itertools.product(["auto", "anderson", ik.Blocks()], [1e-12, 1e-6, 1e9]):
        loop = ik.compose(
            {
                "a": (lambda a, x, b, t=t: 0.5 * t * torch.cos(a / t) + x - 0.1 * b, "x", "b"),
                "b": (lambda b, a, t=t: 0.5 * t * torch.sin(b / t + 1) + a, "a"),
            },
            output="b",
        )
        zero = torch.zeros(2, dtype=torch.float64)
        b = ik.solve(loop, {"a": zero, "b": zero}, (torch.full_like(zero, t),), solver=solver).value["b"] / t
        unscaled = ik.root(  # both equations as one system
            lambda z: torch.stack([0.5 * z[0].cos() + 1 - 0.1 * z[1] - z[0], 0.5 * (z[1] + 1).sin() + z[0] - z[1]]),
            vec(1.0, 1.0),
            solver="newton",
        ).value[1]
        assert torch.allclose(b, unscaled.expand(2), atol=1e-9), f"{solver}, t={t:g}: {b} for {unscaled}"


def test_an_atol_that_is_given_is_in_the_units_of_the_equations() -> None:
    found = ik.root(lambda z: 1e-6 * (torch.exp(z) - 2), vec(1.0), solver="newton", atol=1e-8)
    assert 1e-5 < abs(float(found.value) - 0.6931471805599453) < 1e-2
    assert int(found.steps) > 0
