"""An equation in which all unknowns are added up (a balance, a mean, a norm) costs as much as a row of a border does: pivots
from the diagonal keep the factors sparse, and what is left without it is known to have layers, or a band."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch

import implicitkit as ik
from implicitkit.linear.factors import ordering
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.sparse_factors import SparseFactor


def _exchange(n: int, reach: int) -> sp.csr_matrix:
    """``P' - I`` of a Markov chain on a ring: every state goes to the next, and to three of those within reach."""
    rng, i = np.random.default_rng(0), np.repeat(np.arange(n), 4)
    j = (i + np.where(np.arange(4 * n) % 4 == 0, 1, rng.integers(-reach, reach + 1, 4 * n))) % n
    P = sp.csr_matrix((rng.uniform(0.1, 1, 4 * n), (j, i)), shape=(n, n))
    return sp.csr_matrix(P @ sp.diags_array(1 / np.asarray(P.sum(0)).reshape(-1)) - sp.identity(n))


def _grid(m: int) -> sp.csr_matrix:
    """Upwind transport on ``m x m`` points with walls: rows add up to zero, as columns do not."""
    D = sp.diags_array([-2.0 * np.ones(m), 1.5 * np.ones(m - 1), 0.5 * np.ones(m - 1)], offsets=[0, -1, 1]).tolil()
    D[0, 0], D[-1, -1] = -0.5, -1.5
    return sp.csr_matrix(sp.kronsum(D, D))


def _with_row(A: sp.csr_matrix, places: list[int]) -> sp.csr_matrix:
    """Sums of all unknowns, with weights that differ, in these rows."""
    A, rng = sp.lil_matrix(A), np.random.default_rng(1)
    for k in places:
        A[k] = rng.uniform(0.5, 1, A.shape[1])
    found = sp.csr_matrix(A)
    found.sort_indices()
    return found


def _shifted_mean(n: int) -> sp.csr_matrix:
    """A cyclic shift, of which no entry but those of the sum stands on the diagonal."""
    return sp.csr_matrix((np.ones(n), (np.arange(n), (np.arange(n) + 1) % n)), shape=(n, n))


MATRICES = {
    "chain, last": lambda: _with_row(_exchange(1500, 30), [1499]),
    "chain, first": lambda: _with_row(_exchange(1500, 30), [0]),
    "grid": lambda: _with_row(_grid(40), [800]),
    "two sums": lambda: _with_row(_exchange(1500, 30) - 0.1 * sp.identity(1500), [3, 700]),
    "chain, both ways": lambda: sp.csr_matrix(_with_row(_exchange(1500, 30), [1499]).maximum(0).T),
}


@pytest.mark.parametrize("name", ["chain, last", "chain, first", "grid", "two sums"])
def test_factors_with_sums_are_as_sparse_as_those_without(name: str) -> None:
    A = MATRICES[name]()
    n, pattern = A.shape[0], A.astype(bool)
    analysis = analyse(pattern)
    factor = SparseFactor(analysis, A.data[None])
    assert bool(factor.ok.all())
    assert analysis.ordering.fill < 80 * n, "COLAMD and partial pivoting: 0.2 to 0.7 n^2"
    b = torch.from_numpy(np.random.default_rng(2).standard_normal((1, n)))
    for transpose in (False, True):
        x = factor.solve(b, transpose).numpy()[0]
        left = np.abs((A.T if transpose else A) @ x - b.numpy()[0]).max()
        assert left <= 1e-10 * abs(A).sum(1).max() * np.abs(x).max()


@pytest.mark.parametrize("name", MATRICES)
def test_long_rows_hide_no_layers(name: str) -> None:
    A = MATRICES[name]()
    analysis = analyse(A.astype(bool))
    assert analysis.band is None
    assert 0 < analysis.reach < 150, "that of what is inside"
    assert analysis.likely_fill == 0, "its price is known by its layers"


@pytest.mark.parametrize("name", MATRICES)
def test_no_place_is_looked_for_for_long_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come last; minimum degree of a matrix with one takes the square of ``n`` (10 s for 100,000 unknowns)."""
    A, real, ordered = MATRICES[name](), ordering.superlu, []

    def noted(A: sp.csc_matrix, threshold: float, **options: str) -> object:
        if options.get("permc_spec") != "NATURAL":
            ordered.append(int(max(np.diff(A.indptr).max(), np.bincount(A.indices).max())))
        return real(A, threshold, **options)

    monkeypatch.setattr(ordering, "superlu", noted)
    SparseFactor(analyse(A.astype(bool)), A.data[None])
    assert all(longest < 40 for longest in ordered)


def test_pivots_are_taken_elsewhere_where_the_diagonal_has_none() -> None:
    n = 400
    A = _with_row(_shifted_mean(n), [n - 1])
    factor = SparseFactor(analyse(A.astype(bool)), A.data[None])
    assert bool(factor.ok.all())
    b = np.random.default_rng(2).standard_normal(n)
    x = factor.solve(torch.from_numpy(b[None])).numpy()[0]
    np.testing.assert_allclose(A @ x, b, atol=1e-9)


def test_a_pattern_with_many_long_rows_is_analysed_as_it_stands() -> None:
    n, rng = 20_000, np.random.default_rng(0)
    sums = sp.csr_matrix((np.ones(60 * 4200), (np.repeat(np.arange(60), 4200), rng.integers(0, n, 60 * 4200))), (n, n))
    A = sp.csr_matrix(_exchange(n, 5) + sums)
    A.sort_indices()
    assert analyse(A.astype(bool)).reach > 2000


def test_the_stationary_distribution_of_a_chain() -> None:
    """By defaults, with its derivative, against the eigenvector and its perturbation."""
    n = 600
    A = _exchange(n, 12).tocoo()
    keep = A.row != A.col
    i, j, w = torch.from_numpy(A.col[keep]).long(), torch.from_numpy(A.row[keep]).long(), torch.from_numpy(A.data[keep])

    def balance(p: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        flow = w * p[i]
        change = torch.zeros_like(p).index_add(0, j, flow).index_add(0, i, -flow)
        return torch.cat([change[:-1], (p.sum() - 1)[None]])

    weights = torch.cos(torch.arange(n, dtype=torch.float64))
    p0 = torch.full((n,), 1 / n, dtype=torch.float64)
    leaf = w.clone().requires_grad_()
    p = ik.root(balance, p0, (leaf,)).value
    (found,) = torch.autograd.grad((weights * p).sum(), leaf)
    M = np.zeros((n, n))
    np.add.at(M, (j.numpy(), i.numpy()), w.numpy())
    M -= np.diag(M.sum(0))
    M[-1] = 1
    right = np.linalg.solve(M, np.eye(n)[-1])
    np.testing.assert_allclose(p.detach().numpy(), right, rtol=1e-9)
    u = np.linalg.solve(M.T, weights.numpy())
    u[-1] = 0
    expected = -(u[j] - u[i]) * right[i]
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-8 * np.abs(expected).max())
