"""Programs whose unknowns, constraints and multipliers lie orders of magnitude apart: solved, and not dearly.

Hock & Schittkowski (1981), *Test Examples for Nonlinear Programming Codes*; the optima are those of the book, or of better
points since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from tests.tables.heat import HEAT_BOUNDS, HEAT_START, heat_exchanger

F64 = torch.float64


class Program(NamedTuple):
    objective: Callable[[Tensor], Tensor]
    start: list[float]
    equalities: Callable[[Tensor], Tensor] | None
    inequalities: Callable[[Tensor], Tensor] | None
    bounds: tuple[list[float], list[float]] | None
    best: float
    most: int  # evaluations


def _reactor(x: Tensor) -> Tensor:
    a, b, *_, g, h = x.unbind(-1)
    return 0.4 * (a / g) ** 0.67 + 0.4 * (b / h) ** 0.67 + 10 - a - b


def _reactions(x: Tensor) -> Tensor:
    a, b, c, d, e, f, g, h = x.unbind(-1)
    rows = [0.0588 * e * g + 0.1 * a, 0.0588 * f * h + 0.1 * (a + b)]
    rows += [4 * y / z + 2 * y**-0.71 / z + 0.0588 * y**-1.3 * w for y, z, w in ((c, e, g), (d, f, h))]
    return torch.stack([*(row - 1 for row in rows), 1 - _reactor(x), _reactor(x) - 4.2], -1)


def _power(x: Tensor) -> Tensor:
    _, _, c, d, e, f, g, h, i = x.unbind(-1)
    a, s, co, q = 50.176, torch.sin(x.new_tensor(0.25)), torch.cos(x.new_tensor(0.25)), 0.25
    v = 2 * co - 0.7533e-3 * a
    return torch.stack(
        [
            e * f * (-c - q).sin() + e * g * (-d - q).sin() + 2 * s * e**2 - a * x[0] + 400 * a,
            e * f * (c - q).sin() + f * g * (c - d - q).sin() + 2 * s * f**2 - a * x[1] + 400 * a,
            e * g * (d - q).sin() + f * g * (d - c - q).sin() + 2 * s * g**2 + 881.779 * a,
            a * h + e * f * (-c - q).cos() + e * g * (-d - q).cos() - 200 * a - v * e**2,
            a * i + e * f * (c - q).cos() + f * g * (c - d - q).cos() - 200 * a - v * f**2,
            e * g * (d - q).cos() + f * g * (d - c - q).cos() + 22.938 * a - v * g**2,
        ]
    )


def _limits(x: Tensor) -> Tensor:
    turn = x[3] - x[2]
    return torch.stack([-turn - 0.55, turn - 0.55, x[0] ** 2 + x[7] ** 2 - 2250000, x[1] ** 2 + x[8] ** 2 - 2250000])


def _yields(x: Tensor) -> tuple[Tensor, Tensor]:
    g = 1.12 * x[0] + 0.13167 * x[0] * x[7] - 0.00667 * x[0] * x[7] ** 2
    return g, 1.098 * x[7] - 0.038 * x[7] ** 2 + 0.325 * x[5]


def _refinery(x: Tensor) -> Tensor:
    (g, k), a, b = _yields(x), 0.99, 0.9
    return torch.stack(
        [
            -35.82 + 0.222 * x[9] + b * x[8],
            133 - 3 * x[6] + a * x[9],
            35.82 - 0.222 * x[9] - x[8] / b,
            -133 + 3 * x[6] - x[9] / a,
            a * x[3] - g,
            a * x[6] - k - 57.425,
            g - x[3] / a,
            k - x[6] / a + 57.425,
        ]
    )


def _balances(x: Tensor) -> Tensor:
    mixed = 98000 * x[2] / (x[3] * x[8] + 1000 * x[2]) - x[5]
    return torch.stack([1.22 * x[3] - x[0] - x[4], mixed, (x[1] + x[4]) / x[0] - x[7]])


def _equilibrium(x: Tensor) -> Tensor:
    e = x.exp()
    return torch.stack(
        [
            e[0] + 2 * e[1] + 2 * e[2] + e[5] + e[9] - 2,
            e[3] + 2 * e[4] + e[5] + e[6] - 1,
            e[2] + e[6] + e[7] + 2 * e[8] + e[9] - 1,
        ]
    )


def _free_energy(x: Tensor) -> Tensor:
    c = x.new_tensor([-6.089, -17.164, -34.054, -5.914, -24.721, -14.986, -24.100, -10.708, -26.662, -22.179])
    return (x.exp() * (c + x - x.exp().sum().log())).sum()


def _circles(x: Tensor) -> Tensor:
    a, b = x.unbind(-1)
    return torch.stack([1 - a - b, 1 - a**2 - b**2, 9 - 9 * a**2 - b**2, b - a**2, a - b**2], -1)


PROGRAMS = {
    "23, a refusal by the step limit": Program(
        lambda x: x.square().sum(), [3.0, 1.0], None, _circles, ([-50.0] * 2, [50.0] * 2), 2.0, 150
    ),
    "81, the first step rises": Program(
        lambda x: x.prod().exp() - 0.5 * (x[0] ** 3 + x[1] ** 3 + 1) ** 2,
        [-2.0, 2.0, 2.0, -1.0, -1.0],
        lambda x: torch.stack([x.square().sum() - 10, x[1] * x[2] - 5 * x[3] * x[4], x[0] ** 3 + x[1] ** 3 + 1]),
        None,
        ([-2.3, -2.3, -3.2, -3.2, -3.2], [2.3, 2.3, 3.2, 3.2, 3.2]),
        0.0539498478,
        200,
    ),
    "104, an inequality that is let down": Program(
        _reactor, [6.0, 3.0, 0.4, 0.2, 6.0, 6.0, 1.0, 0.5], None, _reactions, ([0.1] * 8, [10.0] * 8), 3.951163440, 300
    ),
    "106, a heat exchanger": Program(
        lambda x: x[:3].sum(), HEAT_START, None, heat_exchanger, HEAT_BOUNDS, 7049.248021, 300
    ),
    "109, electric power": Program(
        lambda x: 3 * x[0] + 1e-6 * x[0] ** 3 + 2 * x[1] + 0.522074e-6 * x[1] ** 3,
        [0.0] * 9,
        _power,
        _limits,
        (
            [0.0, 0.0, -0.55, -0.55, 196.0, 196.0, 196.0, -400.0, -400.0],
            [torch.inf, torch.inf, 0.55, 0.55, 252.0, 252.0, 252.0, 800.0, 800.0],
        ),
        5326.851330,
        400,
    ),
    "111, a chemical equilibrium": Program(
        _free_energy, [-2.3] * 10, _equilibrium, None, ([-100.0] * 10, [100.0] * 10), -47.7610908594, 600
    ),
    "114, a refinery": Program(
        lambda x: 5.04 * x[0] + 0.035 * x[1] + 10 * x[2] + 3.36 * x[4] - 0.063 * x[3] * x[6],
        [1745.0, 12000.0, 110.0, 3048.0, 1974.0, 89.2, 92.8, 8.0, 3.6, 145.0],
        _balances,
        _refinery,
        (
            [1e-5] * 5 + [85.0, 90.0, 3.0, 1.2, 145.0],
            [2000.0, 16000.0, 120.0, 5000.0, 2000.0, 93.0, 95.0, 12.0, 4.0, 162.0],
        ),
        -1768.806964,
        300,
    ),
    "320, no gradient of the constraint at the start": Program(
        lambda x: (x[0] - 20) ** 2 + (x[1] + 20) ** 2,
        [0.0, 0.0],
        lambda x: (x[0] ** 2 / 100 + x[1] ** 2 / 4 - 1).unsqueeze(0),
        None,
        None,
        485.531463,
        200,
    ),
}


def _solve(p: Program, weigh: Callable[[Tensor], Tensor] = lambda c: c, **options: object) -> ik.Solution:
    constraints = [] if p.equalities is None else [ik.Equality(lambda x: weigh(p.equalities(x)))]  # type: ignore[misc]
    if p.inequalities is not None:
        constraints += [ik.Inequality(lambda x: weigh(p.inequalities(x)))]  # type: ignore[misc]
    bounds = None if p.bounds is None else tuple(torch.tensor(b, dtype=F64) for b in p.bounds)
    start = torch.tensor(p.start, dtype=F64)
    return ik.argmin(p.objective, start, constraints=constraints, bounds=bounds, **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", ["auto", "sqp"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_point_is_found(name: str, solver: str) -> None:
    p = PROGRAMS[name]
    s = _solve(p, solver=solver)
    assert bool(s.converged), (name, s)
    assert float(p.objective(s.value)) == pytest.approx(p.best, rel=1e-6), (name, s)
    assert s.evaluations <= p.most, (name, s.evaluations)


def test_steps_that_have_come_near_are_gone_on_with() -> None:
    """The defaults leave sequential quadratic programming where it is slow, not where its last steps are the fast ones."""
    for name in ("81, the first step rises", "320, no gradient of the constraint at the start"):
        s = _solve(PROGRAMS[name])
        assert s.solver == "auto (sqp)", (name, s)


@pytest.mark.parametrize("name", ["23, a refusal by the step limit", "106, a heat exchanger", "114, a refinery"])
def test_units_of_constraints_do_not_matter(name: str) -> None:
    p = PROGRAMS[name]

    def weigh(c: Tensor) -> Tensor:
        return c * 10.0 ** (torch.arange(len(c), dtype=F64) % 3 * 2 - 2)

    plain, weighed = _solve(p, rtol=1e-9), _solve(p, weigh, rtol=1e-9)
    assert torch.allclose(plain.value, weighed.value, rtol=1e-5, atol=1e-6), name
    assert weighed.evaluations <= 2 * p.most, (name, weighed.evaluations)


def test_one_sample_does_not_change_another() -> None:
    """Heat exchangers of two starts at once come to the points of each alone."""
    p = PROGRAMS["106, a heat exchanger"]
    starts = torch.tensor(p.start, dtype=F64) * torch.tensor([[1.0], [0.9]], dtype=F64)
    bounds = tuple(torch.tensor(b, dtype=F64) for b in p.bounds)  # type: ignore[union-attr]
    options = {"constraints": [ik.Inequality(heat_exchanger)], "bounds": bounds}
    both = ik.argmin(lambda x: x[..., :3].sum(-1), starts, batch_dims=1, **options)  # type: ignore[arg-type]
    for start, value in zip(starts, both.value, strict=True):
        alone = ik.argmin(lambda x: x[:3].sum(), start, **options).value  # type: ignore[arg-type]
        assert torch.allclose(alone, value, rtol=1e-6), start
