"""Programs whose Hessian is sparse but for a few numbers that all unknowns share, against their optimality conditions solved
as dense ones; and the units of the augmented Lagrangian."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.sparsity import known

N, FACTORS = 900, 6


def _data(n: int, k: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Loadings ``(n, k)``, a diagonal ``(n,)`` and slopes ``(batch, n)``."""
    g = torch.Generator().manual_seed(0)
    F = torch.randn(n, k, generator=g, dtype=torch.float64) / n**0.5
    D = 0.5 + torch.rand(n, generator=g, dtype=torch.float64)
    return F, D, 0.1 * torch.randn(batch, n, generator=g, dtype=torch.float64)


def _by_hand(F: Tensor, D: Tensor, mu: Tensor, sign: float, w: Tensor, bounded: bool) -> tuple[Tensor, Tensor]:
    """``x`` that minimises ``x'(D + sign F F')x - mu'x`` over ``sum x = 1``, and ``x >= 0`` if it is bounded, by active
    sets, and the gradient of ``w'x`` with respect to ``mu``."""
    n = len(D)
    H = 2 * (torch.diag(D) + sign * F @ F.T)
    free = torch.ones(n, dtype=torch.bool)
    for _ in range(50):
        i = free.nonzero().squeeze(1)
        ones = torch.ones(len(i), 1, dtype=torch.float64)
        K = torch.cat(
            [torch.cat([H[i][:, i], ones], 1), torch.cat([ones.T, torch.zeros(1, 1, dtype=torch.float64)], 1)]
        )
        found = torch.linalg.solve(K, torch.cat([mu[i], torch.ones(1, dtype=torch.float64)]))
        x = torch.zeros(n, dtype=torch.float64).index_copy(0, i, found[:-1])
        slope = H @ x - mu + found[-1]
        following = torch.where(free, x > 0, slope < 0) if bounded else free
        if bool((following == free).all()):
            break
        free = following
    u = torch.linalg.solve(K, torch.cat([w[i], torch.zeros(1, dtype=torch.float64)]))
    return x, torch.zeros(n, dtype=torch.float64).index_copy(0, i, u[:-1])


PROGRAMS = {
    "factor model": (1.0, 1, True),
    "no bounds": (1.0, 1, False),
    "less than convex": (-0.2, 1, True),  # D - F F' / 5 is definite, D without its border more so
    "two of them": (1.0, 2, True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_portfolio_is_that_of_its_optimality_conditions(name: str) -> None:
    """Of 900 assets with a factor model of risk: the values, and derivatives by their returns."""
    sign, batch, bounded = PROGRAMS[name]
    F, D, mu = _data(N, FACTORS, batch)

    def risk(x: Tensor, mu: Tensor) -> Tensor:
        return (D * x * x).sum(-1) + sign * (x @ F).square().sum(-1) - (mu * x).sum(-1)

    weights = torch.cos(torch.arange(N, dtype=torch.float64))
    mu.requires_grad_()
    solution = ik.argmin(
        risk,
        torch.full((batch, N), 1 / N, dtype=torch.float64),
        (mu,),
        constraints=[ik.Equality(lambda x, mu: x.sum(-1) - 1)],
        bounds=(torch.zeros(N, dtype=torch.float64), None) if bounded else None,
        batch_dims=1,
    )
    (gradient,) = torch.autograd.grad((solution.value @ weights).sum(), mu)
    assert solution.solver == "auto (sqp)" and solution.evaluations <= 40 * batch
    assert (solution.steps == 1).all()  # quadratic, and the Hessian of the step is that of the program
    for i in range(batch):
        x, g = _by_hand(F, D, mu[i].detach(), sign, weights, bounded)
        if bounded:  # both kinds of unknowns
            assert 0.05 < float((x > 0).double().mean()) < 0.95
        assert torch.allclose(solution.value[i], x, rtol=0, atol=1e-9)
        assert torch.allclose(gradient[i], g, rtol=0, atol=1e-8)


def test_curvature_that_changes_has_its_hessian_at_each_step() -> None:
    """Entropic terms and a norm of three sums, under two dense constraints, one of them nonlinear."""
    F, D, _ = _data(N, 3)
    theta = torch.tensor([1.0, 0.3], dtype=torch.float64, requires_grad=True)

    def objective(x: Tensor, theta: Tensor) -> Tensor:
        entropy = (x * x.clamp_min(1e-9).log()).sum()
        return 0.1 * entropy + theta[1] * (1 + (F.T @ x).square().sum()).sqrt() + (D * x * x).sum()

    constraints = [
        ik.Equality(lambda x, theta: x.sum() - theta[0]),
        ik.Inequality(lambda x, theta: (D * x * x).sum() - 1.05e-3 * theta[0]),
    ]

    def solve(theta: Tensor) -> Any:
        return ik.argmin(objective, torch.full((N,), 1 / N, dtype=torch.float64), (theta,), constraints=constraints)

    solution = solve(theta)
    assert solution.solver == "auto (sqp)"
    (gradient,) = torch.autograd.grad(solution.value.square().sum(), theta)
    h = 1e-5
    for i in range(2):
        step = torch.zeros(2, dtype=torch.float64).index_fill(0, torch.tensor(i), h)
        there, back = (solve(theta.detach() + s * step).value.square().sum() for s in (1, -1))
        assert torch.allclose(gradient[i], (there - back) / (2 * h), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("unknowns, scale, weight", [(4, 1.0, 1.0), (400, 1.0, 1.0), (400, 1e4, 1.0), (400, 1.0, 1e-3)])
def test_units_are_nothing_to_the_augmented_lagrangian(unknowns: int, scale: float, weight: float) -> None:
    """Those of the objective, of the constraint, and how many unknowns it adds up."""
    F, D, mu = _data(unknowns, 2)

    def objective(x: Tensor) -> Tensor:
        return scale * ((D * x * x).sum() + (F.T @ x).square().sum() - (mu[0] * x).sum())

    solution = ik.argmin(
        objective,
        torch.full((unknowns,), 1 / unknowns, dtype=torch.float64),
        constraints=[ik.Equality(lambda x: weight * (x.sum() - 1))],
        solver="augmented_lagrangian",
        rtol=1e-8,
    )
    assert int(solution.steps) <= 15 and solution.evaluations <= 800
    assert abs(float(solution.value.sum()) - 1) < 1e-6


def test_more_numbers_are_shared_where_that_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty of them: of 900 unknowns, and not of so many that the equations for them would not fit."""
    F, D, _ = _data(N, 40)
    root = lambda z: D * z + z**3 + torch.tanh(z @ F) @ F.T  # noqa: E731
    z = torch.linspace(-1, 1, N, dtype=torch.float64).unsqueeze(0)
    found = known._detected_bordered(root, z)
    assert found is not None and found.rank == 40
    monkeypatch.setattr(known, "_NUMBERS", 39 * 39 * N)
    assert known._detected_bordered(root, z) is None
