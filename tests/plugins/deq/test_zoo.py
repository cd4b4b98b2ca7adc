"""The models of TorchDEQ's zoo: values and gradients against an oracle that knows neither library, and TorchDEQ's own."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import implicitkit as ik

ROOT = Path(__file__).parents[3]
TRAINED = {"sequence": 20, "multiscale": 40}  # steps: at first neither contracts fast
IMAGES = ("multiscale", "flow")  # two of eight samples, which are independent, do
TIGHT = {"rtol": 1e-11, "rule": ik.Implicit(rtol=1e-11)}


@pytest.fixture(scope="module")
def zoo() -> Any:
    """The package, wherever pytest was started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("benchmarks.zoo")


@pytest.fixture(scope="module")
def tasks(zoo: Any) -> Any:
    """Each model once, in double precision, with data and what is right."""
    found: dict[str, Any] = {}

    def task(name: str) -> Any:
        if name not in found:
            torch.manual_seed(0)
            model = zoo.ZOO[name]()
            zoo.train(model, TRAINED.get(name, 0))
            inputs, target = model.example()
            if name in IMAGES:
                inputs, target = tuple(x[:2].detach() for x in inputs), target[:2]
            found[name] = (*zoo.doubled(model, inputs, target), zoo.exact(model, inputs, target))
        return found[name]

    return task


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return bool((a - b).norm() <= tolerance * b.norm())


NAMES = ["sequence", "multiscale", "graph", "flow", "representation"]
ROWS = [pytest.param(name, marks=[pytest.mark.slow] * (name == "multiscale")) for name in NAMES]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_are_those_of_the_oracle(zoo: Any, tasks: Any, name: str) -> None:
    model, inputs, target, right = tasks(name)
    for solve in (zoo.drop_in(model, solver="relay", **TIGHT), zoo.layer_of(model, **TIGHT)):
        z = solve(*inputs)
        loss = model.loss(z, target)
        assert close(zoo.flat(z), right.state, 1e-8)
        assert abs(float(loss.detach()) - right.loss) < 1e-8
        assert close(zoo.gradient(model, inputs, loss), right.gradient, 1e-6)


@pytest.mark.parametrize("name", ["sequence", "graph", "representation"])
def test_the_oracle_is_what_unrolled_steps_say(zoo: Any, tasks: Any, name: str) -> None:
    model, inputs, target, right = tasks(name)
    injected, z = model.inject(*inputs), model.start(*inputs)
    for _ in range(250):
        z = model.update(z, *injected)
    assert close(zoo.flat(z), right.state, 1e-9)
    assert close(zoo.gradient(model, inputs, model.loss(z, target)), right.gradient, 1e-8)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ROWS)
def test_torchdeq_gives_the_same(zoo: Any, tasks: Any, name: str) -> None:
    pytest.importorskip("torchdeq")
    model, inputs, target, right = tasks(name)
    both = {"solver": "fixed_point_iter", "tol": 1e-11, "stop_mode": "rel", "max_iter": 2000}
    solve = zoo.torchdeq_way(model, ift=True, **{f"{way}_{k}": v for way in "fb" for k, v in both.items()})
    z = solve(*inputs)
    assert close(zoo.flat(z), right.state, 1e-8)
    assert close(zoo.gradient(model, inputs, model.loss(z, target)), right.gradient, 1e-6)


def test_a_later_position_changes_nothing_before_it(zoo: Any, tasks: Any) -> None:
    model, inputs, *_ = tasks("sequence")
    layer, other = zoo.layer_of(model, rtol=1e-3), inputs[0].detach().clone()
    other[:, 12:] += 1.0
    with torch.no_grad():
        before, after = layer(*inputs), layer(other, *inputs[1:])
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.equal(before[:, 12:], after[:, 12:])


def test_correlations_are_looked_up_where_the_flow_points(zoo: Any) -> None:
    """Flow (1, 2) everywhere: in the middle of what (i, j) sees stands <first(i, j), second(i + 2, j + 1)> / sqrt(C)."""
    torch.manual_seed(0)
    model = zoo.ZOO["flow"]()
    first, second = torch.randn(2, 2, 24, 8, 8)
    flow = torch.tensor([1.0, 2.0]).view(1, 2, 1, 1).expand(2, 2, 8, 8)
    look = importlib.import_module("benchmarks.zoo.flow")._look
    seen = look(model.inject(first, second, torch.zeros(2, 16, 8, 8))[1:], flow)
    wanted = (first[:, :, :6, :7] * second[:, :, 2:, 1:]).sum(1) / 24**0.5
    torch.testing.assert_close(seen[:, 12, :6, :7], wanted)
    torch.testing.assert_close(seen[:, 13, :6, :6], (first[:, :, :6, :6] * second[:, :, 2:, 2:]).sum(1) / 24**0.5)
    assert seen.shape == (2, 50, 8, 8)


def test_the_weight_of_the_graph_is_bounded_and_news_travel_along_a_chain_alone(zoo: Any) -> None:
    torch.manual_seed(0)
    model = zoo.ZOO["graph"]().double()
    with torch.no_grad():
        model.raw.mul_(10.0)
        model.own.bias.fill_(3.0)  # nothing is cut off
        (x,), _ = model.batch(0)
        x = x.double()
        _, W = model.inject(x)
        torch.testing.assert_close(W.abs().sum(1), torch.full((16,), 0.9, dtype=torch.float64))
        other = x.clone()
        other[0, 0] = 0.0  # the first node of the first chain
        solve = zoo.drop_in(model, rtol=1e-13)
        apart = (solve(other) - solve(x))[0].abs().amax(1) > 1e-10
    assert bool(apart[:10].all()) and not bool(apart[10:].any())


def test_resolutions_hear_of_each_other_and_a_segment_of_the_one_before(zoo: Any) -> None:
    torch.manual_seed(0)
    model = zoo.ZOO["multiscale"]()
    z = tuple(torch.randn(1, *shape, requires_grad=True) for shape in model.state_shape(torch.zeros(1, 16, 16, 16)))
    for out in model.update(z, torch.randn(1, 16, 16, 16)):
        assert all(float(g.abs().max()) > 0 for g in torch.autograd.grad(out.square().sum(), z, retain_graph=True))
    model = zoo.ZOO["sequence"]()
    (x, memory, before), _ = model.example()
    solve = zoo.drop_in(model, solver="relay")
    with torch.no_grad():
        assert not torch.allclose(solve(x, memory, before), solve(x, memory + 0.1, before), atol=1e-3)


def test_cells_and_products_are_counted(zoo: Any, tasks: Any) -> None:
    model, inputs, target, _ = tasks("graph")
    with zoo.tallied(model) as tally:
        z = model.start(*inputs)
        for _ in range(7):
            z = model.update(z, *model.inject(*inputs))
        zoo.gradient(model, inputs, model.loss(z, target))
    assert (tally.calls, tally.products) == (7, 7)
    model.update(z, *model.inject(*inputs))
    assert tally.calls == 7, "counted only within"


def test_the_comparison_fails_where_a_gradient_is_wrong(
    zoo: Any, tasks: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchdeq")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("bench_zoo")
    model, inputs, target, right = tasks("graph")
    task = bench.Task(model, inputs, target, right)
    row, wrong = bench.same_tolerance("graph", task)
    assert not wrong and row["ours gradient error"] < 1e-6 and row["ours cells"] > 0
    off = dataclasses.replace(task, right=dataclasses.replace(right, gradient=1.00001 * right.gradient))
    monkeypatch.setattr(bench, "prepare", lambda name, steps: off)
    monkeypatch.setattr(bench, "defaults", lambda name, task: row)
    monkeypatch.setattr(bench, "equal_error", lambda name, task: row)
    monkeypatch.setattr("sys.argv", ["bench_zoo.py", "--only", "graph"])
    threads = torch.get_num_threads()
    try:
        with pytest.raises(SystemExit, match=r"graph: implicitkit .* differs from the oracle"):
            bench.main()
    finally:
        torch.set_num_threads(threads)
    assert "FAILED" in capsys.readouterr().out


def test_the_page_has_the_table_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = importlib.import_module("zoo_table").TABLE
    assert [row["row"].split(", ")[0] for row in table.rows] == [name for name in NAMES for _ in range(3)]
    assert table.in_page().group().splitlines() == table.lines()
