"""Quadratic programs within bounds: active sets that change many at a time, against the interior point."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import graph
from implicitkit.problem.qp_data import QPData
from implicitkit.solver.constrained import step_program
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.qp import builtin
from implicitkit.solver.qp.bounds import are_bounds, within_bounds
from implicitkit.solver.qp.interior_point import interior_point

F64 = torch.float64
N = 40


def definite(generator: torch.Generator, n: int = N) -> Tensor:
    F = torch.randn(n, 5, generator=generator, dtype=F64)
    return F @ F.T / 5 + torch.diag(0.1 + torch.rand(n, generator=generator, dtype=F64))


def program(name: str, seed: int = 0, n: int = N) -> QPData:
    """One program of each kind."""
    g = torch.Generator().manual_seed(seed)
    P, q, eye = definite(g, n), torch.randn(n, generator=g, dtype=F64), torch.eye(n, dtype=F64)
    one, none = torch.ones(1, n, dtype=F64), torch.zeros(0, n, dtype=F64)
    scale = 0.5 + torch.rand(n, generator=g, dtype=F64)
    zero, room = torch.zeros(n, dtype=F64), 0.1 + 0.2 * torch.rand(n, generator=g, dtype=F64)
    A, b = (none, none[:, 0]) if name in ("box", "nonnegative", "twice", "held", "some absent") else (one, one[:, 0])
    G, h = -eye, zero
    if name in ("box", "svm", "held"):
        G, h = torch.cat([torch.diag(scale), -torch.diag(scale)]), torch.cat([scale * room, scale * room])
    if name == "svm":  # the dual of a support vector machine
        A, b = torch.sign(q).unsqueeze(0), 0 * b
        h = torch.cat([h[:n], zero])
    if name == "held":  # some bounds are equal, with forces to both sides
        h = torch.cat([h[:n], torch.where(torch.arange(n) % 4 == 0, -h[:n], h[n:])])
    if name == "twice":  # the tighter bound counts
        G, h = torch.cat([-2 * eye, eye, -eye]), torch.cat([room, room, room])
    if name == "some absent":
        h = torch.where(torch.arange(n) % 3 == 0, torch.inf, h)
    if name == "two sums":
        A = torch.cat([one, torch.arange(n, dtype=F64).unsqueeze(0) / n])
        b = torch.tensor([1.0, 0.4], dtype=F64)
    return QPData(*(t.unsqueeze(0) for t in (P, q, A, b, G, h)))


KINDS = ("nonnegative", "portfolio", "box", "svm", "held", "twice", "some absent", "two sums")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", KINDS)
def test_the_solution_is_that_of_the_interior_point(name: str, seed: int) -> None:
    data = program(name, seed)
    found, known = within_bounds(data), interior_point(data, tol=1e-12, max_steps=60)
    assert found.status.tolist() == [0] and int(found.steps) <= 12
    torch.testing.assert_close(found.z, known.z, rtol=0, atol=1e-9)
    torch.testing.assert_close(found.y, known.y, rtol=0, atol=1e-8)
    P, q, A, b, G, h = (t[0] for t in data)
    z, y, lam = found.z[0], found.y[0], found.lam[0]
    assert float((P @ z + q + A.T @ y + G.T @ lam).abs().max()) < 1e-12
    assert bool((lam >= 0).all()) and bool((G @ z <= h + 1e-12).all())
    assert bool(((A @ z - b).abs() < 1e-12).all())
    assert float(torch.where(lam > 0, G @ z - h, 0).abs().max()) < 1e-12


def spoilt(how: str) -> QPData:
    """A program that these sets have no solution of."""
    data = program("portfolio")
    P, A, b = data.P, data.A, data.b
    if how == "not convex":
        return data._replace(P=P - 3 * torch.eye(N, dtype=F64))
    if how == "not strictly convex":
        return data._replace(P=torch.zeros_like(P))
    if how.startswith("no number"):
        part = how[-1]
        return data._replace(**{part: torch.where(getattr(data, part) != 0, torch.nan, getattr(data, part))})
    if how == "empty":
        return data._replace(b=-b)
    return data._replace(A=torch.zeros_like(A))


SPOILT = ("not convex", "not strictly convex", *("no number in " + part for part in "PqAbG"), "empty", "no equation")


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_not_found_is_left_to_others_and_spoils_nothing(how: str) -> None:
    both = QPData(*(torch.cat(pair) for pair in zip(spoilt(how), program("portfolio", 1), strict=True)))
    found = within_bounds(both)
    assert found.status[0] != 0 and found.status[1] == 0
    torch.testing.assert_close(found.z[1:], within_bounds(program("portfolio", 1)).z)


def test_which_rows_are_bounds() -> None:
    data = program("portfolio")
    assert are_bounds(data)
    pair, nothing = data.G.clone(), data.G.clone()
    pair[0, 0, 1], nothing[0, 0, 0] = 1.0, 0.0
    assert not are_bounds(data._replace(G=pair)) and not are_bounds(data._replace(G=nothing))
    assert not are_bounds(data._replace(G=data.G[:, :0], h=data.h[:, :0]))


def test_a_portfolio_takes_few_steps_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """DAQP added its 180 bounds one by one."""
    monkeypatch.setattr(builtin.external.DAQP, "find", lambda *_: pytest.fail("one by one"))
    P, q, A, b, G, h = (t[0] for t in program("portfolio", n=200))
    q = q.requires_grad_()
    s = ik.solve(ik.QuadraticProgram(P, q, A, b, G, h))
    weights = torch.arange(200, dtype=F64)
    (found,) = torch.autograd.grad((s.value * weights).sum(), q)
    (known,) = torch.autograd.grad(
        (ik.solve(ik.QuadraticProgram(P, q, A, b, G, h), solver="interior_point").value * weights).sum(), q
    )
    assert bool(s.converged) and int(s.steps) <= 12
    torch.testing.assert_close(found, known, rtol=1e-6, atol=1e-8)


def test_a_batch_with_a_program_that_has_no_solution() -> None:
    P, q, A, b, G, h = program("portfolio", n=160)
    b = torch.cat([b, -b])
    s: Any = ik.solve(ik.QuadraticProgram(P[0], q[0], A[0], b, G[0], h[0]), on_failure="ignore")
    assert s.status.tolist() == [0, int(ik.Status.INFEASIBLE)]


def test_the_tightest_of_many_bounds_counts_on_several_threads() -> None:
    """40,000 bounds of eight unknowns: threads that write in no order must not choose among them."""
    n, many = 8, 40_000
    g = torch.Generator().manual_seed(0)
    G, h = torch.eye(n, dtype=F64).repeat(many // n, 1), torch.rand(many, generator=g, dtype=F64)
    data = QPData(*(t.unsqueeze(0) for t in (torch.eye(n, dtype=F64), h.new_full((n,), -2.0), G[:0], h[:0], G, h)))
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        found = within_bounds(data)
    finally:
        torch.set_num_threads(before)
    tightest = h.view(-1, n).amin(0)
    torch.testing.assert_close(found.z[0], tightest)
    assert (
        found.lam[0].nonzero().flatten().sort().values.equal((h.view(-1, n).argmin(0) * n + torch.arange(n)).sort()[0])
    )


def test_a_bound_that_is_no_number_is_not_passed_over() -> None:
    """Beside another bound of the same unknown, which is one."""
    data = program("twice")
    data.h[0, 3] = torch.nan
    assert within_bounds(data).status.tolist() == [int(ik.Status.STALLED)]


def _minimised(n: int, constraints: int, **options: Any) -> tuple[Any, Tensor, QPData]:
    """The minimum of one of the programs as a function, its slope by ``q``, and the program; some rows more, if any."""
    data = program("portfolio", n=n)
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(constraints, n, generator=g, dtype=F64) / n
    A = torch.cat([data.A[0], rows])
    b = torch.cat([data.b[0], A[1:].mean(1)])
    P, q = data.P[0], data.q[0].clone().requires_grad_()
    s = ik.argmin(
        lambda z, q: 0.5 * z @ (P @ z) + q @ z, torch.zeros(n, dtype=F64), (q,),
        constraints=[ik.Equality(lambda z, q: A @ z - b)], bounds=(0.0, None), **options,
    )  # fmt: skip
    (slope,) = torch.autograd.grad((s.value * torch.arange(n, dtype=F64)).sum(), q)
    return s, slope, data._replace(A=A.unsqueeze(0), b=b.unsqueeze(0))


def test_steps_whose_programs_have_bounds_alone_change_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """From inside a step took ten systems with a thousand rows."""
    inside = step_program.interior_point
    monkeypatch.setattr(step_program, "interior_point", lambda *_, **__: pytest.fail("from inside"))
    s, slope, data = _minimised(160, 0)
    assert s.solver == "auto (sqp)" and int(s.steps) <= 2
    monkeypatch.setattr(step_program, "interior_point", inside)
    P, q, A, b, G, h = (t[0] for t in data)
    q.requires_grad_()
    known = ik.solve(ik.QuadraticProgram(P, q, A, b, G, h))
    torch.testing.assert_close(s.value, known.value, rtol=0, atol=1e-9)
    (expected,) = torch.autograd.grad((known.value * torch.arange(160, dtype=F64)).sum(), q)
    torch.testing.assert_close(slope, expected, rtol=1e-6, atol=1e-8)


def test_slopes_of_many_constraints_are_pulled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one: list[int] = []
    local, pulled = Model.local, graph.pulled

    def watched(self: Model, *points: Tensor) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(graph, "pulled", lambda *args, **more: one_by_one.append(1) or pulled(*args, **more))
            return local(self, *points)

    monkeypatch.setattr(Model, "local", watched)
    s, _, data = _minimised(40, 20, solver="sqp")
    assert bool(s.converged) and 0 < len(one_by_one) <= 2 * int(s.steps)
    torch.testing.assert_close(s.value, ik.solve(ik.QuadraticProgram(*(t[0] for t in data))).value, rtol=0, atol=1e-9)


def test_a_dense_step_evaluates_what_it_differentiates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes of objective and constraints, where a step begins and where the search ends, are from the graph of the residual
    there: a step evaluates a trial and the Hessian."""
    made, known = Evaluations.made, []

    def watched(self: Evaluations, w: Tensor) -> Any:
        known.append(made(self, w))
        return known[-1]

    monkeypatch.setattr(Evaluations, "made", watched)
    c = torch.linspace(1, 2, 20, dtype=F64, requires_grad=True)
    s = ik.argmin(
        lambda z, c: (c * torch.cosh(z - 0.3)).sum(), torch.zeros(20, dtype=F64), (c,),
        constraints=[ik.Equality(lambda z, c: z[:4] + z[4:8] - 1)],
    )  # fmt: skip
    assert s.solver == "auto (sqp)" and len(known) == int(s.steps) + 1 and None not in known
    x, y = s.value[:4].detach(), s.value[4:8].detach()
    torch.testing.assert_close(x + y, torch.ones(4, dtype=F64))
    torch.testing.assert_close(c[:4].detach() * torch.sinh(x - 0.3), c[4:8].detach() * torch.sinh(y - 0.3))
    torch.testing.assert_close(s.value[8:].detach(), torch.full((12,), 0.3, dtype=F64))


def test_a_step_within_bounds_alone_is_not_taken_from_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few unknowns; of several at once, all are."""
    asked: list[int] = []

    def watched(data: QPData, **options: Any) -> Any:
        asked.append(len(data.q))
        return interior_point(data, **options)

    monkeypatch.setattr(step_program, "interior_point", watched)

    def projected(c: Tensor) -> Tensor:
        s = ik.argmin(
            lambda z, c: 0.5 * (z - c).square().sum(1), torch.zeros_like(c), (c,), batch_dims=1, bounds=(0.0, None),
            constraints=[ik.Equality(lambda z, c: z.sum(1) - 1)], solver="sqp",
        )  # fmt: skip
        return s.value

    c = torch.randn(3, 20, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close(projected(c[:1]), ik.project.simplex()(c[:1]))
    assert asked == []
    torch.testing.assert_close(projected(c), ik.project.simplex()(c))
    assert asked == [3]


def test_a_solution_that_rounding_spoils_is_none() -> None:
    """Factors of a ``P`` of condition 1e10 leave a slope of 1e-8 where the objective's is one."""
    g = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(12, 12, generator=g, dtype=F64))[0]
    P, A = U @ torch.diag(torch.logspace(0, -10, 12, dtype=F64)) @ U.T, torch.randn(3, 12, generator=g, dtype=F64)
    eye, wide = torch.eye(12, dtype=F64), torch.full((24,), 1e9, dtype=F64)
    q, b = torch.randn(12, generator=g, dtype=F64), 1e-3 * torch.ones(3, dtype=F64)
    point = within_bounds(QPData(*(t.unsqueeze(0) for t in (P, q, A, b, torch.cat([eye, -eye]), wide))))
    assert int(point.status) == int(ik.Status.STALLED)


def test_a_ray_along_which_a_linear_program_falls_has_no_end() -> None:
    """The point was far out, and what pulled it on was measured by how far."""
    draw = torch.Generator().manual_seed(0)
    A, x = (torch.rand(*shape, generator=draw, dtype=torch.float64) for shape in ((4, 10), (10,)))
    A, one = A - A.mean(1, keepdim=True), torch.ones(10, dtype=torch.float64)
    data = QPData(*(t[None] for t in (torch.zeros_like(one.diag()), -one, A, A @ (x - one / 2), -one.diag(), one / 2)))
    assert int(interior_point(data, tol=1e-10).status) not in (int(ik.Status.CONVERGED), int(ik.Status.INACCURATE))

    rows = ik.Equality(lambda z: A @ (z - x))
    found = ik.argmin(lambda z: -z.sum(), one / 2, constraints=[rows], bounds=(0.0, torch.inf), on_failure="ignore")
    assert int(found.status) == int(ik.Status.UNBOUNDED) and found.evaluations < 200


def test_a_linear_program_without_numbers_leaves_the_others_alone() -> None:
    """LAPACK refused its eigenvalues, and with them the batch."""
    draw = torch.Generator().manual_seed(0)
    A, x, cost = (torch.rand(*shape, generator=draw, dtype=torch.float64) for shape in ((2, 6), (3, 6), (3, 6)))
    cost[1] = torch.nan

    def found(cost: Tensor, x: Tensor) -> ik.Solution:
        return ik.argmin(
            lambda z, cost, b: (cost * z).sum(-1),
            torch.full_like(x, 0.5),
            (cost, x @ A.T),
            batch_dims=1,
            bounds=(0.0, torch.inf),
            constraints=[ik.Equality(lambda z, cost, b: z @ A.T - b)],
            on_failure="ignore",
        )

    together = found(cost, x)
    assert together.status.tolist() == [int(ik.Status.CONVERGED), int(ik.Status.NONFINITE), int(ik.Status.CONVERGED)]
    assert torch.allclose(together.value[::2], found(cost[::2], x[::2]).value)
