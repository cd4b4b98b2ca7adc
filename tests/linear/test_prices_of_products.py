"""What a product costs beside factors is told by its graph: sums over edges, matrices of each sample, many nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import autodiff, graph, structured
from implicitkit.foundation.graph_size import Matrices
from implicitkit.foundation.operators import Operator, repeated
from implicitkit.foundation.structured import side_by_side
from implicitkit.linear import auto
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.equilibrated import equilibrated
from implicitkit.linear.factors.sparse_form import sparse_blocks
from implicitkit.linear.price import price_of, price_of_dense, price_of_dense_like, touched_beside
from implicitkit.solver.auto import stages
from implicitkit.solver.minimise.convex_newton import ConvexNewton
from implicitkit.solver.minimise.newton_cg import WORTH
from implicitkit.sparsity.patterns import Sparsity

D = torch.float64
BATCH, N = 6, 20
_random = torch.Generator().manual_seed(0)
W, X = (torch.randn(*shape, generator=_random, dtype=D) for shape in ((N, N), (BATCH, N)))
EACH = torch.randn(BATCH, N, N, generator=_random, dtype=D)

#: maps, and how many numbers of matrices one product with their Jacobian reads: thrice, and again for every three rows
_READ: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "nothing": (lambda z: z.sin() - z.roll(1, 1), 0),
    "from the right": (lambda z: z @ W - z, N * N * (3 + BATCH // 3)),
    "from the left": (lambda z: (W @ z.T).T, N * N * (3 + BATCH // 3)),
    "a low one from the left": (lambda z: z + (W[:5] @ z.T).sum(0).unsqueeze(1), 5 * N * (3 + BATCH // 3)),
    "a narrow one from the right": (lambda z: z + (z @ W[:, :5]).sum(1, keepdim=True), 5 * N * (3 + BATCH // 3)),
    "with a shift": (lambda z: torch.nn.functional.linear(z, W, X[0]), N * N * (3 + BATCH // 3)),
    "one sample": (lambda z: (W @ z[0]).expand(BATCH, N) + z, N * N * (3 + 1 / 3)),
    "one of a batch": (lambda z: torch.einsum("bij,bj->bi", EACH[:1], z[:1]) + z, N * N * (3 + 1 / 3)),
    "of each sample": (lambda z: torch.einsum("bij,bj->bi", EACH, z), 7 * BATCH * N * N),
    "of each sample, in a sum": (
        lambda z: torch.baddbmm(z.unsqueeze(2), EACH, z.unsqueeze(2)).squeeze(2),
        7 * BATCH * N * N,
    ),
    "two": (lambda z: (z @ W).tanh() @ W, 2 * N * N * (3 + BATCH // 3)),
}


@pytest.mark.parametrize("name", list(_READ))
def test_matrices_that_a_product_reads(name: str) -> None:
    function, read = _READ[name]
    A = autodiff.linearise(function, X)[1]
    assert A.read().read == pytest.approx(read, rel=0.01)


#: maps, and how many matrices of ``W``'s size are multiplied by the rows of others: those behind the one that is met first
_BEHIND: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "one": (lambda z: z @ W - z, 0),
    "side by side": (lambda z: (z @ W).sin() + z.cos() @ W, 0),
    "two": (lambda z: (z @ W).tanh() @ W, 1),
    "three, and one beside": (lambda z: (((z @ W).tanh() @ W).tanh() + z @ W) @ W + z @ W, 3),
    "two, of each sample": (
        lambda z: torch.einsum("bij,bj->bi", EACH, torch.einsum("bij,bj->bi", EACH, z).sin()),
        1,
    ),
}


@pytest.mark.parametrize("name", list(_BEHIND))
def test_matrices_that_are_met_behind_others(name: str) -> None:
    """Each a third of its numbers for each row; of matrices of their own each sample is one."""
    function, behind = _BEHIND[name]
    found = autodiff.linearise(function, X)[1].read()
    assert found.behind == pytest.approx(behind * N * N * BATCH / 3, rel=0.01)
    assert found.rows >= found.behind and found.read > found.rows


def _layers(n: int, batch: int, alike: bool) -> Operator:
    """The Jacobian of two layers with four times as many unknowns between; ``alike``: of all samples at one point."""
    U, V = (torch.randn(*shape, generator=_random, dtype=D) / n for shape in ((n, 4 * n), (4 * n, n)))
    z = torch.randn(1 if alike else batch, n, generator=_random, dtype=D).expand(batch, n).contiguous()
    return autodiff.linearise(lambda z: 2 * z - (z @ U).tanh() @ V, z)[1]


@pytest.mark.parametrize(
    ("n", "batch", "measured", "alike"),
    [
        (130, 1, 7, False),
        (300, 1, 19, False),
        (65, 64, 26, False),
        (130, 64, 75, False),
        (130, 8, 18, False),
        (300, 64, 5.6, True),
        (600, 64, 11.5, True),
    ],
)
def test_what_rows_of_layers_cost(n: int, batch: int, measured: float, alike: bool) -> None:
    """A row of the Jacobian takes a product with the inner matrix, and of one for all samples a whole product, whatever
    else is multiplied beside it: measured, beside the steps of GMRES."""
    price = price_of_dense_like(_layers(n, batch, alike), batch if alike else 1).factors
    assert measured / 1.6 < price < 1.6 * measured


def test_a_batch_of_layers_is_differentiated_without_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen products, where factors cost twice as many as a Krylov method is tried for."""
    n, batch = 65, 64
    U, V = (torch.randn(*shape, generator=_random, dtype=D) / n**0.5 for shape in ((n, 4 * n), (4 * n, n)))
    x = torch.randn(batch, n, generator=_random, dtype=D).requires_grad_()
    s = ik.root(
        lambda z, x: 2 * z - (z @ U).tanh() @ V / 8 - x, torch.zeros(batch, n, dtype=D), (x,), batch_dims=1,
        solver="newton_krylov",
    )  # fmt: skip
    (want,) = torch.autograd.grad(s.value.square().sum(), x, retain_graph=True)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a dense matrix is formed")

    monkeypatch.setattr("implicitkit.linear.auto.LU.solve_many", refuse)
    (found,) = torch.autograd.grad(s.value.square().sum(), x)
    torch.testing.assert_close(found, want)


def test_what_is_made_of_an_operator_reads_as_much() -> None:
    A = autodiff.linearise(_READ["of each sample"][0], X)[1]
    uneven = torch.logspace(0, 9, N, dtype=D).expand(BATCH, N)
    B = autodiff.linearise(lambda z: _READ["of each sample"][0](z * uneven) + z, X / uneven)[1]
    scaled = equilibrated(B, X, X / uneven, False)
    assert scaled is not None and scaled.A.read() == B.read() and scaled.A.graph() == B.graph()
    found = [A.T, repeated(A, 3)]
    assert A.read().read > 0 and [other.read() for other in found] == [A.read()] * 2
    assert [other.graph() for other in found] == [A.graph()] * 2


def test_factors_beside_products_that_read_matrices_of_each_sample() -> None:
    """They cost fewer products the more a product reads, down to what two cost that read nothing else."""
    n, batch = 130, 64
    plain, own = price_of_dense(batch, n), price_of_dense(batch, n, weight=7 * n * n)
    assert plain.factors > 50 > 25 > own.factors > 15
    A = _operator(batch, n, read=7 * batch * n * n)
    assert price_of_dense_like(A).factors == own.factors
    A.weight = 70 * n * n
    assert price_of_dense_like(A).factors < own.factors


def test_matrices_that_stand_in_the_graph_are_written_down() -> None:
    """Not found by products: measured, factors of 130 to 300 unknowns cost 13 to 20 products, and of 30 four to seven."""
    for n, batch, least, most in ((30, 64, 3, 8), (130, 64, 12, 20), (300, 16, 14, 22)):
        A = _operator(batch, n, read=7 * batch * n * n, graph=(15, 33 * batch * n, 0))
        shown = price_of_dense_like(A).factors
        A.own = lambda: True
        assert least < price_of_dense_like(A).factors < min(most, shown)
    assert shown > 25


def test_a_longer_graph_writes_its_matrices_down_in_more_steps() -> None:
    """Measured, 9 ns an entry for each nine nodes of a graph, whatever its function: of a gradient, twice as long as an
    equation, factors of 65 unknowns cost 15 to 20 products, and conjugate gradients come first."""
    n, batch = 65, 64
    A = _operator(batch, n, read=14 * batch * n * n, graph=(34, 291_200, 0))
    A.own = lambda: True
    assert price_of_dense_like(A).factors > WORTH


def test_of_few_unknowns_no_graph_is_looked_at() -> None:
    """Whatever is in it, their dense factors cost less than the products with which a Krylov method would be tried."""
    for conjugate, weight, wide, nodes in itertools.product((False, True), (0, 10**9), (0.0, 1e12), (9.0, 1e5)):
        for batch in (1, 30, auto._SAMPLES):
            price = price_of_dense(batch, auto._FEWEST, weight, 1, wide, nodes, conjugate=conjugate)
            assert price.factors < auto._WORTH
    for n, asked in ((4, False), (auto._FEWEST + 1, True)):
        b, eye, looked = torch.ones(2, n, dtype=D), torch.eye(n, dtype=D).repeat(2, 1, 1), list[int]()
        A = Operator(lambda v: v, lambda w: w, lambda eye=eye: eye, batch=2, size=n, like=b)
        A.graph = lambda looked=looked: looked.append(1)
        assert auto.Auto().solve(A, b, rtol=1e-9, atol=0.0, max_steps=None).converged.all()
        assert bool(looked) == asked


def test_what_one_product_reads_costs_more_than_what_it_multiplies() -> None:
    """Measured, factors of a dense matrix of one sample, which each product reads anew, cost 15 products where it has 300
    rows, 50 where it has 1,000, and 100 where it has 2,000."""
    for n, least, most in ((300, 8, 20), (1000, 40, 65), (2000, 65, 130)):
        W = torch.randn(n, n, generator=_random, dtype=D)
        A = autodiff.linearise(lambda z, W=W: z - z @ W.T, torch.ones(1, n, dtype=D))[1]
        assert least < price_of_dense_like(A).factors < most


def test_factors_beside_products_of_many_nodes() -> None:
    """The columns of a Hessian take as many nodes each as its products: these cost more beside the steps of GMRES."""
    few, many = (_operator(64, 65, graph=(nodes, nodes * 64 * 65, 0)) for nodes in (4, 36))
    assert price_of_dense_like(few).factors == price_of_dense(64, 65).factors < 20
    assert 22 < price_of_dense_like(many).factors < 35


def test_products_side_by_side_cost_more_where_they_leave_the_cache() -> None:
    """Measured, 25 to 40 times one with conjugate gradients of 20 unknowns and 50,000 data, two times of 40 unknowns and 78
    distances; of more numbers than a cache holds of one product, they cost no more than as many."""
    data, pairs = (_operator(1, n, graph=graph) for n, graph in ((20, (17, 400_180, 0)), (39, (31, 10_569, 546))))
    assert (
        price_of_dense_like(data, conjugate=True).factors > 20 > 3 > price_of_dense_like(pairs, conjugate=True).factors
    )
    assert price_of_dense(1, 150, wide=2e6).factors < 150


def _operator(batch: int, n: int, read: int = 0, graph: tuple[int, int, int] = (0, 0, 0)) -> Operator:
    like = torch.zeros(batch, n, dtype=D)
    A = Operator(lambda v: v, lambda w: w, lambda: like, batch=batch, size=n, like=like)
    A.read, A.graph = lambda: Matrices(read), lambda: graph
    return A


def test_sums_over_edges_make_products_dear() -> None:
    """A sum over five edges for each unknown: 23 numbers a node, and a quarter of them put at their places."""
    graph = (19, 4_700_000, 1_200_000)
    wide = touched_beside(1, 100_000, graph)
    assert touched_beside(1, 100_000, (19, 1_900_000, 1_200_000)) == 0 == touched_beside(1, 100_000, None)
    assert 250_000 < wide < 450_000
    dear, plain = (price_of(1, 100_000, 12, 1_100_000, None, wide=w).factors for w in (wide, 0.0))
    assert 0.2 * plain < dear < 0.4 * plain


def test_a_graph_with_many_edges_has_factors_soon() -> None:
    """Labels spread over a graph, a quadratic objective: the price that its Hessian tells has the graph in it."""
    n = 1500
    a = torch.arange(n).repeat_interleave(8)
    b = torch.randint(0, n, (8 * n,), generator=torch.Generator().manual_seed(1))
    prices: list[tuple[float, float]] = []

    def energy(f: Tensor) -> Tensor:
        return 0.5 * (f[a] - f[b]).square().sum() + 0.5 * (f - 1).square().sum()

    class Spy(ik.Method):
        solves = "minimise"

        def init(self, f: object, z: Tensor) -> None:
            return None

        def step(self, f: ik.extend.Evaluations, z: Tensor, state: None) -> tuple[Tensor, None]:
            H = f.linearize(z)
            price, alone = H.price(), f.price_of_sparse(z)
            assert price is not None and alone is not None
            prices.append((price.factors, alone))
            return z - 1e-3 * f(z), None

    ik.argmin(energy, torch.zeros(n, dtype=D), solver=Spy(), max_steps=1, on_failure="ignore")
    assert prices and all(told < 0.7 * alone for told, alone in prices), prices


# ---------------------------------------------------------------------------------------------------------- minima
def test_where_minima_begin() -> None:
    """With Newton's steps at every size; dense Hessians are formed while they fit."""
    for batch, size, formed in ((1, 10, True), (1, 1024, True), (1, 4000, False), (64, 1000, False), (8, 200, True)):
        newton = next(s.solver for s in stages("argmin", batch, size) if isinstance(s.solver, ConvexNewton))
        assert newton.formed is formed, (batch, size)


@pytest.mark.parametrize(("spread", "by"), [(1.0, "newton"), (1e7, "lbfgs")])
def test_large_minima_by_products_as_long_as_these_are_few(spread: float, by: str) -> None:
    """No pattern is seen in a Fourier transform; a condition of 1e7 takes more than fifty products."""
    n = 1500
    weights = torch.logspace(0, float(torch.tensor(spread).log10()), n // 2 + 1, dtype=D)

    def objective(z: Tensor) -> Tensor:
        seen = torch.fft.rfft(z)
        return (0.5 * weights * (seen.real**2 + seen.imag**2)).sum() / n + 0.25 * (z**4).sum() - z.sum()

    found = ik.argmin(objective, torch.zeros(n, dtype=D), max_steps=30, on_failure="ignore")
    newton = [s for s in stages("argmin", 1, n) if isinstance(s.solver, ConvexNewton)]
    assert len(newton) == 1
    if by == "newton":
        assert bool(found.converged) and found.solver == "auto (newton)" and found.evaluations < 60, found
    else:
        assert found.solver != "auto (newton)", found


def test_matrices_that_are_not_to_be_formed_never_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(H: Tensor, g: Tensor) -> None:
        raise AssertionError("a dense Hessian")

    monkeypatch.setattr("implicitkit.solver.minimise.convex_newton.by_factors", refused)
    scale, generator = torch.logspace(0, 8, 200, dtype=D), torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(200, 200, dtype=D, generator=generator))[0]
    for turned, status in ((lambda z: axes @ z, ik.Status.STALLED), (lambda z: z, ik.Status.CONVERGED)):
        found = ik.argmin(
            lambda z, turned=turned: 0.5 * (scale * turned(z) ** 2).sum() - z.sum(),
            torch.zeros(200, dtype=D),
            solver=ConvexNewton(formed=False),
            on_failure="ignore",
        )
        assert found.status == int(status), found  # a diagonal is no matrix: it scales the products


def test_what_a_scaled_solution_leaves_is_told_by_a_matrix_that_is_there() -> None:
    """One product less, and the same norm; where no matrix has been formed, by a product."""
    n = 200
    scales = torch.logspace(0, -8, n, dtype=D)[None]
    function = lambda y: 3 * y / scales - (y / scales).roll(1, 1) + torch.tanh(y)  # noqa: E731
    sparsity = Sparsity(("by a matrix that is there",))
    counts: list[int] = []
    for formed in (False, True):
        A = autodiff.linearise(function, scales, sparse=sparse_blocks(lambda: sparsity, function, scales))[1]
        b = torch.ones(1, n, dtype=D)
        even = equilibrated(A, b, scales, False)
        assert even is not None
        assert not formed or A.sparse() is not None
        products, plain = [0], A._mv
        A._mv = lambda v, count=products, plain=plain: (count.__setitem__(0, count[0] + 1), plain(v))[1]
        nearly = LinearSolution(torch.ones(1, n, dtype=D), *[torch.zeros(1)] * 3)
        left = even.back(nearly, A, b, A)
        torch.testing.assert_close(
            left.residual_norm, torch.linalg.vector_norm(plain(left.x) - b, dim=1), rtol=1e-12, atol=0
        )
        counts.append(products[0])
    assert counts == [1, 0]


# ---------------------------------------------------------------------------------------------------------------------
# How many products with a Jacobian go side by side while it is formed: so many that operations stay in a cache.
@pytest.mark.parametrize(
    ("device", "numbers", "wanted"),
    [("cpu", 1, 1 << 20), ("cpu", 64 * 300, 54), ("cpu", 1 << 21, 1), ("cpu", 0, 1 << 20), ("meta", 64 * 300, 873)],
    ids=str,
)
def test_how_many(device: str, numbers: int, wanted: int) -> None:
    assert side_by_side(torch.empty(0, device=device), numbers) == wanted


def _dense(z: Tensor) -> Tensor:
    return autodiff.matrix(autodiff.products(*autodiff.recorded(_wave, z))[1], z.shape[1], z)


def _one(z: Tensor) -> Tensor | None:
    return autodiff.one_for_all(
        autodiff.products(*autodiff.recorded(lambda y: _wave(y - y.detach()), z))[1], z.shape[1], z
    )


def _rows(z: Tensor) -> Tensor | None:
    W = torch.randn(z.shape[1], z.shape[1], generator=torch.Generator().manual_seed(1), dtype=D)
    out, point = autodiff.recorded(lambda y: _wave(torch.tanh(y) @ W), z)
    return structured.rows_by_structure(out, point, 1 << 24)


def _wave(z: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(z) * torch.arange(z.shape[1] // 2 + 1), z.shape[1]) + z**3


@pytest.mark.parametrize("form", [_dense, _one, _rows], ids=lambda form: form.__name__)
def test_none_goes_through_more_numbers_at_once(
    form: Callable[[Tensor], Tensor | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same matrix, whatever the pieces; of all of them at once, none is larger than is said."""
    z = torch.randn(8, 200, generator=torch.Generator().manual_seed(0), dtype=D)
    whole, seen, vmap, mapped = form(z), [], torch.func.vmap, graph.mapped

    def watched(function: Callable[..., Any], *options: Any, **more: Any) -> Callable[..., Any]:
        def run(*rows: Tensor) -> Any:
            seen.append(rows[0].shape[0])
            return vmap(function, *options, **more)(*rows)

        return run

    monkeypatch.setattr(torch.func, "vmap", watched)
    monkeypatch.setattr(graph, "mapped", lambda f, rows: (seen.append(len(rows)), mapped(f, rows))[1])
    monkeypatch.setattr(structured, "_CHUNK", 7 * 8 * 200)
    parts = form(z)
    assert whole is not None and parts is not None and torch.allclose(parts, whole, rtol=1e-12, atol=1e-12)
    assert seen and max(seen) <= 7
