"""Sparse matrices whose factors are hardly sparse: once that is known they are factored as dense ones."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize as so
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors import gram
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.gram import Gram, Orders
from implicitkit.linear.factors.sparse_factors import SparseFactor, _Full
from implicitkit.linear.price import price_of

D = torch.float64
N = 400


def design(rows: int = 1200, seed: int = 0) -> sp.csr_matrix:
    """Random entries: a graph without layers."""
    return sp.csr_matrix(sp.random(rows, N, 0.008, random_state=np.random.default_rng(seed)))


def squared(held: np.ndarray) -> Gram:
    A = design()
    square = (A.T @ A + 1e-3 * sp.identity(N)).tocsc()
    square.sort_indices()
    found = Gram(square, np.zeros((0, N)), np.zeros(0))
    found.both_sides(np.where(held, 0.0, 1.0))
    return found


@pytest.mark.parametrize("held", [0, 150])
def test_normal_equations(held: int) -> None:
    orders, which = Orders(), np.arange(N) < held
    squared(which & False).factor(0.1, orders)
    assert orders.alone.fills(N) and not orders.alone.fills(3 * N)
    found = squared(which).factor(0.1, orders)
    assert isinstance(found, gram._Cholesky)
    matrix = squared(which).N.toarray() + 0.1 * np.eye(N)
    for shape in ((N,), (N, 3)):
        b = np.random.default_rng(1).standard_normal(shape)
        np.testing.assert_allclose(found.solve(b), np.linalg.solve(matrix, b), rtol=1e-9, atol=1e-10)


def test_what_is_not_definite_has_the_factors_it_had() -> None:
    orders = Orders()
    squared(np.zeros(N, dtype=bool)).factor(0.1, orders)
    found = squared(np.zeros(N, dtype=bool)).factor(-1.0, orders)
    assert not isinstance(found, gram._Cholesky)
    matrix, b = squared(np.zeros(N, dtype=bool)).N.toarray() - np.eye(N), np.ones(N)
    np.testing.assert_allclose(found.solve(b), np.linalg.solve(matrix, b), rtol=1e-7)
    assert gram._Cholesky.of(squared(np.arange(N) < 9).N, np.arange(N) >= 9, 0.0) is None


def test_grids_stay_sparse() -> None:
    line = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(20, 20))
    orders = Orders()
    Gram(sp.csc_matrix(sp.kronsum(line, line)), np.zeros((0, N)), np.zeros(0)).factor(0.1, orders)
    assert orders.alone.fill > 0 and not orders.alone.fills(N)


def test_lu() -> None:
    R = sp.random(N, N, 0.02, random_state=np.random.default_rng(3))
    A = sp.csr_matrix(R + R.T + 4 * sp.identity(N))
    known = analyse(A.astype(bool))
    first, second = (SparseFactor(known, A.data[None]) for _ in range(2))
    assert not isinstance(first._lus[0], _Full) and isinstance(second._lus[0], _Full)
    b = torch.ones(1, N, 2, dtype=D)
    for transposed in (False, True):
        assert torch.allclose(first.solve(b, transposed), second.solve(b, transposed), rtol=1e-10)


def test_the_price_knows() -> None:
    n = 3000
    sparse, full = (price_of(1, n, 50, 100_000, None, fill=f).factors for f in (1_000_000, 7_000_000))
    assert sparse < full < 6 * sparse


def test_nonnegative_least_squares() -> None:
    A = design()
    rng = np.random.default_rng(2)
    b = A @ np.maximum(rng.standard_normal(N), 0) + rng.standard_normal(A.shape[0])
    rows = torch.from_numpy(np.repeat(np.arange(A.shape[0]), np.diff(A.indptr)))
    columns, entries = torch.from_numpy(A.indices.astype(np.int64)), torch.from_numpy(A.data)

    def residuals(z: Tensor, b: Tensor) -> Tensor:
        return torch.zeros_like(b).index_add(0, rows, entries * z[columns]) - b

    data = torch.from_numpy(b).requires_grad_()
    for _ in range(2):  # the second time with what the first has found out
        z = ik.least_squares(residuals, torch.ones(N, dtype=D), (data,), bounds=(0.0, None)).value
        exact, _ = so.nnls(A.toarray(), b)
        np.testing.assert_allclose(z.detach().numpy(), exact, rtol=0, atol=1e-8)
        (slope,) = torch.autograd.grad(z.cos().sum(), data)
        free = np.flatnonzero(exact > 0)
        part = A.toarray()[:, free]
        adjoint = part @ np.linalg.solve(part.T @ part, -np.sin(exact[free]))
        np.testing.assert_allclose(slope.numpy(), adjoint, rtol=0, atol=1e-7)
