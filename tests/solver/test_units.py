"""What is found with default tolerances does not depend on the units of the unknowns or of the equations.

Each row solves ``F(z) = 0`` as ``s F(z / t) = 0`` (a map as ``t f(z / t)``) for ``s`` and ``t`` over up to 21 orders of
magnitude, and compares ``z / t`` with the solution.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
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


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "solver"), ROWS)
def test_units_do_not_matter(name: str, solver: str) -> None:
    for s, t in UNITS:
        solve, z0, solution = in_units(name, s, t)
        found = solve(z0, solver=solver).value / t
        error = float((found - solution).abs().max())
        assert error < 1e-8, f"{name} by {solver}, s={s:g}, t={t:g}: off by {error:.1e}"


@pytest.mark.one_in(2)
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


# ---------------------------------------------------------------------------------------------------------------------
# A problem whose unknowns are all of the size ``s`` has ``s`` times the solution of the same problem in units of one, or is
# refused: where ``z`` is zero, 1e-16 is no unit that a kink could be beside.
F32, F64 = torch.float32, torch.float64
POWERS_OF_TEN = (1e-12, 1e-8, 1.0, 1e8)
Solve = Callable[..., ik.Solution]


def _data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    A, b, M, c = (torch.randn(*shape, generator=g, dtype=F64) for shape in ((7, 5), (7,), (5, 5), (5,)))
    return A.to(dtype), b.to(dtype), (0.9 * M / M.norm()).to(dtype), c.to(dtype)


def _kinds(dtype: torch.dtype) -> dict[str, Callable[[float, Tensor], ik.Solution]]:
    """name -> solve, of units and a start."""
    A, b, M, c = _data(dtype)

    def fit(s: float) -> Callable[[Tensor], Tensor]:
        return lambda z: 0.5 * ((A @ z - b * s) ** 2).sum()

    def argmin(**what: Callable[[float], Any]) -> Callable[[float, Tensor], ik.Solution]:
        return lambda s, z: ik.argmin(fit(s), z, **{name: make(s) for name, make in what.items()})

    def norm(z: Tensor) -> Tensor:
        return 0.5 * (z**2).sum()

    def program(s: float, z: Tensor) -> ik.Solution:
        row, G = torch.ones(1, 5, dtype=dtype), torch.cat([torch.eye(5, dtype=dtype), -torch.eye(5, dtype=dtype)])
        ends = (torch.full((1,), 0.1 * s, dtype=dtype), G, torch.full((10,), 0.2 * s, dtype=dtype))
        return ik.solve(ik.QuadraticProgram(A.T @ A, -s * (A.T @ b), row, *ends))

    times = torch.linspace(0, 1, 4, dtype=dtype)
    flow = lambda s: lambda t, y: s * torch.tanh(M @ (y / s) + c)  # noqa: E731
    return {
        "argmin": argmin(),
        "simplex": argmin(project=lambda s: ik.project.simplex(s)),
        "box": argmin(project=lambda s: ik.project.box(-0.1 * s, 0.2 * s)),
        "ball": argmin(project=lambda s: ik.project.l2_ball(0.3 * s)),
        "l1": argmin(prox=lambda s: ik.prox.l1(0.5 * s)),
        "bounds": argmin(bounds=lambda s: (-0.1 * s, 0.2 * s)),
        "a bound that the start violates": argmin(bounds=lambda s: (0.1 * s, None)),
        "inequality": argmin(constraints=lambda s: [ik.Inequality(lambda z: 0.2 * s - z)]),
        "equality": argmin(constraints=lambda s: [ik.Equality(lambda z: z.sum() - 0.1 * s)]),
        "an inequality that a minimum violates": lambda s, z: ik.argmin(
            norm, z, constraints=[ik.Inequality(lambda z: s - z.sum())]
        ),
        "least squares": lambda s, z: ik.least_squares(lambda z: A @ z - b * s, z),
        "least squares within bounds": lambda s, z: ik.least_squares(
            lambda z: A @ z - b * s, z, bounds=(-0.1 * s, 0.2 * s)
        ),
        "exponentials": lambda s, z: ik.root(lambda z: torch.exp(z / s + M @ (z / s)) - 1.5 - 0.3 * c.abs(), z),
        "root": lambda s, z: ik.root(lambda z: z - s * torch.tanh(M @ (z / s) + c), z),
        "root with kinks": lambda s, z: ik.root(lambda z: z - torch.relu(M @ z + c * s), z),
        "complementarity": lambda s, z: ik.root(lambda z: torch.minimum(z, z + M @ z - c * s), z),
        "steady state": lambda s, z: ik.steady_state(lambda z: s * torch.tanh(M @ (z / s) + c) - z, z),
        "fixed point": lambda s, z: ik.fixed_point(lambda z: s * torch.tanh(M @ (z / s) + c), z),
        "fixed point with kinks": lambda s, z: ik.fixed_point(lambda z: torch.relu(M @ z + c * s), z),
        "quadratic program": program,
        "initial values": lambda s, z: ik.solve(ik.InitialValue(flow(s), times), z),
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("start", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("name", _kinds(F64))
def test_the_solution_has_the_units_of_the_problem(name: str, dtype: torch.dtype, start: float) -> None:
    solve, z0 = _kinds(dtype)[name], torch.full((5,), start, dtype=dtype)
    expected = solve(1.0, z0).value.to(F64)
    for s in POWERS_OF_TEN:
        found = solve(s, s * z0).value.to(F64) / s
        error = float((found - expected).norm() / expected.norm())
        assert error < (3e-3 if dtype == F32 else 1e-6), f"s={s:g}: off by {error:.1e}"


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
def test_unknowns_beside_others_that_are_ten_trillion_times_as_large(dtype: torch.dtype) -> None:
    """Whatever cancels in an equation does so in units of the unknowns that are in it: a millionth of the largest is no
    unit of one that is 1e-13 of it.  In float64 the equation in small units was off by 2e-5."""
    g = torch.Generator().manual_seed(0)
    rows, units = (10 ** torch.tensor(t, dtype=F64) for t in ((-13, 0, -6.5), (0, -13, -6.5)))
    for _ in range(8):
        A, x = (
            torch.randn(3, 3, generator=g, dtype=F64) + 3 * torch.eye(3, dtype=F64),
            torch.randn(3, generator=g, dtype=F64),
        )
        expected = torch.linalg.solve(A, torch.asinh(x))
        f = lambda z, A=A, x=x: (rows * (torch.sinh(A @ (z.double() / units)) - x)).to(dtype)  # noqa: E731
        found = ik.root(f, torch.zeros(3, dtype=dtype)).value.double() / units
        torch.testing.assert_close(found, expected, rtol=1e-8 if dtype == F64 else 1e-3, atol=0)


@pytest.mark.parametrize("tiny", [1e-6, 1e-13])
def test_an_objective_with_half_of_its_unknowns_in_small_units(tiny: float) -> None:
    g = torch.Generator().manual_seed(0)
    units = torch.tensor([1, tiny, tiny, 1], dtype=F64)
    A, b, y0 = (torch.randn(*shape, generator=g, dtype=F64) for shape in ((9, 4), (9,), (4,)))
    f = lambda y: 0.5 * ((A @ y - b) ** 2).sum() + 0.1 * torch.cosh(y).sum()  # noqa: E731
    found = ik.argmin(lambda z: f(z / units), y0 * units).value / units
    torch.testing.assert_close(found, ik.argmin(f, y0).value, rtol=1e-7, atol=1e-7)


def _tail(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.erfc(-x / 2**0.5)


#: verb, function, start or bracket, solution: |F| is below ``atol`` there, which a start of size one has set, long before
_FAR_BELOW: dict[str, tuple[Any, Any, Any, list[float]]] = {
    "square": (ik.root, lambda z: z**2 - 1e-12, [1.0], [1e-6]),
    "square in company": (ik.root, lambda z: z**2 - torch.tensor([1e-12, 1.0, 1e6]).to(z), [1.0] * 3, [1e-6, 1.0, 1e3]),
    "ionised": (ik.root, lambda x: x**2 / (1 - x) - 4.4671100135464184e-11, [0.5], [6.683621890167146e-06]),
    "quantile": (ik.root, lambda x: _tail(x) - 1e-10, [0.0], [-6.361340902404056]),
    "quantile further out": (ik.root, lambda x: _tail(x) - 1e-15, [0.0], [-7.941345326170997]),
    "quantile by units in the last place": (ik.root, lambda x: torch.special.ndtr(x) - 1e-10, [0.0], [-6.3613409]),
    "quantile in brackets": (ik.root, lambda x: _tail(x) - 1e-10, (-40.0, 40.0), [-6.361340902404056]),
    "square in brackets": (ik.root, lambda x: x**2 - 1e-12, (0.0, 1.0), [1e-6]),
    "logarithm": (ik.root, lambda x: torch.exp(x) - 1e-12, [0.0], [-27.631021115928547]),
    "logarithm in brackets": (ik.root, lambda x: torch.exp(x) - 1e-12, (-100.0, 100.0), [-27.631021115928547]),
    "in small units": (ik.root, lambda z: 1e-9 * ((z / 1e-9) ** 3 + z / 1e-9 - 2), [1.0], [1e-9]),
    "minimum": (ik.argmin, lambda z: (z**3 / 3 - 1e-12 * z).sum(), [1.0, 1.0], [1e-6, 1e-6]),
    "minimum in bounds": (
        partial(ik.argmin, bounds=(0.0, None)),
        lambda z: (z**3 / 3 - 1e-12 * z).sum(),
        [1.0],
        [1e-6],
    ),
    "minimum under a constraint": (
        partial(ik.argmin, constraints=[ik.Inequality(lambda z: -z)]),
        lambda z: (z**3 / 3 - 1e-12 * z).sum(),
        [1.0],
        [1e-6],
    ),
    "fit": (
        ik.least_squares,
        lambda z: 1e-9 * torch.stack([z[0] / 1e-6 - 1, z[0] * z[1] / 1e-12 - 2, z[1] / 1e-6 - 2]),
        [1.0, 1.0],
        [1e-6, 2e-6],
    ),
}


@pytest.mark.parametrize("name", _FAR_BELOW)
def test_a_small_residual_that_still_falls_is_no_solution_yet(name: str) -> None:
    """What is small beside ``|F(z0)|`` may be large beside what ``F`` is made of at the solution."""
    verb, function, start, exact = _FAR_BELOW[name]
    if isinstance(start, tuple):
        found = verb(function, None, bracket=tuple(torch.tensor([end], dtype=torch.float64) for end in start))
    else:
        found = verb(function, torch.tensor(start, dtype=torch.float64))
    torch.testing.assert_close(found.value, torch.tensor(exact, dtype=torch.float64), rtol=2e-7, atol=0.0)
    assert found.evaluations <= (230 if isinstance(verb, partial) else 130)


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_a_fixed_point_far_below_where_it_began_is_told_sample_by_sample(solver: str) -> None:
    """``z = z / 2 + c``: ``|F|`` below ``atol`` is no solution yet, of one sample beside others that are done by then."""
    c = torch.tensor([[1e-12], [1.0], [1e-10]], dtype=torch.float64)
    found = ik.fixed_point(lambda z, c: z / 2 + c, torch.ones_like(c), (c,), batch_dims=1, solver=solver)
    torch.testing.assert_close(found.value, 2 * c, rtol=1e-7, atol=0.0)


@pytest.mark.parametrize(("n", "seed", "dtype", "most"), [(200, 2, F64, 26), (400, 2, F64, 34), (1000, 0, F32, 21)])
def test_what_is_as_precise_as_asked_needs_no_more(n: int, seed: int, dtype: torch.dtype, most: int) -> None:
    """An unknown that happens to be near zero, and single precision, are no reason for another step."""
    A = (0.5 * torch.randn(n, n, generator=torch.Generator().manual_seed(seed)) / n**0.5).to(dtype)
    found = ik.root(lambda z: z - torch.tanh(A @ z) - 0.01, torch.zeros(n, dtype=dtype), solver="newton_krylov")
    assert found.evaluations <= most


def test_a_root_in_single_precision_costs_no_more() -> None:
    found = ik.root(lambda z: z**2 - 2, torch.ones((), dtype=F32))
    assert found.evaluations <= 7 and float(found.value) == pytest.approx(2**0.5, rel=5e-6)


def test_an_atol_that_was_given_is_taken_as_it_is() -> None:
    found = ik.root(lambda z: z**2 - 1e-12, torch.ones(1, dtype=torch.float64), atol=1e-10)
    assert 1e-12 < float(found.residual_norm) <= 1e-10


@pytest.mark.parametrize(("order", "most"), [(1, 20), (2, 105), (3, 115)])
def test_zeros_at_zero_end(order: int, most: int) -> None:
    """Nothing is made of anything there: it is enough that ``|F|`` is small beside ``atol``."""
    found = ik.root(lambda z: z**order + (z**3 if order == 1 else 0), torch.ones(1, dtype=torch.float64))
    assert abs(float(found.value)) < 1e-6 and found.evaluations <= most
