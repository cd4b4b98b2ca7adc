"""Scalar methods: bisection, Chandrupatla and Steffensen in batches, their brackets, and the scalar path of Newton."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

import implicitkit as ik

F64 = torch.float64
BRACKETING: dict[str, Any] = {"bisection": ik.Bisection(), "chandrupatla": ik.Chandrupatla()}

# name -> residual(z, c), the constants, the start, an interval for the reference
EQUATIONS: dict[
    str, tuple[Callable[[Tensor, Tensor], Tensor], list[float], float, Callable[[float], tuple[float, float]]]
] = {
    "linear": (lambda z, c: 3 * z - c, [-4.0, 0.5, 900.0], 1.0, lambda c: (-1e4, 1e4)),
    "cubic": (lambda z, c: z**3 + z - c, [-30.0, 0.1, 5.0], 0.0, lambda c: (-10.0, 10.0)),
    "exponential": (lambda z, c: torch.exp(z) - c, [1e-3, 2.0, 1e4], 0.0, lambda c: (-20.0, 20.0)),
    "flat": (lambda z, c: (z - c) ** 9, [-2.0, 0.3, 7.0], 1.0, lambda c: (-20.0, 20.0)),
    "steep": (lambda z, c: torch.atan(1e6 * (z - c)), [-2.0, 0.3, 7.0], 1.0, lambda c: (-20.0, 20.0)),
    "domain z > 0": (lambda z, c: torch.log(z) - c, [-3.0, 0.2, 4.0], 1.0, lambda c: (1e-9, 1e3)),
}


def solve(residual: Any, z0: Tensor, args: Any, solver: Any, **options: Any) -> ik.Solution:
    defaults: dict[str, Any] = {"batch_dims": 1, "rtol": 0.0, "atol": 1e-12}
    return ik.root(residual, z0, args, solver=solver, **(defaults | options))


@pytest.mark.parametrize("solver", BRACKETING)
@pytest.mark.parametrize("name", EQUATIONS)
def test_agrees_with_brentq(solver: str, name: str) -> None:
    residual, constants, start, interval = EQUATIONS[name]
    c = torch.tensor(constants, dtype=F64)
    solution = solve(residual, torch.full_like(c, start), (c,), BRACKETING[solver], in_dims=0, atol=1e-11)
    for found, constant in zip(solution.value.tolist(), constants, strict=True):
        t = torch.tensor(constant, dtype=F64)
        wanted = brentq(
            lambda x, t=t: float(residual(torch.tensor(x, dtype=F64), t)), *interval(constant), xtol=1e-14, maxiter=2000
        )
        # |F| = |z - c|^9 leaves a neighbourhood of (1e-11)^(1/9) undecided
        assert math.isclose(found, wanted, rel_tol=1e-9, abs_tol=0.07 if name == "flat" else 1e-9), (found, wanted)


@pytest.mark.parametrize("solver", BRACKETING)
@pytest.mark.parametrize("start", [-1e6, -3.0, 0.0, 2.9, 1e6])
def test_bracket_is_found_to_either_side(solver: str, start: float) -> None:
    z0 = torch.tensor([start], dtype=F64)
    solution = solve(lambda z: z - math.pi, z0, (), BRACKETING[solver])
    assert math.isclose(float(solution.value), math.pi, abs_tol=1e-9)


@pytest.mark.parametrize("solver", BRACKETING)
@pytest.mark.parametrize("in_dims", [None, 0], ids=["frozen", "dropped"])
def test_samples_are_independent(solver: str, in_dims: int | None) -> None:
    """Among good samples: one without a root, one that is NaN, one that starts at its root."""
    c = torch.tensor([4.0, -1.0, 9.0, torch.nan, 1.0, 2.0], dtype=F64)
    z0 = torch.ones_like(c)
    solution = solve(lambda z, c: z * z - c, z0, (c,), BRACKETING[solver], in_dims=in_dims, on_failure="ignore")
    assert solution.converged.tolist() == [True, False, True, False, True, True]
    assert ik.Status(int(solution.status[1])) is ik.Status.STALLED
    assert ik.Status(int(solution.status[3])) is ik.Status.NONFINITE
    assert int(solution.steps[4]) == 0
    good = solution.converged
    torch.testing.assert_close(solution.value[good].abs(), c[good].sqrt(), rtol=0, atol=1e-10)
    for i in good.nonzero().flatten().tolist():
        alone = solve(lambda z, c: z * z - c, z0[i : i + 1], (c[i : i + 1],), BRACKETING[solver])
        assert float(alone.value) == float(solution.value[i]) and int(alone.steps) == int(solution.steps[i])


@pytest.mark.parametrize("solver", BRACKETING)
def test_a_jump_is_no_root(solver: str) -> None:
    """A sign change without a zero: reported as stalled, next to the jump."""
    solution = solve(lambda z: 1 / (z - 1), torch.tensor([0.3], dtype=F64), (), BRACKETING[solver], on_failure="ignore")
    assert not bool(solution.converged.any())
    with pytest.raises(ik.ConvergenceError, match="did not converge"):
        solve(lambda z: 1 / (z - 1), torch.tensor([0.3], dtype=F64), (), BRACKETING[solver])


def test_bisection_gains_a_bit_a_step() -> None:
    solution = solve(lambda z: z - 0.3, torch.zeros(1, dtype=F64), (), ik.Bisection(width=1.0), atol=1e-9, trace=True)
    assert solution.trace is not None
    # an interval of length 1 (from 0 to 1) holds the root: after k steps |error| <= 2^-k
    for k, norm in enumerate(solution.trace[1:, 0].tolist(), 1):
        assert norm <= 2.0**-k


def test_chandrupatla_is_superlinear_and_safe() -> None:
    """A third of bisection's evaluations on smooth equations, and never many more on a nasty one."""
    c = torch.linspace(0.1, 50, 200, dtype=F64)
    counts = {
        name: solve(lambda z, c: torch.exp(z) + z - c, torch.zeros_like(c), (c,), s).evaluations
        for name, s in BRACKETING.items()
    }
    assert counts["chandrupatla"] <= 0.45 * counts["bisection"], counts
    nasty = {
        name: solve(lambda z, c: (z - c) ** 9, torch.zeros_like(c), (c,), s, atol=1e-30).evaluations
        for name, s in BRACKETING.items()
    }
    assert nasty["chandrupatla"] <= 3 * nasty["bisection"], nasty


@pytest.mark.parametrize("solver", ["bisection", "chandrupatla", "steffensen"])
def test_systems_are_refused(solver: str) -> None:
    with pytest.raises(ik.CapabilityError, match="at most 1 unknown a sample"):
        ik.fixed_point(lambda z: 0.5 * z, torch.ones(3, 2), solver=solver, batch_dims=1)


@pytest.mark.parametrize("solver", BRACKETING)
def test_derivative(solver: str) -> None:
    c = torch.linspace(1.0, 9.0, 5, dtype=F64, requires_grad=True)
    z = solve(lambda z, c: z**3 - c, torch.ones(5, dtype=F64), (c,), BRACKETING[solver]).value
    (g,) = torch.autograd.grad(z.sum(), c)
    torch.testing.assert_close(g, c.detach() ** (-2 / 3) / 3, rtol=1e-8, atol=0)


def test_evaluations_are_counted() -> None:
    for solver in (*BRACKETING.values(), ik.Steffensen()):
        calls = [0]

        def f(z: Tensor, calls: list[int] = calls) -> Tensor:
            calls[0] += 1
            return torch.cos(z)

        solution = ik.fixed_point(f, torch.zeros(4, dtype=F64), solver=solver, batch_dims=1, rtol=1e-12)
        assert solution.evaluations == calls[0], solver


# --------------------------------------------------------------------------------------------------------------- brackets
GIVEN = [*BRACKETING, "scipy.root_scalar.brentq", "scipy.root_scalar.toms748"]


def _with_bracket(name: str, low: Any, high: Any) -> Any:
    return ik.extend.get_solver(name, bracket=(low, high))


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("in_dims", [None, 0], ids=["frozen", "dropped"])
def test_a_bracket_for_each_sample_chooses_the_root(name: str, in_dims: int | None) -> None:
    """``sin(z) = c`` has a root in every bracket, and another one near ``z0``; the first sample starts at its root."""
    c = torch.tensor([0.0, 0.5, 0.5, -0.5, 0.2], dtype=F64, requires_grad=True)
    shift = 2 * math.pi * torch.tensor([0.0, 1.0, -2.0, 3.0, 4.0], dtype=F64)
    solver = _with_bracket(name, shift - 1.5, shift + 1.5)
    solution = solve(lambda z, c: torch.sin(z) - c, torch.zeros(5, dtype=F64), (c,), solver, in_dims=in_dims)
    torch.testing.assert_close(solution.value, torch.asin(c) + shift, rtol=0, atol=1e-10)
    (slope,) = torch.autograd.grad(solution.value.sum(), c)
    torch.testing.assert_close(slope, (1 - c.detach() ** 2) ** -0.5)


@pytest.mark.parametrize("name", GIVEN)
def test_a_bracket_without_a_change_of_sign_fails_alone(name: str) -> None:
    low, high = torch.tensor([0.0, 5.0, 1.0], dtype=F64), torch.tensor([4.0, 6.0, 9.0], dtype=F64)
    c = torch.tensor([4.0, 4.0, 9.0], dtype=F64)
    solution = solve(
        lambda z, c: z * z - c, torch.ones(3, dtype=F64), (c,), _with_bracket(name, low, high), on_failure="ignore"
    )
    assert solution.converged.tolist() == [True, False, True]
    torch.testing.assert_close(solution.value[[0, 2]], torch.tensor([2.0, 3.0], dtype=F64))


@pytest.mark.parametrize("name", GIVEN)
def test_a_root_at_an_end_and_one_bracket_for_all(name: str) -> None:
    c = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    solution = solve(lambda z, c: z - c, torch.full((3,), 7.0, dtype=F64), (c,), _with_bracket(name, 1.0, 3.0))
    torch.testing.assert_close(solution.value, c)


def test_the_bracket_of_a_call() -> None:
    c = torch.tensor([0.5, 8.0, 27.0], dtype=F64, requires_grad=True)
    for solver in ("auto", "bisection", "scipy.root_scalar.brentq"):
        ends = (torch.zeros(3, dtype=F64), 1 + c.detach())
        found = ik.root(lambda z, c: z**3 - c, args=(c,), bracket=ends, batch_dims=1, solver=solver)
        torch.testing.assert_close(found.value, c ** (1 / 3))
        (slope,) = torch.autograd.grad(found.value.sum(), c)
        torch.testing.assert_close(slope, c.detach() ** (-2 / 3) / 3)
    alone = ik.root(lambda z: z**2 - 2, torch.tensor(1.0, dtype=F64), bracket=(0, 2))
    assert float(alone.value) == pytest.approx(2**0.5, abs=1e-10)
    for solver, error, said in (
        (ik.Bisection(), TypeError, "Bisection"),
        ("newton", TypeError, "bracket"),
        ("scipy.root_scalar.secant", TypeError, "bracket"),
    ):
        with pytest.raises(error, match=said):
            ik.root(lambda z: z**2 - 2, bracket=(0.0, 2.0), solver=solver)
    with pytest.raises(ik.CapabilityError, match="batch_dims"):
        ik.root(lambda z: z**3 - c, bracket=(torch.zeros(3, dtype=F64), 4.0))


@pytest.mark.parametrize("cls", [ik.Bisection, ik.Chandrupatla])
def test_brackets_of_the_wrong_number(cls: Any) -> None:
    c = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    pair = (torch.zeros(2, dtype=F64), 4.0)
    with pytest.raises(ValueError, match="low has 2 numbers for 3 samples"):
        solve(lambda z, c: z - c, torch.zeros(3, dtype=F64), (c,), cls(bracket=pair))
    with pytest.raises(ik.CapabilityError, match="below all of them"):
        torch.func.vmap(
            lambda low, t: ik.root(lambda z: z - t, torch.zeros((), dtype=F64), solver=cls(bracket=(low, 9.0))).value
        )(c - 1, c)


# ------------------------------------------------------------------------------------------------------------ Steffensen
@pytest.mark.parametrize(
    ("f", "start", "solution"),
    [
        (torch.cos, 0.0, 0.7390851332151606),
        (lambda z: 1 + 0.5 * torch.sin(z), 0.0, 1.4987011335178484),
        (lambda z: 2 - z**3, 1.2, 1.0),  # |f'| = 3 at the solution
        (lambda z: torch.exp(-z), 0.0, 0.5671432904097838),
    ],
    ids=["cos", "sin", "not contractive", "exp"],
)
def test_steffensen_converges_quadratically(f: Any, start: float, solution: float) -> None:
    z0 = torch.full((3,), start, dtype=F64)
    found = ik.fixed_point(f, z0, solver="steffensen", batch_dims=1, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(found.value, torch.full_like(z0, solution), rtol=0, atol=1e-13)
    assert int(found.steps.max()) <= 8


# ---------------------------------------------------------------------------------------------------------------- Kepler
@pytest.mark.parametrize("solver", ["newton", "chandrupatla", "bisection"])
def test_eccentric_orbits(solver: str) -> None:
    """Every one of 20,000 orbits to 1e-12."""
    g = torch.Generator().manual_seed(0)
    e = 0.99 * torch.rand(20_000, generator=g, dtype=F64)
    M = math.pi * (2 * torch.rand(20_000, generator=g, dtype=F64) - 1)
    E0 = M + 0.85 * e * torch.sign(M)
    solution = solve(lambda E, e, M: E - e * torch.sin(E) - M, E0, (e, M), solver, in_dims=0)
    E = solution.value
    assert float((E - e * torch.sin(E) - M).abs().max()) <= 1e-12


def test_scalar_newton_step_with_a_flat_sample() -> None:
    """A sample whose derivative vanishes at the start neither moves nor disturbs the others."""
    c = torch.tensor([4.0, 1.0, 9.0], dtype=F64)
    z0 = torch.tensor([1.0, 0.0, 1.0], dtype=F64)
    solution = solve(lambda z, c: z * z - c, z0, (c,), "newton", on_failure="ignore")
    assert solution.converged.tolist() == [True, False, True]
    torch.testing.assert_close(solution.value, torch.tensor([2.0, 0.0, 3.0], dtype=F64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ik.Bisection(width=0.0), "width must be in"),
        (lambda: ik.Chandrupatla(growth=1.0), "growth must be larger than 1"),
        (lambda: ik.Bisection(bracket=(1.0, 1.0)), "low must be below high"),
        (lambda: ik.Chandrupatla(bracket=(0.0,)), "pair"),
        (lambda: ik.Chandrupatla(bracket=(None, 1.0)), "low must be a number"),
        (lambda: ik.Bisection(expansions=0), "expansions must be at least 1"),
        (lambda: ik.Steffensen(safeguard=0.5), "safeguard must be larger than 1"),
    ],
)
def test_bad_options(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------------------------------------------
# Equations of one unknown: a change of sign is found wherever Newton's steps are caught, and nothing is made of a jump.
SINGLE, DOUBLE = torch.float32, torch.float64
SAMPLES = 400


def peng_robinson(Z: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """The compressibility of a fluid (Peng & Robinson 1976): one root or three, and between them slopes of zero."""
    return Z**3 - (1 - B) * Z**2 + (A - 3 * B**2 - 2 * B) * Z - (A * B - B**2 - B**3)


@pytest.mark.parametrize("dtype", (SINGLE, DOUBLE), ids=str)
@pytest.mark.parametrize("start", (1.0, 0.3, 0.01))
def test_every_cubic_has_a_root(start: float, dtype: torch.dtype) -> None:
    r = torch.Generator().manual_seed(0)
    A = (torch.rand(SAMPLES, 1, generator=r) * 0.4 + 0.05).to(dtype).requires_grad_()
    B = (torch.rand(SAMPLES, 1, generator=r) * 0.08 + 0.01).to(dtype)
    found = ik.root(peng_robinson, torch.full((SAMPLES, 1), start, dtype=dtype), (A, B), batch_dims=1)
    assert found.evaluations <= 1500
    Z, (g,) = found.value.detach(), torch.autograd.grad(found.value.sum(), A)
    residual = peng_robinson(Z, A.detach(), B).abs()
    assert residual.max() <= 3e-5 if dtype == SINGLE else residual.max() <= 5e-11
    for a, b, z in zip(A.detach().double(), B.double(), Z.double(), strict=True):
        roots = np.roots([1, float(b) - 1, float(a - 3 * b**2 - 2 * b), float(-(a * b - b**2 - b**3))])
        assert np.abs(roots - float(z)).min() <= (5e-3 if dtype == SINGLE else 1e-6), (float(a), float(b), float(z))
    slope = 3 * Z**2 - 2 * (1 - B) * Z + A.detach() - 3 * B**2 - 2 * B
    torch.testing.assert_close(g, -(Z - B) / slope, rtol=1e-3 if dtype == SINGLE else 1e-8, atol=0)


#: name -> (residual, start, root)
TRAPS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {
    "a minimum of |F| between": (lambda z: z**3 - 3 * z + 2.1, 1.2, -2.0110037),
    "waves on a slope": (lambda z: torch.sin(3 * z) + 1.2 + 0.1 * z, -0.4, -2.8275),
    "a well far from the root": (lambda z: (z - 40) * ((z - 1) ** 2 + 0.1), 1.1, 40.0),
    "on the other side": (lambda z: (z + 40) * ((z - 1) ** 2 + 0.1), 0.9, -40.0),
}


@pytest.mark.parametrize("kind", (ik.root, ik.steady_state))
@pytest.mark.parametrize("name", TRAPS)
def test_a_minimum_of_the_residual_is_left(name: str, kind: Callable[..., ik.Solution]) -> None:
    residual, start, _ = TRAPS[name]
    sign = -1 if kind is ik.steady_state else 1
    found = kind(lambda z: sign * residual(z), torch.tensor(start, dtype=DOUBLE))
    assert residual(found.value.detach()).abs() <= 1e-9, name
    assert found.evaluations <= 800, (name, found.evaluations)


@pytest.mark.parametrize(
    ("name", "residual"),
    (
        ("a jump", lambda z: torch.where(z < 2, -1.0, 1.0) * (1 + z**2)),
        ("a pole", lambda z: 1 / (z - 3) ** 3),
        ("none", lambda z: z**2 + 1),
        ("a constant", lambda z: 0 * z + 1),
    ),
)
def test_what_is_no_zero_is_refused(name: str, residual: Callable[[Tensor], Tensor]) -> None:
    """At a cost that is bounded, too."""
    for dtype in (SINGLE, DOUBLE):
        with pytest.raises(ik.ConvergenceError, match=r"stalled|diverged") as caught:
            ik.root(residual, torch.tensor([0.5], dtype=dtype))
        assert caught.value.solution.evaluations <= 1300, (name, caught.value.solution.evaluations)


def test_many_unknowns_without_a_zero_are_left_sooner() -> None:
    with pytest.raises(ik.ConvergenceError, match="stalled") as caught:
        ik.root(lambda z: z**2 + 1, torch.linspace(0.1, 1, 4, dtype=DOUBLE))
    assert caught.value.solution.evaluations <= 2000
