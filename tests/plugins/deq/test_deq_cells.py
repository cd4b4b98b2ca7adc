"""The cells of the DEQ plugin: each against its unrolled limit, against its formula, and causal where it says so."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import networkx as nx
import pytest
import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, cells, future_leak

F64 = torch.float64
RING = cells.normalised_adjacency(torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 0]]), 5, dtype=F64)


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


# name -> (cell, inputs, options of the DEQ)
CELLS: dict[str, Callable[[], tuple[cells.Cell, tuple[Tensor, ...], dict[str, Any]]]] = {
    "mlp": lambda: (cells.MLP(3, 5, dtype=F64), (_randn(4, 3),), {}),
    "mlp hidden": lambda: (cells.MLP(3, 5, 7, dtype=F64), (_randn(4, 2, 3),), {}),
    "transformer": lambda: (cells.Transformer(3, 8, 2, scale=0.3, dtype=F64), (_randn(2, 6, 3),), {}),
    "transformer memory": lambda: (
        cells.Transformer(3, 8, 2, scale=0.3, dtype=F64),
        (_randn(2, 6, 3), _randn(2, 4, 8), _randn(2, 4, 3)),
        {},
    ),
    "transformer open": lambda: (
        cells.Transformer(3, 8, 1, causal=False, scale=0.3, dtype=F64),
        (_randn(2, 5, 3),),
        {},
    ),
    "transformer state": lambda: (
        cells.Transformer(3, 4, 1, skip="state", scale=1.0, dtype=F64),
        (3 * _randn(2, 4, 3),),
        {},
    ),
    "transformer paper": lambda: (
        cells.Transformer(3, 8, 2, skip="none", scale=0.5, dtype=F64),
        (_randn(2, 5, 3),),
        {},
    ),
    "trellis": lambda: (cells.TrellisNet(3, 4, dtype=F64), (_randn(2, 6, 3),), {}),
    "trellis pointwise": lambda: (cells.TrellisNet(3, 4, input_kernel=1, dtype=F64), (_randn(2, 6, 3),), {}),
    "trellis dilated": lambda: (
        cells.TrellisNet(3, 4, kernel=3, dilation=2, full_output=True, dtype=F64),
        (_randn(2, 7, 3), _randn(2, 5, 8)),
        {},
    ),
    "convolution": lambda: (cells.ConvBlock(1, 4, groups=2, dtype=F64), (_randn(2, 1, 5, 4),), {}),
    "multiscale": lambda: (
        cells.Multiscale(1, (4, 4, 2), groups=2, expansion=1, dtype=F64),
        (_randn(2, 1, 7, 5),),
        {"solver": "anderson"},
    ),
    "graph": lambda: (cells.Graph(RING, 3, 4), (_randn(5, 3),), {"batch_dims": 0}),
    "graph batch": lambda: (cells.Graph(RING.to_dense(), 3, 4), (_randn(2, 5, 3),), {}),
    "graph batch sparse": lambda: (cells.Graph(RING, 3, 4), (_randn(2, 5, 3),), {}),
    "monotone": lambda: (cells.Monotone(3, 6, dtype=F64), (_randn(4, 3),), {}),
}


def _loss(out: Any) -> Tensor:
    leaves = ik.extend.trees.tree_flatten(out)[0]
    return sum((t * torch.linspace(-1, 2, t.numel(), dtype=t.dtype).reshape(t.shape)).sum() for t in leaves)


def _layer(name: str) -> tuple[DEQ, tuple[Tensor, ...]]:
    torch.manual_seed(3)
    cell, inputs, options = CELLS[name]()
    return DEQ(cell, **({"rtol": 1e-12, "atol": 1e-13, "max_steps": 500} | options)), inputs


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CELLS)
def test_gradient_of_every_parameter_is_that_of_the_unrolled_limit(name: str) -> None:
    layer, inputs = _layer(name)
    inputs = tuple(x.requires_grad_() for x in inputs)
    wanted = [*inputs, *layer.parameters()]
    out = layer(*inputs)
    implicit = torch.autograd.grad(_loss(out), wanted)

    cell = layer.cell
    injected = cell.inject(*inputs)
    with torch.no_grad():
        z = ik.extend.trees.tree_map(torch.clone, _state(layer, inputs))
    start = z
    for _ in range(350):  # from the equilibrium: the derivative is summed from nothing
        z = cell.update(z, *injected)
    unrolled = torch.autograd.grad(_loss(cell.output(z)), wanted)
    drift = max(
        float((a - b).detach().abs().max())
        for a, b in zip(*(ik.extend.trees.tree_flatten(t)[0] for t in (z, start)), strict=True)
    )
    assert drift < 1e-8, f"{name}: the unrolled map leaves the equilibrium by {drift:.1e}"
    for i, (a, b) in enumerate(zip(implicit, unrolled, strict=True)):
        error = float((a - b).norm() / b.norm().clamp_min(1e-6))
        assert error < 1e-6, f"{name}: gradient {i} {tuple(b.shape)} is off by {error:.1e}"


def _state(layer: DEQ, inputs: tuple[Tensor, ...]) -> Any:
    """The equilibrium itself, not what the cell makes of it."""
    with torch.no_grad():
        assert layer.solution is not None
        return layer.solution.value


@pytest.mark.parametrize("name", [n for n in CELLS if "graph" not in n and "batch" not in n])
def test_a_sample_does_not_depend_on_its_neighbours(name: str) -> None:
    layer, inputs = _layer(name)
    with torch.no_grad():
        whole = ik.extend.trees.tree_flatten(layer(*inputs))[0]
        alone = ik.extend.trees.tree_flatten(layer(*(x[1:2] for x in inputs)))[0]
    for a, b in zip(whole, alone, strict=True):
        assert torch.allclose(a[1:2], b, rtol=1e-8, atol=1e-9), name


@pytest.mark.parametrize("name", ["transformer", "transformer memory", "trellis", "trellis dilated"])
def test_the_past_does_not_see_the_future(name: str) -> None:
    layer, (x, *more) = _layer(name)
    assert layer.causal
    assert future_leak(layer, x, 3, *more) < 1e-9
    for steps in range(1, 9):  # coefficients per position: not even before convergence
        early = DEQ(layer.cell, rtol=1e-12, max_steps=steps, on_failure="ignore")
        assert future_leak(early, x, 3, *more) < 1e-11  # rounding: products depend on where memory lies
    mixing = ik.Anderson(period=1)  # in every step, also where the cell contracts so much that plain steps would do
    shared = DEQ(layer.cell, solver=mixing, rtol=1e-12, max_steps=4, on_failure="ignore", causal=False)
    assert future_leak(shared, x, 3, *more) > 1e-8


def test_an_open_transformer_sees_everything() -> None:
    layer, (x,) = _layer("transformer open")
    assert not layer.causal and future_leak(layer, x, 3) > 1e-3


# ----------------------------------------------------------------------------------------------------------- transformer
def test_attention_is_the_sum_over_positions_that_it_says() -> None:
    """The vectorised block against loops over queries and keys, memory included."""
    torch.manual_seed(0)
    d, heads, T, M = 4, 2, 5, 3
    cell = cells.Transformer(3, d, heads, skip="state", dtype=F64)
    nn.init.normal_(cell.content_bias)
    nn.init.normal_(cell.distance_bias)
    x, z, memory, memory_x = _randn(1, T, 3), _randn(1, T, d), _randn(1, M, d), _randn(1, M, 3)
    got = cell(z, x, memory, memory_x)

    states, inputs = torch.cat([memory, z], 1)[0], torch.cat([memory_x, x], 1)[0]
    qkv = cell.qkv(states) + cell.injection(inputs)
    rows = []
    for i in range(M, M + T):
        parts = []
        for h in range(heads):
            take = slice(h * d // heads, (h + 1) * d // heads)
            q = qkv[i, :d][take]
            scores = []
            for j in range(i + 1):
                rate = 10000 ** (-torch.arange(0, d, 2, dtype=F64) / d)
                sinusoid = torch.cat([torch.sin((i - j) * rate), torch.cos((i - j) * rate)])
                r = cell.distance(sinusoid)[take]
                k = qkv[j, d : 2 * d][take]
                scores.append(((q + cell.content_bias[h]) @ k + (q + cell.distance_bias[h]) @ r) / (d / heads) ** 0.5)
            weights = torch.softmax(torch.stack(scores), 0)
            parts.append(weights @ qkv[: i + 1, 2 * d :][:, take])
        rows.append(cell.out(torch.cat(parts)))
    hidden = cell.first_norm(z[0] + torch.stack(rows))
    wanted = cell.second_norm(hidden + cell.down(torch.relu(cell.up(hidden))))
    assert torch.allclose(got[0], wanted, rtol=1e-12, atol=1e-12)


def test_dropout_is_one_mask_a_solve() -> None:
    torch.manual_seed(0)
    layer = DEQ(cells.Transformer(3, 8, 2, scale=0.3, dropout=0.3, dtype=F64), rtol=1e-9)
    x = _randn(2, 5, 3)
    first, second = layer(x), layer(x)
    assert layer.solution is not None and bool(layer.solution.converged.all())
    assert not torch.allclose(first, second)
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("memory", [0, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_is_attention(causal: bool, memory: int) -> None:
    torch.manual_seed(0)
    cell = cells.Transformer(3, 8, 2, causal=causal, dtype=F64)
    past = (_randn(2, memory, 8), _randn(2, memory, 3)) if memory else ()
    x, z = _randn(2, 5, 3), _randn(2, 5, 8).requires_grad_()
    wanted = [z, *cell.parameters()]
    plain = cell(z, x, *past)
    exact = torch.autograd.grad(plain.sin().sum(), wanted)
    cell.fused = True
    torch.testing.assert_close(cell(z, x, *past), plain, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(cell(z, x, *past).sin().sum(), wanted), exact, rtol=1e-9, atol=1e-11)
    layer = DEQ(cells.Transformer(3, 8, 2, scale=0.3, fused=True, dtype=F64), rtol=1e-10)
    out = layer(x)
    out.sin().sum().backward()
    got = [p.grad.clone() for p in layer.parameters()]
    layer.cell.fused = False
    layer.zero_grad()
    layer(x).sin().sum().backward()
    torch.testing.assert_close(got, [p.grad for p in layer.parameters()], rtol=1e-7, atol=1e-9)


def test_the_block_of_the_paper_is_its_formula() -> None:
    """LN(phi(LN(SelfAttention(z W_QKV + x U)))): neither state nor input beside the attention."""
    torch.manual_seed(0)
    cell = cells.Transformer(3, 8, 2, skip="none", dtype=F64)
    assert cell.injection.out_features == 3 * 8
    z, x = _randn(2, 5, 8), _randn(2, 5, 3)
    h = cell.first_norm(cell._attend(z, *cell.inject(x)))
    want = cell.second_norm(h + cell.down(torch.relu(cell.up(h))))
    torch.testing.assert_close(cell(z, x), want, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("length", [24, 48, 96])
def test_a_trellis_that_adds_up_far_out_is_solved(length: int) -> None:
    """Open gates: ``c`` grows with every position, by up to one, and what a correction says travels as slowly."""
    for seed in (0, 1, 3):
        torch.manual_seed(seed)
        cell = cells.TrellisNet(3, 4, scale=2.5)
        with torch.no_grad():
            cell.injection.bias += torch.tensor([2.0, 0.0, 1.0, 4.0]).repeat_interleave(4)
        x = torch.randn(4, length, 3)
        layer = DEQ(cell, solver="picard", rtol=1e-3, on_failure="ignore")
        assert layer(x).isfinite().all() and layer.solution is not None
        assert layer.solution.converged.all(), (seed, layer.solution.status)
        assert float(layer.solution.value.abs().max()) > 8


# --------------------------------------------------------------------------------------------------------------- trellis
@pytest.mark.parametrize("input_kernel", [None, 1, 2])
def test_trellis_is_its_formula(input_kernel: int | None) -> None:
    torch.manual_seed(0)
    F, k, s, T = 3, 3, 2, 6
    cell = cells.TrellisNet(2, F, kernel=k, dilation=s, input_kernel=input_kernel, dtype=F64)
    K = input_kernel or k
    U = cell.injection.weight if K > 1 else cell.injection.weight.unsqueeze(2)
    x, z, u = _randn(1, T, 2), _randn(1, T, 2 * F), _randn(1, cell.history_length, 2 * F)
    before = _randn(1, (K - 1) * s, 2)
    got = cell(z, x, u, before)[0]
    seen = torch.cat([before, x], 1)[0]
    padded, past = torch.cat([u, z], 1)[0], u.shape[1]
    for t in range(T):
        gates = cell.injection.bias + sum(U[:, :, j] @ seen[t + j * s] for j in range(K))
        for j in range(k):
            gates = gates + cell.recurrent.weight[:, :, j] @ padded[past + t - (k - 1 - j) * s, F:]
        i, o, g, f = gates.chunk(4)
        c = torch.sigmoid(f) * padded[past + t - s, :F] + torch.sigmoid(i) * torch.tanh(g)
        assert torch.allclose(got[t], torch.cat([c, torch.sigmoid(o) * torch.tanh(c)]), atol=1e-14)


@pytest.mark.parametrize(("kernel", "dilation"), [(2, 1), (2, 3), (3, 2), (1, 2)])
def test_a_sequence_cut_in_two_with_its_history_is_the_whole(kernel: int, dilation: int) -> None:
    torch.manual_seed(0)
    cell = cells.TrellisNet(3, 4, kernel, dilation, full_output=True, dtype=F64)
    layer = DEQ(cell, rtol=1e-12, atol=1e-13)
    x = _randn(2, 16, 3)
    with torch.no_grad():
        whole = layer(x)
        first = layer(x[:, :9])
        second = layer(x[:, 9:], first, x[:, :9])
    assert torch.allclose(torch.cat([first, second], 1), whole, atol=1e-9)


# ----------------------------------------------------------------------------------------------------- graphs, monotone
def test_normalised_adjacency_has_spectral_radius_one() -> None:
    graph = nx.karate_club_graph()
    edges = torch.tensor(list(graph.edges)).T
    A = cells.normalised_adjacency(edges, len(graph), dtype=F64).to_dense()
    assert torch.equal(A, A.mT) and float(torch.linalg.eigvalsh(A).abs().max()) == pytest.approx(1, abs=1e-12)
    degree = torch.tensor([graph.degree[i] + 1.0 for i in range(len(graph))], dtype=F64)
    assert torch.allclose(
        A, (torch.tensor(nx.to_numpy_array(graph, weight=None)) + torch.eye(34)) / (degree[:, None] * degree).sqrt()
    )


def test_the_graph_stays_well_posed_when_its_weights_grow() -> None:
    layer, (x,) = _layer("graph")
    with torch.no_grad():
        layer.cell.recurrent.parametrizations.weight.original.mul_(100)
    layer(x)
    assert layer.solution is not None and bool(layer.solution.converged)
    assert float(layer.cell.recurrent.weight.detach().abs().sum(1).max()) <= 0.9 + 1e-12


def test_monotone_has_its_equilibrium_whatever_the_parameters() -> None:
    """Also where the plain iteration ``relu(W z + u)`` diverges; and it is the one that Newton finds."""
    torch.manual_seed(0)
    cell = cells.Monotone(3, 6, margin=0.3, dtype=F64)
    with torch.no_grad():
        cell.Q.mul_(3)
    x = _randn(4, 3)
    injected, operator, _ = cell.inject(x)
    W = torch.eye(6, dtype=F64) - operator
    assert float(torch.linalg.matrix_norm(W.detach(), 2)) > 3
    assert float(torch.linalg.eigvalsh((operator + operator.mT).detach() / 2).min()) >= 0.3 - 1e-9
    z = DEQ(cell, rtol=1e-11, atol=1e-12, max_steps=5000)(x)
    assert torch.allclose(z, torch.relu(z @ W.mT + injected), atol=1e-8)
    plain = torch.zeros_like(z)
    for _ in range(200):
        plain = torch.relu(plain @ W.mT + injected)
    assert not bool(torch.isfinite(plain).all()) or float((plain - z).detach().abs().max()) > 1


@pytest.mark.parametrize(("skew", "margin", "most"), [(1.0, 0.5, 60), (1.0, 0.1, 60), (5.0, 0.1, 400)])
def test_monotone_is_solved_by_default_in_few_evaluations(skew: float, margin: float, most: int) -> None:
    torch.manual_seed(0)
    cell = cells.Monotone(4, 64, margin=margin)
    with torch.no_grad():
        cell.Q.mul_(skew)
        layer = DEQ(cell).eval()
        layer(torch.randn(32, 4))  # in evaluation a sample that is not solved raises
    assert layer.solution is not None and layer.solution.evaluations < most


def test_multiscale_reaches_every_resolution_from_the_input() -> None:
    layer, (x,) = _layer("multiscale")
    other = x.clone()
    other[:, :, 3, 2] += 1
    with torch.no_grad():
        for i, (a, b) in enumerate(zip(layer(x), layer(other), strict=True)):
            assert float((a - b).abs().max()) > 1e-6, f"resolution {i} did not notice"


# ------------------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: cells.Transformer(3, 9, 2), "multiple of heads"),
        (lambda: cells.Transformer(3, 9, 3), "even"),
        (lambda: cells.Transformer(0, 8), "in_features must be at least 1"),
        (lambda: cells.Transformer(3, 8, skip="both"), "skip must be"),
        (lambda: cells.Transformer(3, 8)(_randn(2, 8), _randn(2, 3)), "batch, positions, features"),
        (lambda: cells.Transformer(3, 8, dtype=F64).inject(_randn(2, 5, 3), _randn(2, 4, 8)), "go together"),
        (lambda: cells.Transformer(3, 8, dtype=F64).inject(_randn(2, 5, 3), _randn(2, 4, 8), _randn(2, 3, 3)), "agree"),
        (lambda: cells.TrellisNet(3, 4, kernel=0), "kernel must be at least 1"),
        (lambda: cells.TrellisNet(3, 4, 3, 2, dtype=F64).inject(_randn(2, 5, 3), _randn(2, 3, 8)), "at least 4"),
        (lambda: cells.ConvBlock(1, 6, groups=4), "groups"),
        (lambda: cells.ConvBlock(1, 8, kernel=2), "odd"),
        (lambda: cells.ConvBlock(1, 8, dtype=F64).inject(_randn(2, 5, 3)), "batch, channels, height, width"),
        (lambda: cells.Multiscale(1, ()), "must be a resolution"),
        (lambda: cells.Multiscale(1, (8, 6)), "groups"),
        (lambda: cells.Graph(torch.ones(2, 3), 1, 1), "square"),
        (lambda: cells.Graph(torch.ones(2, 2), 1, 1, bound=1.0), "bound"),
        (lambda: cells.Graph(RING, 3, 4).inject(_randn(4, 3)), "5 nodes"),
        (lambda: cells.normalised_adjacency(torch.tensor([[0], [7]]), 5), "0..4"),
        (lambda: cells.Monotone(3, 4, margin=0.0), "margin"),
    ],
)
def test_bad_input(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize("name", CELLS)
def test_cells_are_copied_and_saved_like_modules(name: str, tmp_path: Any) -> None:
    layer, inputs = _layer(name)
    other = copy.deepcopy(layer)
    torch.save(layer.state_dict(), tmp_path / "weights.pt")
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    with torch.no_grad():
        for a, b in zip(*(ik.extend.trees.tree_flatten(m(*inputs))[0] for m in (layer, other)), strict=True):
            assert torch.equal(a, b), name


def test_an_adjacency_is_where_its_edges_are_whatever_the_default_device() -> None:
    edges = torch.tensor([[0, 1], [1, 2]])
    expected = cells.normalised_adjacency(edges, 3).to_dense()
    with torch.device("meta"):
        found = cells.normalised_adjacency(edges, 3).to_dense()
    torch.testing.assert_close(found, expected)
