"""Sparse matrices that can be solved for part after part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.block_triangular import BlockTriangular, parts_of
from implicitkit.linear.factors.sparse_factors import SparseFactor


def grid(m: int) -> sp.csr_matrix:
    line = sp.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(m, m))
    return sp.csr_matrix(sp.kron(line, sp.identity(m)) + sp.kron(sp.identity(m), line))


def steps(m: int, count: int, seed: int = 0) -> sp.csr_matrix:
    """``count`` implicit steps of a process on ``m x m`` points, each with a length of its own."""
    rng = np.random.default_rng(seed)
    each = [sp.identity(m * m) - h * grid(m) for h in rng.uniform(0.1, 3, count)]
    return sp.csr_matrix(sp.block_diag(each) - sp.kron(sp.eye_array(count, k=-1), sp.identity(m * m)))


def shuffled(A: sp.csr_matrix, seed: int = 0) -> sp.csr_matrix:
    order = np.random.default_rng(seed).permutation(A.shape[0])
    return sp.csr_matrix(A[order][:, order])


def cascade(count: int, seed: int = 0) -> sp.csr_matrix:
    """Unequal parts, each of which depends on any of those before it."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(40, 400, count)
    blocks: list[list[Any]] = [[None] * count for _ in range(count)]
    for i, size in enumerate(sizes):
        ring = sp.eye_array(size, k=1) + sp.eye_array(size, k=1 - size)
        blocks[i][i] = sp.identity(size) * 4 + ring + 0.3 * sp.random_array((size, size), density=0.01, rng=rng)
        for j in range(i):
            blocks[i][j] = sp.random_array((size, sizes[j]), density=2e-3, rng=rng)
    return sp.csr_matrix(sp.bmat(blocks))


MATRICES = {
    "steps in time": lambda: steps(12, 10),
    "the same, in any order": lambda: shuffled(steps(12, 10)),
    "parts of unequal size": lambda: shuffled(cascade(9)),
    "backwards in time": lambda: sp.csr_matrix(steps(12, 10).T),
}


def pattern_of(A: sp.csr_matrix) -> sp.csr_matrix:
    A.sort_indices()
    return sp.csr_matrix((np.ones(A.nnz, dtype=bool), A.indices, A.indptr), shape=A.shape)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.parametrize("name", MATRICES)
def test_solutions(name: str, columns: int | None, transpose: bool) -> None:
    A = MATRICES[name]()
    analysis = analyse(pattern_of(A))
    assert analysis.band is None and analysis.parts is not None
    factor = SparseFactor(analysis, A.data[None])
    assert isinstance(factor._lus[0], BlockTriangular) and bool(factor.ok.all())
    shape = (1, A.shape[0]) if columns is None else (1, A.shape[0], columns)
    b = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = factor.solve(b, transpose)[0].numpy()
    np.testing.assert_allclose((A.T if transpose else A) @ x, b[0].numpy(), rtol=0, atol=1e-10)


def test_parts_follow_those_that_they_depend_on() -> None:
    A = shuffled(cascade(9))
    parts = parts_of(pattern_of(A))
    assert parts is not None and len(parts.bounds) > 3
    moved = A[parts.order][:, parts.order]
    part = np.repeat(np.arange(len(parts.bounds) - 1), np.diff(parts.bounds))
    rows, columns = moved.nonzero()
    assert (part[rows] >= part[columns]).all()
    assert np.diff(parts.bounds).min() >= 256


@pytest.mark.parametrize(
    ("name", "A"),
    [
        ("one circle", grid(20) + sp.eye_array(400, k=1)),
        ("a large part and a small one", sp.block_diag([grid(20), sp.eye_array(100)])),
        ("few unknowns", steps(4, 6)),
    ],
)
def test_no_parts_worth_having(name: str, A: Any) -> None:
    assert parts_of(pattern_of(sp.csr_matrix(A))) is None, name


@pytest.mark.parametrize("how", ["a row twice", "two rows of one entry"])
def test_a_singular_part_is_found(how: str) -> None:
    A = steps(12, 10).tolil()
    if how == "a row twice":
        A[500] = A[499]
    else:
        A[[500, 501]] = 0
        A[500, 499] = A[501, 499] = 1
    A = sp.csr_matrix(A)
    factor = SparseFactor(analyse(pattern_of(A)), A.data[None])
    assert not bool(factor.ok.any())


def test_parts_of_one_pattern_share_their_order() -> None:
    analysis = analyse(pattern_of(steps(12, 10)))
    assert len({id(part) for part in analysis.of_parts}) < len(analysis.of_parts)


def test_factors_of_steps_in_time_do_not_fill() -> None:
    """As one matrix, 40 steps on 24 x 24 points have factors of more than 4,000 entries an unknown."""
    A = steps(24, 40)
    factor = SparseFactor(analyse(pattern_of(A)), A.data[None])
    assert factor._lus[0].nnz < 40 * A.shape[0]


def test_implicit_steps_of_a_user_are_one_root() -> None:
    """Implicit Euler on 16 x 16 points, all 20 steps as one system, beside SciPy's factors step by step."""
    m, count, h = 16, 20, 300.0
    L = grid(m)

    def laplacian(U: Tensor) -> Tensor:
        P = torch.nn.functional.pad(U, (1, 1, 1, 1))
        return P[:, 2:, 1:-1] + P[:, :-2, 1:-1] + P[:, 1:-1, 2:] + P[:, 1:-1, :-2] - 4 * U

    def residual(U: Tensor, u0: Tensor, k: Tensor) -> Tensor:
        before = torch.cat((u0[None], U[:-1]))
        return U - before - h * (k * laplacian(U) - U**3)

    def by_hand(k: float) -> np.ndarray:
        u = u0.numpy().reshape(-1)
        for _ in range(count):
            before = u
            for _ in range(12):
                F = u - before - h * (k * (L @ u) - u**3)
                J = sp.csc_matrix(sp.identity(m * m) - h * (k * L - sp.diags_array(3 * u**2)))
                u = u - scipy.sparse.linalg.splu(J).solve(F)
        return u

    u0 = torch.rand(m, m, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    k = torch.tensor(1e-4, dtype=torch.float64, requires_grad=True)
    U = ik.root(residual, u0.expand(count, m, m), (u0, k), rtol=1e-12).value
    (slope,) = torch.autograd.grad(U[-1].sum(), k)
    np.testing.assert_allclose(U[-1].detach().numpy().reshape(-1), by_hand(1e-4), rtol=1e-6, atol=1e-9)
    difference = (by_hand(1e-4 + 1e-8).sum() - by_hand(1e-4 - 1e-8).sum()) / 2e-8
    assert float(slope) == pytest.approx(difference, rel=1e-5)
