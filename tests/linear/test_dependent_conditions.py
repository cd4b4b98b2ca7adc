"""Conditions of optimality that depend on each other: assignments, all of the balances of a network."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize as so
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.conditions.least_norm import least_norm
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.sparsity.compression import known_entries

D = torch.float64


def grid_network(side: int) -> sp.csr_matrix:
    """Incidence of a grid, ``(nodes, edges)``: its rows add up to nothing."""
    at = np.arange(side * side).reshape(side, side)
    i, j = np.r_[at[:, :-1].ravel(), at[:-1].ravel()], np.r_[at[:, 1:].ravel(), at[1:].ravel()]
    edge, one = np.arange(len(i)), np.ones(len(i))
    return sp.csr_matrix((np.r_[one, -one], (np.r_[i, j], np.r_[edge, edge])), shape=(side * side, len(i)))


# ------------------------------------------------------------------------------------------------------- least norm
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_least_norm_is_that_of_the_pseudo_inverse(transposed: bool, scale: float) -> None:
    rng = np.random.default_rng(0)
    C = grid_network(9)
    H = sp.diags(rng.uniform(0.5, 2, C.shape[1]))
    units = sp.diags(np.r_[np.ones(C.shape[1]), np.full(C.shape[0], scale)])
    K = sp.csr_matrix(sp.bmat([[H, C.T], [-C, None]]) @ units)
    pattern = sp.csr_matrix(K, dtype=bool)
    blocks = SparseBlocks(known_entries(pattern), K.data[None])
    A = K.T if transposed else K
    blocks = blocks.T if transposed else blocks
    b = A @ rng.standard_normal(A.shape[0])
    x = least_norm(blocks, torch.from_numpy(np.stack([b])))
    assert x is not None
    dense = np.linalg.pinv(A.toarray(), rcond=1e-12) @ b
    np.testing.assert_allclose(x[0].numpy(), dense, rtol=0, atol=1e-9 * np.abs(dense).max())


def test_least_norm_of_what_is_no_block_and_of_nothing() -> None:
    assert least_norm(object(), torch.zeros(1, 3)) is None
    blocks = SparseBlocks(known_entries(sp.identity(3, dtype=bool, format="csr")), np.ones((2, 3)))
    b = torch.tensor([[0.0, 0, 0], [torch.nan, 1, 1]], dtype=D)
    x = least_norm(blocks, b)
    assert x is not None and bool((x[0] == 0).all()) and bool(x[1].isnan().all())


# ------------------------------------------------------------------------------------------------- by the whole library
@pytest.mark.parametrize("balances", ["independent", "all of them"])
def test_flow_in_a_network(balances: str) -> None:
    """One balance too many changes nothing: 4,900 edges, by Newton's method for the conditions of the independent ones."""
    A = grid_network(50)
    nodes, edges = A.shape
    source = np.sin(np.arange(nodes))
    source -= source.mean()
    kept = nodes - 1 if balances == "independent" else nodes
    i, j = (torch.from_numpy(sp.csc_matrix(A.multiply(s) > 0).indices.astype(np.int64)) for s in (1, -1))

    def balance(f: Tensor, c: Tensor) -> Tensor:
        return (torch.zeros(nodes, dtype=D).index_add(0, i, f).index_add(0, j, -f) - torch.from_numpy(source))[:kept]

    def cost(f: Tensor, c: Tensor) -> Tensor:
        return (c * (f.square() / 2 + f**4 / 4)).sum()

    c = torch.linspace(0.5, 1.5, edges, dtype=D, requires_grad=True)
    f = ik.argmin(cost, torch.zeros(edges, dtype=D), (c,), constraints=[ik.Equality(balance)]).value
    weights = torch.cos(torch.arange(edges, dtype=D))
    (slope,) = torch.autograd.grad((weights * f).sum(), c)
    B, w, g = A[:-1], np.zeros(edges + nodes - 1), c.detach().numpy()
    for _ in range(12):
        z, y = w[:edges], w[edges:]
        out = np.r_[g * (z + z**3) + B.T @ y, B @ z - source[:-1]]
        lu = sla.splu(sp.bmat([[sp.diags(g * (1 + 3 * z**2)), B.T], [B, None]], format="csc"))
        w = w - lu.solve(out)
    u = lu.solve(np.r_[weights.numpy(), np.zeros(nodes - 1)])[:edges]
    np.testing.assert_allclose(f.detach().numpy(), w[:edges], rtol=0, atol=1e-9)
    np.testing.assert_allclose(slope.numpy(), -(w[:edges] + w[:edges] ** 3) * u, rtol=0, atol=1e-8)


def transport(k: int, weight: float, c: Tensor) -> Tensor:
    """Uniform masses, so that vertices of the program are degenerate: ``(k, k)``."""
    one, ones = sp.identity(k), np.ones((1, k))
    A = sp.csr_matrix(sp.vstack([sp.kron(one, ones), sp.kron(ones, one)]))[:-1]
    b = torch.full((2 * k - 1,), 1 / k, dtype=D)
    P = weight * sp.identity(k * k, format="csr") if weight else None
    G = -sp.identity(k * k, format="csr")
    return ik.solve(ik.QuadraticProgram(P, c, A, b, G, torch.zeros(k * k, dtype=D))).value


def test_an_assignment_is_the_one_of_the_hungarian_method() -> None:
    """2,279 conditions, of which more hold than there are unknowns."""
    k = 34
    cost = torch.rand(k * k, generator=torch.Generator().manual_seed(0), dtype=D)
    z = transport(k, 0.0, cost).view(k, k)
    rows, columns = so.linear_sum_assignment(cost.view(k, k).numpy())
    expected = torch.zeros(k, k, dtype=D)
    expected[rows, columns] = 1 / k
    assert torch.allclose(z, expected, rtol=0, atol=1e-10)


def test_the_derivative_of_a_transport_with_uniform_masses() -> None:
    k = 34
    generator = torch.Generator().manual_seed(1)
    cost = torch.rand(k * k, generator=generator, dtype=D).requires_grad_()
    weights = torch.randn(k * k, generator=generator, dtype=D)
    way = torch.randn(k * k, generator=generator, dtype=D)
    (slope,) = torch.autograd.grad((weights * transport(k, 0.05, cost)).sum(), cost)
    step = 1e-6
    ends = [(weights * transport(k, 0.05, cost.detach() + s * step * way)).sum() for s in (1, -1)]
    change = (ends[0] - ends[1]) / (2 * step)
    assert torch.allclose((slope * way).sum(), change, rtol=1e-6)


# ------------------------------------------------------------------------------------------------- pivots elsewhere
def _weak(n: int) -> sp.csr_matrix:
    """A symmetric pattern without order whose diagonal is no pivot."""
    R = sp.random(n, n, 2 / n, random_state=np.random.default_rng(1))
    swap = sp.csr_matrix(np.eye(n)[:, np.arange(n) ^ 1])
    return sp.csr_matrix(R - R.T + 3 * swap + 1e-15 * sp.identity(n))


@pytest.mark.parametrize("kind", ["regular", "needs pivots", "singular"])
def test_factors_with_pivots_from_the_diagonal_alone(kind: str) -> None:
    """No more is spent on a matrix that may be singular; one that is not is solved all the same."""
    n = 240
    A = _weak(n)
    if kind == "regular":
        A = sp.csr_matrix(A + 9 * sp.identity(n))
    if kind == "singular":
        A = sp.csr_matrix(A.multiply(np.arange(n)[:, None] != 7).multiply(np.arange(n) != 7))
    pattern = sp.csr_matrix(abs(A) + abs(A.T) + sp.identity(n)) > 0
    pattern.sort_indices()
    blocks = SparseBlocks(known_entries(pattern), np.asarray(A[pattern.nonzero()]).reshape(1, -1))
    easy = blocks.by_diagonal()
    assert bool(easy.factor.ok.all()) == (kind == "regular")
    assert bool(blocks.factor.ok.all()) == (kind != "singular")
    assert (blocks.factor is easy.factor) == (kind == "regular")
    if kind != "singular":
        b = torch.ones(1, n, dtype=D)
        torch.testing.assert_close(blocks.solve(b)[0], torch.linalg.solve(torch.from_numpy(A.toarray()), b[0]))


# ------------------------------------------------------------------------------------------------------ total variation
def variation(side: int) -> sp.csr_matrix:
    line = sp.diags([-1.0, 1.0], [0, 1], shape=(side - 1, side))
    return sp.csr_matrix(sp.vstack([sp.kron(sp.identity(side), line), sp.kron(line, sp.identity(side))]))


def smoothed(y: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """``u`` that minimises ``|u - y|^2 / 2 + weight |Du|_1`` on a square, as a quadratic program with ``-t <= Du <= t``, and
    the multipliers.  In flat parts differences around every small square depend on each other, and no curvature holds
    ``t``."""
    D1 = variation(round(len(y) ** 0.5))
    k, n = D1.shape
    P = sp.block_diag([sp.identity(n), sp.csr_matrix((k, k))], format="csr")
    G = sp.bmat([[D1, -sp.identity(k)], [-D1, -sp.identity(k)]], format="csr")
    q = torch.cat([-y, torch.full((k,), weight, dtype=D)])
    solution = ik.solve(ik.QuadraticProgram(P, q, G=G, h=torch.zeros(2 * k, dtype=D)))
    lam = solution.multipliers.inequality
    return solution.value[:n], lam[:k] - lam[k:]


def test_total_variation_of_a_picture() -> None:
    side, weight = 26, 0.1
    generator = torch.Generator().manual_seed(0)
    y = torch.zeros(side, side, dtype=D)
    y[7:15, 10:20] = 1
    y = (y + 0.1 * torch.randn(side, side, generator=generator, dtype=D)).reshape(-1).requires_grad_()
    u, p = smoothed(y, weight)
    A, at, force = variation(side), u.detach().numpy(), p.detach().numpy()
    assert np.abs(force).max() <= weight * (1 + 1e-9)
    np.testing.assert_allclose(at, y.detach().numpy() - A.T @ force, rtol=0, atol=1e-9)  # stationary, so that ...
    gap = weight * np.abs(A @ at).sum() - force @ (A @ at)  # ... this is the distance from the dual bound
    assert abs(gap) < 1e-8 and (np.abs(A @ at) < 1e-9).mean() > 0.5
    weights = torch.cos(torch.arange(side * side, dtype=D))
    (slope,) = torch.autograd.grad((weights * u).sum(), y)
    way = torch.randn(side * side, generator=generator, dtype=D)
    step = 1e-7
    ends = [(weights * smoothed(y.detach() + s * step * way, weight)[0]).sum() for s in (1, -1)]
    assert torch.allclose((slope * way).sum(), (ends[0] - ends[1]) / (2 * step), rtol=1e-5)


def test_dependent_rows_on_an_ill_conditioned_chain() -> None:
    """1,200 unknowns, condition 7e6, held at one end: ten constraints too many, and a derivative all the same."""
    n = 1200
    x = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=D).requires_grad_()

    def objective(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * (z.diff() ** 2).sum() + 0.5e-3 * z[0] ** 2 - x @ z

    def rows(z: Tensor, x: Tensor) -> Tensor:
        apart = z[::3].diff()
        return torch.cat([apart - 0.1, apart[::2][:10] + apart[1::2][:10] - 0.2])

    found = ik.argmin(objective, torch.zeros(n, dtype=D), (x,), constraints=[ik.Equality(rows)])
    weights = torch.linspace(0, 1, n, dtype=D)
    slope = torch.autograd.grad(found.value @ weights, x)[0]
    zero = torch.zeros(n, dtype=D)
    H, C = torch.func.hessian(objective)(zero, x.detach()), torch.func.jacrev(rows)(zero, x.detach())
    K = torch.cat([torch.cat([H, C.T], 1), torch.cat([C, C.new_zeros(len(C), len(C))], 1)])
    inverse = torch.linalg.pinv(K, hermitian=True)[:n]
    true = inverse @ torch.cat([x.detach(), -rows(zero, x.detach())])
    torch.testing.assert_close(found.value.detach(), true, rtol=0, atol=1e-7 * float(true.abs().max()))
    expected = inverse[:, :n] @ weights
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-7 * float(expected.abs().max()))
