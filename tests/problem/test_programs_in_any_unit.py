"""Quadratic and linear programs whose objectives are tiny or huge: the same points, and never a wrong one that converged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.func import jacfwd, jacrev
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik
from implicitkit.solver.qp.base import Unit, judge
from implicitkit.solver.qp.polish import QPPoint

F64 = torch.float64
SCALES = [1e-14, 1e-12, 1e-10, 1e-8, 1e-5, 1e5, 1e8, 1e12]


@functools.cache
def parts(kind: str, seed: int = 0, n: int = 8) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """A box cut by some rows; objectives that are linear, bowls, or bowls in half of the unknowns."""
    draw = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=draw, dtype=F64)  # noqa: E731
    x, rows, eye = torch.rand(n, generator=draw, dtype=F64), random(6, n), torch.eye(n, dtype=F64)
    G = torch.cat([rows, eye, -eye])
    h = torch.cat(
        [rows @ x + torch.rand(6, generator=draw, dtype=F64), torch.ones(n, dtype=F64), torch.zeros(n, dtype=F64)]
    )
    diagonal = torch.rand(n, generator=draw, dtype=F64) + 0.1
    if kind == "half":
        diagonal[n // 2 :] = 0
    return None if kind == "linear" else torch.diag(diagonal), random(n), G, h


def program(kind: str, s: float | Tensor = 1.0, sparse: bool = False, seed: int = 0) -> ik.QuadraticProgram:
    P, q, G, h = parts(kind, seed)
    return ik.QuadraticProgram(None if P is None else s * P, s * q, None, None, sp.csr_matrix(G) if sparse else G, h)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("s", SCALES)
@pytest.mark.parametrize("kind", ["linear", "bowl", "half"])
def test_the_objective_may_be_measured_in_any_unit(kind: str, s: float) -> None:
    for seed in range(3):
        exact = ik.solve(program(kind, seed=seed), solver="interior_point")
        for solver, sparse in (("auto", False), ("interior_point", False), ("auto", True)):
            row = (kind, s, seed, solver, sparse)
            found = ik.solve(program(kind, s, sparse, seed), solver=solver)
            torch.testing.assert_close(found.value, exact.value, rtol=0, atol=1e-9, msg=str(row))
            lam = found.multipliers.inequality / s
            torch.testing.assert_close(lam, exact.multipliers.inequality, rtol=0, atol=1e-8, msg=str(row))


def test_each_program_of_a_batch_has_its_unit() -> None:
    P, q, G, h = parts("linear")
    s = torch.tensor([1e-10, 1.0, 1e8, torch.nan, 1e-4], dtype=F64).unsqueeze(1)
    found = ik.solve(ik.QuadraticProgram(P, s * q, None, None, G, h), on_failure="ignore")
    assert found.status.tolist() == [0, 0, 0, int(ik.Status.NONFINITE), 0]
    exact = ik.solve(program("linear")).value
    torch.testing.assert_close(found.value[[0, 1, 2, 4]], exact.expand(4, -1), rtol=0, atol=1e-9)


def test_single_precision_has_as_many_units() -> None:
    P, q, G, h = (None if t is None else t.float() for t in parts("bowl"))
    exact = ik.solve(program("bowl")).value.float()
    for s in (1e-10, 1e10):
        found = ik.solve(ik.QuadraticProgram(s * P, s * q, None, None, G, h)).value
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-6, msg=str(s))


@pytest.mark.parametrize("derivative", [jacrev, jacfwd])
def test_derivatives_do_not_depend_on_the_unit(derivative: Any) -> None:
    P, q, G, h = parts("bowl")
    value = lambda q, s: ik.solve(ik.QuadraticProgram(s * P, s * q, None, None, G, h)).value  # noqa: E731
    exact = derivative(value)(q, 1.0)
    for s in (1e-12, 1e-6, 1e10):
        torch.testing.assert_close(derivative(value)(q, s), exact, rtol=0, atol=1e-9, msg=str(s))


@pytest.mark.parametrize("s", [1e-12, 1e12])
def test_a_solver_that_says_it_has_converged_is_not_taken_on_its_word(s: float) -> None:
    """Beside slopes of 1e-12 any feasible point, and beside those of 1e12 any point near it, leaves next to nothing."""

    class Claims(ik.extend.QPSolver):
        name = "claims"

        def find(self, data: Any, tol: float, max_steps: int) -> QPPoint:
            z, n = data.q.new_zeros(1, 1), torch.zeros(1, dtype=torch.int64)
            z = z if s < 1 else 1 + torch.full_like(z, 1e-2)  # the minimum is 1, at the bound
            return QPPoint(z, data.q.new_zeros(1, 0), torch.zeros_like(data.h) if s < 1 else -data.q, n + 6, n)

    one = torch.ones(1, 1, dtype=F64)
    asked = ik.QuadraticProgram(None, -s * one[0], None, None, one, one[0])
    found = ik.solve(asked, solver=Claims(), on_failure="ignore")
    assert bool(found.converged) == (abs(float(found.value) - 1) < 1e-9), found


@pytest.mark.parametrize("s", SCALES)
def test_an_objective_without_end_has_none_in_any_unit(s: float) -> None:
    eye, one = torch.eye(5, dtype=F64), torch.ones(5, dtype=F64)
    flat = torch.diag(torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=F64))
    for sparse in (False, True):
        given = (lambda t: sp.csr_matrix(t.numpy())) if sparse else (lambda t: t)
        for asked in (
            ik.QuadraticProgram(None, s * one, None, None, given(eye), one),
            ik.QuadraticProgram(given(s * flat), s * one),
        ):
            found = ik.solve(asked, on_failure="ignore")
            assert int(found.status) == int(ik.Status.UNBOUNDED), (s, sparse, asked, found)


class Judged(ik.extend.QPSolver):
    """The verdict on a point that ``place(f, z0, options)`` finds in so many steps."""

    name = "judged"

    def __init__(self, place: Callable[[Any, Tensor, Any], Tensor], steps: int) -> None:
        self.place, self.steps = place, steps

    def find(self, data: Any, tol: float, max_steps: int) -> QPPoint:
        raise NotImplementedError

    def run(self, f: Any, z0: Tensor, options: Any) -> Any:
        w = self.place(f, z0, options)
        norm, start = options.size(f.residual(w)), options.size(f.residual(z0))
        none, unit = torch.zeros(1, dtype=torch.int64), Unit.of(f.problem, f.problem.data(f.system, f.theta))
        return judge(f, w, start, norm, none + self.steps, none, options, unit.at(z0))


@pytest.mark.parametrize("off", [0.0, 1e-9, 1e-6])
@pytest.mark.parametrize("n", [1000, 6000])
def test_less_than_rounding_leaves_is_not_asked_for(n: int, off: float) -> None:
    """A string under its weight: ``|P| |z|`` is ``n^2 / 2`` times as large as ``q``; a point that is wrong stays so."""
    P = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n)).tocsr()
    k = torch.arange(1, n + 1, dtype=F64)
    exact = -k * (n + 1 - k) / 2

    def moved(f: Any, z0: Tensor, options: Any) -> Tensor:
        found = ik.InteriorPoint().run(f, z0, options).z
        return found + off * found.abs() * torch.cos(7 * k)

    found = ik.solve(ik.QuadraticProgram(P, torch.ones(n, dtype=F64)), solver=Judged(moved, 1), on_failure="ignore")
    assert bool(found.converged) == (off == 0), (n, off, found)
    if not off:
        torch.testing.assert_close(found.value, exact, rtol=1e-8, atol=0)
        for s in (1e-8, 1e8):
            assert ik.solve(ik.QuadraticProgram(s * P, s * torch.ones(n, dtype=F64))).converged, (n, s)


@pytest.mark.parametrize("s", [1.0, 1e-8, 1e8])
def test_what_rounding_does_not_explain_is_asked_for(s: float) -> None:
    near = Judged(lambda f, z0, options: torch.full_like(z0, -1 + 20 * options.rtol), 0)
    asked = ik.QuadraticProgram(s * torch.eye(4, dtype=F64), s * torch.ones(4, dtype=F64))
    assert not ik.solve(asked, solver=near, on_failure="ignore", atol=0.0).converged


@pytest.mark.parametrize("solver", ["auto", "interior_point"])
def test_a_solution_far_beyond_its_rows(solver: str) -> None:
    """Rounding of ``g'z`` at 1e9 is larger than what was asked of a row of the size one; and ``P = 1`` beside ``q = 1e9``,
    of which the interior point said that the objective falls for ever, ends it."""
    for seed in range(3):
        v, g = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        v = 1e9 * torch.where(g @ v > 0, v, -v)
        found = ik.solve(ik.QuadraticProgram(torch.eye(4).to(v), -v, G=g[None], h=g[:1]), solver=solver).value
        torch.testing.assert_close(found, v - g * (g @ v - g[0]) / (g @ g), rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    "solver, u", [("interior_point", 1e-12), ("sparse", 1e-12), ("linear", 1e-30), ("linear", 1e12)]
)
def test_all_lengths_may_be_small_or_large(solver: str, u: float) -> None:
    """Projections onto ``{z >= 0, z'1 <= u}`` of points of that size, and its vertices: off by as much as they are."""
    eye, rows, linear = torch.eye(9, dtype=F64), torch.ones(1, 9, dtype=F64), solver == "linear"
    for seed in range(6):
        v = torch.randn(9, dtype=F64, generator=torch.Generator().manual_seed(seed))
        A, G, h = (rows, -eye, 0 * v) if linear else (None, torch.cat([rows, -eye]), u * torch.eye(10, dtype=F64)[0])
        P, G = (sp.csr_matrix(M) for M in (eye, G)) if solver == "sparse" else (None if linear else eye, G)
        program = ik.QuadraticProgram(P, v if linear else -u * v, A, u * rows[:, 0] if linear else None, G, h)
        found = ik.solve(program, solver="interior_point" if solver == "interior_point" else "auto").value
        inside = v.clamp_min(0)
        wanted = inside if inside.sum() <= 1 else ik.project.simplex()(v)
        torch.testing.assert_close(found / u, eye[v.argmin()] if linear else wanted, rtol=0, atol=1e-9)


def test_the_corner_of_a_large_box() -> None:
    q, eye = torch.tensor([0.3, 0.5, 0.7], dtype=F64), torch.eye(3, dtype=F64)
    box = ik.QuadraticProgram(None, q, G=torch.cat([eye, -eye]), h=torch.full((6,), 1e9, dtype=F64))
    torch.testing.assert_close(ik.solve(box).value, 0 * q - 1e9, rtol=1e-13, atol=0)


def test_units_of_ordinary_programs_take_few_operations() -> None:
    class Counted(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return function(*args, **(kwargs or {}))

    eye, one = torch.eye(4, dtype=F64)[None], torch.ones(1, 4, dtype=F64)
    program = SimpleNamespace(kappa=0)
    with Counted() as counted:
        unit = Unit.of(program, {"P": eye, "q": one, "A": one[None], "b": one[:, :1], "G": eye, "h": torch.inf * one})
    assert not unit.differs and counted.count <= 55
