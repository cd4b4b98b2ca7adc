"""Bounds of interior-point methods: a little wider where equalities hold unknowns on them."""

from __future__ import annotations

import pytest
import torch

import implicitkit as ik
from implicitkit.solver.constrained.limits import Limits, held_by_equalities
from tests.tables.cops import PROGRAMS

F64 = torch.float64
R = torch.finfo(F64).eps ** 0.5

#: lower, upper, and how much wider each becomes.
WIDER: dict[str, tuple[float, float, float, float]] = {
    "of size one": (0.0, 1.0, R, R),
    "large": (100.0, 1e6, 100 * R, 1e6 * R),
    "near each other": (0.0, 1e-6, 1e-10, 1e-10),
    "below only": (-3.0, torch.inf, 3 * R, 0.0),
    "none": (-torch.inf, torch.inf, 0.0, 0.0),
    "fixed": (2.0, 2.0, 0.0, 0.0),
}


def _limits(lower: float, upper: float) -> Limits:
    return Limits(*(torch.tensor([[x]], dtype=F64, device="cpu") for x in (lower, upper)))


@pytest.mark.parametrize("name", WIDER)
def test_how_much_wider(name: str) -> None:
    lower, upper, low, high = WIDER[name]
    wide = _limits(lower, upper).wider(_limits(-torch.inf, torch.inf))
    assert float(wide.lower) == pytest.approx(lower - low, rel=1e-15, abs=low * 1e-8), name
    assert float(wide.upper) == pytest.approx(upper + high, rel=1e-15, abs=high * 1e-8), name


def test_only_bounds_that_are_held_are_wider() -> None:
    limits = Limits(torch.zeros(2, 1, dtype=F64, device="cpu"), torch.ones(2, 1, dtype=F64, device="cpu"))
    same = limits.wider(limits)
    assert torch.equal(same.lower, limits.lower) and torch.equal(same.upper, limits.upper)
    wide = limits.wider(Limits(limits.lower - torch.inf, limits.upper))
    assert wide.lower.flatten().tolist() == [-R, -R] and torch.equal(wide.upper, limits.upper)


def test_bounds_that_equalities_hold() -> None:
    zero, z = torch.zeros(1, 3, dtype=F64, device="cpu"), torch.full((1, 3), 0.5, dtype=F64, device="cpu")
    limits = Limits(zero, zero + 1)
    constraints = torch.tensor([[0.5, -1.0, 0.5]], dtype=F64, device="cpu")  # z0 = 0, 2 z1 = 2, z2 <= 0
    steep, alone = torch.tensor([[1.0, 2.0, 1.0]], dtype=F64, device="cpu"), torch.tensor([[0, 1, 2]], device="cpu")
    sides = torch.tensor([False, False, True], device="cpu")
    held = held_by_equalities(z, constraints, sides, limits, steep, alone)
    assert held.below.tolist() == [[False, True, True]]
    assert held.above.tolist() == [[True, False, True]]


def test_a_held_unknown_ends_on_its_bound() -> None:
    """Entropies, of which an equality puts one on its bound; the others' slopes are infinite on theirs."""
    cost = torch.linspace(0, 6, 12, dtype=F64, device="cpu")
    held = ik.Equality(lambda z: torch.stack([z.sum() - 1, z[3] - 0.25]))
    low = torch.where(torch.arange(12, device="cpu") == 3, 0.25, 0.0).to(F64)
    seen: list[float] = []
    s = ik.argmin(
        lambda z: (torch.special.xlogy(z, z) + cost * z).sum(),
        torch.full((12,), 1 / 12, dtype=F64, device="cpu"),
        constraints=held,
        bounds=(low, None),
        solver="filter_interior_point",
        callback=lambda _, z, norm: seen.append(float(z.flatten()[3])),
    )
    rest = torch.arange(12, device="cpu") != 3
    assert bool(s.converged) and float(s.value[3]) == 0.25 and min(seen[1:]) >= 0.25
    assert torch.allclose(s.value[rest], 0.75 * torch.softmax(-cost[rest], 0), rtol=0, atol=1e-9)


#: Intervals of the rocket, and steps that interior points may take: one and a half times what IPOPT takes.
ROCKETS = {100: 33, 400: 39}


@pytest.mark.parametrize("intervals", ROCKETS)
def test_starts_with_hardly_any_inside(intervals: int) -> None:
    """The rocket stands on its bounds where it begins, and grids leave it no room there."""
    program = PROGRAMS["rocket"](intervals)
    s = ik.argmin(program.objective, program.z0, solver="filter_interior_point", on_failure="ignore", **program.options)
    assert bool(s.converged) and int(s.steps) <= ROCKETS[intervals], (intervals, int(s.status), int(s.steps))
    assert program.violation(s.value) <= 1e-10
    lower, upper = program.bounds
    assert all(bool((s.value[k] >= lower[k]).all() and (s.value[k] <= upper[k]).all()) for k in s.value)
