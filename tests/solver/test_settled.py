"""Factors of the last step say that a zero is near, or nothing."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.verdict import judge
from implicitkit.solver.verdict.kantorovich import correction_is_settled, distant_factors_hold, zero_is_near

F64 = torch.float64
N = 100


class Factors:
    """Of a diagonal Jacobian."""

    def __init__(self, slope: Tensor) -> None:
        self.slope = slope
        self.factor = types.SimpleNamespace(ok=torch.ones(len(slope), dtype=torch.bool))

    def solve(self, b: Tensor) -> Tensor:
        return b / (self.slope if b.ndim == 2 else self.slope.unsqueeze(2))

    def product(self, x: Tensor) -> Tensor:
        return self.slope * x

    def size(self, x: Tensor) -> Tensor:
        return (self.slope * x).abs()


def newton(f: Callable[[Tensor], Tensor], start: Tensor, steps: int, wrong: float = 1.0) -> bool:
    """What is said after so many steps of Newton's method for each of a hundred unknowns by itself, the last of them by
    factors ``wrong`` times too large; all but the first are at 10 or come to it."""
    z = torch.full((1, N), 10.0 + 1e-7, dtype=F64)
    z[0, 0] = start

    def F(y: Tensor) -> Tensor:
        return torch.cat([f(y[:, :1]), (y[:, 1:] / 10) ** 2 - 1], 1)

    for k in range(steps):
        leaf = z.clone().requires_grad_()
        out = F(leaf)
        (slope,) = torch.autograd.grad(out.sum(), leaf)
        known = Factors(slope * (wrong if k + 1 == steps else 1))
        point, before = z, out.detach()
        z = point - known.solve(before)
    return bool(correction_is_settled(known, z, F(z), point, before))


CASES: dict[str, tuple[Callable[[Tensor], Tensor], float, int, float, bool]] = {
    "a zero, converged to": (lambda z: z**2 - 9, 3.01, 2, 1.0, True),
    "a zero of a linear equation, after a long step": (lambda z: z - 3, 1.0, 1, 1.0, True),
    "a zero of an equation that is nearly linear": (lambda z: z - 3 + 1e-4 * (z - 3) ** 2, 1.0, 1, 1.0, False),
    "a zero of a linear equation, from one at zero": (lambda z: z - 3, 0.0, 1, 1.0, True),
    "a zero, by factors that are too large": (lambda z: z**2 - 9, 3.0001, 1, 30.0, False),
    "a zero at infinity, by factors that are too large": (lambda z: torch.exp(-z), 20.0, 1, 1e6, False),
    "a zero at infinity": (lambda z: torch.exp(-z), 20.0, 3, 1.0, False),
    "a zero at infinity, steps of a thousandth": (lambda z: torch.exp(-(z**2)), 26.0, 2, 1.0, False),
    "underflow": (lambda z: torch.exp(-(z**2)), 27.28, 2, 1.0, False),
    "a linear equation, met to the last bit": (lambda z: z - 8, 8.0, 1, 1.0, True),
    "no equation": (lambda z: 1e-250 * (z - 8), 8.0, 1, 1.0, False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_factors_say(name: str) -> None:
    f, start, steps, wrong, settled = CASES[name]
    assert newton(f, torch.tensor(start, dtype=F64), steps, wrong) is settled


def test_factors_that_are_none_say_nothing() -> None:
    z, point = torch.full((2, N), 3.0, dtype=F64), torch.full((2, N), 3.0001, dtype=F64)
    known = Factors(torch.ones_like(z))
    known.factor.ok[1] = False
    assert correction_is_settled(known, z, z - 3, point, point - 3).tolist() == [True, False]


# the slope by the factors, and the point before: the first of a hundred unknowns has come from there to the zero of z^2 - 9
CAME: dict[str, tuple[float, float, bool]] = {
    "a short step, foretold to a half": (7.0, 3.0001, True),
    "a longer step, foretold to a hundredth": (6.2, 3.2, True),
    "a longer step, foretold less well": (6.4, 3.2, False),
    "a step longer than that, foretold to a thousandth": (6.607, 3.6, False),
    "a step longer than that, foretold to ten digits": (6.6, 3.6, True),
}


@pytest.mark.parametrize("name", CAME)
def test_how_far_factors_hold(name: str) -> None:
    slope, first, settled = CAME[name]
    z, point = torch.full((1, N), 10.0, dtype=F64), torch.full((1, N), 10.0, dtype=F64)
    z[0, 0], point[0, 0] = 3 + 1e-12, first
    known = Factors(torch.full_like(z, 0.2))
    known.slope[0, 0] = slope
    F = lambda y: torch.cat([y[:, :1] ** 2 - 9, (y[:, 1:] / 10) ** 2 - 1 + 1e-12], 1)  # noqa: E731
    assert bool(correction_is_settled(known, z, F(z), point, F(point))) is settled


# of two unknowns, both of which come from ``first`` by a share of Newton's step
FEW: dict[str, tuple[Callable[[Tensor], Tensor], float, float, bool]] = {
    "a zero": (lambda z: z**2 - 9, 3.0001, 1.0, True),
    "on the way to a zero": (lambda z: z**2 - 9, 3.0001, 0.05, False),
    "on the way to infinity, far out": (lambda z: torch.exp(1e7 - z), 1e7 + 20, 1.0, False),
    "on the way to infinity, far out, by a small share": (lambda z: torch.exp(1e7 - z), 1e7 + 20, 0.05, False),
    "at a zero, from where it is": (lambda z: z**2 - 9, 3.0 + 1e-13, 0.0, True),
}


@pytest.mark.parametrize("name", FEW)
def test_few_unknowns_are_settled_by_a_step_that_has_led_there(name: str) -> None:
    f, first, share, settled_there = FEW[name]
    point = torch.full((1, 2), first, dtype=F64, requires_grad=True)
    before = f(point)
    (slope,) = torch.autograd.grad(before.sum(), point)
    point, before, known = point.detach(), before.detach(), Factors(slope)
    z = point - share * known.solve(before)
    assert bool(correction_is_settled(known, z, f(z), point, before)) is settled_there


# what R'R is along the first of a hundred unknowns, its unit D, and mu; of the others both are one
DAMPED: dict[str, tuple[float, float, float, bool]] = {
    "no damping": (1e-12, 1.0, 0.0, True),
    "little beside every direction": (1e-12, 1.0, 1e-14, True),
    "more than one direction has": (1e-12, 1.0, 1e-8, False),
    "more than one direction has, in its units": (1e-6, 1e2, 1e-6, False),
    "little, in its units": (1e-6, 1e-3, 1e-6, True),
}


@pytest.mark.parametrize("name", DAMPED)
def test_factors_with_damping_say_nothing_where_that_is_all_there_is(name: str) -> None:
    little, unit, mu, settled = DAMPED[name]
    slope, units = torch.ones(1, N, dtype=F64), torch.ones(1, N, dtype=F64)
    slope[0, 0], units[0, 0] = little, unit
    known: Any = Factors(slope + mu * units**2)
    known.damping, known.units = torch.tensor([mu], dtype=F64), units
    z = torch.full((1, N), 10.0, dtype=F64)
    point = z + 1e-4
    F = 1e-8 * slope
    assert bool(correction_is_settled(known, z, F, point, F + 1e-4 * known.slope)) is settled


class Beside:
    """What asks of a function beside a point."""

    def __init__(self, F: Callable[[Tensor], Tensor]) -> None:
        self.residual, self.eps, self.kind = F, torch.finfo(F64).eps, types.SimpleNamespace(returns_program=False)

    def beside(self, _: str) -> Beside:
        return self


# the first of a hundred equations, where it is asked, and its slope by factors of a point before
HELD: dict[str, tuple[Callable[[Tensor], Tensor], float, float, bool]] = {
    "a zero": (lambda z: z**2 - 9, 3.0, 6.0, True),
    "a zero at the origin": (lambda z: z, 1e-27, 1.0, True),
    "a zero, by factors of a point far steeper": (lambda z: z**2 - 9, 3.0, 6e3, True),
    "a zero, not met yet": (lambda z: z**2 - 9, 3.0 + 1e-8, 6.0, False),
    "a zero at infinity": (lambda z: torch.exp(-z), 700.0, -9.9e-305, False),
    "a zero at infinity, by factors of a point before": (lambda z: torch.exp(-z), 40.0, -4e-8, False),
    "a zero at infinity, by factors not so far": (lambda z: torch.exp(-z), 40.0, -1e-12, False),
    "underflow": (lambda z: torch.exp(-z), 800.0, -1e-3, False),
    "no equation": (lambda z: 0 * z, 3.0, 0.0, False),
}


@pytest.mark.parametrize("name", HELD)
def test_what_factors_of_a_point_however_far_say(name: str) -> None:
    f, first, slope, held = HELD[name]
    z = torch.full((1, N), 10.0, dtype=F64)
    z[0, 0] = first
    known = Factors(torch.full_like(z, 0.2))
    known.slope[0, 0] = slope
    beside: Any = Beside(lambda y: torch.cat([f(y[:, :1]), (y[:, 1:] / 10) ** 2 - 1], 1))
    assert bool(distant_factors_hold(beside, z, torch.ones(1, dtype=torch.bool), known)[0, 1]) is held
    assert not bool(distant_factors_hold(beside, z, torch.zeros(1, dtype=torch.bool), known)[0, 1])
    known.factor.ok[0] = False
    assert not bool(distant_factors_hold(beside, z, torch.ones(1, dtype=torch.bool), known)[0, 1])


# the first of a hundred equations, where it is zero to the last bit, and its slope at the point before, by 2e-3 off
EXACT: dict[str, tuple[Callable[[Tensor], Tensor], float, float, bool]] = {
    "a zero": (lambda z: z**2 - 9, 3.0, 6.0, True),
    "a zero of a linear equation": (lambda z: z - 3, 3.0, 1.0, True),
    "what rounding leaves at infinity": (lambda z: torch.sqrt(z * z + 1) - z, 9e7, -1.1e-16, False),
    "a zero, by factors of a point far steeper": (lambda z: z**2 - 9, 3.0, 60.0, False),
    "a zero, by factors of the other sign": (lambda z: z**2 - 9, 3.0, -6.0, False),
    "a zero of an equation that is next to zero": (lambda z: z**2 - 9 + 1e-12, 3.0, 6.0, True),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_equation_that_is_zero_to_the_last_bit_changes_beside_that(name: str) -> None:
    f, first, slope, near = EXACT[name]
    z = torch.full((1, N), 10.0, dtype=F64)
    z[0, 0] = first
    known = Factors(torch.full_like(z, 0.2))
    known.slope[0, 0] = slope
    beside: Any = Beside(lambda y: torch.cat([f(y[:, :1]), (y[:, 1:] / 10) ** 2 - 1], 1))
    point = z * (1 + 2e-4)
    before = beside.residual(z) + known.product(point - z)
    assert bool(correction_is_settled(known, z, beside.residual(z), point, before))
    assert bool(zero_is_near(beside, known, z, point, before)) is near


def test_an_equation_that_factors_do_not_say_to_change_says_nothing() -> None:
    z = torch.full((1, N), 10.0, dtype=F64)
    known = Factors(torch.where(torch.arange(N) == 3, 0.0, 0.2).unsqueeze(0).to(F64))
    known.solve = lambda b: torch.zeros_like(b)  # type: ignore[method-assign]
    beside: Any = Beside(lambda y: torch.where(torch.arange(N) == 3, 0.0, (y / 10) ** 2 - 1))
    assert not bool(distant_factors_hold(beside, z, torch.ones(1, dtype=torch.bool), known)[0, 1])


def beam(y: Tensor, load: Tensor) -> Tensor:
    """Of four unknowns a point, held at its ends, by the trapezoidal rule."""
    h = 1 / (len(y) - 1)
    slopes = torch.cat([y[:, 1:], load - 50 * torch.sinh(y[:, :1])], 1)
    inner = (y[1:] - y[:-1]) / h - 0.5 * (slopes[1:] + slopes[:-1])
    ends = torch.stack([y[0, 0], y[0, 1], y[-1, 0], y[-1, 1]])
    return torch.cat([ends[:2], inner.reshape(-1), ends[2:]]).view_as(y)


def test_all_that_is_asked_of_a_large_system_at_rounding_is_one_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equations that hold at the start, boundary values of zero and a point far out: three reasons to ask more."""
    asked: list[str] = []
    for name in ("runs_away", "vanishes", "backward_error"):
        whole = getattr(judge, name)
        monkeypatch.setattr(judge, name, lambda *a, _n=name, _w=whole, **k: (asked.append(_n), _w(*a, **k))[1])
    load = torch.full((51, 1), 100.0, dtype=F64)
    s = ik.root(beam, torch.zeros(51, 4, dtype=F64), (load,))
    assert bool(s.converged) and float(s.value.abs().max()) > 5
    assert not asked


@pytest.mark.parametrize("kind", ["root", "program"])
def test_a_point_far_out_is_not_asked_where_factors_tell(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("asked")

    monkeypatch.setattr(judge, "runs_away", refuse)
    n = 300
    data = 20 + torch.linspace(0, 1, n, dtype=F64)
    z0 = data - 0.005
    if kind == "root":
        s = ik.root(lambda z, d: (z - d) * (1 + 0.01 * z) - 0.1 * torch.roll(z - d, 1) ** 2, z0, (data,))
    else:
        s = ik.argmin(
            lambda z, d: (0.5 * (z - d).square() + 0.1 * torch.cosh(z - d)).sum() + 0.1 * z.diff().square().sum(),
            z0,
            (data,),
            constraints=[ik.Equality(lambda z, d: z[::2] + z[1::2] - d[::2] - d[1::2] - 0.01)],
            solver="sqp",
        )
    assert bool(s.converged) and float(s.value.abs().max()) > 15


def test_a_fit_is_asked_nothing_where_factors_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked")

    for name in ("runs_away", "vanishes"):
        monkeypatch.setattr(judge, name, refuse)
    d = 20 + torch.linspace(0, 1, 300, dtype=F64)
    fit = lambda z, d: torch.cat([torch.sinh(z - d), (z - d).diff()])  # noqa: E731
    s = ik.least_squares(fit, d - 0.1, (d,), solver="levenberg_marquardt")
    assert bool(s.converged) and float(s.value.abs().max()) > 15


def test_a_fit_that_runs_away_is_still_asked() -> None:
    """One of 300 unknowns is best at infinity, where nothing but damping is left of R'R."""
    d = 20 + torch.linspace(0, 1, 299, dtype=F64)
    fit = lambda z, d: torch.cat([torch.exp(-z[:1]), torch.sinh(z[1:] - d)])  # noqa: E731
    for solver in ("auto", "levenberg_marquardt"):
        z0 = torch.cat([torch.full((1,), 10.0, dtype=F64), d - 0.3])
        s = ik.least_squares(fit, z0, (d,), solver=solver, on_failure="ignore")
        assert not bool(s.converged), solver


def test_what_runs_away_is_still_asked() -> None:
    """One of 300 unknowns has no minimum but at infinity."""
    d = 20 + torch.linspace(0, 1, 299, dtype=F64)
    s = ik.argmin(
        lambda z, d: torch.exp(-z[0]) + 0.5 * (z[1:] - d).square().sum(),
        torch.cat([torch.full((1,), 10.0, dtype=F64), d]),
        (d,),
        constraints=[ik.Equality(lambda z, d: z[1::2] - d[::2] - 0.01)],
        solver="sqp",
        on_failure="ignore",
    )
    assert not bool(s.converged)


@pytest.mark.parametrize("solver", ["newton", "auto", "trust_region"])
def test_an_equation_that_holds_at_the_start_has_no_units_of_its_own(solver: str) -> None:
    """Cragg and Levy's, twelve times: a root of order two and three, and the cubic equation holds at the start."""

    def equations(z: Tensor) -> Tensor:
        a, b, c, d = z.view(-1, 4).unbind(1)
        return torch.stack([(a.exp() - b) ** 2, 10 * (b - c) ** 3, torch.tan(c - d) ** 2, d - 1], 1).flatten()

    z0 = torch.tensor([1.0, 2.0, 2.0, 2.0], dtype=torch.float64).repeat(12)
    s = ik.root(equations, z0, solver=solver)
    assert bool(s.converged) and float(equations(s.value).norm()) < 1e-9, s


# ---------------------------------------------------------------------------------------------------------------------
# Minimisers of |F| that stand where its slope is zero and F is not: no step from there moves, and they say so at once.
SOLVERS = {
    "bfgs": ik.BFGS(),
    "lbfgs": ik.LBFGS(),
    "nonlinear_cg": ik.NonlinearCG(),
    "gauss_newton": ik.GaussNewton(),
    "gradient_descent": ik.GradientDescent(),
    "gradient_descent, armijo": ik.GradientDescent(step_size="armijo"),
    "gradient_descent, fixed": ik.GradientDescent(step_size=0.1),
    "gradient_descent, nesterov": ik.GradientDescent(step_size=0.1, nesterov=True),
}
EQUATIONS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "a flat start": (lambda z: z**2 - 2, [0.0, 0.0]),
    "no solution": (lambda z: 0 * z + 1, [0.3, 0.2]),
}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_zero_slope_is_the_end(name: str, equation: str) -> None:
    f, start = EQUATIONS[equation]
    z0 = torch.tensor([start, [1.0, 1.0]], dtype=torch.float64)  # the second sample may go on
    solution = ik.root(f, z0, solver=SOLVERS[name], batch_dims=1, max_steps=400, on_failure="ignore")
    assert solution.status[0] == int(ik.Status.STALLED), solution
    assert solution.steps[0] <= 3, solution
    if equation == "a flat start":
        assert solution.converged[1], solution
