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
from implicitkit.foundation import autodiff
from implicitkit.linear.conditions import kkt, sparse_saddle
from implicitkit.linear.conditions.least_norm import least_norm
from implicitkit.linear.conditions.sparse_saddle import SparseSaddle
from implicitkit.linear.factors import ordering
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


def test_what_solutions_of_least_norm_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one pattern the system is laid out once, and its order is looked for once."""
    C = grid_network(5)
    pattern = sp.csr_matrix(sp.bmat([[sp.identity(C.shape[1]), C.T], [-C, None]]), dtype=bool)
    ready, rng, orders = known_entries(pattern), np.random.default_rng(0), []
    inner = ordering.superlu
    monkeypatch.setattr(ordering, "superlu", lambda *a, **k: orders.append(k.get("permc_spec")) or inner(*a, **k))
    for k in range(3):
        blocks = SparseBlocks(ready, rng.uniform(1, 2, (1, pattern.nnz)))
        b = rng.standard_normal(pattern.shape[0])
        x = least_norm(blocks, torch.from_numpy(b[None]))
        assert x is not None
        np.testing.assert_allclose(ready.matrix(blocks.values[0]) @ x[0].numpy(), b, atol=1e-8)
        if k == 0:
            monkeypatch.delattr(sp, "bmat")
    assert orders == [None, "NATURAL", "NATURAL"]


def test_least_norm_of_what_is_no_block_and_of_nothing() -> None:
    assert least_norm(object(), torch.zeros(1, 3)) is None
    blocks = SparseBlocks(known_entries(sp.identity(3, dtype=bool, format="csr")), np.ones((2, 3)))
    b = torch.tensor([[0.0, 0, 0], [torch.nan, 1, 1]], dtype=D)
    x = least_norm(blocks, b)
    assert x is not None and bool((x[0] == 0).all()) and bool(x[1].isnan().all())


# ------------------------------------------------------------------------------------------------- by the whole library
@pytest.mark.parametrize("balances", ["independent", "all of them"])
def test_flow_in_a_network(balances: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One balance too many changes nothing: 4,900 edges, by Newton's method for the conditions of the independent ones.  Its
    factors are known to be singular, and no others of the same matrices are asked."""
    asked, inner, products, grad = [], kkt.solve_with, [], autodiff._grad
    monkeypatch.setattr(kkt, "solve_with", lambda *a, **k: asked.append(1) or inner(*a, **k))
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
    monkeypatch.setattr(autodiff, "_grad", lambda *a: products.append(1) or grad(*a))
    (slope,) = torch.autograd.grad((weights * f).sum(), c)
    assert len(products) == 2 + (balances == "all of them")  # the third is to know the entries again
    assert len(asked) == (balances == "independent")
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
    H, C = torch.func.hessian(objective)(zero, x.detach()), torch.func.jacrev(rows)(zero, x.detach())[:-10]
    K = torch.cat([torch.cat([H, C.T], 1), torch.cat([C, C.new_zeros(len(C), len(C))], 1)])
    inverse = torch.linalg.inv(K)[:n]
    true = inverse @ torch.cat([x.detach(), -rows(zero, x.detach())[:-10]])
    torch.testing.assert_close(found.value.detach(), true, rtol=0, atol=1e-7 * float(true.abs().max()))
    expected = inverse[:, :n] @ weights
    torch.testing.assert_close(slope, expected, rtol=0, atol=1e-7 * float(expected.abs().max()))


# ---------------------------------------------------------------------------------------------------------------------
# Conditions of optimality of control problems: most rows of ``H`` are zero, and the pivots of ``K`` are tiny.
def heat(points: int, times: int, price: float) -> tuple[sp.csc_matrix, int]:
    """``K`` of heat in a rod, controlled at both ends, that is to have a temperature at the last time; how many unknowns.

    ``y' = y_xx``, implicit Euler; ``h |y(1) - d|^2 / 2 + price dt |q|^2 / 2``.
    """
    h, dt = 1 / (points + 1), 1 / times
    T = sp.diags([1.0, -2.0, 1.0], [-1, 0, 1], shape=(points, points)) * dt / h**2
    before = sp.diags([1.0], [-1], shape=(times, times))
    ends = sp.csr_matrix((np.full(2, -dt / h**2), ([0, points - 1], [0, 1])), shape=(points, 2))
    states = sp.kron(sp.eye(times), sp.eye(points) - T) - sp.kron(before, sp.eye(points))
    C = sp.hstack([states, sp.kron(sp.eye(times), ends)])
    n = points * times
    H = np.zeros(n + 2 * times)
    H[n - points : n], H[n:] = h, price * dt
    return with_diagonal(sp.block_array([[sp.diags(H), C.T], [C, None]])), len(H)


def with_diagonal(K: sp.spmatrix) -> sp.csc_matrix:
    """The same with every entry of the diagonal in its pattern."""
    K = sp.coo_matrix(K)
    i = np.arange(K.shape[0])
    rows, columns = np.concatenate([K.row, i]), np.concatenate([K.col, i])
    return sp.csc_matrix((np.concatenate([K.data, np.zeros(len(i))]), (rows, columns)), shape=K.shape)


PRICES = {"dear": 1e-1, "cheap": 1e-3, "all but free": 1e-5}


@pytest.mark.parametrize("price", PRICES.values(), ids=PRICES)
def test_states_without_curvature(price: float) -> None:
    """The signs are those of ``K``, though its pivots are as small as what regularises them; so are solutions, though
    refinement with these factors does not get there."""
    K, n = heat(40, 40, price)
    saddle = SparseSaddle(K, n)
    assert saddle.negative == K.shape[0] - n
    want = np.random.default_rng(0).standard_normal(K.shape[0])
    x, error = saddle.solve(K @ want)
    assert error < 1e-12
    assert np.abs(K @ (x - want)).max() < 1e-12 * (abs(K) @ np.abs(want)).max()
    assert saddle.regular
    once = saddle.once(K @ want)
    once = once + saddle.once(K @ (want - once))
    assert np.abs(K @ (once - want)).max() < 1e-11 * (abs(K) @ np.abs(want)).max()


@pytest.mark.parametrize("n", [40, 80])
def test_a_beam_needs_no_other_pivots(n: int) -> None:
    """What regularises leaves some thousandths, or hundredths, of a solution, which sweeps of refinement find sooner than
    pivots of any row, which fill."""
    D2 = sp.diags([1.0, -2.0, 1.0], [0, 1, 2], shape=(n - 2, n))
    K = sp.csc_matrix(D2.T @ D2 + sp.diags(np.r_[1.0, 1.0, np.zeros(n - 2)]))
    saddle, want = SparseSaddle(K, n), np.random.default_rng(0).standard_normal(n).cumsum()
    first = saddle.lu.solve((K @ want) * saddle.scale) * saddle.scale
    assert np.abs(first - want).max() > 1e-3 * np.abs(want).max()
    assert saddle.regular and not saddle.hard and "_pivoted" not in vars(saddle)
    assert np.abs(saddle.once(K @ want) - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("off", [0.0, 0.1, 0.3])
def test_a_dominant_diagonal_says_the_signs_itself(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that depend on each other, too, where pivots are rounding; a Hessian whose diagonal is not dominant is asked,
    and so is one that is negative."""
    rng, n, asked, negative = np.random.default_rng(0), 60, [], sparse_saddle._negative
    monkeypatch.setattr(sparse_saddle, "_negative", lambda lu: asked.append(1) or negative(lu))
    H = sp.diags([off, off, 1.0, off, off], [-2, -1, 0, 1, 2], shape=(n, n)) if off else sp.diags(np.ones(n))
    C = sp.random(20, n, 0.1, random_state=rng) + sp.eye(20, n)
    for rows in (C, sp.vstack([C, 2 * C.tocsr()[:3]])):
        K = with_diagonal(sp.block_array([[H, rows.T], [rows, None]]))
        found = SparseSaddle(K, n).negative
        assert bool(asked) == (off == 0.3)
        if not asked:
            assert found == rows.shape[0]
        signs = np.linalg.eigvalsh(K.toarray() + np.diag(np.r_[np.zeros(n), np.full(rows.shape[0], -1e-9)]))
        assert found == int((signs < 0).sum())
    asked.clear()
    assert SparseSaddle(with_diagonal(sp.block_array([[-H, C.T], [C, None]])), n).negative > 20 and asked


def test_curvature_that_is_negative_is_seen() -> None:
    """A control that pays: one direction along the constraints goes down, and it is no rounding."""
    K, n = heat(40, 40, 1e-3)
    K = K.tolil()
    K[n - 1, n - 1] = -1.0
    assert SparseSaddle(with_diagonal(K), n).negative > K.shape[0] - n


def test_constraints_that_depend_are_singular() -> None:
    """A row that is the sum of others, but for rounding: there is no inverse, whatever refinement and other pivots say."""
    K, n = heat(20, 20, 1e-3)
    H, C = K[:n, :n], sp.vstack([K[n:, :n], sp.csc_matrix(K[n:, :n].sum(0) / 7)])
    saddle = SparseSaddle(with_diagonal(sp.block_array([[H, C.T], [C, None]])), n)
    rhs = np.concatenate([np.ones(n), np.zeros(C.shape[0])])
    x, error = saddle.solve(rhs)
    assert error < 1e-6
    assert np.abs(x).max() < 1e6
    assert not saddle.regular
    rhs[-1] = 1.0  # and the others ask for zero
    x, _ = SparseSaddle(saddle.K, n).solve(rhs)
    assert np.abs(x).max() < 1e13
    assert not saddle.hard


def test_what_only_rounding_keeps_from_being_singular_is_singular() -> None:
    """Two unknowns beside the rod, held by two rows that are one but for 1e-14, of which the right-hand side asks nothing:
    the solution is right, by pivots of any row, and there is no inverse."""
    K, n = heat(40, 40, 1e-5)
    H, C = (
        sp.block_diag([K[:n, :n], sp.eye(2)]),
        sp.block_diag([K[n:, :n], sp.csc_matrix([[1.0, 1.0], [1.0, 1 + 1e-14]])]),
    )
    K = with_diagonal(sp.block_array([[H, C.T], [C, None]]))
    saddle, rhs = SparseSaddle(K, n + 2), np.zeros(K.shape[0])
    rhs[:n] = np.random.default_rng(0).standard_normal(n)
    x, error = saddle.solve(rhs)
    assert error < 1e-12
    assert np.abs(K @ x - rhs).max() < 1e-12 * (abs(K) @ np.abs(x)).max()
    assert saddle.hard
    assert not saddle.regular


def test_what_is_in_the_null_space_is_left_alone() -> None:
    """Flow in a network: the potentials are given but for one number, and demands whose sum is not zero have no flow.
    Pivots of any row would find none either, and are not tried; those that have one are met without them."""
    rng = np.random.default_rng(0)
    nodes, edges = 60, 200
    tail, head = rng.integers(0, nodes, edges), rng.integers(0, nodes, edges)
    ways = np.arange(edges)
    C = sp.coo_matrix(
        (np.r_[np.ones(edges), -np.ones(edges)], (np.r_[tail, head], np.r_[ways, ways])), shape=(nodes, edges)
    )
    K = with_diagonal(sp.block_array([[sp.diags(rng.uniform(0.5, 2, edges)), C.T], [C, None]]))
    saddle = SparseSaddle(K, edges)
    rhs = np.r_[np.zeros(edges), rng.standard_normal(nodes)]
    saddle.solve(rhs)
    assert not saddle.hard and "_pivoted" not in vars(saddle)
    rhs[edges:] -= rhs[edges:].mean()
    x, error = saddle.solve(rhs)
    assert error < 1e-12
    assert np.abs(C @ x[:edges] - rhs[edges:]).max() < 1e-12
    assert "_pivoted" not in vars(saddle)


@pytest.mark.parametrize("size", [(20, 40), (50, 40)], ids=str)
def test_a_heated_rod_by_defaults(size: tuple[int, int]) -> None:
    """A quadratic program with equations only is one step, of any size and condition; so is its derivative."""
    points, times = size
    h, dt, price = 1 / (points + 1), 1 / times, 1e-3

    def objective(z: dict[str, Tensor], d: Tensor) -> Tensor:
        return 0.5 * h * (z["y"][-1] - d).square().sum() + 0.5 * price * dt * z["q"].square().sum()

    def heated(z: dict[str, Tensor], d: Tensor) -> Tensor:
        y, q = z["y"], z["q"]
        before = torch.cat([torch.zeros(1, points, dtype=D), y[:-1]])
        across = torch.cat([q[:, :1], y, q[:, 1:]], 1)
        return y - before - dt / h**2 * (across[:, :-2] - 2 * y + across[:, 2:])

    d = torch.sin(3 * torch.linspace(h, 1 - h, points, dtype=D)).requires_grad_()
    start = {"y": torch.zeros(times, points, dtype=D), "q": torch.zeros(times, 2, dtype=D)}
    solution = ik.argmin(objective, start, d, constraints=ik.Equality(heated))
    assert (
        solution.steps <= 2
    )  # the second, and questions about rounding, where the first leaves just more than is asked
    assert solution.evaluations <= 100
    (slope,) = torch.autograd.grad(solution.value["q"].sum(), d)
    K, n = heat(points, times, price)
    lu, m = sp.linalg.splu(K), points * times
    rhs = np.zeros(K.shape[0])
    rhs[m - points : m] = h * d.detach().numpy()
    want = lu.solve(rhs)
    want += lu.solve(rhs - K @ want)
    pulled = np.zeros(K.shape[0])
    pulled[m:n] = 1.0
    back = lu.solve(pulled)
    back += lu.solve(pulled - K @ back)
    np.testing.assert_allclose(solution.value["q"].detach().numpy().ravel(), want[m:n], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(slope.numpy(), h * back[m - points : m], rtol=1e-9, atol=1e-9)
