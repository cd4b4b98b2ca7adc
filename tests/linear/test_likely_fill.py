"""What factors of graphs without layers fill is known, about, before they are made, and where that is much they are not."""

from __future__ import annotations

import time

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.fill import likely_fill
from implicitkit.linear.factors.ordering import superlu


def _matrix(a: np.ndarray, b: np.ndarray, n: int) -> sp.csr_matrix:
    A = sp.coo_matrix((np.ones(len(a)), (a, b)), (n, n))
    A = sp.csr_matrix(A + A.T)
    return sp.csr_matrix(A + sp.eye(n) * (A.sum(1).max() + 1))


def _random(n: int, more: int) -> sp.csr_matrix:
    """A random tree, and ``more`` links for each unknown."""
    r = np.random.default_rng(1)
    tree = (r.random(n - 1) * np.arange(1, n)).astype(int)
    ends = r.integers(0, n, (2, more * n))
    return _matrix(np.r_[np.arange(1, n), ends[0]], np.r_[tree, ends[1]], n)


def _cameras(points: int, cameras: int) -> sp.csr_matrix:
    seen = np.random.default_rng(0).integers(0, cameras, 3 * points)
    return _matrix(np.repeat(np.arange(points), 3) + cameras, seen, points + cameras)


def _small_world(n: int) -> sp.csr_matrix:
    r, a = np.random.default_rng(0), np.arange(n)
    far = r.integers(0, n, (2, n // 10))
    return _matrix(np.r_[a, a, far[0]], np.r_[(a + 1) % n, (a + 2) % n, far[1]], n)


GRAPHS = {
    "tree": lambda: _random(3000, 0),
    "three links": lambda: _random(2000, 1),
    "six links": lambda: _random(1500, 2),
    "cameras": lambda: _cameras(4000, 60),
    "small world": lambda: _small_world(3000),
    "dense": lambda: sp.csr_matrix(np.ones((60, 60)) + 60 * np.eye(60)),
    "diagonal": lambda: sp.csr_matrix(sp.eye(50)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_fill(name: str) -> None:
    A = GRAPHS[name]()
    before = A.copy()
    true = superlu(sp.csc_matrix(A), 0.0).nnz
    assert 0.75 * true <= likely_fill(A) <= 1.35 * true, (name, likely_fill(A), true)
    assert np.array_equal(A.indices, before.indices) and np.array_equal(A.data, before.data), name


def test_the_pattern_stays_as_it_is() -> None:
    A = sp.csr_matrix(_random(50, 1), dtype=bool)
    before = A.copy()
    likely_fill(A)
    assert np.array_equal(A.indices, before.indices) and np.array_equal(A.indptr, before.indptr)
    numbered = sp.csr_matrix((np.arange(A.nnz), A.indices, A.indptr), shape=A.shape)
    assert likely_fill(numbered) == likely_fill(A)
    assert np.array_equal(numbered.data, np.arange(A.nnz))


def test_work_is_bounded() -> None:
    A = _random(30_000, 2)
    start = time.process_time()
    found = likely_fill(A)
    assert time.process_time() - start < 2
    assert found > 1e7  # some seconds of SuperLU's


def test_patterns_with_layers_are_not_asked() -> None:
    line = sp.diags([1.0, 1.0, 1.0], [-1, 0, 1], shape=(60, 60))
    grid = sp.csr_matrix(sp.kron(line, sp.eye(60)) + sp.kron(sp.eye(60), line))
    assert analyse(grid).likely_fill == 0
    assert analyse(_random(2000, 1)).likely_fill > 0


def test_a_network_is_solved_by_products(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 6000
    links = sp.triu(_random(n, 2), 1).tocoo()
    a, b = (torch.from_numpy(t.astype(np.int64)) for t in (links.row, links.col))
    power = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def balance(angles: Tensor, power: Tensor) -> Tensor:
        flow = angles[a] - angles[b]
        out = torch.zeros_like(angles).index_add(0, a, flow).index_add(0, b, -flow)
        return out + 1e-2 * angles - power

    def refused(*given: object, **options: object) -> None:
        raise AssertionError("factors that fill, where a few dozen products do")

    monkeypatch.setattr("implicitkit.linear.factors.ordering.superlu", refused)
    monkeypatch.setattr("implicitkit.linear.factors.sparse_factors.sla.splu", refused)
    given = power.requires_grad_()
    solution = ik.root(balance, torch.zeros(n, dtype=torch.float64), (given,))
    (found,) = torch.autograd.grad(solution.value.sum(), given)
    assert torch.allclose(
        found, torch.full_like(found, 100.0), rtol=1e-4
    )  # the sum of the angles is that of the powers, x 100
