"""Least squares within bounds evaluates its residuals about once at each point, whoever asks for what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.fits import Fits

D = torch.float64
T = torch.linspace(0, 4, 40, dtype=D)
NOISE = torch.randn(80, dtype=D, generator=torch.Generator().manual_seed(0))
A = torch.randn(80, 30, dtype=D, generator=torch.Generator().manual_seed(1))
DECAY = 2.5 * torch.exp(-1.3 * T) + 0.5 + 0.02 * NOISE[:40]
BUMP = 3 * torch.exp(-((T - 2.4) ** 2)) + 0.05 * NOISE[:40]


def decay(z: Tensor) -> Tensor:
    return z[0] * torch.exp(-z[1] * T) + z[2] - DECAY


def bump(z: Tensor) -> Tensor:
    return z[0] * torch.exp(-((T - z[1]) ** 2) / z[2] ** 2) + z[3] - BUMP


def valley(z: Tensor) -> Tensor:
    return torch.stack([10 * (z[1] - z[0] ** 2), 1 - z[0]])


# residuals, start, bounds, loss
FITS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], tuple[float, float], str]] = {
    "a bound holds": (decay, [1.0, 1.0, 0.0], (0.0, 1.0), "linear"),
    "no bound holds": (decay, [1.0, 1.0, 0.0], (0.0, 10.0), "linear"),
    "four unknowns": (bump, [1.0, 2.0, 1.0, 0.1], (0.0, 4.0), "linear"),
    "a robust loss": (decay, [1.0, 1.0, 0.0], (0.0, 10.0), "soft_l1"),
    "a bent valley": (valley, [-1.2, 1.0], (-2.0, 0.5), "linear"),
    "a linear fit": (lambda z: A @ z - NOISE, [0.0] * 30, (0.0, 0.1), "linear"),
}


@pytest.mark.parametrize("name", FITS)
def test_residuals_are_evaluated_once_at_a_point(name: str) -> None:
    residuals, start, bounds, loss = FITS[name]
    points: set[tuple[float, ...]] = set()
    calls = 0

    def counted(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        points.add(tuple(torch.func.debug_unwrap(z.detach()).reshape(-1).tolist()))
        return residuals(z)

    solution = ik.least_squares(counted, torch.tensor(start, dtype=D), bounds=bounds, loss=loss)
    assert calls <= 1.5 * len(points), (calls, len(points))
    assert solution.evaluations <= calls
    assert solution.evaluations >= calls - 3  # those that look at the function before the solve


def test_two_points_are_remembered_by_what_they_are() -> None:
    calls: list[Tensor] = []

    def residuals(z: Tensor) -> Tensor:
        calls.append(z)
        return torch.cat([z.square(), 3 * z], 1)

    fits = Fits(residuals)
    first, second = torch.tensor([[1.0, 2.0]], dtype=D), torch.tensor([[-1.0, 0.5]], dtype=D)
    slope = lambda z: 2 * z**3 + 9 * z  # noqa: E731
    assert torch.equal(fits.at(first).slope, slope(first)) and torch.equal(fits.at(second).slope, slope(second))
    assert fits.at(first.clone()) is fits.at(first) and fits.at(first).slope is fits.at(first.clone()).slope
    assert len(calls) == 2
    vector, leaf = fits.at(first).graph  # which was let go
    assert len(calls) == 3 and torch.equal(vector, fits.at(first).residuals) and torch.equal(leaf, first)
    fits.at(second + 1)
    assert torch.equal(fits.at(first).value, 0.5 * residuals(first).square().sum(1)) and len(calls) == 6


def test_residuals_that_hide_z_are_refused() -> None:
    with pytest.raises(RuntimeError, match="autograd sees no z"):
        Fits(lambda z: z.detach() - 1).at(torch.zeros(1, 2, dtype=D)).slope  # noqa: B018
