"""Large systems whose matrix is sparse but for a few numbers that all unknowns share (a mean, a norm, a softmax)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.linear.factors import gram
from implicitkit.linear.factors.low_rank_blocks import low_rank_blocks
from implicitkit.solver.steps.factored import Jacobian
from implicitkit.solver.steps.normal_equations import normal_equations_of
from implicitkit.sparsity import patterns
from implicitkit.sparsity.low_rank import Bordered
from implicitkit.sparsity.patterns import Sparsity

D = torch.float64
N = 900


def chain(z: Tensor) -> Tensor:
    """Second differences along the last dimension."""
    y = pad(z, (1, 1))
    return 2 * z - y[..., 2:] - y[..., :-2]


def objective(z: Tensor) -> Tensor:
    return (z**4).sum() + len(z) * (z.mean() - 1) ** 2 + 3 * torch.logsumexp(z, 0) + 0.5 * (z * chain(z)).sum()


W = torch.randn(3, N, generator=torch.Generator().manual_seed(0), dtype=D) / N**0.5
MAPS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the rank
    "mean": (lambda z: chain(z) + torch.exp(z) / torch.exp(z).mean(1, keepdim=True), 1),
    "softmax": (lambda z: chain(z) + 10 * torch.softmax(z, 1), 1),
    "log_softmax": (lambda z: chain(z) * z + torch.log_softmax(z, 1), 1),
    "variance and mean": (lambda z: chain(z) * (1 + z.var(1, keepdim=True)).sqrt() + z.mean(1, keepdim=True) * z**2, 2),
    "norm": (lambda z: z / torch.linalg.vector_norm(z, dim=1, keepdim=True) + chain(z), 1),
    "matrix": (lambda z: chain(z) + torch.tanh(z @ W.T) @ W, 3),
    "gradient": (torch.func.vmap(torch.func.grad(objective)), 2),
}


def found(name: str, batch: int) -> tuple[Bordered, Tensor, Tensor, object]:
    f, _ = MAPS[name]
    z = torch.randn(batch, N, generator=torch.Generator().manual_seed(1), dtype=D) * 0.3 + 1
    ready = Sparsity(("test", name, batch)).find_bordered(f, z)
    assert ready is not None
    J = torch.func.vmap(torch.func.jacrev(lambda y: f(y[None])[0]))(z)
    entries, error = ready.values(*autodiff.products(*autodiff.recorded(f, z)), batch, z)
    assert error.max() < 1e-12
    return ready, z, J, entries


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MAPS)
def test_entries_come_from_products_alone(name: str, batch: int) -> None:
    """Against the dense Jacobian, entry by entry, and with no more numbers in the border than there are."""
    ready, _, J, entries = found(name, batch)
    for A, U, V, dense in zip(*entries, J.numpy(), strict=True):
        np.testing.assert_allclose(ready.matrix(A).toarray() + U @ V, dense, atol=1e-12 * np.abs(dense).max())
        np.testing.assert_allclose(V @ V.T, np.eye(len(V)), atol=1e-12)
        assert len(V) == MAPS[name][1]
    assert ready.pattern.nnz <= 3 * N


SYMMETRIC: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # objectives of rows, and the rank of their Hessians
    "mean, and a sum of exponentials": (torch.func.vmap(objective), 2),
    "factors": (lambda z: ((1 + z**2) * z).sum(1) + (z @ W.T).cosh().sum(1), 3),
    "a factor less": (lambda z: (z**4).sum(1) - 0.3 * (z @ W.T).square().sum(1), 3),
    "a factor of nothing": (lambda z: (z**4).sum(1) + (z @ W[:2].T).cosh().sum(1) + 0 * (z @ W[2]), 2),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SYMMETRIC)
def test_symmetric_entries_come_from_fewer_products(name: str, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the dense Hessian; both parts symmetric, and no equations for each row of ``U``."""
    monkeypatch.delattr(Bordered, "_parts")
    f, rank = SYMMETRIC[name]
    gradient = lambda y: torch.func.grad(lambda z: f(z).sum())(y)  # noqa: E731
    z = torch.randn(batch, N, generator=torch.Generator().manual_seed(1), dtype=D) * 0.3 + 1
    ready = Sparsity(("symmetric", name, batch)).find_bordered(gradient, z)
    assert ready is not None
    product = autodiff.products(*autodiff.recorded(gradient, z))[1]
    entries, error = ready.values(product, product, batch, z)
    assert error.max() < 1e-12
    J = torch.func.vmap(torch.func.jacrev(lambda y: gradient(y[None])[0]))(z)
    for A, U, V, dense in zip(*entries, J.numpy(), strict=True):
        np.testing.assert_allclose(ready.matrix(A).toarray() + U @ V, dense, atol=1e-12 * np.abs(dense).max())
        np.testing.assert_allclose(U @ V, (U @ V).T, atol=1e-13 * np.abs(dense).max())
        assert len(V) == rank


#: What becomes of a diagonal and a low-rank part that were seen before, and are all entries looked for anew then?
CHANGES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], bool]] = {
    "nothing": (lambda d, w: (d.clone(), w.clone()), False),
    "an entry": (lambda d, w: (d * (1 + 1e-12 * (torch.arange(N) == 7).to(D)), w), True),
    "a small entry": (lambda d, w: (d * (1 + 1e-9 * (torch.arange(N) == 3).to(D)), w), True),
    "a number in a row": (lambda d, w: (d, w * (1 + 1e-9 * (torch.arange(3 * N).view(3, N) == 5).to(D))), True),
    "fewer digits": (lambda d, w: (d, w), True),
    "not a number": (lambda d, w: (d * torch.nan, w), True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_matrix_that_has_been_seen_is_known_by_one_product(name: str) -> None:
    change, anew = CHANGES[name]
    d = torch.linspace(1, 2, N, dtype=D)
    d[3] = 1e-7  # beside a whole row of larger ones
    f = lambda z: (d * z**2).sum(1) + (z @ W.T).square().sum(1)  # noqa: E731
    gradient = lambda y: torch.func.grad(lambda z: f(z).sum())(y)  # noqa: E731
    z, products = torch.ones(1, N, dtype=D), 0
    ready = Sparsity(("seen", name)).find_bordered(gradient, z)
    assert ready is not None

    def found(d: Tensor, w: Tensor) -> np.ndarray:
        def product(v: Tensor) -> Tensor:
            nonlocal products
            products += 1
            return 2 * d * v + 2 * (v @ w.T) @ w

        entries = ready.values(product, product, 1, z.to(d))[0]
        return ready.matrix(entries.A[0]).toarray() + entries.U[0] @ entries.V[0]

    found(d, W) if name != "fewer digits" else found(d.float(), W.float())
    products, (new_d, new_w) = 0, change(d, W)
    J = found(new_d, new_w)
    assert (products > 1) is anew
    if name == "not a number":
        assert np.isnan(J).any()
        return
    dense = (2 * torch.diag(new_d) + 2 * new_w.T @ new_w).double().numpy()
    np.testing.assert_allclose(J, dense, rtol=1e-12, atol=1e-15)


def test_large_columns_of_a_sample_hide_no_change_of_another() -> None:
    d = torch.linspace(1, 2, N, dtype=D).repeat(2, 1)
    f = lambda z: (d[:1] * z**2).sum(1) + (z @ W.T).square().sum(1)  # noqa: E731
    z = torch.ones(2, N, dtype=D)
    ready = Sparsity("stiff neighbour").find_bordered(torch.func.grad(lambda y: f(y).sum()), z)
    assert ready is not None
    d[1, 5] = 1e20
    for change in (1.0, 2.0):
        d[0, 5] *= change
        product = lambda v: 2 * d * v + 2 * (v @ W.T) @ W  # noqa: E731
        entries = ready.values(product, product, 2, z)[0]
        J = ready.matrix(entries.A[0]).toarray() + entries.U[0] @ entries.V[0]
        np.testing.assert_allclose(J, (2 * torch.diag(d[0]) + 2 * W.T @ W).numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", MAPS)
def test_blocks_with_a_border_are_the_matrix(name: str, transposed: bool) -> None:
    """Product, size, columns, shift and solution against dense ones."""
    ready, _, J, entries = found(name, 2)
    blocks = low_rank_blocks(ready, entries, symmetric=name == "gradient")
    two, three = torch.full((2,), 2.0, dtype=D), torch.full((2,), 3.0, dtype=D)
    shifted, moved = blocks.shifted(two, three), 2 * torch.eye(N, dtype=D) + 3 * J
    if transposed:
        blocks, shifted, J, moved = blocks.T, shifted.T, J.mT, moved.mT
    x = torch.randn(2, N, 2, generator=torch.Generator().manual_seed(2), dtype=D)
    scale = float(J.abs().max())
    torch.testing.assert_close(blocks.product(x), J @ x, rtol=0, atol=1e-11 * scale)
    torch.testing.assert_close(blocks.product(x[..., 0]), (J @ x)[..., 0], rtol=0, atol=1e-11 * scale)
    torch.testing.assert_close(shifted.product(x), moved @ x, rtol=0, atol=1e-11 * scale)
    torch.testing.assert_close(blocks.columns, torch.linalg.vector_norm(J, dim=1), rtol=1e-9, atol=0)
    assert bool((blocks.size(x) >= (J @ x).abs() * (1 - 1e-9) - 1e-12).all())
    torch.testing.assert_close(J @ blocks.solve(x), x, rtol=0, atol=1e-6)
    assert bool(blocks.regular)


def test_a_border_does_not_hide_that_a_matrix_is_singular() -> None:
    """``z - mean z`` has no inverse, ``z + mean z`` has."""
    z = torch.linspace(1, 2, N, dtype=D)[None]
    for sign, regular in ((-1, False), (1, True)):
        f = lambda y, s=sign: y + s * y.mean(1, keepdim=True)  # noqa: E731
        ready = Sparsity(("singular", sign)).find_bordered(f, z)
        assert ready is not None
        entries, _ = ready.values(*autodiff.products(*autodiff.recorded(f, z)), 1, z)
        assert bool(low_rank_blocks(ready, entries, False).factor.ok.all()) is regular


@pytest.mark.parametrize(
    "f", [lambda z: torch.cumsum(z, 1), lambda z: z.sort(1).values.cumprod(1), lambda z: z @ torch.ones(N, N, dtype=D)]
)
def test_what_is_full_is_not_taken_for_a_border(f: Callable[[Tensor], Tensor]) -> None:
    z = torch.linspace(0.9, 1.1, N, dtype=D)[None]
    assert Sparsity(("full", id(f))).find_bordered(f, z) is None


def test_a_pattern_that_does_not_hold_is_told_by_a_product() -> None:
    z = torch.linspace(0, 1, N, dtype=D)[None]
    f, other = MAPS["mean"][0], lambda z: chain(z) + torch.roll(z, 300, 1) * z.mean(1, keepdim=True)
    ready = Sparsity(("wrong",)).find_bordered(f, z)
    assert ready is not None
    assert ready.values(*autodiff.products(*autodiff.recorded(other, z)), 1, z)[1].max() > 1e-3


n = 20_000
SYSTEMS: dict[str, tuple[Callable[..., ik.Solution], Callable[[Tensor, Tensor], Tensor]]] = {
    "root": (ik.root, lambda z, t: 4 * chain(z) + t * torch.exp(z) / torch.exp(z).mean() - 1 + z),
    "argmin": (
        ik.argmin,
        lambda z, t: 0.5 * (z * chain(z)).sum() + (t * z**4 / 4 - z).sum() + n * (z.mean() - 0.2) ** 2,
    ),
    "argmin, negative curvature in the border": (
        ik.argmin,
        lambda z, t: (torch.cosh(z) * t - z).sum() + 0.5 * (z * chain(z)).sum() - 0.2 * n * z.mean() ** 2,
    ),
    "fit, a long row": (
        ik.least_squares,
        lambda z, t: torch.cat(
            [z[1:] - z[:-1] - t[1:] / 100, 0.1 * z[1:] ** 3 - 0.05 * t[1:], 10 * (z.mean() - 3)[None]]
        ),
    ),
    "fit, softmax": (
        ik.least_squares,
        lambda z, t: torch.cat(
            [10 * (z[1:] - z[:-1]), 1e3 * (torch.softmax(z, 0) - t / t.sum()), (z.mean() - 1)[None]]
        ),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in ("fit, softmax", "fit, a long row"))) for n in SYSTEMS]
)
def test_twenty_thousand_unknowns_with_defaults(name: str) -> None:
    """Solved and differentiated, without a dense matrix (3 GB): derivatives against differences."""
    solve, f = SYSTEMS[name]
    t = torch.linspace(1, 2, n, dtype=D, requires_grad=True)
    weights, step, h = torch.linspace(0, 1, n, dtype=D), torch.sin(torch.arange(n, dtype=D)) + 0.5, 1e-5

    def value(theta: Tensor) -> Tensor:
        return (weights * solve(f, torch.ones(n, dtype=D), theta).value).sum()

    (slope,) = torch.autograd.grad(value(t), t)
    with torch.no_grad():
        difference = (value(t + h * step) - value(t - h * step)) / (2 * h)
    torch.testing.assert_close((slope * step).sum(), difference, rtol=1e-5, atol=0)


FITS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the rows of the border
    "long": (lambda y: torch.cat([chain(y) + y**2, 10 * y.mean(1, keepdim=True) ** 2], 1), 1),
    "low rank": (lambda y: torch.cat([chain(y) + y**2, y - torch.exp(y.mean(1, keepdim=True))], 1), 2),
    "one row alone": (
        lambda y: torch.cat([chain(y), 9 * torch.softmax(y, 1), (y.mean(1, keepdim=True) - 3) ** 2], 1),
        4,
    ),
}


def gram_of(name: str, f: Callable[[Tensor], Tensor], z: Tensor) -> gram.Gram:
    sparsity = Sparsity(("gram", name))
    ready = sparsity.find_either(f, z)
    assert ready is not None
    values, error = ready.values(*autodiff.products(*autodiff.recorded(f, z)), 1, z)
    assert error.max() < 1e-12
    if name == "long":
        return gram.of_sparse(ready, values)[0]
    A, U, V = values
    return gram.of_low_rank(ready.matrix(A[0]), U[0], V[0])


@pytest.mark.parametrize("name", FITS)
def test_normal_equations_with_a_border(name: str) -> None:
    """Products, diagonal, scaling and factors of ``R'R``, against dense ones."""
    f, border = FITS[name]
    z = torch.linspace(0.5, 1.5, N, dtype=D)[None]
    made = gram_of(name, f, z)
    assert len(made.W) == border
    assert made.N.nnz <= 5 * N
    R = torch.func.jacrev(lambda y: f(y[None])[0])(z[0]).numpy()
    d = np.linspace(1, 3, N)
    for matrix in (R.T @ R, d[:, None] * (R.T @ R) * d):
        v = np.random.default_rng(0).standard_normal((N, 2))
        np.testing.assert_allclose(made.times(v), matrix @ v, atol=1e-10 * np.abs(matrix).max())
        np.testing.assert_allclose(made.times(v[:, 0]), matrix @ v[:, 0], atol=1e-10 * np.abs(matrix).max())
        np.testing.assert_allclose(made.diagonal(), matrix.diagonal(), rtol=1e-9)
        assert (made.size(v) >= np.abs(matrix @ v) * (1 - 1e-9)).all()
        assert made.most() >= scipy.linalg.eigvalsh(matrix, subset_by_index=[N - 1, N - 1])[0] * (1 - 1e-9)
        b = matrix @ v + 0.1 * v
        np.testing.assert_allclose(made.factor(0.1, gram.Orders()).solve(b), v, atol=1e-8)
        made.both_sides(d)


def stiff(z: Tensor, t: Tensor) -> Tensor:
    """Curvature, and what does not change if all unknowns are moved: a valley that three residuals end."""
    return torch.cat([100 * (z[2:] - 2 * z[1:-1] + z[:-2]), 0.1 * (torch.exp(z - z.mean()) - t), z[:3] - 1])


def test_factors_with_a_border_are_as_good_as_the_matrix() -> None:
    """Of condition 1e9: nothing that was put in to make pivots safe is left in a step."""
    t = torch.linspace(1, 2, N, dtype=D)
    f = torch.func.vmap(lambda z: stiff(z, t))
    z = 1 + 0.1 * torch.sin(torch.arange(N, dtype=D) / 300)[None]
    made = gram_of("stiff", f, z)
    made.both_sides(1 / np.sqrt(made.diagonal()))
    matrix = made.times(np.eye(N)) + 1e-10 * np.eye(N)
    v = np.random.default_rng(0).standard_normal(N)
    assert np.linalg.cond(matrix) > 1e7
    x = made.factor(1e-10, gram.Orders()).solve(matrix @ v)
    assert np.linalg.norm(x - v) < 1e-6 * np.linalg.norm(v)


@pytest.mark.parametrize(("n", "most"), [(800, 70), pytest.param(3000, 90, marks=pytest.mark.slow)])
def test_a_fit_that_ends_in_rounding_has_converged(n: int, most: int) -> None:
    """Its gradient cannot come down to the tolerance, 4e-11: no step lowers the objective any more, and none is tried (it
    took ten evaluations more to find that out)."""
    t = torch.linspace(1, 2, n, dtype=D)
    s = ik.least_squares(stiff, torch.ones(n, dtype=D), t)
    assert bool(s.converged.all())
    assert s.steps.max() < 200 and s.evaluations <= most
    J, r = torch.func.jacrev(lambda z: stiff(z, t))(s.value), stiff(s.value, t)
    assert float(torch.linalg.vector_norm(J.T @ r)) <= 1e-15 * float(
        torch.linalg.vector_norm(J.T.abs() @ (J.abs() @ s.value))
    )


@pytest.mark.parametrize("solver", ["auto", "trust_region", "newton", "pseudo_transient"])
@pytest.mark.parametrize("start", [0.0, 1.0])
def test_roots_by_every_method_with_factors(solver: str, start: float) -> None:
    """From a point where the mean has no influence, too: no border is left there."""
    f = lambda z, t: z + 4 * chain(z) + 3 * z * z.mean() - t  # noqa: E731
    t = torch.linspace(0.5, 1.5, N, dtype=D)
    z = ik.root(f, torch.full((N,), start, dtype=D), t, solver=solver).value
    torch.testing.assert_close(f(z, t), torch.zeros_like(t), rtol=0, atol=1e-7)


def test_the_normal_equations_of_roots_have_a_border_too() -> None:
    """There is no root: what ``trust_region`` does last, by ``J'J``, is tried and told."""
    with pytest.raises(ik.ConvergenceError, match="no solution near"):
        ik.root(lambda z, t: z * z.mean() + t, torch.zeros(N, dtype=D), torch.ones(N, dtype=D))
    J = autodiff.linearise(lambda z: chain(z) + z * z.mean(1, keepdim=True), torch.linspace(1, 2, N, dtype=D)[None])[1]
    z, f = torch.linspace(1, 2, N, dtype=D)[None], lambda z: chain(z) + z * z.mean(1, keepdim=True)
    ready = Sparsity(("roots",)).find_bordered(f, z)
    assert ready is not None
    blocks = low_rank_blocks(ready, ready.values(J.mv, J.rmv, 1, z)[0], False)
    normal = normal_equations_of(Jacobian(J, blocks), z)
    M = J.dense()[0]
    p = normal.solve(torch.full((1,), 0.5, dtype=D), z)
    torch.testing.assert_close(
        p[0], -torch.linalg.solve(M.T @ M + 0.5 * torch.eye(N, dtype=D), z[0]), rtol=1e-8, atol=0
    )


BATCHES: dict[str, tuple[Callable[..., ik.Solution], Callable[[Tensor, Tensor], Tensor]]] = {
    "root": (ik.root, lambda z, t: chain(z) + z + t * torch.exp(z) / torch.exp(z).mean(-1, keepdim=True) - 1),
    "argmin": (
        ik.argmin,
        lambda z, t: 0.5 * (z * chain(z)).sum(-1) + (z**4 / 4 - t * z).sum(-1) + N * (z.mean(-1) - 0.2) ** 2,
    ),
    "fit": (ik.least_squares, lambda z, t: torch.cat([chain(z) * 10 - t, z + z**3 - t * torch.softmax(z, -1)], -1)),
    "fit, a long row": (
        ik.least_squares,
        lambda z, t: torch.cat([chain(z) * 10 - t, z + z**3, t * 10 * (z.mean(-1, keepdim=True) - 3)], -1),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", BATCHES)
def test_a_sample_that_is_not_a_number_spoils_no_other(name: str) -> None:
    solve, f = BATCHES[name]
    good, bad = torch.ones(3, 1, dtype=D), torch.tensor([[1.0], [torch.nan], [1.0]], dtype=D)
    z0 = torch.zeros(3, N, dtype=D)
    expected = solve(f, z0, good, batch_dims=1).value
    found = solve(f, z0, bad, batch_dims=1, on_failure="nan").value
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]])
    assert not bool(found[1].isfinite().any())


def test_blocks_of_a_sample_that_is_not_a_number() -> None:
    """The others are factored, be the matrices symmetric or not."""
    c = torch.tensor([[1.0], [torch.nan], [0.0]], dtype=D)
    f = lambda z: chain(z) + z + c * z.mean(1, keepdim=True)  # noqa: E731
    z = torch.linspace(0, 1, N, dtype=D).expand(3, N)
    ready = Sparsity(("not a number",)).find_bordered(f, z)
    assert ready is not None
    entries, _ = ready.values(*autodiff.products(*autodiff.recorded(f, z)), 3, z)
    for symmetric in (False, True):
        blocks = low_rank_blocks(ready, entries, symmetric)
        assert blocks.factor.ok.tolist() == [True, False, True]
        torch.testing.assert_close(f(blocks.solve(z))[[0, 2]], z[[0, 2]])


# ---------------------------------------------------------------------------------------------------------------------
# Programs whose Hessian is sparse but for a few numbers that all unknowns share, against their optimality conditions solved
# as dense ones; and the units of the augmented Lagrangian.
UNKNOWNS, FACTORS = 900, 6


def _data(n: int, k: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Loadings ``(n, k)``, a diagonal ``(n,)`` and slopes ``(batch, n)``."""
    g = torch.Generator().manual_seed(0)
    F = torch.randn(n, k, generator=g, dtype=torch.float64) / n**0.5
    D = 0.5 + torch.rand(n, generator=g, dtype=torch.float64)
    return F, D, 0.1 * torch.randn(batch, n, generator=g, dtype=torch.float64)


def _by_hand(F: Tensor, D: Tensor, mu: Tensor, sign: float, w: Tensor, bounded: bool) -> tuple[Tensor, Tensor]:
    """``x`` that minimises ``x'(D + sign F F')x - mu'x`` over ``sum x = 1``, and ``x >= 0`` if it is bounded, by active
    sets, and the gradient of ``w'x`` with respect to ``mu``."""
    n = len(D)
    H = 2 * (torch.diag(D) + sign * F @ F.T)
    free = torch.ones(n, dtype=torch.bool)
    for _ in range(50):
        i = free.nonzero().squeeze(1)
        ones = torch.ones(len(i), 1, dtype=torch.float64)
        K = torch.cat(
            [torch.cat([H[i][:, i], ones], 1), torch.cat([ones.T, torch.zeros(1, 1, dtype=torch.float64)], 1)]
        )
        found = torch.linalg.solve(K, torch.cat([mu[i], torch.ones(1, dtype=torch.float64)]))
        x = torch.zeros(n, dtype=torch.float64).index_copy(0, i, found[:-1])
        slope = H @ x - mu + found[-1]
        following = torch.where(free, x > 0, slope < 0) if bounded else free
        if bool((following == free).all()):
            break
        free = following
    u = torch.linalg.solve(K, torch.cat([w[i], torch.zeros(1, dtype=torch.float64)]))
    return x, torch.zeros(n, dtype=torch.float64).index_copy(0, i, u[:-1])


PROGRAMS = {
    "factor model": (1.0, 1, True),
    "no bounds": (1.0, 1, False),
    "less than convex": (-0.2, 1, True),  # D - F F' / 5 is definite, D without its border more so
    "two of them": (1.0, 2, True),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_portfolio_is_that_of_its_optimality_conditions(name: str) -> None:
    """Of 900 assets with a factor model of risk: the values, and derivatives by their returns."""
    sign, batch, bounded = PROGRAMS[name]
    F, D, mu = _data(UNKNOWNS, FACTORS, batch)

    def risk(x: Tensor, mu: Tensor) -> Tensor:
        return (D * x * x).sum(-1) + sign * (x @ F).square().sum(-1) - (mu * x).sum(-1)

    weights = torch.cos(torch.arange(UNKNOWNS, dtype=torch.float64))
    mu.requires_grad_()
    solution = ik.argmin(
        risk,
        torch.full((batch, UNKNOWNS), 1 / UNKNOWNS, dtype=torch.float64),
        (mu,),
        constraints=[ik.Equality(lambda x, mu: x.sum(-1) - 1)],
        bounds=(torch.zeros(UNKNOWNS, dtype=torch.float64), None) if bounded else None,
        batch_dims=1,
    )
    (gradient,) = torch.autograd.grad((solution.value @ weights).sum(), mu)
    assert solution.solver == "auto (sqp)" and solution.evaluations <= 40 * batch
    assert (solution.steps == 1).all()  # quadratic, and the Hessian of the step is that of the program
    for i in range(batch):
        x, g = _by_hand(F, D, mu[i].detach(), sign, weights, bounded)
        if bounded:  # both kinds of unknowns
            assert 0.05 < float((x > 0).double().mean()) < 0.95
        assert torch.allclose(solution.value[i], x, rtol=0, atol=1e-9)
        assert torch.allclose(gradient[i], g, rtol=0, atol=1e-8)


def test_curvature_that_changes_has_its_hessian_at_each_step() -> None:
    """Entropic terms and a norm of three sums, under two dense constraints, one of them nonlinear."""
    F, D, _ = _data(UNKNOWNS, 3)
    theta = torch.tensor([1.0, 0.3], dtype=torch.float64, requires_grad=True)

    def objective(x: Tensor, theta: Tensor) -> Tensor:
        entropy = (x * x.clamp_min(1e-9).log()).sum()
        return 0.1 * entropy + theta[1] * (1 + (F.T @ x).square().sum()).sqrt() + (D * x * x).sum()

    constraints = [
        ik.Equality(lambda x, theta: x.sum() - theta[0]),
        ik.Inequality(lambda x, theta: (D * x * x).sum() - 1.05e-3 * theta[0]),
    ]

    def solve(theta: Tensor) -> Any:
        return ik.argmin(
            objective, torch.full((UNKNOWNS,), 1 / UNKNOWNS, dtype=torch.float64), (theta,), constraints=constraints
        )

    solution = solve(theta)
    assert solution.solver == "auto (sqp)"
    (gradient,) = torch.autograd.grad(solution.value.square().sum(), theta)
    h = 1e-5
    for i in range(2):
        step = torch.zeros(2, dtype=torch.float64).index_fill(0, torch.tensor(i), h)
        there, back = (solve(theta.detach() + s * step).value.square().sum() for s in (1, -1))
        assert torch.allclose(gradient[i], (there - back) / (2 * h), rtol=1e-4, atol=1e-9)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("unknowns, scale, weight", [(4, 1.0, 1.0), (400, 1.0, 1.0), (400, 1e4, 1.0), (400, 1.0, 1e-3)])
def test_units_are_nothing_to_the_augmented_lagrangian(unknowns: int, scale: float, weight: float) -> None:
    """Those of the objective, of the constraint, and how many unknowns it adds up."""
    F, D, mu = _data(unknowns, 2)

    def objective(x: Tensor) -> Tensor:
        return scale * ((D * x * x).sum() + (F.T @ x).square().sum() - (mu[0] * x).sum())

    solution = ik.argmin(
        objective,
        torch.full((unknowns,), 1 / unknowns, dtype=torch.float64),
        constraints=[ik.Equality(lambda x: weight * (x.sum() - 1))],
        solver="augmented_lagrangian",
        rtol=1e-8,
    )
    assert int(solution.steps) <= 15 and solution.evaluations <= 800
    assert abs(float(solution.value.sum()) - 1) < 1e-6


def test_more_numbers_are_shared_where_that_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty of them: of 900 unknowns, and not of so many that the equations for them would not fit."""
    F, D, _ = _data(UNKNOWNS, 40)
    root = lambda z: D * z + z**3 + torch.tanh(z @ F) @ F.T  # noqa: E731
    z = torch.linspace(-1, 1, UNKNOWNS, dtype=torch.float64).unsqueeze(0)
    found = patterns._detected_bordered(root, z)
    assert found is not None and found.rank == 40
    monkeypatch.setattr(patterns, "_NUMBERS", 39 * 39 * UNKNOWNS)
    assert patterns._detected_bordered(root, z) is None


def test_a_program_is_evaluated_once_at_each_point() -> None:
    """A portfolio with a factor model: conditions at the start, a step there, two trials, and the verdict; and whether the
    objective is higher than at the start."""
    rng, n = np.random.default_rng(0), 1000
    F, D = torch.from_numpy(rng.standard_normal((n, 30)) / 30**0.5), torch.from_numpy(rng.uniform(0.1, 1.1, n))
    r = torch.from_numpy(0.1 * rng.standard_normal(n))
    risk = lambda z, r: 0.5 * (D * z * z).sum() + 0.5 * (z @ F).square().sum() - r @ z  # noqa: E731
    limits: dict[str, Any] = {"constraints": [ik.Equality(lambda z, r: z.sum() - 1)], "bounds": (0.0, None)}
    for _ in range(2):  # the first finds the pattern
        found = ik.argmin(risk, torch.full((n,), 1 / n, dtype=torch.float64), (r,), **limits)
    assert bool(found.converged) and found.evaluations <= 8, found
