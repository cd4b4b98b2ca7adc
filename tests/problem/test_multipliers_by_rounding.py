"""Multipliers that balance a gradient by rounding only are told from large ones that are right: cusps, and constraints in
small units or of small unknowns beside large ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.problem.qualification import balances_by_rounding

F32, F64 = torch.float32, torch.float64

# the constraint, the point, the slope of the objective: multipliers are those that balance it best, and is it a cusp?
_ROWS: dict[str, tuple[Callable[[Tensor], Tensor], list[float], list[float], bool]] = {
    "a cube at zero": (lambda z: z[0] ** 3, [1e-9, 5.0], [1, 0], True),
    "a square at zero": (lambda z: z[0] ** 2, [1e-8, 5.0], [1, 0], True),
    "a fourth power at zero": (lambda z: z[0] ** 4, [-1e-5, 5.0], [1, 0], True),
    "a square of a difference": (lambda z: (z[0] - z[1]) ** 2, [1.0, 1.0 + 1e-12], [1, -1], True),
    "an expanded square": (lambda z: z[0] ** 2 - 2 * z[0] * z[1] + z[1] ** 2, [1.0, 1.0 + 1e-12], [1, -1], True),
    "a cube at one": (lambda z: (1 - z[0]) ** 3, [1 + 1e-9, 0.0], [1, 0], True),
    "small units": (lambda z: 1e-12 * (z.sum() - 1), [0.4, 0.6], [3, 3], False),
    "a circle in small units": (lambda z: 1e-14 * (z.square().sum() - 1), [0.6, 0.8], [3, 4], False),
    "a large objective": (lambda z: z.square().sum() - 1, [0.6, 0.8], [3e12, 4e12], False),
    "a small circle": (lambda z: z.square().sum() - 1e-12, [6e-7, 8e-7], [3, 4], False),
    "a small circle beside a large unknown": (
        lambda z: z[:2].square().sum() - 1e-8,
        [6e-5, 8e-5, 1e6],
        [3, 4, 0],
        False,
    ),
    "one of small unknowns in small units": (
        lambda z: 1e-6 * (z[:2].square().sum() - 1e-8),
        [6e-5, 8e-5, 1e9],
        [3, 4, 0],
        False,
    ),
}


@pytest.mark.parametrize("name", list(_ROWS))
def test_cusps_are_told_from_large_multipliers(name: str) -> None:
    constraint, point, slope, cusp = _ROWS[name]
    z, g = torch.tensor(point, dtype=F64), torch.tensor(slope, dtype=F64)
    J = torch.func.grad(constraint)(z)
    lam = -(g @ J) / (J @ J)

    def kernel(w: Tensor) -> Tensor:
        rows = w[:, : len(z)]
        return torch.stack([rows @ g, torch.func.vmap(constraint)(rows)], 1)

    w = torch.cat([z, lam.reshape(1)]).repeat(2, 1)
    found = balances_by_rounding(kernel, w, len(z), torch.tensor([True, False]))
    assert found.tolist() == [cusp, False], (name, float(lam))


@pytest.mark.parametrize("solver", ["auto", "sqp", "filter_interior_point"])
@pytest.mark.parametrize(("radius", "far", "dtype"), [(1e-4, 1e6, F64), (1e-2, 100.0, F32)])
def test_small_circles_beside_large_unknowns_are_met(
    solver: str, radius: float, far: float, dtype: torch.dtype
) -> None:
    end = torch.tensor([1.0, 1.0, far], dtype=dtype)
    circle = ik.Equality(lambda z: z[:2].square().sum() - radius**2)
    start = torch.tensor([10 * radius, 20 * radius, far], dtype=dtype)
    found = ik.argmin(lambda z: (z - end).square().sum(), start, constraints=[circle], solver=solver)
    close = 1e-8 if dtype == F64 else 1e-3
    torch.testing.assert_close(
        found.value[:2] / radius, torch.full((2,), 0.5**0.5, dtype=dtype), rtol=close, atol=close
    )
