"""Tests that notice mutants of methods: steps formed by hand, what is taken over, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend
from implicitkit.diagnostics.linear_stability import stability
from implicitkit.linear.auto import _nearby, _Progress
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.factors.lu import LU
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.root.newton import newton_direction
from implicitkit.solver.root.trust_region import _Dogleg

D = torch.float64


class Still(ik.Method):
    """Stays where it is."""

    name, solves = "still", "root"

    def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        return z, state


def _found(x: list[float], norm: list[float], converged: list[bool]) -> LinearSolution:
    numbers = torch.tensor(x, dtype=D).unsqueeze(1), torch.tensor(norm, dtype=D)
    return LinearSolution(*numbers, torch.ones(len(x), dtype=torch.int64), torch.tensor(converged))


def test_what_a_second_linear_solver_adds() -> None:
    """Solved before; solved now; nearer now; further off now."""
    progress = _Progress(torch.ones(1, 4, 1, dtype=D))
    progress.add(_found([1, 2, 3, 4], [1e-9, 1.0, 1.0, 1.0], [True, False, False, False]))
    progress.add(_found([10, 20, 30, 40], [1e-8, 1e-9, 0.5, 2.0], [True, True, False, False]))
    total = progress.answer()
    assert total.x.squeeze(1).tolist() == [1, 20, 30, 4]
    assert total.residual_norm.tolist() == [1e-9, 1e-9, 0.5, 1.0]
    assert total.converged.tolist() == [True, True, False, False]
    assert total.steps.tolist() == [1, 2, 2, 2]


def test_factors_of_a_matrix_nearby_leave_what_they_cannot_solve() -> None:
    """Solved by refinement; by products after it; by neither, and not called solved."""
    generator = torch.Generator().manual_seed(3)
    matrix = 4 * torch.eye(5, dtype=D) + torch.randn(3, 5, 5, dtype=D, generator=generator)
    change = torch.tensor([1e-12, 0.3, -30.0], dtype=D).view(3, 1, 1) * torch.randn(
        3, 5, 5, dtype=D, generator=generator
    )
    b = torch.randn(1, 3, 5, dtype=D, generator=generator)

    def times(m: Tensor) -> Any:
        return lambda v: (m @ v.unsqueeze(2)).squeeze(2)

    operator = extend.Operator(times(matrix), times(matrix.mT), lambda: matrix, batch=3, size=5, like=matrix[:, 0])
    operator.known = DenseBlocks(matrix + change)
    answer = _nearby(operator, b, rtol=1e-10, atol=0.0)
    left = torch.linalg.vector_norm(times(matrix)(answer.x) - b[0], dim=1) / torch.linalg.vector_norm(b[0], dim=1)
    assert answer.converged.tolist() == (left <= 1e-9).tolist()
    assert answer.converged.tolist() == [True, True, False]


def test_lu_refines_what_growth_of_the_pivots_has_lost() -> None:
    """Wilkinson (1965, p. 212): elimination doubles the last column at every row, and two digits are left of 16; that is
    not rounding, however many right-hand sides there are."""
    n = 44
    matrix = torch.eye(n, dtype=D) - torch.ones(n, n, dtype=D).tril(-1)
    matrix[:, -1] = 1
    b = torch.randn(12, 1, n, dtype=D, generator=torch.Generator().manual_seed(0))
    operator = extend.Operator(
        lambda v: v @ matrix.T, lambda v: v @ matrix, lambda: matrix.unsqueeze(0), batch=1, size=n, like=b[0, :, 0]
    )
    answer = LU().solve_many(operator, b, rtol=1e-10, atol=0.0, max_steps=None)
    left = torch.linalg.vector_norm(answer.x @ matrix.T - b[:, 0], dim=1) / torch.linalg.vector_norm(b[:, 0], dim=1)
    assert float(left.max()) < 1e-10
    assert bool(answer.converged.all())


@pytest.mark.parametrize(
    ("J", "F", "step"),
    [([[2.0]], [6.0], [-3.0]), ([[2.0, 1.0], [4.0, 2.0]], [5.0, 10.0], [-2.0, -1.0])],
    ids=["one unknown", "singular"],
)
def test_a_newton_step_by_hand(J: list[list[float]], F: list[float], step: list[float]) -> None:
    found = newton_direction(torch.tensor([J], dtype=D), torch.tensor([F], dtype=D))
    torch.testing.assert_close(found, torch.tensor([step], dtype=D))


def test_anderson_mixes_as_its_equation_when_the_memory_is_full() -> None:
    """The least-squares problem of Walker & Ni (2011, eq. 2.2) over the last three differences, six steps long."""
    generator = torch.Generator().manual_seed(1)
    W, c = 0.2 * torch.randn(7, 7, dtype=D, generator=generator), torch.randn(7, dtype=D, generator=generator)
    seen: list[Tensor] = []
    ik.fixed_point(
        lambda z: torch.tanh(W @ z) + c,
        torch.zeros(7, dtype=D),
        solver=ik.Anderson(memory=3, period=1, ridge=1e-15, safeguard=torch.inf),
        callback=lambda step, z, norm: seen.append(z.clone()) and None,
        max_steps=8,
        on_failure="ignore",
    )
    maps = [torch.tanh(W @ z) + c for z in seen]
    residuals = [w - z for w, z in zip(maps, seen, strict=True)]
    for k in range(4, 7):
        last = range(k - 3, k)
        dR = torch.stack([residuals[j + 1] - residuals[j] for j in last], 1)
        dW = torch.stack([maps[j + 1] - maps[j] for j in last], 1)
        gamma = torch.linalg.lstsq(dR, residuals[k].unsqueeze(1), driver="gelsd").solution
        torch.testing.assert_close(seen[k + 1], maps[k] - (dW @ gamma).squeeze(1), rtol=1e-7, atol=1e-9)


def test_a_sample_that_is_solved_is_not_given_up() -> None:
    zero = torch.zeros(1, 1, dtype=D)
    f: Any = SimpleNamespace(
        best_norm=zero[0], tolerance=zero[0], best=zero, stuck=None, taken=1, dear=0, residual=lambda z: z
    )
    impatient = Impatient(Still(), window=2, horizon=2.0)
    state = impatient.init(f, zero)
    for _ in range(5):
        _, state = impatient.step(f, zero, state)
    assert f.stuck is None


def test_df_sane_takes_no_step_that_raises_the_residual_without_bound() -> None:
    """``|F(z_1)|^2 <= |F(z_0)|^2 + |F(z_0)|`` (La Cruz, Martinez & Raydan 2006, eq. 13); the full step leads to 1e12."""
    seen: list[float] = []
    ik.root(
        lambda z: 1000 * z**3,
        torch.ones(1, dtype=D),
        solver="df_sane",
        callback=lambda step, z, norm: seen.append(float(norm)) and None,
        max_steps=1,
        on_failure="ignore",
    )
    assert len(seen) == 1
    assert seen[0] ** 2 <= 1000**2 + 1000


# ---------------------------------------------------------------------------------------------------------------------
# Signs and conditions of single steps that no other test told from their opposite.
F64 = torch.float64


class _Matrix:
    """A Jacobian of which ``_Dogleg`` takes four products."""

    def __init__(self, J: Tensor) -> None:
        self.J = J

    def direction(self, f: Any, F: Tensor) -> Tensor:
        return -torch.linalg.solve(self.J, F)

    def adjoint(self, F: Tensor) -> Tensor:
        return (self.J.mT @ F.unsqueeze(2)).squeeze(2)

    def times(self, p: Tensor) -> Tensor:
        return (self.J @ p.unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("seed", range(5))
def test_the_second_leg_of_a_dogleg_ends_on_the_sphere(seed: int) -> None:
    """``|p| = radius`` between Cauchy's point and Newton's (Powell 1970), and ``linear = F + J p / D``."""
    generator = torch.Generator().manual_seed(seed)
    J = torch.randn(4, 3, 3, dtype=F64, generator=generator) + 2 * torch.eye(3, dtype=F64)
    F, D = torch.randn(4, 3, dtype=F64, generator=generator), 0.5 + torch.rand(4, 3, dtype=F64, generator=generator)
    path: Any = _Dogleg(None, _Matrix(J), F, D)  # type: ignore[arg-type]
    turn = path.J_direction  # Cauchy's point: the least |F - t J d / D| along the steepest descent
    assert torch.allclose(path.cauchy_length, (F * turn).sum(1) / turn.square().sum(1), rtol=1e-10)
    for share in (0.1, 0.5, 0.9):
        radius = path.cauchy_length + share * (path.newton_length - path.cauchy_length)
        p, linear = path.step(radius)
        assert torch.allclose(torch.linalg.vector_norm(p, dim=1), radius, rtol=1e-10)
        assert torch.allclose(linear, F + _Matrix(J).times(p / D), rtol=1e-10, atol=1e-12)


def test_df_sane_goes_against_a_residual_that_falls() -> None:
    """``F = 3 - z`` and ``F = (1 - x, y - 2 + x^2)``: the first step is along ``+F``."""
    alone = ik.root(lambda z: 3 - z, torch.tensor(0.0, dtype=F64), solver="df_sane")
    assert int(alone.evaluations) <= 8
    start = torch.tensor([3.0, -1.0], dtype=F64)
    both = ik.root(lambda z: torch.stack([1 - z[0], z[1] - 2 + z[0] ** 2]), start, solver="df_sane")
    assert int(both.evaluations) <= 30


@pytest.mark.parametrize(
    ("f", "bracket", "most"),
    [(lambda z: (z - 1) ** 3, (-3.0, 2.7), 40), (lambda z: z**9 - 1e-3, (-1.0, 2.0), 14)],
    ids=["triple", "ninth power"],
)
def test_chandrupatla_halves_where_its_parabola_is_not_to_be_trusted(
    f: Callable[[Tensor], Tensor], bracket: tuple[float, float], most: int
) -> None:
    """Chandrupatla (1997): interpolated only if ``phi^2 < xi`` and ``(1 - phi)^2 < 1 - xi``."""
    found = ik.root(f, torch.tensor(0.0, dtype=F64), bracket=bracket, solver="chandrupatla")
    assert int(found.evaluations) <= most


def test_a_simplex_at_the_noise_of_its_values_ends_by_the_gradient() -> None:
    """``1e8 + |z - 1|^2`` is flat to 1e-4: the last simplex goes by ``|grad|``."""
    start = torch.tensor([3.0, -2.0], dtype=F64)
    found = ik.argmin(lambda z: 1e8 + (z - 1).square().sum(), start, solver="nelder_mead")
    assert torch.allclose(found.value, torch.ones(2, dtype=F64), atol=1e-8)


def test_a_minimum_of_many_unknowns_is_where_the_gradient_flow_comes_to_rest() -> None:
    """``dz/dt = -grad``: of ``sum_i i z_i^2 / 2`` over 520 unknowns the slowest rate is -1, by Arnoldi."""
    weights = torch.arange(1.0, 521.0, dtype=F64)
    report = stability(ik.Argmin(lambda z: 0.5 * (weights * z.square()).sum()), torch.zeros(520, dtype=F64), count=2)
    assert not report.exact
    assert float(report.growth_rate) == pytest.approx(-1.0, rel=1e-6)
    assert bool(report.stable)
