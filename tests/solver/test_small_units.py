"""A problem whose unknowns are all of the size ``s`` has ``s`` times the solution of the same problem in units of one, or is
refused: where ``z`` is zero, 1e-16 is no unit that a kink could be beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F32, F64 = torch.float32, torch.float64
UNITS = (1e-12, 1e-8, 1.0, 1e8)
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


@pytest.mark.parametrize("start", [0.0, 0.3])
@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("name", _kinds(F64))
def test_the_solution_has_the_units_of_the_problem(name: str, dtype: torch.dtype, start: float) -> None:
    solve, z0 = _kinds(dtype)[name], torch.full((5,), start, dtype=dtype)
    expected = solve(1.0, z0).value.to(F64)
    for s in UNITS:
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
