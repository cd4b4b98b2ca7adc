"""Programs that have no solution are told in a few evaluations, and their neighbours that have one are solved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64


def _rows(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, right-hand sides that a point meets, and a linear objective."""
    draw = torch.Generator().manual_seed(n)
    A, z, c = (torch.randn(*shape, generator=draw, dtype=F64) for shape in ((2 * n, n), (n,), (n,)))
    return A, A @ z + torch.rand(2 * n, generator=draw, dtype=F64), c


def _program(kind: str, lift: float) -> tuple[Any, list[Any], Tensor]:
    """Objective, constraints and start; ``lift``: how far these are from what is impossible, negative: beyond it."""
    away = lambda z: (z - 1).square().sum()  # noqa: E731
    if kind == "exp":
        return away, [ik.Inequality(lambda z: torch.exp(z) - lift)], torch.zeros(3, dtype=F64)
    if kind == "l1":
        return away, [ik.Inequality(lambda z: z.abs().sum() - lift)], torch.full((3,), 0.7, dtype=F64)
    if kind == "balls":
        centre = torch.tensor([2.0 - lift, 0, 0], dtype=F64)
        balls = [ik.Inequality(lambda z, c=c: (z - c).square().sum() - 1) for c in (0 * centre, centre)]
        return away, balls, torch.full((3,), 0.01, dtype=F64)
    A, b, c = _rows(20)
    if kind == "rows apart":
        A, b = torch.cat([A, -A[:3].sum(0, keepdim=True)]), torch.cat([b, lift - b[:3].sum(0, keepdim=True)])
        bounds = torch.eye(20, dtype=F64)
        A, b = torch.cat([A, bounds, -bounds]), torch.cat([b, torch.full((40,), 1e3, dtype=F64)])
    else:  # "equalities apart", within a box
        E = torch.cat([A[:5], A[:2].sum(0, keepdim=True)])
        e = torch.cat([b[:5], b[:2].sum(0, keepdim=True) + min(lift, 0.0)])
        A = torch.cat([torch.eye(20, dtype=F64), -torch.eye(20, dtype=F64)])
        box = ik.Inequality(lambda z: A @ z - 10)
        return lambda z: c @ z, [ik.Equality(lambda z: E @ z - e), box], torch.zeros(20, dtype=F64)
    return lambda z: c @ z, [ik.Inequality(lambda z: A @ z - b)], torch.zeros(20, dtype=F64)


_CASES = ("exp", "l1", "balls", "rows apart", "equalities apart")


@pytest.mark.parametrize("kind", _CASES)
def test_constraints_that_contradict_each_other_are_told_early(kind: str) -> None:
    """There is a proof by tangent planes, or a violation that vanishes at infinity only: 860 to 5,600 evaluations before."""
    lift = 0.0 if kind == "exp" else -1.0 if kind in ("l1", "rows apart") else -0.1
    objective, constraints, z0 = _program(kind, lift)
    found = ik.argmin(objective, z0, constraints=constraints, on_failure="ignore")
    assert int(found.status) == int(ik.Status.STALLED)
    assert found.evaluations < 300


@pytest.mark.parametrize("kind", _CASES)
def test_their_neighbours_are_solved(kind: str) -> None:
    objective, constraints, z0 = _program(kind, 1e-4)
    found = ik.argmin(objective, z0, constraints=constraints)
    assert bool(found.converged)
    for constraint in constraints:
        value = constraint.function(found.value)
        assert float((value.clamp_min(0) if constraint.one_sided else value.abs()).max()) < 1e-9


@pytest.mark.parametrize(("held", "status"), [(False, "UNBOUNDED"), (True, "CONVERGED")])
def test_a_linear_program_without_an_end_is_told_early(held: bool, status: str) -> None:
    """A direction along which all rows hold is followed by evaluations; with a bound far out there is none: 2,200 before."""
    A, b, c = _rows(20)
    bounds = (-1e4, 1e4) if held else None
    found = ik.argmin(
        lambda z: c @ z,
        torch.zeros(20, dtype=F64),
        constraints=[ik.Inequality(lambda z: A[:10] @ z - b[:10])],
        bounds=bounds,
        on_failure="ignore",
    )
    assert ik.Status(int(found.status)).name == status
    assert found.evaluations < 150


def test_a_region_that_is_long_is_no_ray() -> None:
    """``z_0 <= 1e7 z_1 <= 1e7``: the objective falls for ten million steps, and then no more."""
    A = torch.tensor([[1e-7, -1.0], [0.0, 1.0]], dtype=F64)
    b = torch.tensor([0.0, 1.0], dtype=F64)
    rows = [ik.Inequality(lambda z: A @ z - b)]
    found = ik.argmin(lambda z: -z[0], torch.zeros(2, dtype=F64), constraints=rows, on_failure="ignore", max_steps=1)
    assert int(found.status) != int(ik.Status.UNBOUNDED)


def test_the_point_that_violates_less_is_kept() -> None:
    """A ball and a half space apart: planes prove it from a point far out, which violates them by 127; the start by 2."""
    rows = [ik.Inequality(lambda z: z.square().sum() - 1), ik.Inequality(lambda z: 3 - z[0])]
    z0 = torch.tensor([1.0, 0.5], dtype=F64)
    found = ik.argmin(lambda z: z.square().sum(), z0, constraints=rows, on_failure="ignore")
    assert int(found.status) == int(ik.Status.STALLED)
    assert max(float(row.function(found.value).max()) for row in rows) <= 2.0
    assert found.evaluations < 400
