"""Constrained minimisation: a point where the first-order conditions hold is a minimum, or left, or refused; and what has
no minimum within its constraints is unbounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver import finding
from implicitkit.solver.constrained.second_order import _Look, falls_forever_within
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict import curvature as second_order_look

F64 = torch.float64


def waves(z: Tensor) -> Tensor:
    """Maximal at 0."""
    return torch.cos(z).sum(-1)


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# what keeps z back, and the value of the best minimum that can be reached from 0
WITHIN: dict[str, tuple[dict[str, Any], float]] = {
    "bounds": ({"bounds": (-1.0, 1.0)}, 1.0806),
    "a bound on one side": ({"bounds": (None, 5.0)}, -2.0),
    "at a bound without force": ({"bounds": (tensor(0.0, -5.0), tensor(9.0, 5.0))}, -1.911),
    "box": ({"project": ik.project.box(-1.0, 1.0)}, 1.0806),
    "ball": ({"project": ik.project.l2_ball(1.0)}, 1.5205),
    "inequality": ({"constraints": ik.Inequality(lambda z: z.square().sum(-1) - 2)}, 1.0806),
    "at an inequality without force": ({"constraints": ik.Inequality(lambda z: -z)}, -2.0),
    "equality": ({"constraints": ik.Equality(lambda z: z.sum(-1))}, -2.0),
    "curved equality": ({"constraints": ik.Equality(lambda z: z[..., 1] - z[..., 0] ** 2)}, -0.4),
    "equality and bounds": ({"constraints": ik.Equality(lambda z: z.sum(-1)), "bounds": (-2.0, 2.0)}, -0.8323),
    "equality and ball": ({"constraints": ik.Equality(lambda z: z.sum(-1)), "project": ik.project.l2_ball(1.0)}, 1.5205),
}  # fmt: skip
SOLVERS = (
    "auto",
    "sqp",
    "filter_interior_point",
    "augmented_lagrangian",
    "proximal_gradient",
    "newton",
    "scipy.slsqp",
    "scipy.root.hybr",
)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", WITHIN)
def test_a_maximum_within_constraints_is_left_or_refused(name: str, solver: str) -> None:
    """From z = 0, where the gradient vanishes."""
    options, best = WITHIN[name]
    try:
        s = ik.argmin(waves, torch.zeros(2, dtype=F64), solver=solver, on_failure="ignore", **options)
    except ik.CapabilityError:
        return
    assert waves(s.value).item() <= best + 1e-3 or not bool(s.converged), s
    if solver == "auto":
        assert bool(s.converged), s


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_only_the_samples_at_a_maximum_are_moved(dtype: torch.dtype) -> None:
    start = torch.tensor([[0.0, 0.0], [3.0, 3.0], [0.0, 3.0]], dtype=dtype)
    s = ik.argmin(waves, start, bounds=(-4.0, 4.0), batch_dims=1, solver="newton", on_failure="ignore")
    assert [ik.Status(int(i)) for i in s.status[:2]] == [ik.Status.SADDLE, ik.Status.CONVERGED]
    assert not bool(s.converged[2]) or waves(s.value[2]).item() == pytest.approx(-2)
    s = ik.argmin(waves, start, bounds=(-4.0, 4.0), batch_dims=1)
    torch.testing.assert_close(waves(s.value), torch.full((3,), -2.0, dtype=dtype))


@pytest.mark.parametrize("start", range(3))
def test_eigenvectors_on_the_sphere(start: int) -> None:
    """``min z'Az`` on ``|z| = 1``: every eigenvector is stationary, by a curvature that is the multiplier's; the least is
    the minimum."""
    A = torch.diag(tensor(1.0, 2.0, 3.0))
    sphere = ik.Equality(lambda z: z.square().sum() - 1)
    begin, f = torch.eye(3, dtype=F64)[start], lambda z: z @ A @ z
    least = ik.argmin(f, begin, constraints=sphere).value
    torch.testing.assert_close(least.abs(), tensor(1.0, 0.0, 0.0), rtol=0, atol=1e-6)
    stays = ik.argmin(f, begin, constraints=sphere, solver="newton", on_failure="ignore")
    assert bool(stays.converged) == (start == 0)


def test_a_maximum_on_a_curved_set() -> None:
    """``max z'Az`` in the unit ball: on the sphere, at an eigenvector; the ball's own curvature decides."""
    A = torch.diag(tensor(1.0, 2.0, 3.0))
    ball = ik.project.l2_ball(1.0)
    for start in range(3):
        s = ik.argmin(lambda z: -(z @ A @ z), torch.eye(3, dtype=F64)[start], project=ball)
        torch.testing.assert_close(s.value.abs(), tensor(0.0, 0.0, 1.0), rtol=0, atol=1e-5)


MINIMA: dict[str, tuple[Callable[[Tensor], Tensor], Tensor, dict[str, Any]]] = {
    "corner of a box": (lambda z: -(z * z).sum(), tensor(1.0, -1.0), {"bounds": (-1.0, 1.0)}),
    "vertex of the simplex": (lambda z: -(z * z).sum(), tensor(1.0, 0.0, 0.0), {"project": ik.project.simplex()}),
    "linear": (lambda z: z @ tensor(1.0, 2.0), tensor(-1.0, -1.0), {"bounds": (-1.0, 1.0)}),
    "kink of a term": (lambda z: -0.4 * (z * z).sum() + 0.5 * z.sum(), tensor(0.0, 0.0), {"prox": ik.prox.l1(1.0)}),
    "a constraint that holds z": (lambda z: z[1] - 0.4 * z[0] ** 2, tensor(0.0, 0.0),
                                  {"constraints": ik.Inequality(lambda z: z[0] ** 2 - z[1])}),
    "constraints that repeat": (lambda z: (z**2).sum(), tensor(0.5, 0.5), {
        "constraints": [ik.Equality(lambda z: z.sum() - 1), ik.Equality(lambda z: 2 * z.sum() - 2)]}),
    "semidefinite": (lambda z: (z - torch.diag(tensor(1.0, -2.0))).square().sum(), torch.diag(tensor(1.0, 0.0)),
                     {"project": ik.project.psd_cone()}),
}  # fmt: skip


@pytest.mark.parametrize("name", MINIMA)
def test_minima_of_objectives_that_are_not_convex_are_kept(name: str) -> None:
    f, minimum, options = MINIMA[name]
    s = ik.argmin(f, minimum, **options)
    torch.testing.assert_close(s.value, minimum, rtol=0, atol=1e-6)


def test_least_squares_within_bounds_leaves_a_maximum() -> None:
    """``(z_1 - 1, z_2^2 - 1)``: ``z_2 = 0`` is stationary."""
    f = lambda z: torch.stack([z[0] - 1, z[1] ** 2 - 1])  # noqa: E731
    s = ik.least_squares(f, torch.zeros(2, dtype=F64), bounds=(-2.0, 2.0))
    torch.testing.assert_close(s.value.abs(), tensor(1.0, 1.0))


def test_a_term_without_a_value_is_looked_at_by_its_curvature() -> None:
    """``cos(z) + 0.01 |z_1|`` over two unknowns, of which the first alone has a kink at 0."""
    prox = lambda z, t: torch.stack([z[0].sign() * (z[0].abs() - 0.01 * t).clamp_min(0), z[1]])  # noqa: E731
    s = ik.argmin(waves, torch.zeros(2, dtype=F64), prox=prox)
    assert s.value[0].item() == 0
    assert s.value[1].abs().item() == pytest.approx(torch.pi, rel=1e-6)
    refused = ik.argmin(waves, torch.zeros(2, dtype=F64), prox=prox, solver="scipy.root.hybr", on_failure="ignore")
    assert ik.Status(int(refused.status)) is ik.Status.SADDLE


@pytest.mark.parametrize("curved", [1e-4, 1e-6, 1e-8])
def test_a_term_that_is_hardly_curved_has_its_minimum_far_out(curved: float) -> None:
    c = tensor(1.5, -3.0).requires_grad_()
    found = ik.argmin(lambda z, c: (c * z).sum(), torch.ones(2, dtype=F64), (c,), prox=ik.prox.elastic_net(1.0, curved))
    torch.testing.assert_close(found.value, tensor(-0.5, 2.0) / curved)
    torch.testing.assert_close(torch.autograd.grad(found.value.sum(), c)[0], tensor(-1.0, -1.0) / curved)


ENDLESS: dict[str, dict[str, Any]] = {
    "bounds": {"bounds": (None, 5.0)},
    "halfspace": {"project": ik.project.halfspace(torch.ones(3, dtype=F64), 1.0)},
    "equality": {"constraints": ik.Equality(lambda z: z[0] - 1)},
    "inequality": {"constraints": ik.Inequality(lambda z: z - 1)},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_falls_for_ever_within_its_constraints_is_unbounded(name: str) -> None:
    with pytest.raises(ik.ConvergenceError, match=r"unbounded .*State what keeps z back"):
        ik.argmin(lambda z: z.sum(), torch.ones(3, dtype=F64), **ENDLESS[name])


def test_constraints_that_cannot_hold_are_not_unbounded() -> None:
    with pytest.raises(ik.ConvergenceError, match="perhaps no z meets all of them"):
        ik.argmin(
            lambda z: z.sum(), torch.ones(3, dtype=F64), constraints=ik.Equality(lambda z: z[0] ** 2 + 1), max_steps=40
        )


# --------------------------------------------------------------------------------------------- what is looked at, by itself
def _at(f: Any, z: Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Evaluations, Tensor]:
    """The evaluations of a solve that claims ``z``, and its point with multipliers."""
    seen: list[tuple[Evaluations, Tensor]] = []
    monkeypatch.setattr(finding, "downhill_within", lambda f, w, *_: seen.append((f, w)) or w)
    ik.argmin(f, z, on_failure="ignore", rtol=0.1, atol=1e3, **options)
    return seen[-1]


def test_far_inside_of_a_constraint_that_has_a_force_the_lagrangian_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At ``z_0 = 1``, the least with ``z_0 >= 1``: the Lagrangian is as low all along ``z_0``, the objective is not."""
    options = {"constraints": ik.Inequality(lambda z: 1 - z[0])}
    f, w = _at(lambda z: z[0] + z[1] ** 2, tensor(1.0, 0.0), monkeypatch, **options)
    look = _Look(f, torch.cat([w[:, :2], torch.ones(1, 1, dtype=F64)], 1))  # the multiplier there
    for z, holds in (((3.0, 0.0), False), ((1.001, 0.1), True), ((0.5, 0.0), False)):
        assert look.merit(tensor(*z).unsqueeze(0), tensor(0.1))[1].tolist() == [holds], z


def test_a_constraint_in_small_units_takes_its_direction_out(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"constraints": ik.Equality(lambda z: torch.stack([z[0] - 1, 1e-9 * (z[1] - 1)]))}
    look = _Look(*_at(lambda z: z.square().sum(), tensor(1.0, 1.0, 0.0), monkeypatch, **options))
    torch.testing.assert_close(look.tangent(tensor(1.0, 2.0, 3.0).unsqueeze(0)), tensor(0.0, 0.0, 3.0).unsqueeze(0))


def test_what_rounding_leaves_in_a_corner_is_no_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    normals = tensor(0.3, 0.7, -0.9, 0.1).reshape(2, 2)
    f, w = _at(lambda z: z.sum(), tensor(0.0, 0.0), monkeypatch, constraints=ik.Equality(lambda z: normals @ z))
    look = _Look(f, w)
    u = tensor(0.6, -0.8).unsqueeze(0)
    assert float(look.tangent(u).abs().max()) > 0, "nothing is left of it: no test"
    assert look.unit(u).tolist() == [[0.0, 0.0]]


def test_the_curvature_of_a_ball_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``-z'Az / 2`` at an eigenvector on the sphere: along the others ``a_k - a_i``, of which the ball gives ``a_k``."""
    a = tensor(1.0, 2.0, 3.0)
    for k in range(3):
        z = torch.eye(3, dtype=F64)[k]
        look = _Look(*_at(lambda z: -0.5 * (a * z * z).sum(), z, monkeypatch, project=ik.project.l2_ball(1.0)))
        for i in {0, 1, 2} - {k}:
            u = torch.eye(3, dtype=F64)[i : i + 1]
            q = (u * look.curvature(u)).sum() / look.tangent(u).square().sum()
            assert q.item() == pytest.approx((a[k] - a[i]).item(), abs=1e-4)


def test_unknowns_that_a_bound_holds_with_force_are_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    f = lambda z: waves(z) + 0.3 * z[0] + 1e-13 * z[1]  # noqa: E731
    bounds = (torch.zeros(4, dtype=F64), tensor(2.0, 2.0, 0.0, 1.0))
    look = _Look(*_at(f, tensor(0.0, 0.0, 0.0, 1.0), monkeypatch, bounds=bounds))
    assert look.free is not None
    assert look.free.tolist() == [[False, True, False, False]]  # force, rounding, no room, force


def test_the_slope_of_the_lagrangian_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    sphere = ik.Equality(lambda z: z.square().sum() - 1)
    s = ik.argmin(lambda z: (z - 2).square().sum(), tensor(0.6, 0.8), constraints=sphere)
    f, w = _at(lambda z: (z - 2).square().sum(), s.value, monkeypatch, constraints=sphere)
    w = torch.cat([s.value, torch.as_tensor(s.multipliers[0]).reshape(1)]).unsqueeze(0)
    assert float(_Look(f, w).slope.abs().max()) < 1e-8


def test_a_kink_that_is_only_just_active_is_open() -> None:
    """``cos(z) / 100 + z / 2 + |z| / 2`` falls to the left of 0 by its curvature alone, which is small."""
    f = lambda z: (0.01 * torch.cos(z) + 0.5 * z).sum()  # noqa: E731
    s = ik.argmin(f, torch.zeros(2, dtype=F64), prox=ik.prox.l1(0.5))
    torch.testing.assert_close(s.value, torch.full((2,), -torch.pi, dtype=F64), rtol=1e-6, atol=0)


def test_a_ray_begins_within_the_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    for equality, unbounded in ((lambda z: z[0] - 1, True), (lambda z: z[0] - 1 + 0 * z[1] + 2, False)):
        f, w = _at(lambda z: z.sum(), torch.ones(3, dtype=F64), monkeypatch, constraints=ik.Equality(equality))
        assert falls_forever_within(f, w, torch.tensor([True])).tolist() == [unbounded]


def _corner_of_curves(z: Tensor) -> Tensor:
    """Hock & Schittkowski (1981), no. 23; the third is steep, and far from active in the solution."""
    x, y = z
    return torch.stack([1 - x - y, 1 - x**2 - y**2, 9 - 9 * x**2 - y**2, y - x**2, x - y**2])


@pytest.mark.parametrize("steep", [1.0, 100.0])
@pytest.mark.parametrize("bounds", [None, (-50.0, 50.0)], ids=["free", "bounded"])
def test_in_a_corner_nothing_is_free(bounds: Any, steep: float) -> None:
    """As many constraints hold there as there are unknowns: what is left of a direction along all of them is rounding."""
    scale = tensor(1.0, 1.0, steep, 1.0, 1.0)
    solution = ik.argmin(
        lambda z: 0.5 * z.square().sum(),
        tensor(3.0, 1.0),
        constraints=ik.Inequality(lambda z: scale * _corner_of_curves(z)),
        bounds=bounds,
    )
    assert float((solution.value - 1).abs().max()) < 1e-7
    assert int(solution.steps) <= 15


HELD = {"nothing is free": [1.0, 2, 3, 1, 2], "one": [-1.0, 2, 3, 1, 2], "two": [-1.0, 2, -3, 1, 2]}


@pytest.mark.parametrize("how", ["bounds", "constraints"])
@pytest.mark.parametrize("name", HELD)
def test_what_is_held_is_no_flat_direction(name: str, how: str) -> None:
    """Unknowns that bounds or constraints hold have no curvature, and are not looked at: it took 19 to 67 evaluations."""
    H = torch.diag(tensor(4.0, 3.0, 5.0, 2.0, 3.0)) + 0.2
    within: Any = {"bounds": (0.0, None)} if how == "bounds" else {"constraints": ik.Inequality(lambda z: -z)}
    found = ik.argmin(lambda z: 0.5 * z @ H @ z + tensor(*HELD[name]) @ z, torch.ones(5, dtype=F64), **within)
    free = found.value > 1e-9
    assert found.evaluations <= 14 and int(free.sum()) == {"nothing": 0, "one": 1, "two": 2}[name.split()[0]]
    slope = H @ found.value + tensor(*HELD[name])
    assert float(slope[free].abs().sum()) < 1e-8 and bool((slope[~free] > 0).all())


@pytest.mark.parametrize("solver", ["auto", "sqp", "filter_interior_point"])
@pytest.mark.parametrize(
    ("needs", "least"), [((60.0, 50.0, 70.0, 85.0, 100.0), 664.82045), ((60.0, 70.0, 100.0, 50.0, 85.0), 751.07585)]
)
def test_multipliers_that_constraints_leave_open_are_no_way_to_infinity(
    needs: tuple[float, ...], least: float, solver: str
) -> None:
    """Hock & Schittkowski (1981), no. 118, and with its needs in another order: there more constraints meet in the solution
    than there are unknowns."""

    def objective(x: Tensor) -> Tensor:
        a, b, c = x.view(5, 3).unbind(1)
        return (2.3 * a + 1e-4 * a**2 + 1.7 * b + 1e-4 * b**2 + 2.2 * c + 1.5e-4 * c**2).sum()

    def held(x: Tensor) -> Tensor:
        y = x.view(5, 3)
        steps = y[1:] - y[:-1]
        needed = tensor(*needs) - y.sum(1)
        return torch.cat([needed, (steps - tensor(6.0, 7.0, 6.0)).flatten(), (-7 - steps).flatten()])

    low = torch.cat([tensor(8.0, 43.0, 3.0), torch.zeros(12, dtype=F64)])
    high = torch.cat([tensor(21.0, 57.0, 16.0), tensor(90.0, 120.0, 60.0).repeat(4)])
    start = torch.cat([tensor(20.0, 55.0, 15.0), tensor(20.0, 60.0, 20.0).repeat(4)])
    s = ik.argmin(objective, start, constraints=ik.Inequality(held), bounds=(low, high), solver=solver)
    assert abs(float(objective(s.value)) - least) < 1e-5
    assert s.evaluations < 500, f"{s.evaluations} evaluations"


# ---------------------------------------------------------------------------------------------------------------------
# Sequential quadratic programming where the curved model draws a step uphill to an inequality that holds already.
#: seed, unknowns, inequalities, size of the start -> evaluations that the method may take
CASES = {(14, 3, 3, 2.0): 110, (8, 4, 5, 2.0): 230}


def _program(seed: int, n: int, m: int, size: float) -> tuple[Any, Any, Tensor]:
    """An indefinite quadratic with a quartic, between indefinite quadrics."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)  # noqa: E731
    B, Q, c, C = draw(m, n), draw(n, n), draw(n), 0.3 * draw(m, n, n)
    objective = lambda z: c @ z + z @ (Q + Q.T) @ z / 2 + 0.1 * z.pow(4).sum()  # noqa: E731
    return objective, lambda z: B @ z + torch.einsum("i,kij,j->k", z, C + C.mT, z) - 1, size * draw(n)


@pytest.mark.parametrize("case", CASES)
def test_nonconvex(case: tuple[int, int, int, float]) -> None:
    objective, g, z0 = _program(*case)
    s = ik.argmin(objective, z0, constraints=ik.Inequality(g), bounds=(-1.5, 1.0), solver="sqp", on_failure="ignore")
    assert bool(s.converged) and s.evaluations <= CASES[case], (case, s.steps, s.evaluations)
    assert float(g(s.value).max()) <= 1e-9, case


#: A well on both sides of a saddle, and within: 7e-4, 5e-6 and 7e-8 away.
_WALLS = {"near": (1e4, 1e-2), "nearer": (1e8, 5e-3), "next to it": (1e8, 1e-6)}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", list(_WALLS))
def test_a_wall_close_behind_hides_no_saddle(name: str, within: bool) -> None:
    """A tenth, a hundredth and a thousandth away ``b z^4`` is more than ``c z^2``."""
    b, c = _WALLS[name]
    objective = lambda z: b * z[0] ** 4 - c * z[0] ** 2 + z[1] ** 2  # noqa: E731
    more: dict[str, Any] = {"constraints": [ik.Inequality(lambda z: z.sum() - 9)]} if within else {}
    found = ik.argmin(objective, torch.tensor([0.0, 1.0], dtype=F64), on_failure="ignore", **more)
    well = (c / (2 * b)) ** 0.5
    assert not bool(found.converged) or abs(abs(float(found.value[0])) - well) < 1e-2 * well


def test_a_wall_beside_one_sample_says_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wall is nearer than the difference reaches, derivatives tell the curvature, of that sample alone."""
    told: list[torch.Tensor] = []

    def lower(probe, z, value, which, direction, curvature=None):
        told.append(curvature)
        return z

    monkeypatch.setattr(second_order_look, "_lower", lower)
    wall = torch.tensor([1.0, 0.0], dtype=torch.float64)

    def objective(z: torch.Tensor, wall: torch.Tensor) -> torch.Tensor:
        saddle = z[:, 0] ** 2 + torch.cos(1.3 * z[:, 1] + 0.7) + 1.3 * math.sin(0.7) * z[:, 1]
        return saddle + 1e6 * wall * torch.relu(z.abs() - 1e-6).square().sum(1)

    def curvature(walls: torch.Tensor) -> torch.Tensor:
        told.clear()
        z0 = torch.zeros(len(walls), 2, dtype=torch.float64)
        ik.argmin(objective, z0, (walls,), batch_dims=1, in_dims=0, on_failure="ignore")
        return told[0][-1]

    assert float(curvature(wall)) == float(curvature(wall[1:]))
