"""Patterns, colourings, compressed Jacobians and sparse factors, each against the dense Jacobian."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from patterns_table import PATTERNS, Case
from torch import Tensor

import implicitkit as ik
from implicitkit.foundation import autodiff, graph
from implicitkit.linear.factors import ordering, sparse_factors
from implicitkit.linear.factors.analysis import analyse
from implicitkit.linear.factors.sparse_factors import SparseFactor, _Full
from implicitkit.sparsity import colouring, compression, index_sets
from implicitkit.sparsity.colouring import groups_of_columns
from implicitkit.sparsity.compression import coloured
from implicitkit.sparsity.detection import detect
from implicitkit.sparsity.patterns import detected
from implicitkit.sparsity.rules import RULES, windows
from implicitkit.sparsity.tracing import Trace, watching


def dense(function, z: Tensor) -> Tensor:
    """``(batch, m, n)``, one sample and one row at a time."""
    return torch.stack([torch.autograd.functional.jacobian(lambda x: function(x[None])[0], row) for row in z])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", PATTERNS, ids=lambda c: c.name)
@pytest.mark.parametrize("batch", [1, 3])
def test_detection_misses_nothing(case: Case, batch: int) -> None:
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(batch, case.n, generator=generator, dtype=torch.float64)
    if case.name == "embedding-like table":
        z = z[:1]
    found = detect(case.function, z)
    assert found.pattern is not None, found.reason
    pattern = torch.from_numpy(found.pattern.toarray())
    shown = torch.zeros_like(pattern)
    for _ in range(3):
        point = torch.randn(2, case.n, generator=generator, dtype=torch.float64)[: len(z)]
        shown |= (dense(case.function, point) != 0).any(0)
    for i, j in case.hidden:
        shown[i, j] = True
    missed = (shown & ~pattern).nonzero().tolist()
    assert not missed, f"entries missed: {missed}"
    more = int((pattern & ~shown).sum())
    assert more <= case.extra, f"{more} entries more than there are, {case.extra} expected"
    assert bool(found.guessed) == case.guesses, found.guessed


def test_a_trace_knows_of_numbers_as_long_as_somebody_may_read_them() -> None:
    """Sets go with their memory, unless NumPy has it, too: there it may be read through another tensor."""
    shared, held = np.zeros(40), []

    def function(z: Tensor) -> Tensor:
        for _ in range(30):
            z = torch.sin(z + z.flip(1))
        torch.from_numpy(shared).copy_(z[0])
        held.extend(trace._sets)
        return z.detach() * 0 + torch.from_numpy(shared).roll(1)

    trace, z = Trace(RULES, 40), torch.ones(1, 40, dtype=torch.float64)
    trace.write(z, index_sets.identity(40, 40))
    with watching(trace):
        found = trace.read(function(z)).toarray()
    assert len(held) <= 5
    i = np.arange(40)
    assert found[i, (i - 1) % 40].all() and found[i, (40 - i) % 40].all()


def test_sixty_functions() -> None:
    assert len(PATTERNS) >= 60 and len({c.name for c in PATTERNS}) == len(PATTERNS)


@pytest.mark.parametrize(
    ("name", "function", "reason"),
    [
        ("numpy", lambda z: torch.from_numpy(np.sin(z.detach().numpy())) + z, "numpy"),
        (
            "sparse of unknowns",
            lambda z: torch.sparse_coo_tensor(torch.tensor([[0], [0]]), z[0, :1], (6, 6)) @ z.T,
            "sparse",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_seen_is_no_pattern(name, function, reason) -> None:
    found = detect(function, torch.rand(1, 6, dtype=torch.float64))
    assert found.pattern is None and reason in found.reason


@pytest.mark.parametrize("options", [{"scale_factor": 2.7, "mode": "nearest-exact"}, {"size": 50, "mode": "linear"}])
def test_places_of_single_precision_are_rounded_as_such(options: dict) -> None:
    """Other entries than in double precision."""
    resize = lambda z: F.interpolate(z.unsqueeze(1), **options).squeeze(1)  # noqa: E731
    pattern = detect(resize, torch.rand(1, 30)).pattern
    assert pattern is not None
    assert (pattern.toarray() == (resize(torch.eye(30)) != 0).T.numpy()).all()


@pytest.mark.parametrize("adds", [False, True])
def test_an_index_may_take_a_corner_of_what_is_scattered(adds: bool) -> None:
    """torch has its derivative in forward mode only."""
    index, rows = torch.tensor([[1, 3, 0]]), ([0, 1, 3], [2, 0, 1])

    def function(z: Tensor) -> Tensor:
        out = torch.zeros_like(z[:, :5])
        return (out.scatter_add if adds else out.scatter)(1, index.expand(len(z), -1), z**2)

    pattern = detect(function, torch.rand(2, 6, dtype=torch.float64)).pattern
    assert pattern is not None
    wanted = np.zeros((5, 6), dtype=bool)
    wanted[rows] = True
    assert (pattern.toarray() == wanted).all()


def test_dense_functions_stop_early() -> None:
    found = detect(lambda z: z + z.sum(1, keepdim=True), torch.rand(1, 1000, dtype=torch.float64), budget=100_000)
    assert found.pattern is None and "dense" in found.reason


# ------------------------------------------------------------------------------------------------------------ colouring
def _patterns() -> dict[str, sp.csr_matrix]:
    rng = np.random.default_rng(0)
    hub = sp.random(200, 200, 0.01, random_state=rng) + sp.identity(200)
    hub = sp.lil_matrix(hub)
    hub[7] = 1
    hub[:, 11] = 1
    n = 20
    line = sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(n, n))
    return {
        "diagonal": sp.identity(9),
        "tridiagonal": line,
        "grid": sp.kronsum(line, line),
        "periodic": sp.diags([1.0, 1, 1, 1, 1], [-29, -1, 0, 1, 29], shape=(30, 30)),
        "random": sp.random(150, 150, 0.02, random_state=rng) + sp.identity(150),
        "hubs": hub,
        "wide": sp.random(40, 120, 0.03, random_state=rng),
        "tall": sp.random(120, 40, 0.03, random_state=rng),
        "empty": sp.csr_matrix((12, 12)),
        "two blocks": sp.block_diag([np.ones((5, 5)), np.ones((7, 7))]),
    }


@pytest.mark.parametrize("turned", [False, True])
def test_links_of_wide_convolutions_are_counted_before_they_are_made(
    turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch all are watched together: these, of a network of images, took ten seconds."""
    monkeypatch.setattr(windows, "_links", lambda *_: pytest.fail("they are made"))
    weight = torch.ones(32, 32, 3, 3)
    conv = F.conv_transpose2d if turned else F.conv2d
    z = torch.zeros(32, 32 * 64)
    assert detected(lambda z: conv(z.unflatten(1, (32, 8, 8)), weight, padding=1).flatten(1), z) is None


def test_a_full_constant_is_not_listed_entry_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three indices for each of 16 million entries took ten seconds and 1.1 GB before they said "dense"."""
    W = torch.rand(300, 300, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    listed: list[int] = []
    plain = np.nonzero
    monkeypatch.setattr(np, "nonzero", lambda a: (listed.append(a.size), plain(a))[1])
    for function in (lambda z: z @ W.T, lambda z: (W @ z.unsqueeze(2)).squeeze(2)):
        assert detect(function, torch.rand(1, 300, dtype=torch.float64), budget=20_000).pattern is None
    assert W.numel() not in listed


@pytest.mark.parametrize("name", _patterns())
def test_columns_of_one_colour_share_no_row(name: str) -> None:
    pattern = sp.csr_matrix(_patterns()[name]).astype(bool)
    groups, count = groups_of_columns(pattern)
    assert groups.max() < count and groups.min() >= 0
    for colour in range(count):
        assert pattern[:, groups == colour].sum(1).max() <= 1
    assert count >= np.diff(pattern.indptr).max()


@pytest.mark.parametrize(("name", "most"), [("tridiagonal", 3), ("grid", 6), ("periodic", 5), ("two blocks", 7)])
def test_structured_patterns_need_few_colours(name: str, most: int) -> None:
    assert groups_of_columns(sp.csr_matrix(_patterns()[name]).astype(bool))[1] <= most


@pytest.mark.parametrize("name", _patterns())
@pytest.mark.parametrize("batch", [1, 3])
def test_compressed_jacobian_is_the_jacobian(name: str, batch: int) -> None:
    pattern = sp.csr_matrix(_patterns()[name]).astype(bool)
    ready = coloured(pattern)
    if ready is None:
        assert name == "two blocks" or min(pattern.shape) < 50
        return
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(batch, *pattern.shape, generator=generator, dtype=torch.float64)
    blocks = blocks * torch.from_numpy(pattern.toarray())
    mv = lambda v: (blocks @ v.unsqueeze(2)).squeeze(2)  # noqa: E731
    rmv = lambda w: (blocks.mT @ w.unsqueeze(2)).squeeze(2)  # noqa: E731
    values, error = ready.values(mv, rmv, batch, blocks)
    for i in range(batch):
        assert np.array_equal(ready.matrix(values[i]).toarray(), blocks[i].numpy())
    assert error.max() < 1e-12
    # one entry more than the pattern knows of is noticed
    i, j = np.argwhere(~pattern.toarray())[0]
    blocks[0, i, j] = 1.0
    assert ready.values(mv, rmv, batch, blocks)[1][0] > 1e-3


@pytest.mark.parametrize("name", ["grid", "hubs", "a symmetric arrow"])
def test_products_are_looked_at_a_few_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product in a call, or three, show what all of them show together; no call has more."""
    symmetric = name == "a symmetric arrow"
    pattern = sp.csr_matrix(_arrow() if symmetric else _patterns()[name]).astype(bool)
    ready = coloured(pattern, symmetric=symmetric)
    assert ready is not None and (name == "grid" or ready.colouring.apart_count > 0)
    m, n = pattern.shape
    A = torch.randn(2, m, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = (A + A.mT if symmetric else A) * torch.from_numpy(pattern.toarray())
    mv = lambda v: (A @ v.unsqueeze(2)).squeeze(2)  # noqa: E731
    rmv = mv if symmetric else lambda w: (A.mT @ w.unsqueeze(2)).squeeze(2)
    widths: list[int] = []
    mapped = graph.mapped
    monkeypatch.setattr(graph, "mapped", lambda f, v: (widths.append(len(v)), mapped(f, v))[1])
    for at_once in (1, 3):
        widths.clear()
        monkeypatch.setattr(compression, "_CHUNK", at_once * 2 * max(m, n))
        values, error = ready.values(mv, rmv, 2, A)
        assert max(widths) == at_once and sum(widths) == ready.colouring.products + 1
        for i in range(2):
            assert np.array_equal(ready.matrix(values[i]).toarray(), A[i].numpy())
        assert error.max() < 1e-12


def test_hubs_are_set_apart() -> None:
    ready = coloured(sp.csr_matrix(_patterns()["hubs"]).astype(bool))
    assert ready is not None and len(ready.colouring.apart) >= 1 and ready.colouring.products < 40


def _arrow() -> np.ndarray:
    """Twelve unknowns that meet all others, of which blocks of three meet each other."""
    n = 312
    A = np.kron(np.eye(n // 3), np.ones((3, 3)))
    A[:12] = A[:, 12:24] = 1
    order = np.random.default_rng(3).permutation(n)
    return np.maximum(A, A.T)[order][:, order] * (1 + np.add.outer(np.arange(n), np.arange(n)))


def test_a_symmetric_matrix_needs_no_products_for_what_stands_across_the_diagonal() -> None:
    A = torch.from_numpy(_arrow())
    product = lambda v: v @ A  # noqa: E731
    counts = {}
    for symmetric in (False, True):
        ready = coloured(sp.csr_matrix(A.numpy()).astype(bool), symmetric=symmetric)
        counts[symmetric] = ready.colouring.products
        values, error = ready.values(product, product, 1, A)
        assert np.array_equal(ready.matrix(values[0]).toarray(), A.numpy()) and error.max() < 1e-12
    assert counts[True] == 24 + 3 and counts[False] >= 2 * 24
    # a pair that the pattern does not know of is noticed, and so is a matrix that is not symmetric
    i, j = np.argwhere(A.numpy() == 0)[0]
    A[i, j] = A[j, i] = 1e3
    assert ready.values(product, product, 1, A)[1][0] > 1e-4
    A[i, j] = A[j, i] = 0
    i, j = np.argwhere(A.numpy() > 0)[5]
    A[i, j] += 1e4
    assert ready.values(product, product, 1, A)[1][0] > 1e-4


def test_the_greedy_colouring_is_that_of_columns_in_turn() -> None:
    """Rows that each couple one of ten groups of six with one of many groups of three: nine colours do."""
    rng = np.random.default_rng(0)
    cameras, points = rng.integers(0, 10, 600), np.repeat(np.arange(100), 6)
    columns = np.concatenate([6 * cameras[:, None] + np.arange(6), 60 + 3 * points[:, None] + np.arange(3)], 1).reshape(
        -1
    )
    shuffled = rng.permutation(360)[columns]
    rows = sp.csr_matrix((np.ones(5400, dtype=bool), (np.repeat(np.arange(600), 9), shuffled)), shape=(600, 360))
    assert groups_of_columns(rows)[1] == 9


# -------------------------------------------------------------------------------------------------------------- factors
_FACTORS = {
    "tridiagonal": (sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(40, 40)), "band"),
    "block band": (sp.block_diag([np.ones((4, 4))] * 10) + sp.eye(40, k=4), "band"),
    "shuffled band": (None, "renumbered"),
    "grid": (
        sp.kronsum(
            sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(40, 40)), sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(40, 40))
        ),
        "superlu",
    ),
    "graph": (sp.random(300, 300, 0.03, random_state=np.random.default_rng(1)) + sp.eye(300), "superlu"),
    "hardly sparse": (sp.random(150, 150, 0.2, random_state=np.random.default_rng(1)) + sp.eye(150), "full"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", _FACTORS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("columns", [None, 4])
def test_sparse_factors_against_dense(name: str, transpose: bool, columns: int | None) -> None:
    pattern, kind = _FACTORS[name]
    if pattern is None:
        order = np.random.default_rng(2).permutation(200)
        pattern = sp.csr_matrix(sp.diags([1.0, 1, 1, 1], [-2, -1, 0, 1], shape=(200, 200)))[order][:, order]
    pattern = sp.csr_matrix(pattern).astype(bool)
    pattern.sort_indices()
    analysis = analyse(pattern)
    n = pattern.shape[0]
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(3, n, n, generator=generator, dtype=torch.float64) * torch.from_numpy(pattern.toarray())
    blocks = blocks + 3 * torch.eye(n, dtype=torch.float64) * (1 + torch.rand(3, n, 1, generator=generator))
    blocks[1] *= torch.logspace(-150, 150, n, dtype=torch.float64)[:, None]  # units of the equations do not matter
    values = np.stack([b.numpy()[pattern.nonzero()] for b in blocks])
    shape = (3, n) if columns is None else (3, n, columns)
    b = torch.randn(shape, generator=generator, dtype=torch.float64)
    factor = SparseFactor(analysis, values)
    assert factor.ok.all() and factor.reason == ""
    if analysis.band is None:
        apart = factor._lus and isinstance(factor._lus[0], _Full)
        assert ("full" if apart else "superlu") == kind and (factor._stacked is None) == (
            name in ("graph", "hardly sparse")
        )
    else:
        assert ("band" if analysis.order is None else "renumbered") == kind
    rows = blocks.abs().amax(2, keepdim=True)
    scaled = blocks / rows
    rhs = b if columns else b[..., None]
    expected = torch.linalg.solve(scaled.mT, rhs) / rows if transpose else torch.linalg.solve(scaled, rhs / rows)
    torch.testing.assert_close(factor.solve(b, transpose), expected.reshape(b.shape), rtol=1e-8, atol=0)


@pytest.mark.parametrize("size", [40, 400])
def test_a_bad_block_leaves_the_others_alone(size: int) -> None:
    pattern = sp.csr_matrix(sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(size, size))).astype(bool)
    if size == 400:
        pattern = sp.csr_matrix(sp.kronsum(*2 * [sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(20, 20))])).astype(bool)
    pattern.sort_indices()
    rows, columns = pattern.nonzero()
    good = np.where(rows == columns, 6.0, -1.0)
    neumann = np.where(rows == columns, np.diff(pattern.indptr)[rows] - 1.0, -1.0)  # rows sum to zero: singular
    broken = good.copy()
    broken[3] = np.nan
    factor = SparseFactor(analyse(pattern), np.stack([good, neumann, broken, good]))
    assert factor.ok.tolist() == [True, False, False, True]
    x = factor.solve(torch.ones(4, size, dtype=torch.float64))
    assert x[[0, 3]].isfinite().all() and x[[1, 2]].isnan().all() and torch.equal(x[0], x[3])
    assert factor.reason == "the matrix is not finite"


@pytest.mark.parametrize("wrong", ["none", "exactly singular", "badly pivoted"])
def test_blocks_of_a_batch_are_factored_by_one_call(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """... unless one of them is singular, or its pivots on the diagonal are poor: then block by block, as one alone."""
    pattern = sp.csr_matrix(sp.kronsum(*2 * [sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(30, 30))])).astype(bool)
    pattern.sort_indices()
    rows, columns = pattern.nonzero()
    analysis, rng = analyse(pattern), np.random.default_rng(0)
    values = rng.standard_normal((5, len(rows))) + 6.0 * (rows == columns)
    if wrong == "exactly singular":
        values[2] = np.where((rows == 7) | (columns == 7), 0.0, values[2])
        values[2][(rows == 7) & (columns == 8)] = values[2][(rows == 9) & (columns == 8)] = 1.0
    elif wrong == "badly pivoted":
        monkeypatch.setattr(sparse_factors, "_ACCURATE", -1.0)
    alone = [SparseFactor(analysis, v[None]) for v in values]
    calls: list[int] = []
    splu = ordering.sla.splu
    monkeypatch.setattr(ordering.sla, "splu", lambda A, **options: (calls.append(A.shape[0]), splu(A, **options))[1])
    factor = SparseFactor(analysis, values)
    assert calls[0] == 5 * 900 and (len(calls) == 1) == (wrong == "none")
    assert factor.ok.tolist() == [bool(one.ok[0]) for one in alone]
    b = torch.from_numpy(rng.standard_normal((5, 900, 3)))
    for transpose in (False, True):
        x = factor.solve(b, transpose)
        for i in range(5):
            single = alone[i].solve(b[i : i + 1], transpose)[0]
            torch.testing.assert_close(x[i], single, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_indefinite_matrices_are_pivoted() -> None:
    """A symmetric pattern with a zero diagonal: the preference for diagonal pivots must not cost accuracy."""
    pattern = sp.csr_matrix(sp.kronsum(*2 * [sp.diags([1.0, 1, 1], [-1, 0, 1], shape=(24, 24))])).astype(bool)
    pattern.sort_indices()
    rows, columns = pattern.nonzero()
    rng = np.random.default_rng(0)
    values = np.where(rows == columns, 1e-12, rng.standard_normal(len(rows)))[None]
    A = torch.zeros(576, 576, dtype=torch.float64)
    A[rows, columns] = torch.from_numpy(values[0])
    b = torch.ones(1, 576, dtype=torch.float64)
    x = SparseFactor(analyse(pattern), values).solve(b)
    assert (A @ x[0] - 1).abs().max() < 1e-8 * x.abs().max()


def test_pattern_of_a_residual_and_its_factors_solve_it() -> None:
    n = 500
    f = lambda z: 2 * z - torch.nn.functional.pad(z, (1, 0))[:, :-1] - z.roll(-1, 1) * z + z**3  # noqa: E731
    z = torch.linspace(1, 2, 2 * n, dtype=torch.float64).view(2, n)
    ready = coloured(detect(f, z).pattern)
    _, A = autodiff.linearise(f, z)
    values, error = ready.values(A.mv, A.rmv, 2, z)
    assert error.max() < 1e-12
    b = torch.ones(2, n, dtype=torch.float64)
    x = SparseFactor(analyse(ready.pattern), values).solve(b)
    torch.testing.assert_close(A.mv(x), b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shared", [255, 256, 512])
def test_columns_that_share_many_rows_have_colours_of_their_own(shared: int) -> None:
    rows = sp.lil_matrix((shared + 40, 300), dtype=bool)
    rows[:shared, 0] = rows[:shared, 7] = True
    rows[shared + np.arange(40), np.arange(20, 60)] = rows[shared + np.arange(40), np.arange(250, 290)] = True
    groups, _ = groups_of_columns(sp.csr_matrix(rows))
    assert groups[0] != groups[7] and all(groups[20 + i] != groups[250 + i] for i in range(40))


def test_the_greedy_colouring_of_columns_that_share_256_rows() -> None:
    from implicitkit.sparsity.colouring import _greedy

    rows = sp.csr_matrix(np.ones((256, 2), dtype=bool))
    assert len(set(_greedy(rows).tolist())) == 2


def _graph(n: int) -> sp.csr_matrix:
    """Every node beside four others; no stride fits."""
    rng, A = np.random.default_rng(0), sp.identity(n, dtype=bool, format="csr")
    for _ in range(2):
        P = sp.csr_matrix((np.ones(n, dtype=bool), (np.arange(n), rng.permutation(n))), shape=(n, n))
        A = A + P + P.T
    return sp.csr_matrix(A)


def test_no_colours_are_looked_for_before_entries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solve by products alone never colours the graph of its unknowns, nor one of which every operation is followed; the
    bounds hold for every pattern there is here."""
    looked: list[int] = []
    greedy = colouring._greedy
    monkeypatch.setattr(colouring, "_greedy", lambda pattern: (looked.append(pattern.shape[0]), greedy(pattern))[1])
    g = torch.Generator().manual_seed(0)
    near = torch.arange(5000) + 20 * torch.rand(8, 5000, generator=g)  # factors fill little
    places = near.argsort(dim=1)  # of rows with less than 8 entries products take less time

    def f(z: Tensor, x: Tensor) -> Tensor:
        return 10 * z + z**3 - sum(z[some] for some in places) - x

    def unfollowed(z: Tensor, x: Tensor) -> Tensor:
        return f(z, x) + torch.erf(z)

    x = torch.linspace(0.5, 1.5, 5000, dtype=torch.float64)
    assert bool(ik.root(unfollowed, torch.zeros_like(x), (x,)).converged) and not looked
    assert bool(ik.root(f, torch.zeros_like(x), (x,), solver="newton").converged) and not looked
    found = ik.root(unfollowed, torch.zeros_like(x), (x,), solver="newton")
    assert bool(found.converged) and looked == [5000, 5000]  # by rows and by columns
    for pattern in (_graph(400), sp.csr_matrix(_patterns()["hubs"]), sp.csr_matrix(_patterns()["grid"])):
        for symmetric in (False, True):
            ready = coloured(pattern, symmetric=symmetric)
            if ready is not None:
                least, bound = ready.products, colouring.most(ready.pattern)
                assert bound is not None and least <= ready.colouring.products == ready.products <= bound


def test_a_symmetric_pattern_is_coloured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns have the colours of its rows; of another both are tried.  A table of what is taken says what sorting
    says."""
    looked: list[np.ndarray] = []
    greedy = colouring._greedy
    monkeypatch.setattr(colouring, "_greedy", lambda pattern: (looked.append(greedy(pattern)), looked[-1])[1])
    both = _graph(600)
    assert colouring.colour(both) is not None and len(looked) == 1
    mixed = both[np.random.default_rng(1).permutation(600)]
    assert colouring.colour(mixed) is not None and len(looked) == 3
    monkeypatch.setattr(colouring, "_TABLE", 0)
    np.testing.assert_array_equal(greedy(both), looked[0])


def test_the_side_that_may_take_fewer_products_is_coloured_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences along the links of a graph: each has two columns, a column ten rows; were these coloured, their graph has
    ten times as many links."""
    looked: list[tuple[int, ...]] = []
    greedy = colouring._greedy
    monkeypatch.setattr(colouring, "_greedy", lambda pattern: (looked.append(pattern.shape), greedy(pattern))[1])
    i, j = np.random.default_rng(0).integers(0, 400, (2, 2000))
    D = sp.csr_matrix((np.ones(4000, dtype=bool), (np.tile(np.arange(2000), 2), np.append(i, j))), shape=(2000, 400))
    for pattern, by_rows in ((D, False), (sp.csr_matrix(D.T), True)):
        found = colouring.colour(pattern)
        assert found is not None and found.by_rows is by_rows and looked.pop() == (2000, 400) and not looked


def test_what_a_side_takes_is_told_without_the_lines_that_it_sets_apart() -> None:
    """A band beside a column that is full takes the rows of the band, and one product for the column, not 12."""
    n = 400
    lines = sp.lil_matrix(sp.diags([1.0] * 7, range(-3, 4), shape=(n, n)))
    lines[:, 0] = 1
    pattern = sp.csr_matrix(lines, dtype=bool)
    for by_rows, matrix in ((True, pattern), (False, sp.csr_matrix(pattern.T))):
        found = colouring.colour(matrix, row_cost=1.0, column_cost=1.0)
        assert found is not None and found.by_rows is by_rows and (found.count, found.apart_count) == (7, 1)
    found = colouring.colour(pattern)
    assert found is not None and found.by_rows and (found.count, found.apart_count) == (7, 1)


def test_a_product_that_all_but_cancels_does_not_refute_a_pattern() -> None:
    n = 60
    ready = coloured(sp.diags([1.0, 1.0], [0, 1], shape=(n, n)))
    assert ready is not None
    v = ready._random
    A = sp.diags([np.append(v[1:], 1.0), -v[:-1]], [0, 1], format="csr")  # A v = 0, but for the last
    A = sp.csr_matrix(A.T if ready.colouring.by_rows else A)
    ready = coloured(A)
    assert ready is not None
    M = torch.from_numpy(A.toarray())
    like = torch.zeros(1, n, dtype=torch.float64)
    values, error = ready.values(lambda x: x @ M.T + 1e-16, lambda x: x @ M + 1e-16, 1, like)  # as rounding leaves it
    np.testing.assert_allclose(ready.matrix(values[0]).toarray(), A.toarray(), rtol=1e-14)
    assert error[0] < 1e-14
    _, wrong = ready.values(lambda x: x @ (M + 1).T, lambda x: x @ (M + 1), 1, like)
    assert wrong[0] > 0.1


def test_entries_that_are_rounding_do_not_refute_a_pattern() -> None:
    """``sech^2(w z)``, computed as ``1 - tanh^2``, is nothing but rounding from ``w z = 20`` on."""
    n = 400
    w = torch.logspace(0, 2, n, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ik.SparsityWarning)
        found = ik.argmin(lambda z: torch.log(torch.cosh(w * (z - 1))).sum(), torch.zeros(n, dtype=torch.float64))
    torch.testing.assert_close(found.value, torch.ones(n, dtype=torch.float64))


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e-11])
def test_what_a_pattern_lacks_is_told_from_rounding(size: float) -> None:
    """An entry beside others that are what rounding leaves of ``(1 + 1e-16) v_i - v_i``."""
    n = 60
    ready = coloured(sp.eye(n, format="csr"))
    assert ready is not None
    like, shift = torch.zeros(1, n, dtype=torch.float64), torch.linspace(0, 1e-15, n, dtype=torch.float64)

    def rounded(v: Tensor) -> Tensor:
        return v * (1 + shift) - v * torch.ones_like(shift)

    def lacking(v: Tensor) -> Tensor:
        return rounded(v) + size * torch.nn.functional.pad(v[:, -1:], (0, n - 1))

    values, error = ready.values(rounded, rounded, 1, like)
    assert error[0] > 1e-3 and ready.is_rounding(values, rounded, rounded, like, 1e-4)
    values, error = ready.values(lacking, lacking, 1, like)
    assert error[0] > 1e-3 and not ready.is_rounding(values, lacking, lacking, like, 1e-4)


def test_one_function_of_real_and_complex_unknowns_has_two_patterns() -> None:
    def coupled(z: Tensor, a: Tensor) -> Tensor:
        return z**3 + 4 * z - a + 0.1 * z.roll(1, -1)

    for dtype in (torch.float64, torch.complex128, torch.float32):
        a = torch.linspace(0.5, 1.5, 200, dtype=dtype)
        z = ik.root(coupled, torch.zeros_like(a), a).value
        assert coupled(z, a).abs().max() < 1e-5


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: F.huber_loss(z, y, reduction="sum", delta=0.2),
        lambda z, y: F.smooth_l1_loss(z, y, reduction="sum", beta=0.2),
        lambda z, y: F.leaky_relu(z - y).square().sum(),
        lambda z, y: 2000 * F.mse_loss(z, y),
        lambda z, y: F.soft_margin_loss(z, y.detach().sign(), reduction="sum") + 0.1 * (z - y).square().sum(),
        lambda z, y: (F.interpolate(z.view(1, 1, -1), scale_factor=2, mode="linear")[0, 0, ::2] - y).square().sum(),
    ],
    ids=["huber", "smooth l1", "leaky", "mse", "soft margin", "interpolated"],
)
def test_torchs_own_losses_show_their_pattern(loss) -> None:
    """A smoothed signal of 2,000 numbers: hundreds of steps of L-BFGS, or no derivative, where a loss hides the Hessian."""
    y = torch.sin(torch.linspace(0, 60, 2000, dtype=torch.float64)).requires_grad_()
    solution = ik.argmin(
        lambda z, y: loss(z, y) + 50 * F.mse_loss(z[1:], z[:-1], reduction="sum"), torch.zeros_like(y), (y,)
    )
    assert solution.evaluations <= 80
    assert bool(torch.isfinite(torch.autograd.grad(solution.value.sum(), y)[0]).all())
