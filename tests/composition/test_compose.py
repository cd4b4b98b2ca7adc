"""Compositions: what they are, that every way to solve them agrees, what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compositions_table import BATCH, TABLE, TIGHT, Built, Cell, D, N, solved_with, zeros
from test_transforms import BY_HAND, TRANSFORMS
from torch import Tensor, nn

import implicitkit as ik

WAYS: dict[str, dict[str, Any]] = {
    "joint": {"solver": "anderson"},
    "joint, gmres": {"solver": "anderson", "rule": ik.Implicit(linear_solver="gmres", rtol=1e-13)},
    "joint, newton": {"solver": "newton"},
    "blocks": {"solver": ik.Blocks()},
    "blocks, picard": {"solver": ik.Blocks("picard", cyclic="picard")},
    "blocks, newton": {"solver": ik.Blocks("newton")},
    "blocks, gmres": {
        "solver": ik.Blocks(),
        "rule": ik.Implicit(linear_solver=ik.linear.BlockSubstitution("gmres"), rtol=1e-13),
    },
    "concurrent": {"solver": ik.Blocks(mode="concurrent")},
}


def _loss(joint: Any, states: dict[str, Tensor]) -> Tensor:
    z = joint.output(states)
    return (z * torch.linspace(0.5, 1.5, z.numel(), dtype=D).view_as(z)).sum() + z.pow(3).sum()


def _close(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-3)


# ------------------------------------------------------------------------------------------- one answer, however found
@pytest.mark.one_in(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("graph", TABLE)
def test_values_and_gradients_equal_those_of_layers_solved_by_hand(graph: str, way: str) -> None:
    built = TABLE[graph]()
    want = built.by_hand(*built.inputs)
    got = ik.solve(built.joint, built.start, built.inputs, **{**TIGHT, **WAYS[way]})
    assert set(got.value) == set(want)
    _close([got.value[n] for n in want], list(want.values()))
    gradients = torch.autograd.grad(_loss(built.joint, got.value), built.leaves)
    _close(gradients, torch.autograd.grad(_loss(built.joint, want), built.leaves))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("rule", ["one_step", "phantom", "neumann"])
@pytest.mark.parametrize("graph", ["pair", "chain", "diamond"])
def test_truncated_rules_equal_those_of_layers_one_after_another(graph: str, rule: str) -> None:
    built = TABLE[graph]()
    options = {**TIGHT, "rule": rule}
    want = torch.autograd.grad(_loss(built.joint, solved_with(options, built.by_hand, *built.inputs)), built.leaves)
    for solver in ("anderson", ik.Blocks()):
        value = ik.solve(built.joint, built.start, built.inputs, solver=solver, **options).value
        got = torch.autograd.grad(_loss(built.joint, value), built.leaves)
        assert all(bool(g.any()) for g in got)
        _close(got, want)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("graph", ["diamond", "cycle", "fan_in"])
@pytest.mark.parametrize("way", ["joint", "blocks", "concurrent"])
def test_forward_mode_is_the_transpose_of_reverse_mode(graph: str, way: str) -> None:
    built = TABLE[graph]()

    def solve(*inputs: Tensor) -> Tensor:
        return built.joint.output(ik.solve(built.joint, built.start, inputs, **{**TIGHT, **WAYS[way]}).value)

    inputs = tuple(x.detach() for x in built.inputs)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    value, pushed = torch.func.jvp(solve, inputs, tangents)
    w = torch.randn_like(value)
    pulled = torch.func.vjp(solve, *inputs)[1](w)
    torch.testing.assert_close((w * pushed).sum(), sum((p * t).sum() for p, t in zip(pulled, tangents, strict=True)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("solver", [ik.Blocks(), ik.Blocks(mode="concurrent")], ids=lambda s: s.mode)
@pytest.mark.parametrize("graph", ["pair", "feedback"])
def test_gradcheck_and_gradgradcheck(graph: str, solver: Any) -> None:
    built = TABLE[graph]()
    start = {name: z[:1, :2] for name, z in built.start.items()}
    W = [0.4 * torch.randn(2, 2, dtype=D).requires_grad_() for _ in range(4)]
    x = built.inputs[0].detach()[:1, :2].requires_grad_()
    loop = graph == "feedback"

    def solve(x: Tensor, *W: Tensor) -> Tensor:
        nodes: dict[str, Any] = {
            "a": (lambda z, x, *r: torch.tanh(z @ W[0] + x + sum(t @ W[1] for t in r)), "x", *(("b",) if loop else ())),
            "b": (lambda z, a: torch.tanh(z @ W[2] + a @ W[3]), "a"),
        }
        renamed = dict(zip(nodes, start.values(), strict=True))
        return ik.solve(ik.compose(nodes, output="b"), renamed, (x,), solver=solver, **TIGHT).value["b"]

    arguments = (x, *(w if loop or i != 1 else w.detach() for i, w in enumerate(W)))
    assert torch.autograd.gradcheck(solve, arguments, check_forward_ad=True, nondet_tol=1e-9, fast_mode=True)
    assert torch.autograd.gradgradcheck(solve, arguments, check_fwd_over_rev=True, nondet_tol=1e-9, fast_mode=True)


# ----------------------------------------------------------------------------- the transform matrix on the stacked pair
def _first(z: Tensor, W: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(0.4 * W @ z + b)


def _second(z: Tensor, w: Tensor, W: Tensor) -> Tensor:
    return torch.tanh(0.3 * W.mT @ z + w.sin() + 0.2)


def _stacked(solver: Any) -> Any:
    def joint(W: Tensor | None = None) -> Any:
        if W is None:
            return ik.compose({"f": (_first, "W", "b"), "v": (_second, "f", "W")}, output="v")
        return ik.compose(
            {"f": (lambda z, b: _first(z, W, b), "b"), "v": (lambda z, w: _second(z, w, W), "f")}, output="v"
        )

    options = {"solver": solver, "rtol": 1e-13, "atol": 1e-13}

    def solve(z0: Tensor, W: Tensor, b: Tensor) -> Tensor:
        return ik.solve(joint(), {"f": z0, "v": z0}, (W, b), **options).value["v"]

    def closed(W: Tensor) -> Any:
        return lambda z0, b: ik.solve(joint(W), {"f": z0, "v": z0}, (b,), **options).value["v"]

    solve.closed = closed  # type: ignore[attr-defined]
    return solve


def _oracle(z0: Tensor, W: Tensor, b: Tensor) -> Tensor:
    w = z = z0
    for _ in range(60):
        w = _first(w, W, b)
    for _ in range(60):
        z = _second(z, w, W)
    return z


@pytest.mark.one_in(3)
@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda t: t.__name__)
@pytest.mark.parametrize(
    "solver", ["anderson", ik.Blocks(), ik.Blocks(mode="concurrent")], ids=["joint", "blocks", "concurrent"]
)
def test_transform_of_the_stacked_pair(solver: Any, transform: Any) -> None:
    from problems_table import inputs

    got = transform(_stacked(solver), *inputs())
    want = BY_HAND.get(transform, transform)(_oracle, *inputs())
    torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-8)


# --------------------------------------------------------------------------------------------------- what a joint is
def test_graph_blocks_and_inputs_of_a_graph_with_everything() -> None:
    any_map = lambda z, *reads: z  # noqa: E731
    joint = ik.compose(
        {
            "out": (any_map, "b", "x"),
            "b": (any_map, "c", "y"),
            "c": (any_map, "b", "a"),
            "a": (any_map, "x", "a"),
            "dead": (any_map, "out", "z"),
        },
        output="out",
    )
    assert joint.inputs == ("x", "y", "z")
    assert [set(block) for block in joint.blocks] == [{"a"}, {"b", "c"}, {"out"}, {"dead"}]
    assert joint.blocks[1] == ("c", "b")  # c is entered from outside
    assert joint.live == {"a", "b", "c", "out"}
    assert set(joint.graph.edges) == {("b", "out"), ("c", "b"), ("b", "c"), ("a", "c"), ("a", "a"), ("out", "dead")}
    assert joint.graph.nodes["c"]["reads"] == ("b", "a")
    assert joint.graph.edges["a", "c"]["arguments"] == (1,)
    text = str(joint)
    for part in ("feedback loop", "c = <lambda>(z[c], b, a)", "cannot reach the output", "inputs: x, y, z"):
        assert part in text
    assert "5 nodes, 4 blocks" in repr(joint)


def test_gamma_split_and_output() -> None:
    joint = ik.compose({"f": (lambda z, x: z + x, "x"), "v": (lambda z, w: 2 * w - z, "f")}, output="v")
    state = {"v": torch.tensor([1.0]), "f": torch.tensor([2.0])}
    out = joint.gamma(state, torch.tensor([10.0]))
    assert out == {"v": torch.tensor([3.0]), "f": torch.tensor([12.0])}
    assert list(out) == ["v", "f"]  # the order of the state, whatever that of the graph
    assert list(joint.split(out)) == ["f", "v"]
    assert joint.output(out) == torch.tensor([3.0])


def test_arrow_reads_all_arguments_first_and_appends_to_the_output() -> None:
    def f(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * w + x * y

    def v(w: Tensor, u: Tensor) -> Tensor:
        return 0.25 * w + u

    joint = ik.FixedPoint(f) >> ik.FixedPoint(v) >> ik.FixedPoint(v)
    assert isinstance(joint, ik.FixedPoint)
    assert list(joint.graph) == ["f", "v", "v_2"] and joint.inputs == ("x", "y")
    assert joint.output_node == "v_2" and joint.blocks == (("f",), ("v",), ("v_2",))
    x = torch.ones(1, 1, dtype=D)
    start = {name: torch.zeros(1, 1, dtype=D) for name in joint.graph}
    value = ik.solve(joint, start, (3 * x, 2 * x), **TIGHT).value
    assert [round(float(value[n]), 9) for n in joint.graph] == [12.0, 16.0, round(64 / 3, 9)]
    right = ik.FixedPoint(f) >> (ik.FixedPoint(v) >> ik.FixedPoint(v))
    assert set(right.graph.edges) == set(joint.graph.edges)
    closed = ik.FixedPoint(f) >> ik.compose({"v": (v, "u"), "w": (v, "v")}, output="w")
    assert set(closed.graph.edges) == {("f", "v"), ("v", "w")}


def test_nested_compositions_are_flattened_with_distinct_names() -> None:
    cells = [Cell(N) for _ in range(3)]
    inner = ik.compose({"f": (cells[0], "u"), "v": (cells[1], "f")}, output="v")
    joint = ik.compose({"one": (inner, "x"), "two": (inner, "one"), "v": (cells[2], "two")}, output="v")
    assert list(joint.graph) == ["one.f", "one.v", "two.f", "two.v", "v"]
    assert joint.inputs == ("x",)
    x = torch.randn(BATCH, N, dtype=D)
    solution = ik.solve(joint, {n: zeros() for n in joint.graph}, (x,), solver=ik.Blocks(), **TIGHT)
    flat = ik.compose(
        {"a": (cells[0], "x"), "b": (cells[1], "a"), "c": (cells[0], "b"), "d": (cells[1], "c"), "v": (cells[2], "d")},
        output="v",
    )
    want = ik.solve(flat, {n: zeros() for n in flat.graph}, (x,), solver=ik.Blocks(), **TIGHT)
    torch.testing.assert_close(joint.output(solution.value), want.value["v"])
    parts = joint.split(solution.value)
    assert list(parts) == ["one", "two", "v"] and list(parts["two"]) == ["f", "v"]
    twice = ik.compose({"deep": (joint, "x"), "last": (cells[2], "deep")}, output="last")
    assert "deep.one.f" in twice.graph and twice.graph.has_edge("deep.v", "last")
    as_output = ik.compose({"only": (inner, "x")}, output="only")
    assert as_output.output_node == "only.v"


@pytest.mark.parametrize("dotted_first", [True, False])
def test_split_loses_no_part_where_names_overlap(dotted_first: bool) -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.3 * z + x)

    nested = ik.compose({"f": (ik.FixedPoint(f) >> ik.FixedPoint(f), "x")}, output="f")
    plain = ik.FixedPoint(f)  # named "f", as the nested composition
    joint = nested >> plain if dotted_first else plain >> nested
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(joint.graph)}
    parts = joint.split(state)
    assert set(parts) == {"f", "f.f", "f.f_2"} and all(parts[name] is state[name] for name in state)


def test_states_may_be_pytrees_complex_or_of_different_shapes() -> None:
    def f(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"h": 0.5 * z["h"] + x, "c": (0.4 * z["c"][0] + z["h"].sum(1, keepdim=True) * 1j,)}

    def v(z: Tensor, state: dict[str, Tensor]) -> Tensor:
        return 0.3 * z + state["c"][0].imag.unsqueeze(2) * state["h"].unsqueeze(1)

    joint = ik.compose({"f": (f, "x"), "v": (v, "f")}, output="v")
    x = torch.randn(2, 3, dtype=D, requires_grad=True)
    start = {
        "v": torch.zeros(2, 1, 3, dtype=D),
        "f": {"h": torch.zeros(2, 3, dtype=D), "c": (torch.zeros(2, 1, dtype=torch.complex128),)},
    }
    for solver in ("anderson", ik.Blocks(), ik.Blocks(mode="concurrent")):
        value = ik.solve(joint, start, (x,), solver=solver, **TIGHT).value
        h = 2 * x
        want = (h.sum(1, keepdim=True) / 0.6).unsqueeze(2) * h.unsqueeze(1) / 0.7
        torch.testing.assert_close(value["v"], want)
        torch.testing.assert_close(*(torch.autograd.grad(t.pow(2).sum(), x)[0] for t in (value["v"], want)))


def test_self_loop_is_the_state_once_more() -> None:
    joint = ik.compose({"f": (lambda z, again, x: 0.25 * z + 0.25 * again + x, "f", "x")}, output="f")
    assert joint.blocks == (("f",),) and joint.graph.has_edge("f", "f")
    x = torch.ones(2, 1, dtype=D, requires_grad=True)
    value = ik.solve(joint, {"f": torch.zeros(2, 1, dtype=D)}, (x,), solver=ik.Blocks(), **TIGHT).value["f"]
    torch.testing.assert_close(value, 2 * x)
    torch.testing.assert_close(torch.autograd.grad(value.sum(), x)[0], torch.full((2, 1), 2.0, dtype=D))


def test_draws_its_blocks() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    built: Built = TABLE["cycle"]()
    axes = built.joint.draw()
    written = {text.get_text() for text in axes.texts}
    assert {"a", "b", "c", "out", "x"} <= written
    assert len(axes.patches) >= 2  # a box round each block


def test_an_edge_over_a_node_is_not_drawn_through_it() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    joint = ik.compose({"a": (_two, "x"), "b": (_two, "a"), "c": (lambda z, a, b: z, "b", "a")}, output="c")
    axes = joint.draw()
    axes.figure.canvas.draw()
    bends = []
    for arrow in (p for p in axes.patches if isinstance(p, matplotlib.patches.FancyArrowPatch)):
        first, middle, last = arrow.get_path().vertices[:3]  # what is drawn: a parabola and its control point
        (x, y), (right, up) = middle - first, last - first
        bends.append(abs(right * y - up * x) / math.hypot(right, up) ** 2)
    *straight, bent = sorted(bends)
    assert max(straight) < 1e-3 and len(straight) == 3, "x to a, a to b and b to c are straight"
    assert 0.2 < bent < 0.4, "a to c is not"


def test_no_arrow_ends_in_a_name() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    joint = ik.compose({"an_encoder": (_two, "x"), "a_long_head": (_two, "an_encoder")}, output="a_long_head")
    axes = joint.draw()
    axes.figure.canvas.draw()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    for arrow in (p for p in axes.patches if isinstance(p, matplotlib.patches.FancyArrowPatch)):
        for point in axes.transData.transform(arrow.get_path().vertices):
            assert not any(box.contains(*point) for box in boxes.values()), (point, boxes)


# ------------------------------------------------------------------------------------------------------------ bad input
def _id(z: Tensor, *reads: Tensor) -> Tensor:
    return z


def _two(z: Tensor, a: Tensor) -> Tensor:
    return z


INNER = ik.compose({"p": (_two, "u")}, output="p")
REFUSED_GRAPHS: dict[str, tuple[Any, type[Exception], str]] = {
    "empty": (lambda: ik.compose({}, output="v"), ValueError, "graph is empty"),
    "unknown output": (
        lambda: ik.compose({"first": (_id, "x")}, output="frist"),
        ValueError,
        "unknown output 'frist'.*Did you mean 'first'",
    ),
    "name twice": (
        lambda: ik.compose([("f", (_id, "x")), ("f", (_id, "x"))], output="f"),
        ValueError,
        "'f' is used for two",
    ),
    "nested name twice": (
        lambda: ik.compose({"a": (INNER, "x"), "a.p": (_id, "a")}, output="a"),
        ValueError,
        "'a.p' is used for two nodes",
    ),
    "isolated": (
        lambda: ik.compose({"f": (_id, "x"), "alone": (_id,)}, output="f"),
        ValueError,
        "'alone' reads nothing and nobody reads it",
    ),
    "too few reads": (lambda: ik.compose({"f": (_two,)}, output="f"), TypeError, "'f' reads 0 names.*missing"),
    "too many reads": (
        lambda: ik.compose({"f": (_two, "x", "y")}, output="f"),
        TypeError,
        "'f' reads 2 names.*too many",
    ),
    "nested inputs": (lambda: ik.compose({"f": (INNER, "x", "y")}, output="f"), TypeError, "composition with 1 inputs"),
    "no map": (lambda: ik.compose({"f": ("x",)}, output="f"), TypeError, "'f' must start with a callable"),
    "nothing": (lambda: ik.compose({"f": ()}, output="f"), TypeError, "'f' has no map"),
    "not a name": (lambda: ik.compose({"f": (_two, 3)}, output="f"), TypeError, "'f' reads 3"),
    "names only": (lambda: ik.compose(["f", "g"], output="f"), TypeError, r"pairs \(name, \(map, ...\)\), got 'f'"),
    "no nodes": (lambda: ik.compose(3, output="f"), TypeError, "pairs .* got 3"),
    "bad name": (lambda: ik.compose({3: (_two, "x")}, output="f"), TypeError, "must be a string"),
    "root": (lambda: ik.compose({"f": (ik.Root(_two), "x")}, output="f"), TypeError, "'f' is a Root; only fixed-point"),
    "arrow to a root": (lambda: ik.FixedPoint(_two) >> ik.Root(_two), TypeError, "got Root"),
    "arrow to a map of three": (
        lambda: ik.FixedPoint(_two) >> ik.FixedPoint(lambda z, a, b: z),
        TypeError,
        "reads 1 name",
    ),
    "arrow to two inputs": (
        lambda: ik.FixedPoint(_two) >> ik.compose({"p": (_two, "u"), "q": (lambda z, a, b: z, "p", "w")}, output="q"),
        TypeError,
        r"has 2 \(u, w\)",
    ),
}


@pytest.mark.parametrize("row", REFUSED_GRAPHS)
def test_refuses_a_graph(row: str) -> None:
    make, error, message = REFUSED_GRAPHS[row]
    with pytest.raises(error, match=message):
        make()


F, V = (lambda z, x: 0.5 * z + x), (lambda z, w: 0.5 * z + w)
ONE, LONG = torch.zeros(2, 3, dtype=D), torch.zeros(2, 4, dtype=D)
REFUSED_SOLVES: dict[str, tuple[Any, tuple[Any, ...], type[Exception], str]] = {
    "state missing": ({"f": ONE}, (ONE,), ValueError, "no initial state for node 'v'"),
    "state unknown": ({"f": ONE, "v": ONE, "w": ONE}, (ONE,), ValueError, "a state for 'w', which is not a node"),
    "not a dict": ((ONE, ONE), (ONE,), TypeError, "a dict by node name"),
    "input missing": ({"f": ONE, "v": ONE}, (), TypeError, r"1 external inputs \('x'.*got 0"),
    "input too many": ({"f": ONE, "v": ONE}, (ONE, ONE), TypeError, "got 2"),
    "edge of another shape": (
        {"f": LONG, "v": ONE},
        (LONG,),
        ValueError,
        r"node 'v' fails on what it reads \(its own state \(2, 3\), 'f' \(2, 4\)\)",
    ),
    "batch": ({"f": ONE, "v": torch.zeros(3, 3, dtype=D)}, (ONE,), ValueError, r"\['v'\] has batch shape \(3,\)"),
    "dtype": ({"f": ONE, "v": ONE.float()}, (ONE,), TypeError, r"\['v'\] has torch.float32"),
}


@pytest.mark.parametrize("solver", ["anderson", ik.Blocks()], ids=["joint", "blocks"])
@pytest.mark.parametrize("row", REFUSED_SOLVES)
def test_refuses_a_solve(row: str, solver: Any) -> None:
    start, inputs, error, message = REFUSED_SOLVES[row]
    with pytest.raises(error, match=message):
        ik.solve(ik.compose({"f": (F, "x"), "v": (V, "f")}, output="v"), start, inputs, solver=solver, batch_dims=1)


def test_output_of_another_shape_than_its_state_names_its_readers() -> None:
    joint = ik.compose({"f": (lambda z, x: x, "x"), "v": (lambda z, w: 0.5 * z, "f")}, output="v")
    with pytest.raises(ValueError, match=r"node 'f' returned shape \(2, 4\), but its state has shape \(2, 3\).*'v'"):
        ik.solve(joint, {"f": ONE, "v": ONE}, (LONG,), batch_dims=1)


def test_errors_of_a_map_keep_their_type_and_name_the_node() -> None:
    def broken(z: Tensor, w: Tensor) -> Tensor:
        raise IndexError("no such thing")

    with pytest.raises(IndexError, match=r"node 'v' fails.*no such thing"):
        ik.solve(
            ik.compose({"f": (F, "x"), "v": (broken, "f")}, output="v"), {"f": ONE, "v": ONE}, (ONE,), batch_dims=1
        )


class _ThreeArguments(nn.Module):
    def forward(self, z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return z + a + b


def test_a_module_of_the_wrong_arity_is_refused_by_its_forward() -> None:
    with pytest.raises(TypeError, match=r"'f' reads 1 name.*_ThreeArguments.*missing a required argument: 'b'"):
        ik.compose({"f": (_ThreeArguments(), "x")}, output="f")
