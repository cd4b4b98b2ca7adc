"""Factors of programs whose Hessian is sparse but for a few shared numbers, as those of their optimality conditions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.conditions import kkt
from implicitkit.linear.conditions.lifted_saddle import LiftedFactors, LiftedMatrix
from implicitkit.linear.conditions.sparse_saddle import SparseSaddle

F64 = torch.float64

#: Unknowns, rows, shared numbers, and the signs of these.
SIZES = {
    "one": (7, 1, 1, (1,)),
    "indefinite": (9, 2, 3, (1, -1, 1)),
    "no rows": (6, 0, 2, (1, 1)),
    "none": (5, 2, 0, ()),
}


def _both(name: str) -> tuple[sp.csc_matrix, np.ndarray, int, int, int]:
    """The matrix of the second form, and that of the first."""
    n, m, k, signs = SIZES[name]
    rng = np.random.default_rng(n)
    A, J, V, S = np.diag(2 + rng.random(n)), rng.normal(size=(m, n)), 0.3 * rng.normal(size=(k, n)), np.diag(signs)
    S = S.reshape(k, k).astype(float)
    zero = lambda *shape: np.zeros(shape)  # noqa: E731
    second = np.block(
        [
            [A, zero(n, k), J.T, -V.T],
            [zero(k, n), S, zero(k, m), np.eye(k)],
            [J, zero(m, k), zero(m, m), zero(m, k)],
            [-V, np.eye(k), zero(k, m), zero(k, k)],
        ]
    )
    first = np.block([[A + V.T @ S @ V, J.T], [J, zero(m, m)]])
    K = sp.csc_matrix(second + np.diag(np.full(len(second), 1.0)))  # its whole diagonal is there
    K.setdiag(second.diagonal())
    return K, first, n, m, k


@pytest.mark.parametrize("name", SIZES)
def test_products(name: str) -> None:
    K, first, n, m, _ = _both(name)
    x = np.random.default_rng(1).normal(size=n + m)
    matrix = LiftedMatrix(K, n, m)
    assert np.allclose(matrix @ x, first @ x, rtol=0, atol=1e-13), name
    assert (abs(matrix) @ np.abs(x) >= np.abs(first) @ np.abs(x) - 1e-13).all(), name


@pytest.mark.parametrize("name", SIZES)
def test_solutions(name: str) -> None:
    K, first, n, m, k = _both(name)
    b = np.random.default_rng(2).normal(size=n + m)
    factors = LiftedFactors(SparseSaddle(K, n + k), n, m, k)
    assert factors.regular, name
    assert np.allclose(factors.once(b), np.linalg.solve(first, b), rtol=0, atol=1e-6), name  # they are regularised


def test_the_derivative_of_a_portfolio_takes_the_factors_of_its_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long only, with a budget and a factor model: ``min z'(D + F F') z / 2 - r'z``; by the system of the active set."""
    monkeypatch.delattr(kkt, "GMRES")
    n, k = 400, 12
    rng = torch.Generator(device="cpu").manual_seed(0)
    F = torch.randn(n, k, generator=rng, dtype=F64, device="cpu") / k**0.5
    d = 0.1 + torch.rand(n, generator=rng, dtype=F64, device="cpu")
    r = 0.1 * torch.randn(n, generator=rng, dtype=F64, device="cpu")
    c = torch.cos(torch.arange(n, dtype=F64, device="cpu"))
    wanted = r.clone().requires_grad_()

    def risk(z: Tensor, r: Tensor) -> Tensor:
        return 0.5 * (d * z * z).sum() + 0.5 * (F.T @ z).square().sum() - r @ z

    s = ik.argmin(
        risk,
        torch.full((n,), 1 / n, dtype=F64, device="cpu"),
        (wanted,),
        constraints=ik.Equality(lambda z, r: z.sum() - 1),
        bounds=(0.0, None),
    )
    (found,) = torch.autograd.grad((c * s.value).sum(), wanted)
    held = s.value.detach() > 0
    size = int(held.sum()) + 1
    K = torch.ones(size, size, dtype=F64, device="cpu")
    K[:-1, :-1], K[-1, -1] = torch.diag(d[held]) + F[held] @ F[held].T, 0
    right = torch.cat([c[held], torch.zeros(1, dtype=F64, device="cpu")])
    assert 10 < size < n
    assert torch.allclose(found[held], torch.linalg.solve(K, right)[:-1], rtol=0, atol=1e-12)
    assert bool((found[~held] == 0).all())
