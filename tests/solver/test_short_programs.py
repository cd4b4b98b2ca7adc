"""What one step of a program takes: evaluations, programs, systems; each case names what it would take otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import system
from implicitkit.foundation import autodiff, clamping, graph
from implicitkit.linear.conditions import sparse_saddle
from implicitkit.linear.conditions.active_factors import ActiveFactors, ActiveSystem, DenseActiveFactors
from implicitkit.linear.conditions.part_saddle import PartSaddle
from implicitkit.linear.conditions.sparse_saddle import Layout, SparseSaddle
from implicitkit.linear.factors.arrowhead import ArrowheadMatrix
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.factors.direct import refined
from implicitkit.problem.argmin import Bounded
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.rule import determinacy
from implicitkit.solver.constrained import step_program
from implicitkit.solver.qp import sparse as qp
from implicitkit.solver.verdict import judge

F64 = torch.float64


def mixture(n: int, sums: int) -> tuple[Any, Any, Tensor]:
    """A dense program with a minimum at many bounds: objective, constraint and linear term."""
    g = torch.Generator().manual_seed(0)
    M, A = torch.randn(n, n, generator=g, dtype=F64), torch.randn(sums, n, generator=g, dtype=F64)
    P, b = M @ M.T / n + 0.1 * torch.eye(n, dtype=F64), A @ torch.randn(n, generator=g, dtype=F64).abs()
    return lambda z, q: 0.5 * z @ (P @ z) + q @ z, lambda z, q: A @ z - b, torch.randn(n, generator=g, dtype=F64)


def portfolio(n: int, k: int) -> tuple[Any, Any, Tensor]:
    """A factor model of risk under a budget, long only."""
    g = torch.Generator().manual_seed(0)
    F, D = torch.randn(n, k, generator=g, dtype=F64) / k**0.5, 0.1 + torch.rand(n, generator=g, dtype=F64)
    risk = lambda z, r: 0.5 * (D * z * z).sum() + 0.5 * (z @ F).square().sum() - r @ z  # noqa: E731
    return risk, lambda z, r: z.sum() - 1, 0.1 * torch.randn(n, generator=g, dtype=F64)


def solve(parts: tuple[Any, Any, Tensor], z0: Tensor) -> ik.Solution:
    objective, constraint, theta = parts
    return ik.argmin(objective, z0, (theta,), constraints=[ik.Equality(constraint)], bounds=(0.0, None))


def is_optimal(parts: tuple[Any, Any, Tensor], s: ik.Solution) -> bool:
    """Stationary within the bounds, and feasible."""
    objective, constraint, theta = parts
    z = s.value.detach().requires_grad_()
    y = s.multipliers[0].detach()
    (slope,) = torch.autograd.grad(objective(z, theta) + (y * constraint(z, theta)).sum(), z)
    z = z.detach()
    natural = z - (z - slope).clamp_min(0)
    return float(natural.abs().max()) < 1e-9 and float(constraint(z, theta).abs().max()) < 1e-9


def test_a_dense_program_takes_three_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, where the step has led and beside that; five: one for the Hessian, and one for the verdict."""
    asked: list[Any] = []
    monkeypatch.setattr(judge, "distant_factors_hold", lambda *given: asked.append(given))
    parts = mixture(160, 16)
    s = solve(parts, torch.zeros(160, dtype=F64))
    assert (s.evaluations, int(s.steps), asked) == (3, 1, []) and is_optimal(parts, s)


def test_a_portfolio_takes_two_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start and at the end, for the program of an arrowhead costs less than a third, where the first of its active
    sets has led; and four passes through graphs: for the unit of the objective, for the slopes at both ends, and one product
    to show that the matrices are those of the last time, which need not be scaled again.  Seven: the start once more for its
    second derivatives, those of the end, and a product for the budget.  Bounds that are numbers are not evaluated to be
    known, and what the function is asked once, here and for the derivative."""
    parts, z0 = portfolio(1024, 8), torch.full((1024,), 1 / 1024, dtype=F64)
    parts[2].requires_grad_()
    solve(parts, z0)  # finds the pattern
    twice: list[bool] = []  # of each pass, may it be differentiated?
    for name in ("_run", "_engine_run_backward"):
        inner = getattr(graph, name)
        monkeypatch.setattr(graph, name, lambda *a, inner=inner, **k: twice.append(a[3]) or inner(*a, **k))
    named, identity, clipped, clip = [], system.identity_of, [], Bounded.__call__
    monkeypatch.setattr(system, "identity_of", lambda function: named.append(1) or identity(function))
    monkeypatch.setattr(Bounded, "__call__", lambda *given: clipped.append(1) or clip(*given))
    monkeypatch.delattr(sparse_saddle, "equilibrated")
    monkeypatch.delattr(Bounded, "natural")  # the bounds themselves say what it is
    monkeypatch.setattr(ConstrainedMinimisation, "has_natural", True)
    s = solve(parts, z0)
    assert (s.evaluations, int(s.steps), twice) == (2, 1, [False, True, False, False]) and is_optimal(parts, s)
    s.value.square().sum().backward()
    assert (len(named), len(clipped)) == (1, 1)  # for two patterns, and when the function was lifted


def test_bounds_are_evaluated_to_be_known_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each side, and when the function is lifted; four: where the end is looked at, too."""
    clipped, clip, ends = [], Bounded.__call__, torch.tensor([[-1.0, -2.0], [0.5, 2.0]], dtype=F64)
    monkeypatch.setattr(Bounded, "__call__", lambda *given: clipped.append(1) or clip(*given))
    s = ik.argmin(lambda z: (z - 1).square().sum(), torch.zeros(2, dtype=F64), bounds=(ends[0], ends[1]), solver="sqp")
    torch.testing.assert_close(s.value, torch.tensor([0.5, 1.0], dtype=F64))
    assert len(clipped) == 3


def test_numbers_may_be_others_by_leaf() -> None:
    """Values, and derivatives by what they depend on, where a lower bound, an upper one, both or none is active."""
    z0 = {name: torch.zeros(2, dtype=F64) for name in "abc"}
    lower, upper = {"a": -1.0, "b": 0.5, "c": None}, {"a": 0.25, "b": 9, "c": None}
    x = torch.tensor([1.0, 0.125], dtype=F64, requires_grad=True)
    z = ik.argmin(lambda z, x: sum((t - x).square().sum() for t in z.values()), z0, (x,), bounds=(lower, upper)).value
    found = torch.cat([*z.values()])
    torch.testing.assert_close(found, torch.tensor([0.25, 0.125, 1.0, 0.5, 1.0, 0.125], dtype=F64))
    (g,) = torch.autograd.grad((found * torch.arange(1, 7)).sum(), x)
    torch.testing.assert_close(g, torch.tensor([3.0 + 5, 2.0 + 6], dtype=F64))


@pytest.mark.parametrize("what", ["objective", "constraint", "off the start"])
def test_matrices_of_the_last_time_are_not_taken_for_others(what: str) -> None:
    """Where the risk is another, where the prices of the budget are, and where the Hessian is the same at the start only."""
    n, k = 800, 5
    g = torch.Generator().manual_seed(0)
    F, one = torch.randn(n, k, generator=g, dtype=F64) / k**0.5, torch.ones(n, dtype=F64)
    z0 = torch.zeros(n, dtype=F64)
    found = []
    for number in range(2):
        price = one + 0.5 * number * (torch.arange(n) % 3 == 0) if what == "constraint" else one
        weight = 1.0 + number if what == "objective" else 1.0
        power = 1e3 * float(what == "off the start")

        def risk(z: Tensor, r: Tensor, weight: float = weight, power: float = power) -> Tensor:
            return 0.5 * weight * (z * z).sum() + 0.5 * (z @ F).square().sum() + power * (z**4).sum() - r @ z

        parts = risk, lambda z, r, price=price: price @ z - 1, 0.01 * torch.randn(n, generator=g, dtype=F64)
        s = solve(parts, z0)
        assert is_optimal(parts, s)
        found.append(s)
    assert found[1].evaluations <= found[0].evaluations
    if what == "off the start":
        assert int(found[1].steps) > 1
    again = solve(parts, z0)
    torch.testing.assert_close(again.value, s.value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", [-1, 0, 1])
def test_an_unknown_with_one_value_is_held_there(side: int) -> None:
    """Whatever set of bounds it comes from, and on whichever side of it."""
    K, none, half = sp.csc_matrix(np.eye(1)), np.zeros(0), np.full(1, 0.5)
    program = qp.SparseProgram(K, np.zeros(1), none, none > 0, half, half)
    for bounds in (-1, 0, 1):
        active, d = qp.Active(np.full(1, bounds), none > 0), half + 0.25 * side
        assert qp._following(program, active, (d, none), d, 0.0).bounds.tolist() == [1]


def test_what_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of what is added up at a point; of numbers, their order, without a tensor."""
    system = ActiveSystem(sp.csc_matrix([[2.0, -1.0], [-1.0, 1.0]]), None, np.ones(2, dtype=bool), np.ones(2))  # type: ignore[arg-type]
    factors, x = ActiveFactors([system]), torch.tensor([[1.0, -2.0]], dtype=F64)
    size = factors.size(x)
    assert factors.size(x) is size and size.tolist() == [[4.0, 3.0]]
    assert factors.size(x.add_(1)).tolist() == [[5.0, 3.0]]
    monkeypatch.delattr(clamping, "look")
    for lower, upper in ((0.0, None), (-math.inf, 3), (None, 0), (1, 1)):
        clamping.check_order("bounds", lower, upper)
    for lower, upper in ((1.0, 0.0), (math.nan, None), (math.inf, None), (None, -math.inf)):
        with pytest.raises(NameError, match="look"):
            clamping.check_order("bounds", lower, upper)


@pytest.mark.parametrize("digits", [None, 1e-3])
def test_what_meets_the_target_is_corrected_without_another_product(digits: float | None) -> None:
    """And not where a correction is no little one."""
    g = torch.Generator().manual_seed(0)
    M, b = torch.eye(6, dtype=F64) + 0.1 * torch.randn(6, 6, generator=g, dtype=F64), torch.randn(1, 6, 1, dtype=F64)
    asked, want = [], torch.linalg.solve(M, b[0])

    def by(inverse: Any) -> Any:
        asked.clear()
        ok, target = torch.ones(1, dtype=torch.bool), torch.full((1, 1), 1e-6, dtype=F64)
        rounding = lambda x: torch.zeros(1, 1, dtype=F64)  # noqa: E731
        return refined(inverse, lambda x: asked.append(1) or M @ x, b, target, rounding, ok, "", 4, digits)

    found = by(lambda r: (1 + 1e-9) * torch.linalg.solve(M, r))
    assert bool(found.converged.all()) and len(asked) == 1 and float(found.residual_norm) < 1e-7
    off = float((found.x.T - want).abs().max())
    assert off < 1e-14 if digits else 1e-12 < off < 1e-7
    found = by(lambda r: torch.linalg.solve(M, r) + (1e-9 if r is b else torch.inf))
    assert float((found.x.T - want).abs().max()) < 1e-8


def test_bounds_are_handed_over_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as ``2 n`` rows of a matrix; where their sets do not settle these are made all the same."""
    made: list[int] = []

    class Watched(step_program.Program):
        @property
        def box(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            made.append(1)
            return step_program.Program.box.func(self)  # type: ignore[attr-defined]

    monkeypatch.setattr("implicitkit.solver.constrained.sqp.Program", Watched)
    parts = mixture(160, 16)
    s = solve(parts, torch.zeros(160, dtype=F64))
    assert made == [] and is_optimal(parts, s)
    monkeypatch.setattr("implicitkit.solver.qp.bounds._SWEEPS", 1)
    other = solve(parts, torch.zeros(160, dtype=F64))
    assert made and is_optimal(parts, other)
    torch.testing.assert_close(other.value, s.value)


@pytest.mark.parametrize("unit", [1.0, 1e-6])
def test_a_linear_program_from_where_its_constraints_hold(monkeypatch: pytest.MonkeyPatch, unit: float) -> None:
    """One program, and no line search: in units of what rounding leaves of the constraints it had no solution."""
    asked: list[int] = []
    inner = step_program.interior_point
    monkeypatch.setattr(step_program, "interior_point", lambda *a, **k: asked.append(1) or inner(*a, **k))
    g = torch.Generator().manual_seed(0)
    c, A = torch.rand(60, generator=g, dtype=F64), torch.rand(20, 60, generator=g, dtype=F64)
    b = unit * A.sum(1)
    s = ik.argmin(
        lambda z, c: c @ z, unit * torch.ones(60, dtype=F64), (c,), bounds=(0.0, None),
        constraints=[ik.Equality(lambda z, c: A @ z - b)],
    )  # fmt: skip
    linprog = pytest.importorskip("scipy.optimize").linprog
    best = linprog(c.numpy(), A_eq=A.numpy(), b_eq=b.numpy() / unit)
    assert asked == [1] and int(s.steps) == 1
    torch.testing.assert_close(s.value, unit * torch.from_numpy(best.x), rtol=1e-7, atol=1e-9 * unit)


def test_conditions_before_a_step_that_has_led_to_bounds() -> None:
    """By the form that they have where it led: the change of those in between is what the matrix says, of those at their
    bounds what they have moved by."""
    K = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]], dtype=F64)
    factors = DenseActiveFactors(K, torch.tensor([[True, False]]), torch.ones(1, 2, dtype=F64))
    point, end = torch.tensor([[1.0, 1.0]], dtype=F64), torch.tensor([[0.25, 0.0]], dtype=F64)
    slope = lambda z: (K @ z.unsqueeze(2)).squeeze(2) - 0.5  # noqa: E731
    F = torch.stack([slope(end)[:, 0], end[:, 1]], 1)
    assert factors.before(point, end - point, F) is None
    factors.began = point, slope(point)
    before = factors.before(point, end - point, F)
    assert before is not None
    torch.testing.assert_close(F - before, factors.product(end - point))
    assert factors.before(point.clone(), end - point, F) is None


@pytest.mark.parametrize("held", [0.0, 0.7, 1.0])
def test_what_is_free_of_an_arrowhead(held: float) -> None:
    """Its factors solve as those of the whole with ones in the place of what is held."""
    rng = np.random.default_rng(0)
    n, m = 40, 3
    K = ArrowheadMatrix(rng.uniform(0.5, 2, n), rng.standard_normal((m, n)), np.zeros((m, m)))
    free = np.concatenate([rng.uniform(size=n) >= held, [True, False, True]])
    added = np.where(
        free, 0.1 * rng.uniform(size=n + m) * (np.arange(n + m) < n), np.where(np.arange(n + m) < n, 1, -1)
    )
    scale, rhs = np.ones(n + m), np.where(free, rng.standard_normal(n + m), 0.0)
    layout = Layout(sp.csc_matrix(np.ones((n + m, n + m))))
    whole = SparseSaddle(K.both_sides(free.astype(float)).shifted(added), n, scale, layout)
    part = PartSaddle(K, free, added[:n], scale, layout)
    assert part.negative == whole.negative == m and part.regular == whole.regular
    if held < 1:
        np.testing.assert_allclose(part.solve(rhs)[0], whole.solve(rhs)[0], atol=1e-12)
        np.testing.assert_allclose(part.once(rhs), whole.once(rhs), atol=1e-12)


def test_a_check_of_a_derivative_uses_factors_as_they_are() -> None:
    g = torch.Generator().manual_seed(0)
    M, b = torch.randn(1, 12, 12, generator=g, dtype=F64), torch.randn(3, 12, generator=g, dtype=F64)
    A = autodiff.linearise(lambda z: z @ M[0].T, torch.zeros(1, 12, dtype=F64))[1]
    A.exact = DenseBlocks(M)

    def never(*_: Any) -> Any:
        raise AssertionError

    found = determinacy._roughly(A, b, never)
    torch.testing.assert_close(found.x @ M[0].T, b)
    torch.testing.assert_close(determinacy._roughly(A.T, b, never).x @ M[0], b)
    assert found.converged.all()
    A.exact = DenseBlocks(0 * M)  # singular
    with pytest.raises(AssertionError):
        determinacy._roughly(A, b, never)


@pytest.mark.parametrize("one_sided", [False, True])
def test_a_start_that_rounding_puts_outside_costs_no_look_at_rounding(one_sided: bool) -> None:
    """A violation of one unit in the last place is rounding, as the rows say: eight evaluations asked before."""
    g = torch.Generator().manual_seed(3)
    A, x = torch.randn(3, 5, generator=g, dtype=F64), torch.randn(5, generator=g, dtype=F64)
    b = A @ x
    z0 = x * (1 + 2e-16)
    assert 0 < float((A @ z0 - b).max()) < 1e-15
    constraint = (ik.Inequality if one_sided else ik.Equality)(lambda z: A @ z - b)
    assert ik.argmin(lambda z: (z - 1).square().sum(), z0, constraints=[constraint]).evaluations <= 6
