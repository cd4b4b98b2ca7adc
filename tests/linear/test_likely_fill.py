"""What factors of graphs without layers fill is known, about, before they are made, and where that is much they are not."""

from __future__ import annotations

import time

import numpy as np
import pytest
import scipy.optimize as so
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors import gram, sparse_blocks
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.fill import likely_fill
from implicitkit.linear.factors.gram import Gram, Orders
from implicitkit.linear.factors.ordering import superlu
from implicitkit.linear.factors.sparse_factors import SparseFactor, _Full
from implicitkit.linear.price import price_of


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


# ---------------------------------------------------------------------------------------------------------------------
# Derivatives of fixed points on a graph without layers: products for as long as factors cost more.
D = torch.float64


def test_a_slow_map_on_a_random_graph_has_no_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 unknowns whose factors fill: 120 products are not enough, and factors took seconds every time."""
    n, rng, generator = 2500, np.random.default_rng(0), torch.Generator().manual_seed(0)
    i, j = (torch.from_numpy(rng.integers(0, n, 4 * n)) for _ in range(2))
    degree = torch.ones(n, dtype=D).index_add(0, i, torch.ones(4 * n, dtype=D))

    def layer(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.93 * (z.index_add(0, i, z[j])) / degree[:, None] + x)

    def never(*arguments: object) -> object:
        raise AssertionError("factors")

    x = 0.05 * torch.randn(n, 4, generator=generator, dtype=D)
    weights = torch.cos(torch.arange(4 * n, dtype=D)).view(n, 4)

    def value(x: Tensor) -> tuple[Tensor, ik.Solution]:
        solution = ik.fixed_point(layer, torch.zeros(n, 4, dtype=D), (x,), rtol=1e-12, atol=0.0)
        return (weights * solution.value).sum(), solution

    leaf = x.clone().requires_grad_()
    torch.autograd.grad(value(leaf)[0], leaf)  # after which it is known what factors fill
    monkeypatch.setattr(sparse_blocks, "factors", never)
    loss, solution = value(leaf)
    (slope,) = torch.autograd.grad(loss, leaf)
    assert int(solution.backward.steps) > 120 and bool(solution.backward.converged)
    way, step = torch.randn(n, 4, generator=generator, dtype=D), 1e-5
    change = (value(x + step * way)[0] - value(x - step * way)[0]) / (2 * step)
    assert torch.allclose((slope * way).sum(), change, rtol=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Sparse matrices whose factors are hardly sparse: once that is known they are factored as dense ones.
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
    orders.last.forget()  # the very same matrix has the factors that it had
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
    m = 30  # of 20 they are a band
    line, orders = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(m, m)), Orders()
    Gram(sp.csc_matrix(sp.kronsum(line, line)), np.zeros((0, m * m)), np.zeros(0)).factor(0.1, orders)
    assert orders.alone.fill > 0 and not orders.alone.fills(m * m)


def test_normal_equations_in_a_band() -> None:
    """By Cholesky's method, whatever their numbering, if they are definite and their entries stand where they did."""
    n, rng = 300, np.random.default_rng(0)
    D2 = sp.diags([1.0, -2.0, 1.0], [0, 1, 2], shape=(n - 2, n))
    mixed, b, orders, others = rng.permutation(n), rng.standard_normal((n, 2)), Orders(), Orders()
    N_ = sp.csc_matrix(D2.T @ D2 + 9 * sp.identity(n))
    turned, moved = sp.csc_matrix(N_.tocsr()[mixed][:, mixed]), N_.tolil()
    moved[0, 1] = moved[1, 0] = 0
    moved[0, 3] = moved[3, 0] = 0.3
    cases = [(turned, 0.1, True, orders), (turned, -10.0, False, orders), (turned, 0.2, True, orders),
             (N_, 0.0, True, others), (sp.csc_matrix(moved), 0.0, False, others)]  # fmt: skip
    for matrix, shift, band, orders in cases:
        matrix.sort_indices()
        factors = Gram(matrix.copy(), np.zeros((0, n)), np.zeros(0)).factor(shift, orders)
        assert (getattr(factors, "negative", 1) == 0) == band
        for rhs in (b, b[:, 0]):
            expected = np.linalg.solve(matrix.toarray() + shift * np.eye(n), rhs)
            np.testing.assert_allclose(factors.solve(rhs), expected, rtol=1e-9, atol=1e-9)
    assert others.band(cases[-1][0]) is None


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
