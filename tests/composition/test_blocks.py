"""Solving and differentiating by blocks: what it costs, how it judges, how it fails; analysis; tied networks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
import torch
from compositions_table import BATCH, TABLE, TIGHT, Cell, D, N, zeros
from torch import Tensor, nn

import implicitkit as ik
from implicitkit.linear import BlockSubstitution, Operator

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import bench_compose as bench

BOTH = [ik.Blocks(), ik.Blocks(mode="concurrent")]
ids = {"ids": lambda s: s.mode}


class Calls:
    """A map that counts its calls, and the samples in them."""

    def __init__(self, function: Any) -> None:
        self.function, self.count, self.samples = function, 0, 0

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        self.samples += len(arguments[0])
        return self.function(*arguments)


# ----------------------------------------------------------------------------------------------------------- evaluations
@pytest.mark.slow
def test_stacked_pair_costs_what_it_costs_by_hand_and_concurrently_less_depth() -> None:
    found = bench.medians(bench.stacked_rows(8))
    by_hand = found["by hand"][0]
    assert found["blocks"][0] <= 1.05 * by_hand and found["blocks"][1] <= 1.05 * by_hand
    assert found["concurrent"][0] <= 1.1 * found["blocks"][0]
    assert found["concurrent"][1] <= 0.75 * found["blocks"][1]
    assert found["joint anderson"][0] >= 1.15 * by_hand  # one set of coefficients for both: what merging costs


@pytest.mark.parametrize("seed", [0, 3])
def test_stacked_pair_at_one_tolerance(seed: int) -> None:
    pair = bench.stacked(seed)
    start = {"f": pair.start, "v": pair.start}
    by_hand, error = bench.by_hand(pair, 1e-5, 1e-5)
    options: dict[str, Any] = {"batch_dims": 1, "rtol": 1e-5, "atol": 0.0}
    blocks = ik.solve(pair.joint(), start, (pair.x,), solver=ik.Blocks(), **options)
    assert blocks.evaluations == blocks.blocks.total <= by_hand + 1
    assert blocks.blocks.depth == by_hand
    assert pair.error(blocks.value) <= 1.01 * error
    concurrent = ik.solve(pair.joint(), start, (pair.x,), solver=ik.Blocks(mode="concurrent"), **options)
    assert concurrent.blocks.total <= 1.25 * by_hand and concurrent.blocks.depth <= 0.85 * by_hand
    assert pair.error(concurrent.value) <= 10 * error


@pytest.mark.slow
def test_feedback_pair_needs_the_fewest_evaluations_by_accelerated_sweeps() -> None:
    found = bench.medians(bench.feedback_rows(3))
    best = found.pop("accelerated sweep")[0]
    others = {name: evaluations for name, (evaluations, _) in found.items()}
    assert {"joint anderson", "joint broyden (by the book)", "nested", "plain sweep"} <= set(others)
    assert all(best < evaluations for evaluations in others.values()), (best, others)
    assert others["nested"] > 3 * best


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_backward_by_blocks_takes_no_more_passes_than_layer_by_layer(seed: int) -> None:
    layers, want = bench.adjoint_passes(bench.stacked(seed), "layers")
    blocks, got = bench.adjoint_passes(bench.stacked(seed), "blocks")
    joint, _ = bench.adjoint_passes(bench.stacked(seed), "joint")
    assert all(blocks[node] <= layers[node] for node in layers), (blocks, layers)
    assert sum(joint.values()) > 1.2 * sum(blocks.values())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("solver", BOTH, **ids)
def test_reported_evaluations_are_the_calls_made(solver: Any) -> None:
    maps = {
        name: Calls(function) for name, function in zip("abcd", [Cell(N), Cell(N, N), Cell(N), Cell(N)], strict=True)
    }
    nodes = {"a": (maps["a"], "x"), "b": (maps["b"], "a", "c"), "c": (maps["c"], "b"), "d": (maps["d"], "c")}
    joint = ik.compose(nodes, output="d")
    with torch.no_grad():
        solution = ik.solve(
            joint, {n: zeros() for n in nodes}, (torch.randn(BATCH, N, dtype=D),), solver=solver, batch_dims=1
        )
    assert solution.blocks.evaluations == {name: m.count for name, m in maps.items()}
    assert solution.evaluations == sum(m.count for m in maps.values())
    assert solution.sample_evaluations == sum(m.samples for m in maps.values())
    text = str(solution.blocks)
    assert f"{solution.evaluations} evaluations, depth {solution.blocks.depth}" in text and "a " in text
    assert ik.solve(joint, {n: zeros() for n in nodes}, (torch.randn(BATCH, N, dtype=D),), solver="anderson", batch_dims=1
                    ).blocks is None  # fmt: skip


@pytest.mark.parametrize("solver", BOTH, **ids)
def test_depth_counts_parallel_branches_once(solver: Any) -> None:
    built = TABLE["diamond"]()
    report = ik.solve(built.joint, built.start, built.inputs, solver=solver, **TIGHT).blocks
    count = report.evaluations
    if solver.mode == "sequential":
        assert report.depth == count["top"] + max(count["left"], count["right"]) - 1 + count["out"] - 1
    assert report.depth < report.total


@pytest.mark.parametrize("solver", BOTH, **ids)
def test_a_node_that_cannot_reach_the_output_is_not_solved_and_has_derivative_zero(solver: Any) -> None:
    live, dead, below = Cell(N), Calls(Cell(N)), Calls(Cell(N))
    joint = ik.compose({"f": (live, "x"), "dead": (dead, "f"), "below": (below, "dead")}, output="f")
    x = torch.randn(BATCH, N, dtype=D, requires_grad=True)
    start = {"f": zeros(), "dead": zeros() + 0.5, "below": zeros()}
    solution = ik.solve(joint, start, (x,), solver=solver, **TIGHT)
    assert dead.count == below.count == 1 and solution.blocks.unsolved == ("dead", "below")
    assert torch.equal(solution.value["dead"], start["dead"])
    grads = torch.autograd.grad(
        sum(z.sum() for z in solution.value.values()), [x, *live.parameters(), *dead.function.parameters()]
    )
    plain = torch.autograd.grad(ik.fixed_point(live, zeros(), (x,), **TIGHT).value.sum(), [x, *live.parameters()])
    for a, b in zip(grads[: len(plain)], plain, strict=True):
        torch.testing.assert_close(a, b)
    assert all(not g.any() for g in grads[len(plain) :])
    _, pushed = torch.func.jvp(
        lambda x: ik.solve(joint, start, (x,), solver=solver, **TIGHT).value, (x.detach(),), (torch.ones_like(x),)
    )
    assert pushed["f"].any() and not pushed["dead"].any() and not pushed["below"].any()
    # any other solver solves every node, and differentiates it
    whole = ik.solve(joint, start, (x,), solver="anderson", **TIGHT)
    assert torch.autograd.grad(whole.value["below"].sum(), x)[0].abs().min() > 0


# ----------------------------------------------------------------------------------------------------------- convergence
@pytest.mark.parametrize("solver", BOTH, **ids)
def test_every_node_meets_the_tolerance_where_a_joint_norm_would_hide_the_small_one(solver: Any) -> None:
    large = lambda z, x: 0.2 * z + 1e3 * x  # noqa: E731
    small = lambda z, w: 0.9 * z + 1e-6 * w  # noqa: E731
    joint = ik.compose({"f": (large, "x"), "v": (small, "f")}, output="v")
    x = torch.rand(2, N, dtype=D) + 1
    start = {"f": torch.zeros_like(x), "v": torch.zeros_like(x)}
    options: dict[str, Any] = {"batch_dims": 1, "rtol": 1e-6, "atol": 0.0}

    def relative(value: dict[str, Tensor]) -> float:
        v = value["v"]
        return float(((small(v, value["f"]) - v).norm(dim=1) / v.norm(dim=1)).max())

    assert relative(ik.solve(joint, start, (x,), solver="picard", **options).value) <= 1e-6
    by_blocks = ik.solve(joint, start, (x,), solver=solver, **options)
    assert relative(by_blocks.value) <= 1e-6 and bool(by_blocks.converged.all())


@pytest.mark.parametrize("solver", BOTH, **ids)
@pytest.mark.parametrize("graph", ["pair", "diamond", "cycle"])
def test_tolerances_of_the_blocks_imply_that_of_the_joint_residual(graph: str, solver: Any) -> None:
    built = TABLE[graph]()
    rtol, atol = 1e-5, 1e-4
    s = ik.solve(built.joint, built.start, built.inputs, solver=solver, batch_dims=1, rtol=rtol, atol=atol)
    z = {name: t.detach() for name, t in s.value.items()}
    new = built.joint.gamma(z, *built.inputs)
    joint = torch.cat([(new[n] - z[n]).flatten(1) for n in z], 1).norm(dim=1)
    torch.testing.assert_close(s.residual_norm, joint.detach(), rtol=1e-6, atol=1e-12)
    assert bool((joint <= atol + rtol * torch.cat([t.flatten(1) for t in z.values()], 1).norm(dim=1)).all())
    for name, norm in s.blocks.residual_norm.items():
        torch.testing.assert_close(norm, (new[name] - z[name]).detach().flatten(1).norm(dim=1), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("solver", BOTH, **ids)
@pytest.mark.parametrize("graph", ["diamond", "cycle"])
def test_a_sample_that_fails_does_not_spoil_the_others(graph: str, solver: Any) -> None:
    built = TABLE[graph]()
    x = built.inputs[0].detach().clone()
    want = ik.solve(built.joint, built.start, (x,), solver=solver, **TIGHT)
    x[1, 0] = torch.nan
    got = ik.solve(built.joint, built.start, (x,), solver=solver, **TIGHT, on_failure="ignore")
    assert got.converged.tolist() == [True, False, True]
    for name in want.value:
        torch.testing.assert_close(got.value[name][[0, 2]], want.value[name][[0, 2]], rtol=1e-9, atol=1e-11)
        assert bool(got.value[name].isfinite().all())


@pytest.mark.parametrize("solver", BOTH, **ids)
@pytest.mark.parametrize(
    ("nodes", "output"),
    [
        ({"a": (lambda z, x: z + 1 + x.exp(), "x")}, "a"),
        ({"a": (lambda z, x: torch.tanh(0.3 * z + x), "x"), "b": (lambda z, u: z + 1 + u.exp(), "a")}, "b"),
        ({"a": (lambda z, u, x: u + 1 + 0 * x, "b", "x"), "b": (lambda z, u: u + 1.0, "a")}, "b"),
        ({"a": (lambda z, u, x: z + 1 + u.tanh().exp() + 0 * x, "b", "x"), "b": (lambda z, u: 0.5 * z + u, "a")}, "b"),
        ({"a": (lambda z, u, x: u + (-(u**2)).exp() + 0 * x, "b", "x"), "b": (lambda z, u: u * 1.0, "a")}, "b"),
    ],
    ids=["node", "chain", "loop", "loop of unequal maps", "loop that slows down"],
)
def test_what_runs_away_has_not_converged_however_small_its_residual(nodes: Any, output: str, solver: Any) -> None:
    joint = ik.compose(nodes, output=output)
    start, x = {name: torch.zeros(3, 2, dtype=D) for name in nodes}, torch.randn(3, 2, dtype=D)
    found = ik.solve(joint, start, (x,), solver=solver, batch_dims=1, on_failure="ignore")
    assert found.status.tolist() == [int(ik.Status.DIVERGED)] * 3


def test_a_map_that_is_not_finite_on_the_way_of_what_it_reads_waits_for_its_end() -> None:
    W, R, V = (
        torch.randn(n, m, dtype=D, generator=torch.Generator().manual_seed(0)) for n, m in ((2, 4), (4, 4), (4, 3))
    )
    nodes: Any = {
        "a": (lambda z, x: torch.tanh(0.4 * z @ R + x @ W), "x"),
        "b": (lambda z, u: 0.3 * z + torch.log(u + 0.5), "a"),
        "c": (lambda z, u: torch.tanh(0.3 * z + u @ V), "b"),
    }
    joint, x = ik.compose(nodes, output="c"), torch.randn(200, 2, dtype=D)
    start = {name: torch.zeros(200, n, dtype=D) for name, n in (("a", 4), ("b", 4), ("c", 3))}
    one, two = (ik.solve(joint, start, (x,), solver=s, on_failure="ignore", **TIGHT) for s in BOTH)
    assert 10 < int(one.converged.sum()) < 190
    assert one.converged.tolist() == two.converged.tolist()
    torch.testing.assert_close(one.value["c"][one.converged], two.value["c"][one.converged], rtol=1e-8, atol=1e-9)


def test_converged_samples_are_dropped_block_by_block() -> None:
    rates = torch.tensor([[0.05]] * 14 + [[0.95]] * 2, dtype=D)
    f = lambda z, r: r * z + 1  # noqa: E731
    joint = ik.compose({"f": (f, "r"), "v": (lambda z, w, r: r * z + w, "f", "r")}, output="v")
    start = {n: torch.zeros(16, 1, dtype=D) for n in ("f", "v")}
    options: dict[str, Any] = {"solver": ik.Blocks("picard"), "batch_dims": 1, "rtol": 1e-8}
    frozen = ik.solve(joint, start, (rates,), **options)
    dropped = ik.solve(joint, start, (rates,), in_dims=0, **options)
    torch.testing.assert_close(dropped.value, frozen.value)
    torch.testing.assert_close(dropped.value["v"], (1 - rates) ** -2, rtol=1e-5, atol=0)
    assert dropped.sample_evaluations < 0.4 * frozen.sample_evaluations


@pytest.mark.parametrize("solver", BOTH, **ids)
def test_vmap_solves_a_batch_of_loops(solver: Any) -> None:
    built = TABLE["cycle"]()
    (x,) = built.inputs
    start = {name: z[0] for name, z in built.start.items()}
    got = torch.vmap(lambda x: ik.solve(built.joint, start, (x,), solver=solver, rtol=1e-13, atol=1e-13).value["out"])(
        x
    )
    want = ik.solve(built.joint, built.start, (x,), solver=solver, **TIGHT).value["out"]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("solver", BOTH, **ids)
def test_a_loop_that_diverges_is_named(solver: Any) -> None:
    grow = lambda z, other, x: 0.5 * z + 2 * other**2 + x  # noqa: E731
    nodes = {
        "calm": (lambda z, x: 0.5 * z + x, "x"),
        "p": (grow, "q", "calm"),
        "q": (grow, "p", "calm"),
        "end": (lambda z, q: 0.5 * z + q, "q"),
    }
    one = torch.ones(2, 3, dtype=D)
    with pytest.raises(
        ik.ConvergenceError, match=r"feedback loop \{p, q\} in 2 of 2 samples: (div|the step)"
    ) as caught:
        ik.solve(
            ik.compose(nodes, output="end"),
            dict.fromkeys(nodes, one),
            (one,),
            solver=solver,
            batch_dims=1,
            max_steps=100,
        )
    assert "node 'end'" not in str(caught.value) and "'calm'" not in str(caught.value)
    assert all(bool(z.isfinite().all()) for z in caught.value.solution.value.values())


@pytest.mark.parametrize("solver", BOTH, **ids)
def test_a_node_out_of_steps_is_named(solver: Any) -> None:
    slow = ik.compose({"f": (lambda z, x: 0.1 * z + x, "x"), "v": (lambda z, w: 0.999 * z.sin() + w, "f")}, output="v")
    start = {n: torch.zeros(1, 2, dtype=D) for n in "fv"}
    picard = ik.Blocks("picard", mode=solver.mode)
    with pytest.raises(ik.ConvergenceError, match=r"node 'v'.*step limit"):
        ik.solve(slow, start, (torch.zeros(1, 2, dtype=D) + 0.01,), solver=picard, max_steps=15, batch_dims=1)


def test_modes_may_choose_different_solutions_each_exact() -> None:
    """A bistable second map: one solution if it starts from the input's transient, another from its limit."""
    f = lambda z, x: 0.9 * z + 0.1 * x  # noqa: E731
    v = lambda z, w: torch.tanh(3 * z + 2 * (w - 0.9))  # noqa: E731
    joint = ik.compose({"f": (f, "x"), "v": (v, "f")}, output="v")
    start = {n: torch.zeros(1, 1, dtype=D) for n in "fv"}
    x = torch.ones(1, 1, dtype=D)
    found = {}
    for name, solver in {"joint": "picard", "blocks": ik.Blocks("picard")}.items():
        z = ik.solve(joint, start, (x,), solver=solver, **TIGHT).value
        torch.testing.assert_close(v(z["v"], z["f"]), z["v"], rtol=1e-12, atol=1e-12)
        found[name] = float(z["v"])
    assert found["joint"] < -0.9 and found["blocks"] > 0.9


@pytest.mark.parametrize("solver", BOTH, **ids)
def test_callback_stops_and_trace_is_kept(solver: Any) -> None:
    built = TABLE["cycle"]()
    seen: list[int] = []

    def watch(step: int, z: dict[str, Tensor], norm: Tensor) -> bool:
        assert set(z) == set(built.start) and norm.shape == (BATCH,)
        seen.append(step)
        return len(seen) == 3

    stopped = ik.solve(
        built.joint, built.start, built.inputs, solver=solver, callback=watch, trace=True, on_failure="ignore", **TIGHT
    )
    assert seen == sorted(set(seen)) and len(seen) == 3
    assert set(stopped.status.tolist()) == {int(ik.Status.STOPPED)}
    assert stopped.trace is not None and len(stopped.trace) >= 3


def test_each_node_its_own_solver() -> None:
    built = TABLE["chain"]()
    solver = ik.Blocks({"a": "newton", "b": ik.Picard(damping=0.9)})
    s = ik.solve(built.joint, built.start, built.inputs, solver=solver, **TIGHT)
    want = built.by_hand(*built.inputs)
    for name in want:
        torch.testing.assert_close(s.value[name], want[name], rtol=1e-9, atol=1e-10)
    assert s.blocks.evaluations["a"] < s.blocks.evaluations["b"]


def test_a_plain_fixed_point_is_one_block() -> None:
    f, x = Cell(N), torch.randn(BATCH, N, dtype=D)
    rule = ik.Implicit(linear_solver="blocks", rtol=1e-13)
    got = ik.fixed_point(f, zeros(), (x,), solver=ik.Blocks(), **{**TIGHT, "rule": rule})
    want = ik.fixed_point(f, zeros(), (x,), solver="anderson", **TIGHT)
    torch.testing.assert_close(got.value, want.value, rtol=0, atol=0)
    for a, b in zip(*(torch.autograd.grad(s.value.sum(), list(f.parameters())) for s in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


F, V = (lambda z, x: 0.5 * z + x), (lambda z, w: 0.5 * z + w)
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "mode": (lambda: ik.Blocks(mode="parallel"), ValueError, "mode must be 'sequential' or 'concurrent', got 'parallel'"),
    "gate": (lambda: ik.Blocks(gate=0.0), ValueError, "gate must be positive"),
    "blocks of blocks": (lambda: ik.Blocks(ik.Blocks()), ValueError, "cannot be Blocks itself"),
    "linear blocks of blocks": (lambda: BlockSubstitution("blocks"), ValueError, 'cannot be "blocks" itself'),
    "unknown name": (lambda: _solve(ik.Blocks("andersen")), ik.UnknownNameError, "Did you mean 'anderson'"),
    "unknown node": (lambda: _solve(ik.Blocks({"w": "picard"})), ValueError, "inner names 'w', which is not a node"),
    "nodes of no composition": (
        lambda: ik.fixed_point(lambda z: 0.5 * z, torch.ones(2), solver=ik.Blocks({"layer1": "newton"})),
        ValueError,
        "inner names 'layer1', which is not a node; the problem is not a composition",
    ),
    "a minimiser at once": (lambda: _solve(ik.Blocks("lbfgs", mode="concurrent")), ik.CapabilityError, "'lbfgs' is not one"),
    "a black box in a loop": (lambda: _solve(ik.Blocks(cyclic="scipy.root.hybr"), True), ik.CapabilityError, r"\{f, v\}"),
}  # fmt: skip


def _solve(solver: Any, loop: bool = False) -> Any:
    one = torch.ones(1, 2, dtype=D)
    nodes: dict[str, Any] = {"f": (F, "v" if loop else "x"), "v": (V, "f")}
    return ik.solve(
        ik.compose(nodes, output="v"), {"f": one, "v": one}, () if loop else (one,), solver=solver, batch_dims=1
    )


@pytest.mark.parametrize("row", REFUSED)
def test_refuses(row: str) -> None:
    make, error, message = REFUSED[row]
    with pytest.raises(error, match=message):
        make()


# ------------------------------------------------------------------------------------------------------- linear systems
def test_explicit_nodes_cost_no_products_in_the_backward() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    tied = ik.tie(net)
    x = torch.randn(5, 3, dtype=D, requires_grad=True)
    solution = ik.solve(tied, tied.start(x), (x,), solver=ik.Blocks(), **TIGHT)
    got = torch.autograd.grad(tied.output(solution.value).pow(2).sum(), [x, *net.parameters()])
    want = torch.autograd.grad(net(x).pow(2).sum(), [x, *net.parameters()])
    assert int(solution.backward.steps.max()) == 0
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


COPIES: dict[str, Any] = {
    "input": ({"copy": (lambda z, x: x, "x"), "v": (lambda z, a: 0.5 * z + a, "copy")}, 2.0),
    "node": (
        {
            "f": (lambda z, x: 0.5 * z + x, "x"),
            "copy": (lambda z, a: a, "f"),
            "v": (lambda z, a, x: 0.5 * z + a + x, "copy", "x"),
        },
        6.0,
    ),
    "module": ({"copy": (ik.tie([nn.Identity()]), "x"), "v": (lambda z, a: 0.5 * z + a, "copy")}, 2.0),
}


@pytest.mark.parametrize("solver", ["anderson", ik.Blocks()], ids=["joint", "blocks"])
@pytest.mark.parametrize("what", COPIES)
def test_a_map_may_return_what_it_reads_as_it_is(what: str, solver: Any) -> None:
    nodes, slope = COPIES[what]
    joint = ik.compose(nodes, output="v")
    x = torch.randn(3, 2, dtype=D, requires_grad=True)
    start = {n: torch.zeros(3, 2, dtype=D) for n in joint.graph}

    def solve(x: Tensor) -> Tensor:
        return joint.output(ik.solve(joint, start, (x,), solver=solver, **TIGHT).value)

    (g,) = torch.autograd.grad(solve(x).sum(), x)
    torch.testing.assert_close(g, torch.full_like(x, slope))
    _, pushed = torch.func.jvp(solve, (x.detach(),), (torch.ones_like(x),))
    torch.testing.assert_close(pushed, torch.full_like(pushed, slope))


@pytest.mark.parametrize(
    "v",
    [lambda z, w: 1.0 * z, lambda z, w: z, lambda z, w: z + 0 * w],
    ids=["computed", "as it is", "beside what it reads"],
)
def test_a_map_that_returns_its_state_is_singular_and_named_in_the_backward(v: Any) -> None:
    joint = ik.compose({"f": (F, "x"), "v": (v, "f")}, output="v")
    x = torch.ones(2, 3, dtype=D, requires_grad=True)
    start = {"f": torch.zeros(2, 3, dtype=D), "v": torch.ones(2, 3, dtype=D)}
    value = ik.solve(joint, start, (x,), solver=ik.Blocks(), batch_dims=1).value
    with pytest.raises(ik.ConvergenceError, match=r"block \{v\}: the matrix is singular"):
        value["v"].sum().backward()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("graph", ["diamond", "cycle", "feedback"])
def test_block_products_and_substitution_agree_with_the_dense_jacobian(graph: str, transposed: bool) -> None:
    A = _operator(graph)
    A = A.T if transposed else A
    J = A.dense()
    b = torch.randn(BATCH, A.size, dtype=D)
    torch.testing.assert_close(A.mv(b), torch.einsum("bij,bj->bi", J, b))
    torch.testing.assert_close(A.rmv(b), torch.einsum("bji,bj->bi", J, b))
    for inner in ("lu", "gmres", "auto"):
        answer = BlockSubstitution(inner).solve(A, b, rtol=1e-12, atol=0.0, max_steps=None)
        assert bool(answer.converged.all())
        torch.testing.assert_close(answer.x, torch.linalg.solve(J, b), rtol=1e-9, atol=1e-11)
    blocks = A.structure
    assert blocks is not None
    radii = [torch.linalg.eigvals(blocks.diagonal(i).dense()) for i in range(len(blocks))]
    assert len(blocks) == {"diamond": 4, "cycle": 2, "feedback": 1}[graph]
    union, whole = (torch.sort(e.abs(), 1).values for e in (torch.cat(radii, 1), torch.linalg.eigvals(J)))
    torch.testing.assert_close(union, whole, rtol=1e-8, atol=1e-10)
    determinants = torch.stack([torch.linalg.det(blocks.diagonal(i).dense()) for i in range(len(blocks))]).prod(0)
    torch.testing.assert_close(determinants, torch.linalg.det(J))


def _operator(graph: str) -> Operator:
    """``dF/dz`` of a composition at its solution."""
    built = TABLE[graph]()
    solution = ik.solve(built.joint, built.start, built.inputs, solver=ik.Blocks(), **TIGHT)
    record = solution._record
    return record.system.problem.linearise(record.system, record.outcome.z, record.theta)[1]


# ---------------------------------------------------------------------------------------------------------- large graphs
@pytest.mark.parametrize("make", [bench.long_chain, bench.random_graph], ids=lambda f: f.__name__)
def test_large_graphs_are_solved_and_differentiated(make: Any) -> None:
    count = 50 if make is bench.long_chain else 200
    nodes = {name: (entry[0].function.double(), *entry[1:]) for name, entry in make(count, width=4).items()}
    joint = ik.compose(nodes, output=list(nodes)[-1])
    assert len(joint.graph) == count + (make is bench.random_graph)
    assert (make is bench.random_graph) == (not nx.is_directed_acyclic_graph(joint.graph))
    assert joint.live == set(joint.graph)
    x = torch.randn(2, 4, dtype=D, requires_grad=True)
    start = {name: torch.zeros(2, 4, dtype=D) for name in joint.graph}
    solution = ik.solve(joint, start, (x,), solver=ik.Blocks(), **TIGHT)
    got = joint.output(solution.value)
    want = bench.in_turn(joint, x, start, solver="anderson", **TIGHT)[joint.output_node]
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    first = nodes["n0"][0].W
    for a, b in zip(*(torch.autograd.grad(z.pow(2).sum(), (x, first)) for z in (got, want)), strict=True):
        assert (a - b).abs().max() <= 1e-9 * b.abs().max() + 1e-14


@pytest.mark.slow  # a ratio of times, which load changes
@pytest.mark.parametrize("make", [bench.long_chain, bench.random_graph], ids=lambda f: f.__name__)
def test_the_graph_costs_little_beside_its_evaluations(make: Any) -> None:
    best_evaluation, best_solve = float("inf"), float("inf")
    for _ in range(12):  # processor time, yet other processes share the caches
        found = bench.overhead(make(), repeats=3)
        best_evaluation, best_solve = min(best_evaluation, found.evaluation), min(best_solve, found.solve)
        if best_evaluation < 0.1 and best_solve < 0.1:
            break
    assert best_evaluation < 0.1 and best_solve < 0.1


# --------------------------------------------------------------------------------------------------------------- analysis
def test_analysis_of_a_chain_and_of_a_loop() -> None:
    for graph in ("chain", "cycle"):
        built = TABLE[graph]()
        s = ik.solve(built.joint, built.start, built.inputs, solver=ik.Blocks(), **TIGHT)
        found = built.joint.analyse(s.value, built.inputs, batch_dims=1)
        J = _operator(graph).dense() + torch.eye(sum(z.shape[1] for z in built.start.values()), dtype=D)
        radius = torch.linalg.eigvals(J).abs().max().item()
        # the spectrum is that of the same composition only if the seeds agree: build once more from its own state
        assert set(found.radius) == set(built.joint.blocks)
        assert found.joint_radius == max(found.radius.values()) < 1 and radius < 1
        assert found.growth >= 1 and not found.warnings
        assert set(found.costs) == {"joint", "sequential", "concurrent"}
        edges = {(b, a) for a, b in built.joint.graph.edges} | {(n, n) for n in built.joint.graph}
        assert set(found.coupling) == edges and min(found.coupling.values()) > 0
        assert found.recommendation in str(found) and "evaluations, depth" in str(found)


def test_analysis_is_exact_on_linear_maps() -> None:
    g = torch.Generator().manual_seed(3)
    A, B, C = (torch.randn(3, 3, generator=g, dtype=D) / 3 for _ in range(3))
    joint = ik.compose(
        {"f": (lambda z, x: z @ A.mT + x, "x"), "v": (lambda z, w: z @ B.mT + 30 * w @ C.mT, "f")}, output="v"
    )
    x = torch.randn(2, 3, generator=g, dtype=D)
    start = {n: torch.zeros(2, 3, dtype=D) for n in "fv"}
    solution = ik.solve(joint, start, (x,), solver=ik.Blocks(), batch_dims=1, rtol=1e-6, atol=1e-9)
    found = joint.analyse(solution.value, (x,), batch_dims=1, rtol=1e-6)
    radius = [torch.linalg.eigvals(M).abs().max().item() for M in (A, B)]
    assert found.radius[("f",)] == pytest.approx(radius[0]) and found.radius[("v",)] == pytest.approx(radius[1])
    assert found.coupling["v", "f"] == pytest.approx(30 * torch.linalg.matrix_norm(C, 2).item())
    J = torch.cat([torch.cat([A, torch.zeros_like(A)], 1), torch.cat([30 * C, B], 1)])
    norms = [torch.linalg.matrix_norm(torch.linalg.matrix_power(J, t), 2).item() for t in range(60)]
    assert max(norms) / 2 <= found.growth <= max(norms) * (1 + 1e-12)  # non-normal: grows although it contracts
    assert found.growth > 5 and found.joint_radius < 1
    measured = ik.solve(joint, start, (x,), solver=ik.Blocks(), batch_dims=1, rtol=1e-6, atol=0.0).blocks
    assert abs(found.costs["sequential"].evaluations - measured.total) <= 2  # the linearisation is the map itself
    assert found.recommendation == "blocks"


def test_analysis_predicts_the_same_cost_away_from_the_solution_of_linear_maps() -> None:
    joint = ik.compose({"f": (F, "x"), "v": (V, "f")}, output="v")
    x = torch.randn(2, 3, dtype=D)
    start = {n: torch.zeros(2, 3, dtype=D) for n in "fv"}
    solution = ik.solve(joint, start, (x,), solver=ik.Blocks(), batch_dims=1, rtol=1e-12, atol=1e-12)
    there = joint.analyse(solution.value, (x,), batch_dims=1)
    here = joint.analyse(start, (x,), batch_dims=1)  # where the start of the prediction is the state itself
    for mode, cost in there.costs.items():
        assert abs(here.costs[mode].evaluations - cost.evaluations) <= 2, mode
        assert cost.evaluations > 4, "it takes steps"


def test_analysis_warns_of_a_loop_whose_blocks_contract_but_not_together() -> None:
    nodes = {"a": (lambda z, b, x: 0.5 * z + 0.6 * b + x, "b", "x"), "b": (lambda z, a: 0.5 * z + 0.6 * a, "a")}
    joint, one = ik.compose(nodes, output="b"), torch.ones(2, 3, dtype=D)
    with pytest.warns(
        ik.ConvergenceWarning, match=r"feedback loop \{a, b\} does not contract here \(spectral radius 1.1\)"
    ):
        found = joint.analyse({"a": one, "b": one}, (one,), batch_dims=1)
    assert found.coupling["a", "a"] == pytest.approx(0.5) and found.joint_radius == pytest.approx(1.1)
    with pytest.raises(ValueError, match="2048 unknowns a sample are more than 1024"):
        joint.analyse({n: torch.ones(2, 1024) for n in "ab"}, (torch.ones(2, 1024),), batch_dims=1)


# ---------------------------------------------------------------------------------------------------------- tied networks
def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 6),
        nn.Tanh(),
        nn.Sequential(nn.Linear(6, 5), nn.ReLU()),
        nn.Linear(5, 4, bias=False),
        nn.Sigmoid(),
        nn.Linear(4, 2),
    ).double()


@pytest.mark.parametrize("share", [True, False])
def test_tied_network_arrives_in_exactly_as_many_steps_as_it_has_layers(share: bool) -> None:
    net = _network()
    tied = ik.tie(net, share=share)
    assert tied.depth == 4 and tied.inputs == ("x",) and tied.output_node == "layer4"
    x = torch.randn(7, 3, dtype=D, requires_grad=True)
    solution = ik.solve(tied, tied.start(x), (x,), solver="picard", batch_dims=1)
    assert solution.steps.tolist() == [4] * 7
    torch.testing.assert_close(tied.output(solution.value), net(x), rtol=1e-14, atol=1e-15)
    far = {name: torch.randn_like(z) for name, z in tied.start(x).items()}
    for step in range(5):
        exact = torch.equal(far["layer4"], net(x))
        assert exact == (step >= 4)
        far = {name: z.detach() for name, z in tied.gamma(far, x).items()}
    parameters = [p for m in tied.map.functions.values() for p in m.parameters()]
    assert {p.data_ptr() for p in parameters}.isdisjoint(p.data_ptr() for p in net.parameters()) != share
    got = torch.autograd.grad(tied.output(solution.value).pow(2).sum(), [x, *parameters])
    want = torch.autograd.grad(net(x).pow(2).sum(), [x, *net.parameters()])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_tied_matrices_are_those_of_the_theorem() -> None:
    net = _network()
    tied = ik.tie(net)
    W_z, W_x, b, rows = tied.matrices()
    assert W_z.shape == (17, 17) and W_x.shape == (17, 3) and b.shape == (17,)
    assert not W_x[6:].any() and not torch.triu(W_z).any()
    assert not torch.linalg.matrix_power(W_z, 4).any() and torch.linalg.matrix_power(W_z, 3).any()  # nilpotent
    x = torch.randn(5, 3, dtype=D)
    z = torch.zeros(5, 17, dtype=D)
    activations = [torch.tanh, torch.relu, torch.sigmoid, lambda t: t]
    for _ in range(4):
        pre = z @ W_z.mT + x @ W_x.mT + b
        z = torch.cat([s(pre[:, r]) for s, r in zip(activations, rows.values(), strict=True)], 1)
    torch.testing.assert_close(z[:, rows["layer4"]], net(x))


def test_tie_takes_any_layers_and_refuses_what_is_none() -> None:
    net = nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    tied = ik.tie(net)
    x = torch.randn(2, 16, dtype=D)
    assert tied.depth == 3
    torch.testing.assert_close(
        ik.solve(tied, tied.start(x), (x,), solver=ik.Blocks(), batch_dims=1).value["layer3"], net(x)
    )
    with pytest.raises(TypeError, match="layer 'layer1' is not a linear map"):
        tied.matrices()
    with pytest.raises(ValueError, match="at least one layer"):
        ik.tie([])
    with pytest.raises(TypeError, match=r"takes nn\.Modules in order, got builtin_function_or_method"):
        ik.tie([nn.Linear(2, 2), torch.tanh])  # type: ignore[list-item]
