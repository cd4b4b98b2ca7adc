"""Sparse factors where the diagonal is weak or empty: saddle points, waves, conditions of optimality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors import cholmod, sparse_factors
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.linear.factors.sparse_factors import SparseFactor
from implicitkit.sparsity.compression import known_entries

D = torch.float64


def stokes(n: int, stabilised: float, pinned: bool = True) -> sp.csr_matrix:
    """A slow fluid on ``n x n`` staggered cells: ``[[L, G], [-G', stabilised I]]``, its last pressure fixed."""
    line = lambda m: n**2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(m, m))  # noqa: E731
    slope = n * sp.diags([-1.0, 1.0], [0, 1], shape=(n - 1, n))
    one, less = sp.eye(n), sp.eye(n - 1)
    across = sp.kron(line(n - 1), one) + sp.kron(less, line(n))
    along = sp.kron(line(n), less) + sp.kron(one, line(n - 1))
    G, H = sp.kron(slope, one), sp.kron(one, slope)
    last = np.zeros(n * n)
    last[-1] = float(pinned)
    A = sp.block_array([[across, None, G], [None, along, H], [-G.T, -H.T, sp.diags(stabilised + last)]])
    A = sp.csr_matrix(A)
    A.eliminate_zeros()
    A.sort_indices()
    return A


def wave(n: int) -> sp.csr_matrix:
    """No entry on the diagonal at all."""
    K = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n))
    K = sp.kron(K, sp.eye(n)) + sp.kron(sp.eye(n), K)
    pattern = abs(K) > 0
    upper = sp.eye(n * n) + 0.1 * pattern.multiply(sp.random(n * n, n * n, 1.0, random_state=np.random.default_rng(0)))
    return sp.csr_matrix(sp.block_array([[None, upper], [-K, None]]))


def weak(n: int) -> sp.csr_matrix:
    """A symmetric pattern without order, and a thousandth on the diagonal."""
    R = sp.random(n, n, 2 / n, random_state=np.random.default_rng(1))
    return sp.csr_matrix(R + R.T + 1e-3 * sp.eye(n))


MATRICES: dict[str, Callable[[], sp.csr_matrix]] = {
    "stokes, stabilised": lambda: stokes(12, 1e-3),
    "stokes, hardly stabilised": lambda: stokes(12, 1e-12),
    "stokes": lambda: stokes(12, 0.0),
    "wave": lambda: wave(12),
    "weak": lambda: weak(600),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("batch", [1, 3])
def test_solutions(name: str, batch: int) -> None:
    """Of ``A`` and ``A'``, and of several matrices of one pattern, as accurate as LAPACK's."""
    A = MATRICES[name]()
    n = A.shape[0]
    values = np.stack([(1 + 0.1 * i) * A.data for i in range(batch)])
    factor = SparseFactor(analyse(A), values)
    assert bool(factor.ok.all())
    b = torch.randn(batch, n, 2, dtype=D, generator=torch.Generator().manual_seed(0))
    for transpose in (False, True):
        x = factor.solve(b, transpose).numpy()
        for i in range(batch):
            matrix = (1 + 0.1 * i) * A.toarray()
            matrix = matrix.T if transpose else matrix
            left = np.abs(matrix @ x[i] - b[i].numpy()).max()
            assert left <= (1e-12 if name == "weak" else 1e-15) * (
                np.abs(matrix).sum(1).max() * np.abs(x[i]).max() + 1
            ), (name, transpose, i)
            expected = np.linalg.solve(matrix, b[i].numpy())
            assert np.abs(x[i] - expected).max() <= 1e-9 * np.abs(expected).max()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("stabilised", [1e-3, 1e-6, 1e-12, 0.0])
def test_an_order_that_keeps_factors_sparse_is_kept(
    stabilised: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 x 24 cells: 60,000 entries of factors, a million where pivots are looked for elsewhere; nor is that needed."""
    plain, fills = sla.splu, list[int]()

    def splu(A: sp.csc_matrix, permc_spec: str, **options: Any) -> Any:
        assert permc_spec != "COLAMD"
        lu = plain(A, permc_spec=permc_spec, **options)
        fills.append(lu.nnz)
        return lu

    monkeypatch.setattr(sla, "splu", splu)
    A = stokes(24, stabilised)
    values = np.stack([A.data] * batch)
    assert bool(SparseFactor(analyse(A), values).ok.all())
    assert len(fills) == batch and max(fills) < 150_000 * batch


def test_a_border_whose_corner_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long chain, of condition 1e9, and one unknown that all share: as it stands its factors have five entries a row."""
    n, plain = 30_000, sla.splu

    def splu(A: sp.csc_matrix, permc_spec: str, **options: Any) -> Any:
        assert permc_spec != "COLAMD"
        return plain(A, permc_spec=permc_spec, **options)

    monkeypatch.setattr(sla, "splu", splu)
    line = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n))
    A = sp.csr_matrix(sp.block_array([[line, -np.ones((n, 1))], [np.full((1, n), 1 / n), None]]))
    factor = SparseFactor(analyse(A), A.data[None])
    b = torch.ones(1, n + 1, dtype=D)
    x = factor.solve(b).numpy()[0]
    assert bool(factor.ok.all()) and np.abs(A @ x - 1).max() <= 1e-9


def test_a_pressure_that_is_not_fixed_is_singular() -> None:
    """An empty diagonal that is made a little larger does not hide it."""
    A = stokes(12, 0.0, pinned=False)
    factor = SparseFactor(analyse(A), A.data[None])
    assert not bool(factor.ok.any()) and "singular" in factor.reason
    good = stokes(12, 0.0)
    bad = good.copy()
    bad[-1, -1] = 0.0
    factor = SparseFactor(analyse(good), np.stack([good.data, bad.data, good.data]))
    assert factor.ok.tolist() == [True, False, True]


def test_a_fluid_by_defaults() -> None:
    """The root of Stokes' equations with inertia, and its derivative, against the dense Jacobian."""
    A = torch.from_numpy(stokes(16, 0.0).toarray())
    M = torch.from_numpy(stokes(16, 0.0).tocoo().toarray()).to_sparse()
    moving = 2 * 15 * 16
    w = torch.linspace(-1, 1, len(A), dtype=D)

    def flow(z: Tensor, x: Tensor) -> Tensor:
        inertia = torch.cat([z[:moving] * z[:moving].abs(), torch.zeros(len(A) - moving, dtype=D)])
        return torch.sparse.mm(M, z.unsqueeze(1)).squeeze(1) + inertia - x

    x = torch.sin(torch.arange(len(A), dtype=D)).requires_grad_()
    solution = ik.root(flow, torch.zeros(len(A), dtype=D), x)
    z = solution.value
    (z @ w).backward()
    J = A.clone()
    J.diagonal()[:moving] += 2 * z.detach()[:moving].abs()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.linalg.solve(J.T, w), rtol=1e-7, atol=1e-9)


# ---------------------------------------------------------------------------------------------------------------------
# Symmetric definite blocks that are large are factored by CHOLMOD where it is installed, and others are not.
SIDE = 30
_INSTALLED = cholmod.is_installed()


def _grid(skew: float = 0.0, shift: float = 0.0) -> sp.csr_matrix:
    """Diffusion on a grid in the plane of 900 points, too wide for a band, with convection ``skew``."""
    line = sp.diags([-1.0 - skew, 2.0, -1.0 + skew], [-1, 0, 1], shape=(SIDE, SIDE))
    A = sp.csr_matrix(sp.kronsum(line, line) + shift * sp.identity(SIDE * SIDE))
    A.sort_indices()
    return A


BLOCKS = {
    "definite": (_grid(), True),
    "negative definite": (-_grid(), True),
    "convection": (_grid(skew=0.1), False),
    "indefinite": (_grid(shift=-2.0), False),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of CHOLMOD has found factors; without it, those of SuperLU where all eigenvalues have one sign."""
    found: list[bool] = []

    def stand_in(A: sp.csc_matrix) -> Any:
        eigenvalues = np.linalg.eigvalsh(A.toarray())
        return sla.splu(A) if eigenvalues[0] * eigenvalues[-1] > 0 else None

    make = cholmod.definite_factors if _INSTALLED else stand_in

    def recorded(A: sp.csc_matrix) -> Any:
        factors = make(A)
        found.append(factors is not None)
        return factors

    monkeypatch.setattr(sparse_factors, "is_installed", lambda: True)
    monkeypatch.setattr(sparse_factors, "definite_factors", recorded)
    monkeypatch.setattr(sparse_factors, "_SUPERNODES", 100)
    monkeypatch.setattr(sparse_factors, "_TOGETHER", 0)
    return found


@pytest.mark.parametrize("name", BLOCKS)
def test_definite_blocks_have_cholesky_factors(name: str, calls: list[bool]) -> None:
    """Two samples, both with ``A`` and its transposed; those that are not definite are solved as well."""
    A, is_definite = BLOCKS[name]
    values = np.stack([A.data, 2 * A.data])
    pattern = sp.csr_matrix((np.ones(A.nnz, dtype=bool), A.indices, A.indptr), shape=A.shape)
    blocks = SparseBlocks(known_entries(pattern), values)
    b = torch.randn(2, A.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = blocks.solve(b), blocks.T.solve(b)
    factors = blocks.factor
    assert isinstance(factors, sparse_factors.SparseFactor)
    assert [isinstance(lu, sparse_factors._Unscaled) for lu in factors._lus] == [is_definite] * 2
    for i, M in enumerate((A.toarray(), 2 * A.toarray())):
        matrix = torch.from_numpy(M)
        torch.testing.assert_close(matrix @ x[i], b[i], rtol=0, atol=1e-10)
        torch.testing.assert_close(matrix.T @ y[i], b[i], rtol=0, atol=1e-10)
    asked = [True, True] if is_definite else [] if name == "convection" else [False]  # once of a pattern
    assert calls == asked


def test_small_blocks_and_those_without_the_package_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    A, _ = BLOCKS["definite"]
    pattern = sp.csr_matrix((np.ones(A.nnz, dtype=bool), A.indices, A.indptr), shape=A.shape)
    b = torch.ones(1, A.shape[0], dtype=torch.float64)
    monkeypatch.setattr(sparse_factors, "_SUPERNODES", 4096)
    SparseBlocks(known_entries(pattern), A.data[None]).solve(b)
    monkeypatch.setattr(sparse_factors, "_SUPERNODES", 100)
    monkeypatch.setattr(sparse_factors, "is_installed", lambda: False)
    SparseBlocks(known_entries(pattern), A.data[None]).solve(b)
    assert calls == []
