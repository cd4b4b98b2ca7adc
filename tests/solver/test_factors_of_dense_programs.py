"""Dense programs leave the factors of their last step: to those who judge where it led, and to the derivative."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.optimize as so
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.conditions import kkt
from implicitkit.linear.conditions.active_factors import DenseActiveFactors
from implicitkit.solver.qp.interior_point import _Rows

F64 = torch.float64


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _formed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the linear solver of optimality conditions factors a matrix of its own."""
    seen: list[int] = []
    lu = kkt._lu

    def watched(M: Tensor, b: Tensor) -> Tensor:
        seen.append(len(M))
        return lu(M, b)

    monkeypatch.setattr(kkt, "_lu", watched)
    return seen


def _program(q: Tensor, n: int = 80, m: int = 10, size: float = 1.0, **options: Any) -> ik.Solution:
    """``min z'Pz / 2 + q'z``, ``Az = b``, ``Gz <= h``, ``z >= 0``, where ``z`` of some ``size`` are."""
    M, A, G = _random(n, n), _random(m, n, seed=1), _random(m, n, seed=2)
    P, point = M @ M.T / n + 0.1 * torch.eye(n, dtype=F64), size * _random(n, seed=3).abs()
    b, h = A @ point, G @ point - 0.1

    def objective(z: Tensor, q: Tensor) -> Tensor:
        return 0.5 * z @ (P @ z) + q @ z

    if options.pop("as_data", False):
        eye = torch.eye(n, dtype=F64)
        problem = ik.QuadraticProgram(P, q, A, b, torch.cat([G, -eye]), torch.cat([h, torch.zeros(n, dtype=F64)]))
        return ik.solve(problem)
    limits = [ik.Equality(lambda z, q: A @ z - b), ik.Inequality(lambda z, q: G @ z - h)]
    return ik.argmin(objective, torch.zeros(n, dtype=F64), (q,), constraints=limits, bounds=(0.0, None), **options)


def test_the_derivative_uses_the_factors_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    formed, q, w = _formed(monkeypatch), _random(80, seed=4).requires_grad_(), _random(80, seed=5)
    s, data = _program(q, solver="sqp"), _program(q, as_data=True)
    (mine,) = torch.autograd.grad(w @ s.value, q)
    assert formed == [] and bool(s.converged)
    active = s.value == 0
    assert 10 < int(active.sum()) < 70 and bool((s.multipliers[1] > 0).any() and (s.multipliers[1] == 0).any())
    (by_data,) = torch.autograd.grad(w @ data.value, q)
    torch.testing.assert_close(s.value, data.value, rtol=0, atol=1e-9)
    torch.testing.assert_close(mine, by_data, rtol=0, atol=1e-8)


@pytest.mark.parametrize("size", [1.0, 4.0])
def test_what_factors_tell_is_not_evaluated(size: float) -> None:
    """That it is a minimum (9 evaluations without), and of one far out that a zero is near."""
    s = _program(_random(80, seed=4), size=size, solver="sqp")
    assert bool(s.converged) and int(s.evaluations) <= 5


def test_a_weakly_active_bound_leaves_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """There one active set is as good as the other, and a derivative by one of them is not that of least norm."""
    formed, n = _formed(monkeypatch), 80
    c = _random(n, seed=6).index_fill(0, torch.tensor([3]), 0.0).requires_grad_()
    A = _random(2, n, seed=7)
    zero = torch.zeros(n, dtype=F64)
    s = ik.argmin(
        lambda z, c: 0.5 * (z - c).square().sum(), zero, (c,),
        constraints=[ik.Inequality(lambda z, c: A @ z - 1e3)], bounds=(0.0, None), solver="sqp",
    )  # fmt: skip
    (g,) = torch.autograd.grad(s.value.sum(), c)
    assert formed == [1]
    others = torch.arange(n) != 3
    torch.testing.assert_close(g[others], (c[others] > 0).to(F64))


@pytest.mark.parametrize("transposed", [False, True])
def test_factors_are_those_of_the_conditions(transposed: bool) -> None:
    n, m, batch = 6, 3, 4
    H, J = _random(batch, n, n), _random(batch, m, n, seed=1)
    K = torch.cat([torch.cat([H @ H.mT + torch.eye(n, dtype=F64), J.mT], 2), torch.nn.functional.pad(J, (0, m))], 1)
    free = torch.ones(batch, n + m, dtype=torch.bool)
    free[0, :2], free[1, -1], free[2] = False, False, False
    sign = torch.ones(batch, n + m, dtype=F64)
    sign[3, -1] = -1
    eye, P = torch.eye(n + m, dtype=F64), torch.diag_embed(free.to(F64))
    N = torch.diag_embed(sign) @ (P @ K + eye - P)
    factors = DenseActiveFactors(K, free, sign)
    N, factors = (N.mT, factors.T) if transposed else (N, factors)
    b = _random(batch, n + m, 2, seed=2)
    assert bool(factors.factor.ok.all())
    torch.testing.assert_close(factors.solve(b), torch.linalg.solve(N, b))
    torch.testing.assert_close(factors.solve(b[:, :, 0]), torch.linalg.solve(N, b[:, :, 0]))
    torch.testing.assert_close(factors.product(b), N @ b)
    torch.testing.assert_close(factors.size(b), N.abs() @ b.abs())


def test_another_batch_has_its_own_active_sets() -> None:
    q = torch.stack([_random(80, seed=k) for k in (4, 8, 9)]).requires_grad_()
    s = ik.argmin(
        lambda z, q: (0.5 * (z - q) ** 2 + torch.cosh(z) / 5).sum(1), torch.zeros_like(q), (q,), batch_dims=1,
        constraints=[ik.Equality(lambda z, q: z.sum(1, keepdim=True) - 5)], bounds=(0.0, None), solver="sqp",
    )  # fmt: skip
    w = torch.stack([_random(80, seed=k) for k in (5, 6, 7)])
    (together,) = torch.autograd.grad((w * s.value).sum(), q)
    h = 1e-6 * w

    def solved(q: Tensor) -> Tensor:
        return ik.argmin(
            lambda z, q: (0.5 * (z - q) ** 2 + torch.cosh(z) / 5).sum(1), torch.zeros_like(q), (q,), batch_dims=1,
            constraints=[ik.Equality(lambda z, q: z.sum(1, keepdim=True) - 5)], bounds=(0.0, None), solver="sqp",
        ).value  # fmt: skip

    with torch.no_grad():
        difference = ((solved(q + h) - solved(q - h)) * w).sum(1) / 2e-6
    torch.testing.assert_close((together * w).sum(1), difference, rtol=1e-6, atol=1e-7)


def test_a_linear_program_is_one_step() -> None:
    """Its Hessian, zero, is taken as it is: made definite it took 22 steps and more."""
    A, c = _random(20, 60), _random(60, seed=1).abs()
    b, c = A @ _random(60, seed=2).abs(), (A.T @ _random(20, seed=3) + c).requires_grad_()
    s = ik.argmin(
        lambda z, c: c @ z, torch.zeros(60, dtype=F64), (c,),
        constraints=[ik.Equality(lambda z, c: A @ z - b)], bounds=(0.0, None),
    )  # fmt: skip
    assert bool(s.converged) and s.solver == "auto (sqp)" and int(s.steps) == 1 and int(s.evaluations) <= 4
    best = so.linprog(c.detach().numpy(), A_eq=A.numpy(), b_eq=b.numpy(), bounds=(0, None))
    torch.testing.assert_close(s.value.detach(), torch.from_numpy(best.x), rtol=0, atol=1e-9)
    assert int((s.value == 0).sum()) == 40  # a corner, whose bounds hold to the last bit


def test_a_step_without_an_end_is_taken_by_a_definite_model() -> None:
    """Without multipliers the Hessian is zero, and the linearised program falls for ever."""
    c = torch.linspace(1, 2, 5, dtype=F64, requires_grad=True)
    s = ik.argmin(
        lambda z, c: c @ z, torch.zeros(5, dtype=F64), (c,),
        constraints=[ik.Inequality(lambda z, c: z @ z - 4)], solver="sqp",
    )  # fmt: skip
    torch.testing.assert_close(s.value, -2 * c / c.norm(), rtol=0, atol=1e-9)


def test_bounds_are_no_rows_of_the_gram_matrix() -> None:
    g = torch.zeros(3, 6, 4, dtype=F64)
    g[:, :2], g[:, 2, 1], g[:, 3, 1], g[:, 4, 3] = _random(3, 2, 4), 2.0, -3.0, 0.5
    g[0, 5, 2], g[1, 5, 0] = 1.0, 4.0  # of every sample another unknown; of the last none
    P, weight = _random(3, 4, 4, seed=1), _random(3, 6, seed=2).abs()
    rows = _Rows.of(g)
    assert rows.several.tolist() == [0, 1]
    torch.testing.assert_close(rows.gram(P, g, weight), P + g.mT @ torch.diag_embed(weight) @ g)
