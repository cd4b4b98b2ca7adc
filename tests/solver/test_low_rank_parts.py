"""Large systems whose matrix is sparse but for a few numbers that all unknowns share (a mean, a norm, a softmax)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.linear import gram
from implicitkit.linear.low_rank_blocks import low_rank_blocks
from implicitkit.sparsity.known import Sparsity
from implicitkit.sparsity.low_rank import Bordered

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
    entries, error = ready.values(*autodiff.rectangular(f, z), batch, z)
    assert error.max() < 1e-12
    return ready, z, J, entries


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
        entries, _ = ready.values(*autodiff.rectangular(f, z), 1, z)
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
    assert ready.values(*autodiff.rectangular(other, z), 1, z)[1].max() > 1e-3


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


@pytest.mark.parametrize("name", SYSTEMS)
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


@pytest.mark.parametrize("kind", ["long", "low rank"])
def test_normal_equations_with_a_border(kind: str) -> None:
    """Products, diagonal, scaling and factors of ``R'R``, against dense ones."""
    z = torch.linspace(0.5, 1.5, N, dtype=D)[None]
    if kind == "long":
        f = lambda y: torch.cat([chain(y) + y**2, 10 * y.mean(1, keepdim=True) ** 2], 1)  # noqa: E731
        ready = Sparsity(("long",)).find(f, z)
        assert ready is not None
        values, _ = ready.values(*autodiff.rectangular(f, z), 1, z)
        made = gram.of_sparse(ready, ready.matrix(values[0]))
        assert len(made.W) == 1
    else:
        f = lambda y: torch.cat([chain(y) + y**2, y - torch.exp(y.mean(1, keepdim=True))], 1)  # noqa: E731
        border = Sparsity(("low",)).find_bordered(f, z)
        assert border is not None
        (A, U, V), _ = border.values(*autodiff.rectangular(f, z), 1, z)
        made = gram.of_low_rank(border.matrix(A[0]), U[0], V[0])
        assert len(made.W) == 2
    assert made.N.nnz <= 5 * N
    R = torch.func.jacrev(lambda y: f(y[None])[0])(z[0]).numpy()
    d = np.linspace(1, 3, N)
    for matrix in (R.T @ R, d[:, None] * (R.T @ R) * d):
        v = np.random.default_rng(0).standard_normal((N, 2))
        np.testing.assert_allclose(made.times(v), matrix @ v, atol=1e-10 * np.abs(matrix).max())
        np.testing.assert_allclose(made.times(v[:, 0]), matrix @ v[:, 0], atol=1e-10 * np.abs(matrix).max())
        np.testing.assert_allclose(made.diagonal(), matrix.diagonal(), rtol=1e-9)
        assert (made.size(v) >= np.abs(matrix @ v) * (1 - 1e-9)).all()
        assert made.most() >= np.linalg.norm(matrix, 2) * (1 - 1e-9)
        b = matrix @ v + 0.1 * v
        np.testing.assert_allclose(made.factor(0.1, gram.Orders()).solve(b), v, atol=1e-8)
        made.both_sides(d)
