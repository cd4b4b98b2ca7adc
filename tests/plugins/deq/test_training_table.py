"""The table of trainings: seeds that are trained side by side are trained as each would be alone."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from implicitkit_deq import DEQ, ForgivenWarning

STEPS = 6


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name", ["cells.MLP", "tanh", "GRU", pytest.param("LayerNorm(ReLU)", marks=pytest.mark.slow), "residual"]
)
def test_seeds_side_by_side_are_trained_as_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    table = importlib.import_module("bench_deq_training")
    warnings.simplefilter("ignore", ForgivenWarning)
    old = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        runs = table.train(name, [0, 1, 2], 2e-2, STEPS, warm=True)
        torch.manual_seed(1)
        cell = table.CELLS[name]()
        layer, head = DEQ(cell, (16,), rtol=1e-3), nn.Linear(16, 1)
        if name == "GRU":
            z, x = torch.randn(5, 16), torch.randn(5, 4)
            torch.testing.assert_close(cell(z, x), cell.cell(x, z))
        optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], 2e-2)
        x, y = table.data(1)
        for step in range(STEPS):
            loss = (head(layer(x, index=torch.arange(64))) - y).square().mean()
            torch.testing.assert_close(loss.detach(), runs.losses[step, 1], rtol=1e-8, atol=0.0)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    finally:
        torch.set_default_dtype(old)
    assert runs.losses.shape == (STEPS, 3) and len({float(v) for v in runs.losses[-1]}) == 3


@pytest.mark.slow
def test_full_batches_are_trained_as_with_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    table = importlib.import_module("bench_deq_training")
    warnings.simplefilter("ignore", ForgivenWarning)
    x, y = table.data(0)
    losses: list[list[float]] = []
    for index in (None, torch.arange(64)):
        torch.manual_seed(0)
        layer, head = DEQ(table.CELLS["residual"](), (16,), rtol=1e-3), nn.Linear(16, 1)
        optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], 1e-2)
        losses.append([])
        for _ in range(34):  # the 32nd of which starts from zero
            loss = (head(layer(x, index=index)) - y).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses[-1].append(float(loss.detach()))
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_dear_solvers_pause_for_each_seed_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    table = importlib.import_module("bench_deq_training")
    warnings.simplefilter("ignore", ForgivenWarning)
    seeds, old = [1, 0, 5], torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        together = table.begin("LayerNorm(ReLU)", seeds, 1e-2)
        apart = [table.begin("LayerNorm(ReLU)", [seed], 1e-2) for seed in seeds]
        for one in apart:
            one.layer = DEQ(one.side.cell, (16,), rtol=1e-3, in_dims=(0, 0))
        pauses = []
        for _ in range(2):
            for one in (together, *apart):
                one.step(True)
            pauses.append(together.layer.train_settings.solver.pauses.tolist())
            assert pauses[-1] == [one.layer._effort.pause for one in apart]
    finally:
        torch.set_default_dtype(old)
    assert pauses[-1][0] > 0 and 0 in pauses[-1], "one seed is dear, another is not"


def test_a_bound_holds_for_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    table = importlib.import_module("bench_deq_training")
    torch.manual_seed(0)
    V = torch.randn(2, 48, 16)
    V[0, :16] *= 0.01
    W = table.Bound()(V)
    torch.testing.assert_close(W[0, :16], V[0, :16])
    for block in (W[0, 16:32], W[1, :16], table.Bound()(torch.randn(2, 16, 32))[1, :, 16:]):
        torch.testing.assert_close(torch.linalg.matrix_norm(block, 2), torch.tensor(0.95))


@pytest.mark.slow
def test_a_row_that_was_killed_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    table = importlib.import_module("bench_deq_training")
    whole = table.train("tanh", [0, 1], 1e-2, 30, warm=True)
    step, taken = table.Training.step, []

    def killed(training: Any, warm: bool) -> None:
        taken.append(warm)
        if len(taken) == 24:
            raise KeyboardInterrupt
        step(training, warm)

    monkeypatch.setattr(table.Training, "step", killed)
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            again = table.train("tanh", [0, 1], 1e-2, 30, warm=True, keep=tmp_path / "row.pt")
    assert len(taken) == 24 + 10  # three steps are taken twice: what is kept is written every 20
    assert torch.equal(again.losses, whole.losses) and again.evaluations == whole.evaluations


def test_slices_of_seeds_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    table = importlib.import_module("bench_deq_training")
    old = {"seed": [3, 4], "loss": [0.3, 0.4], "bounded": [3.0, 4.0]}
    new = {"seed": [4, 2], "loss": [0.04, 0.2], "bounded": [0.4, 2.0]}
    assert table.joined(old, new) == {"seed": [2, 3, 4], "loss": [0.2, 0.3, 0.04], "bounded": [2.0, 3.0, 0.4]}
    assert table.joined({}, new) == {"seed": [2, 4], "loss": [0.2, 0.04], "bounded": [2.0, 0.4]}
    mean, error = table.by_pairs([1.0, 1e-3], [1e-1, 1e-1])
    assert mean == pytest.approx(-0.5) and error == pytest.approx(1.5)  # log10 of the ratios: 1 and -2


def test_the_page_has_the_table_that_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    table, root = importlib.import_module("training_table").TABLE, Path(__file__).parents[3]
    rows = table.rows
    pages = (table.path, root / "docs" / "tutorials" / "deq.md", root / "README.md")
    page, tutorial, readme = (" ".join(p.read_text().split()) for p in pages)
    assert table.in_page().group().splitlines() == table.lines()
    at_most = sum(row["value"] <= 1.1 for row in rows)
    assert f"Of the {len(rows)} rows {at_most} have a median at most 1.1 times that of their reference" in page
    tanh = {row["row"]: round(row["evaluations"]) for row in rows if row["row"].startswith("tanh, rate 0.01,")}
    warm, cold = tanh["tanh, rate 0.01, warm"], tanh["tanh, rate 0.01, cold"]
    assert f"a tanh cell is called {warm} times a step where it is called {cold} times without" in tutorial
    assert f"is then called {warm} times a step in place of {cold}" in readme
