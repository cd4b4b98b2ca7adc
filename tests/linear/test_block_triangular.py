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
from implicitkit.linear.factors import sparse_factors
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.block_triangular import BlockTriangular, parts_of
from implicitkit.linear.factors.complex_pairs import AsReal, pairs_of
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


# ---------------------------------------------------------------------------------------------------------------------
# Sparse real matrices that are complex ones are factored as those.
def random_phases(A: sp.csr_matrix, seed: int = 0) -> sp.csr_matrix:
    rng = np.random.default_rng(seed)
    return sp.csr_matrix((A.data * np.exp(2j * np.pi * rng.uniform(size=A.nnz)), A.indices, A.indptr), shape=A.shape)


def one_way(m: int) -> sp.csr_matrix:
    """No symmetric pattern: partial pivoting."""
    wind = sp.kron(sp.eye_array(m, k=3), sp.identity(m)) + sp.kron(sp.identity(m), sp.eye_array(m, k=2))
    return sp.csr_matrix(random_phases(sp.csr_matrix(grid(m) + wind)) + (5 + 2j) * sp.identity(m * m))


def in_turn(m: int) -> sp.csr_matrix:
    """Parts that can be solved for one after the other."""
    each = [grid(m) + (2j + k) * sp.identity(m * m) for k in range(5)]
    return sp.csr_matrix(sp.block_diag(each) - 1j * sp.kron(sp.eye_array(5, k=-1), sp.identity(m * m)))


def hollow(m: int) -> sp.csr_matrix:
    """Nothing on the diagonal of half of the equations."""
    B = random_phases(sp.csr_matrix(grid(m) + 6 * sp.identity(m * m)), 1)
    return sp.csr_matrix(sp.bmat([[random_phases(grid(m)), B], [B.T, 0 * sp.identity(m * m)]]))


COMPLEX = {
    "waves": lambda: sp.csr_matrix(grid(24) + (0.7 + 0.1j) * sp.identity(576)),
    "waves without a loss": lambda: sp.csr_matrix(grid(24) + (0.7 + 0j) * sp.identity(576)),
    "phases": lambda: sp.csr_matrix(random_phases(grid(24)) + (3 + 4j) * sp.identity(576)),
    "one way": lambda: one_way(24),
    "parts": lambda: in_turn(12),
    "saddle point": lambda: hollow(16),
}


def as_real(C: sp.csr_matrix) -> sp.csr_matrix:
    """Real and imaginary parts, one beside the other."""
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])
    A = sp.csr_matrix(sp.kron(C.real, np.eye(2)) + sp.kron(C.imag, turn))
    A.sort_indices()
    return A


def factor_of(A: sp.csr_matrix) -> SparseFactor:
    pattern = sp.csr_matrix((np.ones(A.nnz, dtype=bool), A.indices, A.indptr), shape=A.shape)
    return SparseFactor(analyse(pattern), A.data[None].astype(float))


@pytest.mark.parametrize("name", COMPLEX)
def test_solutions_are_those_of_the_complex_system(name: str) -> None:
    C = COMPLEX[name]()
    A, n = as_real(C), C.shape[0]
    factor = factor_of(A)
    assert isinstance(factor._lus[0], AsReal), name
    assert bool(factor.ok.all()), name
    b = np.random.default_rng(0).normal(size=(1, 2 * n, 3))
    for transpose, M in ((False, A), (True, A.T)):
        x = factor.solve(torch.from_numpy(b), transpose).numpy()[0]
        assert np.abs(M @ x - b[0]).max() < 1e-10 * (1 + np.abs(x).max()), (name, transpose)
        single = factor.solve(torch.from_numpy(b[:, :, 0]), transpose).numpy()[0]
        assert np.abs(single - x[:, 0]).max() < 1e-12 * np.abs(x).max(), (name, transpose)


def test_a_matrix_with_other_blocks_is_none() -> None:
    A = as_real(COMPLEX["phases"]())
    A.data[7] *= 1 + 1e-9  # the pattern of one, and nearly its entries
    factor = factor_of(A)
    assert not isinstance(factor._lus[0], AsReal)
    b = torch.ones(1, A.shape[0], dtype=torch.float64)
    assert np.abs(A @ factor.solve(b).numpy()[0] - 1).max() < 1e-11


@pytest.mark.parametrize("entry", [(0, 600), (1, 600), (600, 0), (601, 0)])
def test_a_pattern_with_an_entry_of_its_own_is_none(entry: tuple[int, int]) -> None:
    A = as_real(COMPLEX["waves"]()).tolil()
    A[entry] = 1.0
    pattern = sp.csr_matrix(A).astype(bool)
    pattern.sort_indices()
    assert pairs_of(pattern) is None, entry


def test_a_singular_one_is_said_to_be() -> None:
    C = COMPLEX["waves"]()
    C = sp.csr_matrix(C - sp.linalg.eigs(C, k=1, sigma=0.3)[0][0] * sp.identity(576))
    assert not bool(factor_of(as_real(C)).ok.any())


def test_of_a_batch_each_has_its_own() -> None:
    A = as_real(COMPLEX["phases"]())
    pattern = sp.csr_matrix((np.ones(A.nnz, dtype=bool), A.indices, A.indptr), shape=A.shape)
    broken = A.data.copy()
    broken[3] += 1.0
    factor = SparseFactor(analyse(pattern), np.stack([A.data, broken, 2 * A.data]))
    b = torch.ones(3, A.shape[0], dtype=torch.float64)
    x = factor.solve(b).numpy()
    for i, values in enumerate((A.data, broken, 2 * A.data)):
        M = sp.csr_matrix((values, A.indices, A.indptr), shape=A.shape)
        assert np.abs(M @ x[i] - 1).max() < 1e-11, i


def lap(u: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(torch.view_as_real(u).movedim(-1, 0)[:, None], (1, 1, 1, 1))[:, 0]
    out = (
        padded[:, 2:, 1:-1]
        + padded[:, :-2, 1:-1]
        + padded[:, 1:-1, 2:]
        + padded[:, 1:-1, :-2]
        - 4 * padded[:, 1:-1, 1:-1]
    )
    return torch.complex(out[0], out[1])


@pytest.mark.parametrize("kind", ["holomorphic", "not"])
def test_waves_and_their_derivative(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, made = 24, []
    k = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    source = torch.zeros(m, m, dtype=torch.complex128)
    source[m // 3, m // 2] = 1.0
    monkeypatch.setattr(sparse_factors, "AsReal", lambda factors: made.append(1) or AsReal(factors))

    def waves(u: Tensor, k: Tensor) -> Tensor:
        strength = u * u if kind == "holomorphic" else u.abs().square()
        return lap(u) + (k * (1 + 0.2j) + 0.1 * strength) * u - source

    def power(k: Tensor) -> Tensor:
        found: Any = ik.root(waves, torch.full((m, m), 0.1 + 0.1j, dtype=torch.complex128), (k,)).value
        return found.abs().square().sum()

    (slope,) = torch.autograd.grad(power(k), k)
    h = 1e-5
    with torch.no_grad():
        want = (power(k + h) - power(k - h)) / (2 * h)
    assert abs(float(slope / want) - 1) < 1e-7
    assert bool(made) == (kind == "holomorphic")
