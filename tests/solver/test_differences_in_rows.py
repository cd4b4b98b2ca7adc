"""Equations that are differences of neighbours: along every second direction each of them sees its terms cancel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.verdict.backward_error import row_scales

F64 = torch.float64


class Chain(NamedTuple):
    residual: Callable[[Tensor, Tensor], Tensor]
    z0: Tensor
    theta: Tensor
    exact: Tensor | None = None


def beam(n: int) -> Chain:
    """``y'''' + 50 sinh y = load``, clamped, as four equations of first order by the trapezoidal rule."""

    def residual(y: Tensor, load: Tensor) -> Tensor:
        slopes = torch.cat([y[:, 1:], load - 50 * torch.sinh(y[:, :1])], 1)
        inner = (y[1:] - y[:-1]) * n - 0.5 * (slopes[1:] + slopes[:-1])
        return torch.cat([y[0, :2], inner.reshape(-1), y[-1, :2]]).view(n + 1, 4)

    return Chain(residual, torch.zeros(n + 1, 4, dtype=F64), torch.full((n + 1, 1), 100.0, dtype=F64))


def pendulum(n: int) -> Chain:
    """``x'' = -r sin x`` between two angles, by the midpoint rule."""

    def residual(y: Tensor, r: Tensor) -> Tensor:
        middle = 0.5 * (y[1:] + y[:-1])
        slopes = torch.stack([middle[:, 1], -r * torch.sin(middle[:, 0])], 1)
        inner = (y[1:] - y[:-1]) * n - slopes
        return torch.cat([y[:1, 0] - 2, inner.reshape(-1), y[-1:, 0] - 1]).view(n + 1, 2)

    return Chain(residual, torch.ones(n + 1, 2, dtype=F64), torch.tensor(2.0, dtype=F64))


def decay(n: int) -> Chain:
    """``y' = -r y``, ``y(0) = 1000``: ``y_k = 1000 ((1 - r h / 2) / (1 + r h / 2))^k``."""

    def residual(y: Tensor, r: Tensor) -> Tensor:
        return torch.cat([y[:1] - 1e3, (y[1:] - y[:-1]) * n + 0.5 * r * (y[1:] + y[:-1])])

    half = 0.05 / n
    exact = 1e3 * ((1 - half) / (1 + half)) ** torch.arange(n + 1, dtype=F64)
    return Chain(residual, torch.full((n + 1,), 1e3, dtype=F64), torch.tensor(0.1, dtype=F64), exact)


def slope(n: int) -> Chain:
    """``y' = r``, ``y(0) = 1e6``: next to nothing beside what cancels."""

    def residual(y: Tensor, r: Tensor) -> Tensor:
        return torch.cat([y[:1] - 1e6, (y[1:] - y[:-1]) * n - r])

    exact = 1e6 + 1e-3 * torch.arange(n + 1, dtype=F64) / n
    return Chain(residual, torch.full((n + 1,), 1e6, dtype=F64), torch.tensor(1e-3, dtype=F64), exact)


CHAINS = {"beam": beam, "pendulum": pendulum, "decay": decay, "slope": slope}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [50, 100, 200, 1000])
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_few_steps_are_enough(name: str, dtype: torch.dtype, n: int) -> None:
    residual, z0, theta, exact = CHAINS[name](n)
    found = ik.root(residual, z0.to(dtype), (theta.to(dtype),))
    assert int(found.steps) <= 9 and int(found.evaluations) <= 150, found
    exact = ik.root(residual, z0, (theta,)).value if exact is None else exact
    assert float((found.value - exact).abs().max()) <= 30 * n * torch.finfo(dtype).eps * float(exact.abs().max())
    rounding = 4 * torch.finfo(F64).eps * n * float(exact.abs().max())
    assert float(residual(exact, theta).abs().max()) <= rounding  # of the reference, which may be ours


class Counted:
    """A residual, and how often it has been asked for."""

    def __init__(self, residual: Callable[[Tensor], Tensor]) -> None:
        self.of, self.count, self.eps = residual, 0, torch.finfo(F64).eps

    def residual(self, z: Tensor) -> Tensor:
        self.count += 1
        return self.of(z)


def scale_of(chain: Chain, z: Tensor) -> tuple[Tensor, int]:
    f = Counted(lambda z: chain.residual(z[0], chain.theta)[None])
    return row_scales(f, z[None], torch.ones(1, dtype=torch.bool), 1e-12, 0.0, careful=False)[0], f.count


def test_what_cancels_is_seen_in_every_row() -> None:
    n = 4000
    chain = decay(n)
    assert chain.exact is not None
    scale, count = scale_of(chain, chain.exact)
    assert float(scale[1:].min()) >= 900 * n  # of 2000 n at most, and 100 where the terms cancel
    assert count <= 4 + 2 * 12


@pytest.mark.parametrize("n", range(3, 9))
def test_of_few_unknowns_no_difference_is_missed(n: int) -> None:
    """Of any two that are all but equal, and of any three, ``z_i - 2 z_j + z_k``; the other equations hold."""
    z = 1 + 1e-9 * 2.0 ** torch.arange(n, dtype=F64)[None]
    for i, j, k in itertools.permutations(range(n), 3):
        for row in (torch.tensor([1.0, -1.0, 0.0]), torch.tensor([1.0, -2.0, 1.0])):
            weights = torch.zeros(n, 1, dtype=F64).index_put((torch.tensor([i, j, k]),), row.double()[:, None])
            f = Counted(lambda y, weights=weights: torch.cat([y @ weights, 0 * y[:, 1:]], 1))
            scale = row_scales(f, z, torch.ones(1, dtype=torch.bool), 1e-6, 0.0, careful=False)
            assert float(scale[0, 0]) >= 0.05 and f.count <= 5, (i, j, k)


def test_where_most_rows_are_refused_no_more_is_asked() -> None:
    chain = decay(4000)
    assert chain.exact is not None
    assert scale_of(chain, chain.exact + torch.cos(7.0 * torch.arange(4001)))[1] == 4  # F, and three directions


@pytest.mark.parametrize(
    ("times", "careful", "count"),
    [
        ([5.0], False, 4),  # F, and three directions: a step more costs less
        ([5.0], True, 1 + 3 * (3 + 2 * 12)),  # there is none
        ([1.3], False, 1 + 3 + 2 * 12),  # the next direction may show a half more
        ([1e3], False, 1 + 3 + 2 * 12),  # its terms may have cancelled
        ([5.0, 1e3], False, 1 + 5),  # of two, one would have been seen by now
        (100 * [1.3], False, 1 + 4),  # and half of a hundred
        (100 * [1.3], True, 1 + 3 * 8),
        ([0.9], False, 2),
    ],
)
def test_where_a_step_more_is_taken_no_more_is_asked(times: list[float], careful: bool, count: int) -> None:
    """Of 4000 equations ``F_i = 1e-12 t_i``, where ``1e-12`` is what they may be, ``t_i`` other than zero for a few."""
    z = torch.ones(1, 4000, dtype=F64)
    target = 1 - 1e-12 * torch.nn.functional.pad(torch.tensor(times, dtype=F64), (0, 4000 - len(times)))
    f = Counted(lambda z: z - target)
    row_scales(f, z, torch.ones(1, dtype=torch.bool), 1e-12, 0.0, careful=careful)
    assert f.count == count


def test_a_step_of_the_size_of_rounding_is_the_last_but_two() -> None:
    """Of few unknowns, whose factors are not asked what rounding leaves."""
    chain = slope(50)
    found = ik.root(chain.residual, chain.z0, (chain.theta,), solver="newton")
    assert int(found.steps) <= 4, found


@pytest.mark.parametrize("unit", [1.0, 1e-13])
def test_small_equations_below_rounding_are_not_given_up(unit: float) -> None:
    """Newton's steps go on while an unknown changes, though ``|F|`` is the rounding of another equation, 1e-10."""
    units = torch.tensor([1.0, unit], dtype=F64)

    def residual(z: Tensor) -> Tensor:
        x = z / units
        return torch.stack([1e6 * (x[0] ** 2 - 0.2), 1e-19 * (torch.exp(x[1]) - torch.e)])

    start = torch.tensor([0.2**0.5 + 1e-6, 8.0], dtype=F64)
    found = ik.root(residual, start * units, solver="newton", rtol=1e-10)
    torch.testing.assert_close(found.value / units, torch.tensor([0.2**0.5, 1.0], dtype=F64), rtol=1e-6, atol=0)
