"""Tests that notice mutants of methods: steps formed by hand, what is taken over, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend
from implicitkit.linear.auto import _nearby, _Progress
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.factors.lu import LU
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.root.newton import newton_direction

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
    f: Any = SimpleNamespace(best_norm=zero[0], tolerance=zero[0], best=zero, stuck=None, taken=1, residual=lambda z: z)
    impatient = Impatient(Still(), window=2, horizon=2.0)
    state = impatient.init(f, zero)
    for _ in range(5):
        _, state = impatient.step(f, zero, state)
    assert not bool(f.stuck.any())


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
