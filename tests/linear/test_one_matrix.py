"""Samples that have one matrix, a linear equation for many right-hand sides: formed and factored once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import autodiff
from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors import sparse_blocks
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.dense import factor_batched
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.factors.sparse_blocks import SharedFactor, SparseBlocks, factors
from implicitkit.linear.factors.sparse_factors import SparseFactor
from implicitkit.linear.price import price_of, price_of_dense
from implicitkit.solver import auto
from implicitkit.solver.costs import have_one_matrix
from implicitkit.sparsity import compression
from implicitkit.sparsity.compression import Coloured

D = torch.float64
PATTERNS = {
    "band": sp.diags([-1.0, 2.5, -1.0], [-1, 0, 1], shape=(140, 140), format="csr"),
    "grid": sp.csr_matrix(sp.kronsum(*2 * [sp.diags([-1.0, 2.1, -1.2], [-1, 0, 1], shape=(14, 14))])),
}


# --------------------------------------------------------------------------------------------------------- sparse factors
@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("which", [(0,) * 7, (0, 1, 0, 0, 1, 1, 0, 1), (0, 0, 2, 1, 2, 2, 0, 1)])
def test_shared_factors_are_those_of_each(name: str, which: tuple[int, ...]) -> None:
    A = PATTERNS[name]
    rng = np.random.default_rng(0)
    different = np.stack([A.data, A.data * 1.5, A.data * rng.uniform(0.9, 1.1, A.nnz)])
    values = different[list(which)]
    known = analyse(A.astype(bool))
    found, each = factors(known, values), SparseFactor(analyse(A.astype(bool)), values)
    assert isinstance(found, SharedFactor) and found.inner.batch == len(set(which))
    assert known.ordering.alike == len(which) / len(set(which))
    for shape in ((len(which), A.shape[0]), (len(which), A.shape[0], 3)):
        b = torch.from_numpy(rng.standard_normal(shape))
        for transposed in (False, True):
            assert torch.allclose(found.solve(b, transposed), each.solve(b, transposed), rtol=1e-12, atol=1e-13)


def test_a_bad_sample_spoils_no_other() -> None:
    A = PATTERNS["grid"]
    values = np.stack([A.data, 0 * A.data, A.data, 0 * A.data, A.data, A.data])
    found = factors(analyse(A.astype(bool)), values)
    assert isinstance(found, SharedFactor) and found.ok.tolist() == [True, False, True, False, True, True]
    assert found.reason
    b = torch.ones(6, A.shape[0], dtype=D)
    b[2, 0] = torch.nan
    x = found.solve(b)
    assert x.isfinite().all(1).tolist() == [True, False, False, False, True, True]


def test_matrices_that_begin_alike_are_told_apart() -> None:
    A = PATTERNS["grid"]
    other = A.data.copy()
    other[-1] *= 2
    values = np.stack([A.data, other, A.data, other, A.data, other])
    found, each = factors(analyse(A.astype(bool)), values), SparseFactor(analyse(A.astype(bool)), values)
    b = torch.from_numpy(np.random.default_rng(0).standard_normal((6, A.shape[0])))
    assert isinstance(found, SharedFactor) and found.inner.batch == 2
    assert torch.allclose(found.solve(b), each.solve(b), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("count", [1, 3])
def test_different_matrices_are_not_shared(count: int) -> None:
    A = PATTERNS["band"]
    values = np.stack([A.data * (1 + 1e-14 * k) for k in range(count)])
    known = analyse(A.astype(bool))
    assert isinstance(factors(known, values), SparseFactor) and known.ordering.alike == 1


def test_the_price_is_that_of_the_matrices() -> None:
    each, shared = (price_of(20, 10_000, 10, 50_000, None, fill=600_000, alike=k) for k in (1, 20))
    assert shared.factors < 0.2 * each.factors
    each, shared = (price_of_dense(20, 200, 1000, alike=k) for k in (1, 20))
    assert shared.factors < 0.1 * each.factors and price_of_dense(1, 200).factors < 20


# -------------------------------------------------------------------------------------------------------- their entries
def entries_of(blocks: np.ndarray, pattern: sp.csr_matrix, ready: Coloured) -> tuple[np.ndarray, np.ndarray, int]:
    """What products with ``blocks`` ``(batch, nnz)`` show, how far it is from them, and how many products."""
    batch, n = len(blocks), pattern.shape[0]
    each = [sp.csr_matrix((row, pattern.indices, pattern.indptr), shape=pattern.shape) for row in blocks]
    calls: list[int] = []

    def product(matrices: list[sp.csr_matrix]) -> Callable[[Tensor], Tensor]:
        whole = torch.stack([torch.from_numpy(A.toarray()) for A in matrices])

        def times(v: Tensor) -> Tensor:
            calls.append(1)
            return torch.einsum("bij,bj->bi", whole, v)

        return times

    mv, rmv = product(each), product([A.T for A in each])
    values, error = ready.values(mv, rmv, batch, torch.zeros(batch, n, dtype=D))
    return values, error, len(calls)


@pytest.mark.parametrize("batch", [4, 7, 40])
@pytest.mark.parametrize("turned", [False, True], ids=["by columns", "by rows"])
@pytest.mark.parametrize("name", PATTERNS)
def test_entries_of_one_matrix(name: str, turned: bool, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_LEAST", 0)
    A = PATTERNS[name].copy()
    if turned:  # a full row: its columns would all have colours of their own
        A = sp.lil_matrix(A)
        A[3] = np.linspace(1, 2, A.shape[0])
        A = sp.csr_matrix(A.T) if name == "grid" else sp.csr_matrix(A)
    A.sort_indices()
    ready = Coloured(sp.csr_matrix(A.astype(bool)))
    values, error, calls = entries_of(np.tile(A.data, (batch, 1)), A, ready)
    apart = ready.colouring.apart_count
    assert values.shape == (batch, A.nnz) and error.shape == (batch,) and bool((error < 1e-12).all())
    np.testing.assert_allclose(values, np.tile(A.data, (batch, 1)), rtol=1e-14)
    assert (values.strides[0] == 0) == (not apart)
    if not apart:  # the colours, and two to compare samples
        assert calls == 2 + -(-ready.colouring.count // batch)


@pytest.mark.parametrize("entry", ["one of many", "in a small row", "in a small column"])
def test_entries_of_a_sample_with_another_matrix(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_LEAST", 0)
    A = sp.lil_matrix(PATTERNS["grid"])
    if entry == "in a small row":
        A[7] *= 1e-9
    if entry == "in a small column":
        A[:, 8] *= 1e-9
    A = sp.csr_matrix(A)
    place = int(np.flatnonzero((A.indices == 8) & (np.repeat(np.arange(196), np.diff(A.indptr)) == 7))[0])
    blocks = np.tile(A.data, (9, 1))
    blocks[5, place] *= 1 + 1e-8
    values, error, _ = entries_of(blocks, A, Coloured(sp.csr_matrix(A.astype(bool))))
    assert values.strides[0] != 0 and bool((error < 1e-12).all())
    np.testing.assert_allclose(values, blocks, rtol=1e-13)


def test_a_pattern_that_does_not_hold_is_refuted_for_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_LEAST", 0)
    A = PATTERNS["band"]
    missing = sp.csr_matrix(sp.diags([True, True], [0, 1], shape=A.shape, dtype=bool))
    assert bool((entries_of(np.tile(A.data, (6, 1)), A, Coloured(missing))[1] > 0.01).all())


def test_known_to_be_one_matrix() -> None:
    A = PATTERNS["grid"]
    values = np.broadcast_to(A.data, (5, A.nnz))
    found = factors(analyse(A.astype(bool)), values)
    assert isinstance(found, SharedFactor) and found.inner.batch == 1
    b = torch.from_numpy(np.random.default_rng(0).standard_normal((5, A.shape[0])))
    wanted = SparseFactor(analyse(A.astype(bool)), values.copy()).solve(b)
    assert torch.allclose(found.solve(b), wanted, rtol=1e-12, atol=1e-13)


# ---------------------------------------------------------------------------------------------------------- dense matrices
def _maps(batch: int, n: int) -> tuple[Tensor, Tensor]:
    A = torch.randn(n, n, generator=torch.Generator().manual_seed(0), dtype=D)
    return A, torch.zeros(batch, n, dtype=D)


@pytest.mark.parametrize("batch", [4, 7, 300])
def test_one_matrix_for_all_is_that_of_each(batch: int) -> None:
    A, z = _maps(batch, 130)
    calls = []
    shown = autodiff.one_for_all(lambda w: calls.append(1) or w @ A, 130, z)
    assert shown is not None and shown.stride(0) == 0
    assert (
        torch.equal(shown, A.expand(batch, -1, -1)) and len(calls) == 3
    )  # two to compare samples, the unit vectors at once


@pytest.mark.parametrize("entry", ["one of many", "in a small row", "in a small column"])
def test_a_sample_with_another_matrix_is_noticed(entry: str) -> None:
    A, z = _maps(9, 130)
    blocks = A.repeat(9, 1, 1)
    if entry == "in a small row":  # beside the others of its column that is less than rounding
        blocks[:, 3] *= 1e-9
    if entry == "in a small column":
        blocks[:, :, 4] *= 1e-9
    blocks[5, 3, 4] *= 1 + 1e-8
    product = lambda w: torch.einsum("bi,bij->bj", w, blocks)  # noqa: E731
    assert autodiff.one_for_all(product, 130, z) is None


@pytest.mark.parametrize("scale", [1e7, 1e10])
def test_a_large_equation_hides_no_difference_between_samples(scale: float) -> None:
    """Of samples whose matrices differ in small rows each has a derivative of its own."""
    n, rng = 130, torch.Generator().manual_seed(0)
    A = torch.diag_embed(1e-3 * (1 + 1e-3 * torch.rand(8, n, generator=rng, dtype=D)))
    A[:, 0] = scale
    b = torch.randn(8, n, generator=rng, dtype=D).requires_grad_()
    found = ik.root(
        lambda z, A, b: (A @ z.unsqueeze(2)).squeeze(2) - b,
        torch.zeros(8, n, dtype=D),
        (A, b),
        solver="newton",
        rule=ik.Implicit(linear_solver="lu"),
        batch_dims=1,
    )
    weights = torch.randn(8, n, generator=rng, dtype=D)
    (slope,) = torch.autograd.grad((weights * found.value).sum(), b)
    torch.testing.assert_close(slope, torch.linalg.solve(A.mT, weights.unsqueeze(2)).squeeze(2), rtol=1e-9, atol=1e-9)


def test_few_samples_or_unknowns_are_not_asked() -> None:
    def never(w: Tensor) -> Tensor:
        raise AssertionError

    for batch, n in ((3, 200), (9, 100)):
        assert autodiff.one_for_all(never, n, torch.zeros(batch, n, dtype=D)) is None


@pytest.mark.parametrize("kind", ["regular", "badly scaled", "singular"])
def test_dense_factors_of_one_matrix(kind: str) -> None:
    A, _ = _maps(1, 40)
    if kind == "badly scaled":
        A = A * torch.logspace(0, -20, 40, dtype=D)[:, None]
    if kind == "singular":
        A[:, 3] = A[:, 5]
    expanded, copied = A.expand(6, -1, -1), A.repeat(6, 1, 1)
    one, each = factor_batched(expanded), factor_batched(copied)
    assert one.ok.tolist() == each.ok.tolist() and one.reason == each.reason
    blocks, plain = DenseBlocks(expanded), DenseBlocks(copied)
    for shape in ((6, 40), (6, 40, 3)):
        b = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=D)
        for transposed in (False, True):
            torch.testing.assert_close(one.solve(b, transposed), each.solve(b, transposed), equal_nan=True)
        torch.testing.assert_close(blocks.product(b), plain.product(b))
        torch.testing.assert_close(blocks.T.size(b), plain.T.size(b))
    torch.testing.assert_close(blocks.columns, plain.columns)


# ---------------------------------------------------------------------------------------------------- the whole library
@pytest.mark.parametrize("name", [*PATTERNS, "dense"])
def test_many_right_hand_sides_by_vmap(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Counted(SparseFactor):
        def __init__(self, analysis, values, *more) -> None:
            made.append(len(values))
            super().__init__(analysis, values, *more)

    monkeypatch.setattr(sparse_blocks, "SparseFactor", Counted)
    if name == "dense":
        A = 12 * torch.eye(150, dtype=D) + torch.randn(150, 150, generator=torch.Generator().manual_seed(0), dtype=D)
        solver = "newton"
    else:
        A, solver = torch.from_numpy(PATTERNS[name].toarray()), "newton"
    rows, columns = A.nonzero().T
    entries = A[rows, columns]

    def residual(u: Tensor, b: Tensor) -> Tensor:
        return torch.zeros_like(b).index_add(0, rows, entries * u[columns]) - b

    def solve(b: Tensor) -> Tensor:
        return ik.root(residual, torch.zeros(len(A), dtype=D), (b,), solver=solver).value

    b = torch.randn(12, len(A), generator=torch.Generator().manual_seed(2), dtype=D, requires_grad=True)
    x = torch.func.vmap(solve)(b)
    weights = torch.cos(torch.arange(b.numel(), dtype=D)).view(b.shape)
    (slope,) = torch.autograd.grad((weights * x).sum(), b)
    torch.testing.assert_close(x, torch.linalg.solve(A, b.detach().T).T, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(slope, torch.linalg.solve(A.T, weights.T).T, rtol=1e-9, atol=1e-10)
    assert made == ([] if name == "dense" else [1] * len(made)) and (name == "dense" or made)


@pytest.mark.parametrize("structure", ["dense", "grid"])
@pytest.mark.parametrize("cubic", [0.0, 0.3])
def test_auto_asks_whether_samples_have_one_matrix(structure: str, cubic: float) -> None:
    """Its factors then are cheaper than Krylov vectors, ten of which are enough here; those of every sample's are not."""
    rng = torch.Generator().manual_seed(0)
    if structure == "dense":
        N = torch.randn(500, 500, generator=rng, dtype=D) / 500**0.5
        coupled = lambda z: z @ N.T  # noqa: E731
    else:
        coupled = lambda z: sum(  # noqa: E731
            z.unflatten(-1, (40, 40)).roll(k, dim).flatten(-2) for k in (1, -1) for dim in (-1, -2)
        )
    n, batch = (500 if structure == "dense" else 1600), 64
    x = torch.randn(batch, n, generator=rng, dtype=D).requires_grad_()
    s = ik.root(
        lambda z, x: 6 * z + cubic * z**3 - coupled(z) - x, torch.zeros(batch, n, dtype=D), (x,),
        solver="newton_krylov", batch_dims=1,
    )  # fmt: skip
    s.value.square().sum().backward()
    assert s.backward is not None
    assert (int(s.backward.steps.max()) <= 2) == (cubic == 0), s.backward


@pytest.mark.parametrize(("cubic", "start", "formed"), [(0.0, 1.0, 1), (0.3, 1.0, 0), (0.3, 0.0, 1)])
def test_newton_steps_take_one_matrix_for_all(
    cubic: float, start: float, formed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a linear equation the only step; where all samples begin at one point the first; else Krylov vectors cost less."""
    made, plain = list[int](), Operator.dense
    monkeypatch.setattr(Operator, "dense", lambda A: (made.append(1), plain(A))[1])
    rng = torch.Generator().manual_seed(0)
    N = torch.randn(300, 300, generator=rng, dtype=D) / 300**0.5
    z0, x = torch.randn(2, 64, 300, generator=rng, dtype=D)
    s = ik.root(lambda z, x: 3 * z + cubic * z**3 - z @ N.T - x, start * z0, (x,), batch_dims=1)
    assert bool(s.converged.all()) and len(made) == formed and (int(s.steps.max()) == 1) == (cubic == 0)


@pytest.mark.parametrize("start", [0.0, 1.0])
@pytest.mark.parametrize("cubic", [0.0, 0.3])
def test_newton_steps_of_a_sparse_equation_take_one_matrix_for_all(
    cubic: float, start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its factors cost less than Krylov vectors, whose memory they need not; where samples have one matrix at their common
    start alone Krylov vectors go on from step to step."""
    made: list[int] = []

    class Counted(SparseFactor):
        def __init__(self, analysis, values, *more) -> None:
            made.append(len(values))
            super().__init__(analysis, values, *more)

    monkeypatch.setattr(sparse_blocks, "SparseFactor", Counted)
    z0, x = torch.randn(2, 64, 1600, generator=torch.Generator().manual_seed(0), dtype=D)

    def residual(z: Tensor, x: Tensor) -> Tensor:
        Z = z.unflatten(-1, (40, 40))
        near = sum(Z.roll(k, dim) for k in (1, -1) for dim in (-1, -2))
        return (6 * Z + cubic * Z**3 - near).flatten(-2) - x

    s = ik.root(residual, start * z0, (x,), batch_dims=1)
    assert bool(s.converged.all()) and made == ([1] if cubic == 0 else [])
    assert (int(s.steps.max()) == 1) == (cubic == 0)


def test_one_matrix_at_zero_is_none_of_an_odd_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Jacobian changes there with the square of z alone (root, graph, 130 x 64, of the regret table)."""
    made: list[int] = []

    class Counted(SparseFactor):
        def __init__(self, analysis, values, *more) -> None:
            made.append(len(values))
            super().__init__(analysis, values, *more)

    monkeypatch.setattr(sparse_blocks, "SparseFactor", Counted)
    rng = torch.Generator().manual_seed(0)
    first, second = (torch.randperm(130, generator=rng) for _ in range(2))
    back, again = first.argsort(), second.argsort()

    def residual(z: Tensor, x: Tensor) -> Tensor:
        return 2.1 * z + z**3 - (z[:, first] + z[:, back] + z[:, second] + z[:, again]) / 2 - x

    x = 1.5 + torch.rand(64, 130, generator=rng, dtype=D)
    s = ik.root(residual, torch.zeros_like(x), (x,), batch_dims=1)
    assert bool(s.converged.all()) and not made


@pytest.mark.parametrize("cubic", [0.0, 0.3])
def test_a_dense_equation_for_more_samples_than_matrices_fit(cubic: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Condition 1e5: a Krylov method fails; one factorisation does, and is taken only where there is one matrix."""
    rng = torch.Generator().manual_seed(0)
    monkeypatch.setattr(auto, "_MOST_NUMBERS", 1 << 25)
    monkeypatch.setattr(auto, "_usual", auto._usual.__wrapped__)  # what is made with it is not kept
    n, batch = 600, 100
    U, V = (torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=D))[0] for _ in range(2))
    A = U @ torch.diag(torch.logspace(0, -5, n, dtype=D)) @ V.T + (0 if cubic == 0 else 4 * torch.eye(n, dtype=D))
    b = torch.randn(batch, n, generator=rng, dtype=D).requires_grad_()
    s = ik.root(lambda z, b: z @ A.T + cubic * z**3 - b, torch.zeros(batch, n, dtype=D), (b,), batch_dims=1)
    assert (s.solver == "auto (newton)") == (cubic == 0), s
    residual = s.value @ A.T + cubic * s.value**3 - b
    assert float(residual.detach().norm(dim=1).max()) < 1e-5 * float(b.detach().norm(dim=1).max())
    if cubic == 0:
        (g,) = torch.autograd.grad(s.value.sum(), b)
        torch.testing.assert_close(g @ A, torch.ones_like(g), rtol=0, atol=1e-5)


def test_a_batch_that_begins_with_one_matrix_is_factored_once() -> None:
    """Condition 1e5, hardly nonlinear: from one start all have one matrix, whose factors serve all steps."""
    rng = torch.Generator().manual_seed(0)
    n, batch = 600, 100
    U, V = (torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=D))[0] for _ in range(2))
    A = U @ torch.diag(torch.logspace(0, -5, n, dtype=D)) @ V.T
    b = 1e-3 * torch.randn(batch, n, generator=rng, dtype=D) @ A.T
    f = lambda z, b: z @ A.T + 1e-6 * z**2 - b  # noqa: E731
    s = ik.root(f, torch.zeros(batch, n, dtype=D), (b,), batch_dims=1)
    assert s.solver == "auto (newton)" and s.evaluations <= 15, s
    assert float(f(s.value, b).norm(dim=1).max()) < 1e-8 * float(b.norm(dim=1).max())


@pytest.mark.parametrize("repeats", [False, True])
def test_matrices_that_are_seen_to_be_their_own_are_not_asked(repeats: bool) -> None:
    """A batch of matrices in the graph; one that is repeated by a stride of zero is one."""
    V = torch.randn(1, 130, 130, dtype=D, generator=torch.Generator().manual_seed(0)).expand(6, -1, -1)
    V = V if repeats else V.contiguous()  # whose entries are the same all the same: what is asked would say so
    A = autodiff.linearise(lambda z: torch.bmm(V, z.unsqueeze(2)).squeeze(2), torch.ones(6, 130, dtype=D))[1]
    for operator in (A, A.T):
        assert operator.own() is not repeats and operator.alike() is repeats


@pytest.mark.parametrize("heads", [1, 4])
def test_one_matrix_for_all_is_not_taken_for_their_own(heads: int) -> None:
    """Matrices of an ``einsum``, larger than the state: one for all samples, or one a head."""
    n = 132 // heads
    V = torch.randn(heads, n, n, dtype=D, generator=torch.Generator().manual_seed(0))
    f = lambda z: torch.einsum("hij,bhj->bhi", V, z.view(6, heads, n)).flatten(1)  # noqa: E731
    A = autodiff.linearise(f, torch.ones(6, 132, dtype=D))[1]
    for operator in (A, A.T):
        assert not operator.own() and operator.alike()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("columns", [(), (3,)])
def test_products_with_one_matrix_for_all(transposed: bool, columns: tuple[int, ...]) -> None:
    A = PATTERNS["grid"]
    values = np.broadcast_to(A.data, (5, A.nnz))
    one, each = (SparseBlocks(Coloured(A.astype(bool)), v) for v in (values, values.copy()))
    assert one.is_one and not each.is_one
    one, each = (one.T, each.T) if transposed else (one, each)
    x = torch.randn(5, A.shape[0], *columns, dtype=D, generator=torch.Generator().manual_seed(0))
    for name in ("product", "size"):
        torch.testing.assert_close(getattr(one, name)(x), getattr(each, name)(x), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(one.columns, each.columns)


def test_one_matrix_is_looked_for_where_the_function_has_a_value() -> None:
    """One unknown farther off, as it was, a square root has none; and of one that raises even so nothing is said."""
    z = torch.full((12, 3), 0.5, dtype=D)
    seen = []

    def refuse(point: torch.Tensor) -> None:
        seen.append(point)
        raise ValueError("outside")

    assert not have_one_matrix(SimpleNamespace(eps=torch.finfo(D).eps, linearize=refuse), z)
    assert float((seen[0] - z).abs().max()) < 1e-3
    assert len(seen[0].unique(dim=0)) == len(z)
