"""Sweeps over grids as fixed-point maps: Newton's method with sparse factors goes on where acceleration is slow."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik
from implicitkit.solver.evaluations import Evaluations

M = 40
H2 = (M + 1.0) ** 2
D = torch.float64


def _neighbours(u: Tensor) -> Tensor:
    U = pad(u, (1, 1, 1, 1))
    return U[2:, 1:-1] + U[:-2, 1:-1] + U[1:-1, 2:] + U[1:-1, :-2]


def _jacobi(u: Tensor, b: Tensor) -> Tensor:
    return (_neighbours(u) + b / H2 - 0.1 * u**3 / H2) / 4


_RED = (torch.arange(M)[:, None] + torch.arange(M)) % 2 == 0


def _red_black(u: Tensor, b: Tensor) -> Tensor:
    u = torch.where(_RED, _jacobi(u, b), u)
    return torch.where(_RED, u, _jacobi(u, b))


def _damped(u: Tensor, b: Tensor) -> Tensor:
    return u / 3 + 2 / 3 * _jacobi(u, b)


SWEEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Jacobi": _jacobi, "red-black": _red_black, "damped": _damped}


@pytest.mark.parametrize("name", SWEEPS)
def test_slow_sweeps_are_left_for_factors(name: str) -> None:
    b = torch.linspace(1, 3, M * M, dtype=D).view(M, M).requires_grad_()
    solution = ik.fixed_point(SWEEPS[name], torch.zeros(M, M, dtype=D), (b,))
    assert solution.solver == "auto (newton)" and int(solution.steps) <= 60
    weights = torch.cos(torch.arange(M * M, dtype=D)).view(M, M)
    (slope,) = torch.autograd.grad((weights * solution.value).sum(), b)
    assert int(solution.backward.steps) <= 4
    line = H2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(M, M))
    L, u, load = sp.csc_matrix(sp.kronsum(line, line)), np.zeros(M * M), b.detach().numpy().reshape(-1)
    for _ in range(10):
        lu = sla.splu(sp.csc_matrix(L + sp.diags(0.3 * u**2)))
        u = u - lu.solve(L @ u + 0.1 * u**3 - load)
    np.testing.assert_allclose(solution.value.detach().numpy().reshape(-1), u, rtol=0, atol=1e-9 * np.abs(u).max())
    adjoint = lu.solve(weights.numpy().reshape(-1))
    np.testing.assert_allclose(slope.numpy().reshape(-1), adjoint, rtol=0, atol=1e-8 * np.abs(adjoint).max())


def test_what_contracts_stays_with_acceleration(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nobody looks for a pattern."""

    def never(self: Evaluations, z: Tensor) -> float:
        raise AssertionError

    monkeypatch.setattr(Evaluations, "price_of_sparse", never)
    maps = (lambda u, b: torch.tanh(0.15 * _neighbours(u) + b), lambda u, b: 0.1 * _neighbours(u) + b)
    for contracting in maps:
        solution = ik.fixed_point(contracting, torch.zeros(M, M, dtype=D), (torch.ones(M, M, dtype=D),))
        assert solution.solver == "auto (anderson)" and bool(solution.converged)


def test_without_a_pattern_acceleration_goes_on() -> None:
    generator = torch.Generator().manual_seed(0)
    Q, _ = torch.linalg.qr(torch.randn(200, 200, generator=generator, dtype=D))
    A = Q @ torch.diag(torch.linspace(0, 0.99, 200, dtype=D)) @ Q.T
    solution = ik.fixed_point(lambda z, b: A @ z + b, torch.zeros(200, dtype=D), (torch.ones(200, dtype=D),))
    assert solution.solver == "auto (anderson)" and int(solution.steps) > 40


def test_factors_that_cost_much_are_not_bought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluations, "price_of_sparse", lambda self, z: 1e4)
    solution = ik.fixed_point(_jacobi, torch.zeros(M, M, dtype=D), (torch.ones(M, M, dtype=D),))
    assert solution.solver == "auto (anderson)" and int(solution.steps) > 100


def test_where_newton_fails_acceleration_goes_on() -> None:
    """On a ring the mean is nowhere in the equations: the Jacobian is singular."""
    b = torch.sin(2 * torch.pi * torch.arange(400, dtype=D) / 400)
    start = torch.ones(400, dtype=D)

    def sweep(u: Tensor, b: Tensor) -> Tensor:
        return u / 3 + (u.roll(1) + u.roll(-1) + b / 20) / 3

    solution = ik.fixed_point(sweep, start, (b,))
    assert bool(solution.converged)
    exact = 1 + b / 40 / (1 - np.cos(2 * np.pi / 400))
    torch.testing.assert_close(solution.value, exact, rtol=1e-5, atol=1e-5)


def test_samples_of_a_batch() -> None:
    b = torch.stack([torch.full((M, M), float(k), dtype=D) for k in (1, 2, 3)])
    field = lambda u, b: torch.stack([_jacobi(x, y) for x, y in zip(u, b, strict=True)])  # noqa: E731
    solution = ik.fixed_point(field, torch.zeros(3, M, M, dtype=D), (b,), batch_dims=1)
    assert solution.solver == "auto (newton)" and bool(solution.converged.all())
    torch.testing.assert_close(field(solution.value, b), solution.value, rtol=1e-8, atol=1e-10)
