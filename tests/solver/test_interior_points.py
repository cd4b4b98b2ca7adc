"""Nonlinear programs far from quadratic ones: the interior-point method with a filter, alone and behind the defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.constrained.filter import Filter, Standing
from implicitkit.solver.constrained.limits import Limits, held_by_equalities
from tests.tables.cops import PROGRAMS
from tests.tables.heat import HEAT_BOUNDS, HEAT_START, heat_exchanger

F64 = torch.float64
SOLVERS = ("auto", "filter_interior_point")
#: Evaluations that either may take.
MOST = 450


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_cops(name: str, solver: str) -> None:
    program = PROGRAMS[name]()
    s = ik.argmin(program.objective, program.z0, solver=solver, **program.options)
    assert bool(s.converged) and s.evaluations <= MOST, (name, solver, s.evaluations)
    assert float(program.objective(s.value)) == pytest.approx(program.best, rel=2e-8), (name, solver)
    assert program.violation(s.value) <= 1e-10, (name, solver)


#: Intervals, and the steps that interior points may take: where a shift stays a singular arc takes 148.
LONG: dict[str, tuple[int, int]] = {"mixing": (200, 90), "robot": (100, 36), "rocket": (100, 40), "steering": (100, 16)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LONG)
def test_steps_of_long_programs(name: str) -> None:
    intervals, most = LONG[name]
    program = PROGRAMS[name](intervals)
    s = ik.argmin(program.objective, program.z0, solver="filter_interior_point", on_failure="ignore", **program.options)
    assert bool(s.converged) and int(s.steps) <= most, (name, int(s.status), int(s.steps))
    assert program.violation(s.value) <= 1e-10, name


# ------------------------------------------------------------------------------------------------ badly scaled programs
_HEAT_TERMS = torch.tensor([1.0, 1, 1, 1e5, 4e5, 1e6], dtype=F64)  # what is added up in each row


def _crane(z: Tensor) -> Tensor:
    """Four numbers whose product is bounded and whose squares add up (Hock & Schittkowski 71)."""
    return 25 - z.prod(-1)


@pytest.mark.parametrize("solver", SOLVERS)
def test_unknowns_and_constraints_of_different_sizes(solver: str) -> None:
    z0 = torch.tensor(HEAT_START, dtype=F64)
    bounds = tuple(torch.tensor(b, dtype=F64) for b in HEAT_BOUNDS)
    s = ik.argmin(lambda z: z[:3].sum(), z0, constraints=ik.Inequality(heat_exchanger), bounds=bounds, solver=solver)
    assert bool(s.converged) and s.evaluations <= 400, s
    assert float(s.value[:3].sum()) == pytest.approx(7049.2480, abs=1e-3)  # as published
    assert float((heat_exchanger(s.value) / _HEAT_TERMS).max()) <= 1e-11


# --------------------------------------------------------------------------------------------------------- derivatives
def _of_product(t: Tensor, solver: str, z0: Tensor, **options: Any) -> Any:
    batched = {"batch_dims": 1} if z0.ndim == 2 else {}
    return ik.argmin(
        lambda z, t: t * z[..., 0] * z[..., 3] * z[..., :3].sum(-1) + z[..., 2],
        z0,
        (t,),
        constraints=[ik.Inequality(lambda z, t: _crane(z)), ik.Equality(lambda z, t: z.square().sum(-1) - 40 * t**0.1)],
        bounds=(torch.ones_like(z0), 5 * torch.ones_like(z0)),
        solver=solver,
        **batched,
        **options,
    )


def test_batches_agree_with_samples_and_differences_with_derivatives() -> None:
    t = torch.linspace(0.8, 1.3, 5, dtype=F64)
    z0 = torch.tensor([1.0, 5, 5, 1], dtype=F64)
    one = lambda t: _of_product(t, "filter_interior_point", z0).value  # noqa: E731
    alone = torch.stack([one(x) for x in t])
    together = _of_product(t, "filter_interior_point", z0.expand(5, 4).clone())
    torch.testing.assert_close(together.value, alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.func.vmap(one)(t), alone, rtol=1e-10, atol=1e-10)
    h = 1e-5
    central = torch.stack([(one(x + h) - one(x - h)) / (2 * h) for x in t])
    torch.testing.assert_close(torch.func.vmap(torch.func.jacrev(one))(t), central, rtol=1e-6, atol=1e-8)


def test_a_bad_sample_spoils_no_other() -> None:
    t = torch.tensor([1.0, math.nan, 1.1], dtype=F64)
    z0 = torch.tensor([1.0, 5, 5, 1], dtype=F64)
    s = _of_product(t, "filter_interior_point", z0.expand(3, 4).clone(), on_failure="ignore")
    assert s.converged.tolist() == [True, False, True]
    for i in (0, 2):
        torch.testing.assert_close(s.value[i], _of_product(t[i], "filter_interior_point", z0).value)


def test_single_precision() -> None:
    t, z0 = torch.tensor(1.0), torch.tensor([1.0, 5, 5, 1])
    s = _of_product(t, "filter_interior_point", z0)
    double = _of_product(t.double(), "filter_interior_point", z0.double())
    assert s.value.dtype == torch.float32
    torch.testing.assert_close(s.value.double(), double.value, rtol=5e-5, atol=0)


@pytest.mark.slow
def test_the_derivative_of_a_flight() -> None:
    """The highest flight by the drag: by the rule, and by differences of solutions."""
    program = PROGRAMS["rocket"]()

    def height(scale: Tensor) -> Tensor:
        equalities = lambda z, scale: program.equalities({**z, "v": z["v"] * scale})  # type: ignore[misc]  # noqa: E731
        s = ik.argmin(
            lambda z, scale: program.objective(z),
            program.z0,
            (scale,),
            constraints=[ik.Equality(equalities)],
            bounds=program.bounds,
        )
        return s.value["h"][-1]

    scale = torch.tensor(1.0, dtype=F64)
    slope = torch.func.grad(height)(scale)
    differences = (height(scale + 1e-5) - height(scale - 1e-5)) / 2e-5
    assert float(slope) == pytest.approx(float(differences), rel=1e-5, abs=1e-9)


# ------------------------------------------------------------------------------------------------------- its own ways
def _sizes(n: int) -> tuple[Callable[[Tensor], Tensor], Tensor, dict[str, Any]]:
    """``n`` unknowns with a sparse pattern: a chain of products that must stay above a floor."""
    target = torch.linspace(0.5, 1.5, n, dtype=F64)
    floor = ik.Inequality(lambda z: 0.6 - z[1:] * z[:-1])
    return (
        (lambda z: (z - target).square().sum() + 0.1 * (z[1:] - z[:-1]).pow(4).sum()),
        3 * target,
        {"constraints": floor},
    )


def test_sparse_and_dense_systems_give_one_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from implicitkit.solver.constrained import barrier_systems

    objective, z0, options = _sizes(60)
    sparse = ik.argmin(objective, z0, solver="filter_interior_point", **options)
    monkeypatch.setattr(barrier_systems, "_SPARSE", 1_000_000)
    dense = ik.argmin(objective, z0, solver="filter_interior_point", **options)
    assert int(sparse.steps) == int(dense.steps)
    torch.testing.assert_close(sparse.value, dense.value, rtol=1e-10, atol=1e-10)


def test_too_many_unknowns_without_a_pattern() -> None:
    W = torch.randn(2100, 2100, dtype=F64, generator=torch.Generator().manual_seed(0)) / 30
    with pytest.raises(ik.CapabilityError, match="filter_interior_point forms dense matrices"):
        ik.argmin(
            lambda z: torch.tanh(W @ z - 1).square().sum(),
            torch.zeros(2100, dtype=F64),
            constraints=ik.Inequality(lambda z: z.sum() - 1),
            solver="filter_interior_point",
        )


def test_a_bound_that_an_equality_meets() -> None:
    """Nothing lies strictly inside: the equality stands for the bound."""
    s = ik.argmin(
        lambda z: (z[0] + z[1] - 3) ** 2 + z[1] ** 4,
        torch.tensor([0.3, 0.4], dtype=F64),
        constraints=ik.Equality(lambda z: z[:1] - 1),
        bounds=(1.0, 4.0),
        solver="filter_interior_point",
    )
    assert bool(s.converged) and int(s.steps) <= 15
    torch.testing.assert_close(s.value, torch.tensor([1.0, 1.0], dtype=F64))


def test_restoration_leads_back() -> None:
    """From where linearised constraints lead out of the bounds (Wächter & Biegler 2000, example 1)."""
    s = ik.argmin(
        lambda z: z[0],
        torch.tensor([-2.0, 3.0, 1.0], dtype=F64),
        constraints=ik.Equality(lambda z: torch.stack([z[0] ** 2 - z[1] - 1, z[0] - z[2] - 0.5])),
        bounds=(torch.tensor([-math.inf, 0, 0], dtype=F64), torch.full((3,), math.inf, dtype=F64)),
        solver="filter_interior_point",
    )
    assert bool(s.converged)
    torch.testing.assert_close(s.value, torch.tensor([1.0, 0.0, 0.5], dtype=F64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("solver", ["filter_interior_point"])
def test_what_has_no_solution_is_refused_soon(solver: str) -> None:
    s = ik.argmin(
        lambda z: z.square().sum(),
        torch.ones(3, dtype=F64),
        constraints=[ik.Equality(lambda z: z.sum() - 1), ik.Inequality(lambda z: 3 - z.sum())],
        solver=solver,
        on_failure="ignore",
    )
    assert not bool(s.converged) and s.evaluations <= 300, s


@pytest.mark.parametrize(
    ("theta", "phi", "good", "falls"),
    [
        (1e-9, 0.5, True, True),  # the objective falls by half of what its slope says
        (1e-9, 0.99999, False, False),  # ... by hardly anything
        (1e-7, 0.5, True, True),  # whatever the violation does, near to none
        (1e-9, math.nan, False, False),
    ],
)
def test_where_hardly_anything_is_violated_the_objective_must_fall(
    theta: float, phi: float, good: bool, falls: bool
) -> None:
    column = lambda x: torch.tensor([x], dtype=F64)  # noqa: E731
    at = Standing(column(1e-8), column(1.0), column(-1.0))
    accepted, falling = Filter.empty(column(1.0)).accepts(at, column(theta), column(phi), column(1.0))
    assert (bool(accepted), bool(falling)) == (good, falls)


@pytest.mark.parametrize(
    ("theta", "phi", "good"),
    [(0.5, 2.0, True), (1.5, 0.5, True), (1.0, 1.0, False), (1.5, 2.0, False), (2e4, 0.0, False)],
)
def test_where_much_is_violated_either_must_fall(theta: float, phi: float, good: bool) -> None:
    column = lambda x: torch.tensor([x], dtype=F64)  # noqa: E731
    at = Standing(column(1.0), column(1.0), column(-1.0))
    empty = Filter.empty(column(1.0))
    assert bool(empty.accepts(at, column(theta), column(phi), column(1.0))[0]) == good
    known = empty.with_pair(torch.tensor([True]), at)  # from there on neither may be worse in both
    assert bool(known.allows(column(theta), column(phi))) == good
    assert bool(known.cleared(torch.tensor([True])).allows(column(1.5), column(2.0)))


# ---------------------------------------------------------------------------------------------------------------------
# Bounds of interior-point methods: a little wider where equalities hold unknowns on them.
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


def test_a_step_that_moves_nothing_is_the_last() -> None:
    """On a ball of radius 1000 a unit in the last place of the constraint is more than its slack: the same step was taken
    until the limit of 300."""
    ball = ik.Inequality(lambda z: z.square().sum() - 1e6)
    s = ik.argmin(lambda z: z.sum(), torch.zeros(3, dtype=F64), constraints=[ball], solver="filter_interior_point")
    torch.testing.assert_close(s.value, torch.full((3,), -1e3 / 3**0.5, dtype=F64), rtol=1e-9, atol=0)
    assert int(s.steps) <= 60
