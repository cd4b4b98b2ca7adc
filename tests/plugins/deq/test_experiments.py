"""Every experiment in ``examples/`` runs in its quick mode, gives the numbers that it claims, and draws its figures.

The scripts assert what they prove by themselves; here the numbers that they return are looked at once more.  To add one, add
a row to ``EXPERIMENTS`` (or to ``THEOREMS``, for a file of ``examples/deq_theorems/``).
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[3] / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _examples_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@contextlib.contextmanager
def expect(row: str, what: str) -> Iterator[None]:
    """Name the row in a failure."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{row}: {what}: {error}") from error


def check_figure(row: str, path: Path) -> None:
    """A PNG of more than an empty canvas."""
    assert path.is_file(), f"{row}: no figure {path.name}; there are {sorted(p.name for p in path.parent.glob('*'))}"
    for file, head in ((path, PNG), (path.with_suffix(".pdf"), b"%PDF-")):
        data = file.read_bytes()
        assert data.startswith(head) and len(data) > 5_000, f"{row}: {file.name} is not readable ({len(data)} bytes)"


# ----------------------------------------------------------------------------------------------------------- deq_theory
def gradient(r: dict[str, Any]) -> None:
    assert r["differences"] < 1e-8 and r["unrolled"] < 1e-13
    assert r["tightest"] < 1e-11
    assert r["exponent"] == pytest.approx(1, abs=0.1)
    for (solver, rtol), (evaluations, residual, _, error) in r["found"].items():
        assert evaluations > 0 and residual <= 1.01 * rtol and error < 20 * rtol, (solver, rtol, residual, error)


def one_layer(r: dict[str, Any]) -> None:
    assert r["merged"]["value"] < 1e-12 and r["merged"]["gradients"] < 1e-12
    assert r["tied"]["value"] < 1e-13 and r["tied"]["gradients"] < 1e-12
    assert r["tied"]["width"] == 37
    assert r["selected"]["sequential"] > 0.9 and r["selected"]["joint"] < -0.8


def regions(r: dict[str, Any]) -> None:
    assert set(r["counts"]) >= {3, 4, 5, 6, 7, 8}
    for m, n in r["counts"].items():
        assert (n["patterns"], n["pieces"], n["slope"], n["error"], n["steps"]) == (2**m, 2**m, 2**m, 0, m), m
    assert r["evaluations"]["picard"][1] <= max(r["counts"]) + 2
    assert r["held"][1] < r["held"][0]


def steep(r: dict[str, Any]) -> None:
    for eps, errors in r["errors"].items():
        assert set(errors) == {6, 10, 14, 20, 40} and max(errors.values()) <= eps * (1 + 1e-6), eps
    assert r["lemma"] < 1e-9 and r["random"] < 1e-12
    assert all(0 < error <= 0.1 * (1 + 1e-6) and other == 0 for error, other in r["many"].values())
    assert [max(c) for c in r["bisections"].values()] == [7, 17, 37]
    assert len({r["steps"]["bisection", d] for d in (6, 10, 14)}) == 1
    assert all(r["steps"]["newton", d] <= 8 for d in (6, 10, 14))
    assert 400 < r["steps"]["picard", 6] < 600
    assert set(r["slopes"]) == {"bisection", "newton", "picard", "anderson", "broyden"}
    assert max(r["slopes"].values()) < 1e-9


def trained_norms(r: dict[str, Any]) -> None:
    assert set(r["largest"]) == {(i, m) for i in ("one input", "d inputs") for m in ("equilibrium", "network")}
    for norms, errors in zip(r["largest"].values(), r["errors"].values(), strict=True):
        assert norms.shape == errors.shape == (2, 2) and bool((norms > 0.5).all()) and bool((errors < 0.35).all())
    for model in ("equilibrium", "network"):  # of d = 6 something is learned in 150 steps
        assert float(r["share"]["one input", model][0]) < 0.7, (model, r["share"])
    assert r["solved"] > 0.99


def sawtooth(r: dict[str, Any]) -> None:
    assert set(r["shares"]) == {name for name, _ in r["prices"]} and len(r["shares"]) == 6
    assert all(float(r["shares"][f"network, {n}"][0].min()) < 0.1 for n in ("2 x 10", "2 x 30", "1 x 100"))
    for (name, _), (forward, backward, saved, evaluations) in r["prices"].items():
        assert (evaluations > 0) == name.startswith("equilibrium") and min(forward, backward, saved) > 0, name
    forward, backward, saved, _ = r["prices"]["network, 2 x 10", 1]
    assert (forward, backward) == (2 * (10 + 100 + 10), 2 * (10 + 200 + 20))  # by hand: x, W, v; no gradient for x
    assert saved == pytest.approx(4 * (10 + 10 + 1), abs=1)  # two layers and the error
    assert all(min(errors) < 1 for name, errors in r["starts"].items() if "0.9" in name)


def density(r: dict[str, Any]) -> None:
    assert len(r["densities"]) == 9
    for (name, model), (one,) in r["densities"].items():
        assert 1 <= one.effective <= 20 and 1 <= one.above <= 20 and one.heat.shape == (20, 40), (name, model)
        if model != "diagonal equilibrium":
            assert one.error < 0.8 and one.effective != one.effective_first, (name, model, one.error)
        else:
            assert (one.above_first, one.effective_first) == (20, pytest.approx(20)), name


def generalisation(r: dict[str, Any]) -> None:
    assert r["apart"] < 1e-6 and r["below"] < -1e6
    last = {key: sorted(run[-1] for run in runs)[len(runs) // 2] for key, runs in r["errors"].items()}
    assert last["near 1", "equilibrium from 1"] < 0.2 * last["near 1", "least norm"]
    assert last["four entries", "equilibrium from 1"] > last["four entries", "least norm"]
    assert last["four entries", "equilibrium from 0.1"] < 0.1 * last["four entries", "least norm"]


def perturbation(r: dict[str, Any]) -> None:
    assert len(r) == 4 and all(0 < ratio <= 1 + 1e-6 for ratio in r.values())
    assert r["L z + a, shifted"] == pytest.approx(1, abs=1e-6)


def bias(r: dict[str, Any]) -> None:
    assert r["distance"] < 1e-6 and r["gradient"] < 1e-12
    assert r["counts"][0.05] <= 10 and r["counts"][1.0] >= 35
    assert r["descents"][0.01] < 0.5 * r["descents"][0.03]
    assert r["counts"]["u^2 - v^2, 0.001"] < r["counts"][0.1] and r["counts"]["u^2 - v^2, 1"] > 30
    assert r["signs"]["ones"] > 0.3 and r["signs"]["signs of the truth"] < 1e-8
    middle = {name: distances[5] for name, distances in r["optimisers"].items()}
    assert middle["descent"] < middle["single samples"] < middle["momentum"] < 0.05 < middle["Adam"]


def structures(r: dict[str, Any]) -> None:
    assert r["worst"] < 1e-12
    angles = {kind: {name: one["angle"] for name, one in by_name.items()} for kind, by_name in r["found"].items()}
    assert set(angles) == {"squares", "classes"} and len(angles["squares"]) == 5
    assert all(len(a) == 2 and bool((a < 90).all()) for a in angles["squares"].values()), angles
    ends = {name: beta.abs().sum(1) for name, beta in r["ends"].items()}
    assert bool((ends["residual"] > 1.5 * ends["diagonal"]).all() and (ends["full"] < ends["diagonal"]).all())
    assert float(r["found"]["squares"]["full"]["loss"].max()) < 1e-12


def gotu(r: dict[str, Any]) -> None:
    assert r["worst"] < 1e-2
    assert r["losers"] == [(1.0, 0.3), (1.5, -0.5)]
    assert r["errors"][1.0, 1.0]["plain bias"] == pytest.approx(2.137, abs=2e-3)
    assert r["errors"][2.0, 1.0]["plain bias"] == pytest.approx(11.34, abs=2e-2)
    assert set(r["relu"]) == {(d, name) for d in (8, 20) for name in ("1 + x_k + sum", "x_0 x_k + x_1")}
    for models in r["relu"].values():  # untrained errors on the seen half are 2 to 8
        assert all(run.seen < 1.5 and run.unseen > run.seen for runs in models.values() for run in runs)


def conditioning(r: dict[str, Any]) -> None:
    assert r["well_posed"]["Monotone, any weights"]["equilibria"] == 1
    assert r["well_posed"]["MLP, |W| = 3, free"]["equilibria"] > 1
    assert r["determinant"] == 0
    assert r["adjoint"][0.99]["norm"] > 100
    assert r["adjoint"][0.99]["neumann"][0] > 20 * r["adjoint"][0.99]["gmres"][0]


def traces(r: dict[str, Any]) -> None:
    assert r["bias"] < 4 and len(r["exponent"]) == 6 and r["gain"]["falling"] > 10 > r["gain"]["flat"]
    assert all(shares[32] < 1.5 for shares in r["determinant"].values())


def audio(r: dict[str, Any]) -> None:
    sizes, costs = dict(r["sizes"]), dict(r["costs"])
    wide, dear = sizes.pop("network, sine, equal FLOPs"), costs.pop("network, sine, equal FLOPs")
    assert max(sizes.values()) - min(sizes.values()) <= 40 < wide
    assert dear.step == pytest.approx(costs["equilibrium, sine"].step, rel=0.1)
    assert costs["network, sine"].forward == 1000 * 2 * (16 * 16 + 16 * 16 + 16 + 16)  # two layers, readout, features
    assert r["converged"]["equilibrium, sine"] == 1 and min(r["converged"].values()) > 0.95  # free: some are forgiven
    assert set(r["rates"]) == set(r["errors"]) and all(e < 0.5 for errors in r["errors"].values() for e in errors)


def frequency(r: dict[str, Any]) -> None:
    assert len(r["errors"]) == 4
    for name, (run,) in r["errors"].items():  # 30 steps are enough for what is nearly a feature, and not for 200 Hz
        assert max(run[:2]) < 0.5 and run[-1] > 2 * max(run[:2]), (name, run)


SLOW = (
    "gradient",
    "regions",
    "conditioning",
    "audio",
    "frequency",
    "trained_norms",
    "sawtooth",
    "density",
    "generalisation",
    "gotu",
    "bias",
    "traces",
    "structures",
    "steep",
)
THEOREMS: dict[str, Callable[[dict[str, Any]], None]] = {
    f.__name__: f
    for f in (
        *(gradient, one_layer, regions, sawtooth, steep, trained_norms, perturbation, bias, structures),
        *(generalisation, density),
        *(gotu, conditioning, traces, audio, frequency),
    )
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in THEOREMS])
def test_theory(name: str, tmp_path: Path) -> None:
    script = importlib.import_module("deq_theory")
    results = script.main(["--quick", "--only", name, "--output", str(tmp_path)])
    assert list(results) == [name]
    with expect(name, "numbers"):
        THEOREMS[name](results[name])
    check_figure(name, tmp_path / f"deq_theory_{name}.png")


def test_theory_is_tested_whole() -> None:
    script = importlib.import_module("deq_theory")
    files = {p.stem for p in (EXAMPLES / "deq_theorems").glob("*.py")} - {"__init__", "claims", "cost", "stacks"}
    assert set(script.THEOREMS) == set(THEOREMS) == files


def test_a_claim_that_fails_is_an_error() -> None:
    claims = importlib.import_module("deq_theorems.claims")
    with pytest.raises(AssertionError, match="two is three"):
        claims.claim(2 == 3, "two is three")


# ------------------------------------------------------------------------------------------------------ the other scripts
def convergence(r: dict[str, Any]) -> None:
    assert r["ratio"] < 5
    for kind in ("TrellisNet", "Transformer"):
        for when in ("at first", "trained"):
            found = r["traces"][kind, when]
            assert set(found) == {"unrolled, 60 layers", "picard", "anderson", "broyden", "newton_krylov"}
            assert 0 < r["radii"][kind, when] < 2
            for name, points in found.items():
                assert points[-1][1] < 1e-6 * points[0][1], (kind, when, name, points[-1])
        short, long = r["iterations"][kind, 16], r["iterations"][kind, 64]
        for way in ("forward", "backward"):
            most = 2 if kind == "Transformer" else 6
            assert 0 < long[way] <= most * short[way], (kind, way, short[way], long[way])


def graph(r: dict[str, Any]) -> None:
    assert set(r) == {"karate club", "Les Miserables"}
    for task, least in (("karate club", 0.9), ("Les Miserables", 0.7)):  # most sides and communities are told
        assert min(r[task]["equilibrium"]) >= least, (task, r[task])
        assert set(r[task]) == {"equilibrium", "1 layer", "2 layers", "8 layers"}


def memory(r: dict[str, Any]) -> None:
    assert len(r) == 6
    for name, modes in r.items():
        evaluations, _ = modes["deq"]["steps"]
        assert evaluations >= 20 and modes["deq"]["converged"] == 1, (name, modes["deq"])  # as long as a trained cell's
        unrolled, checkpointed, deq = (modes[m]["saved"] for m in ("unrolled", "checkpointed", "deq"))
        layers = int(name.split()[1].rstrip(","))
        assert deq < checkpointed < (1 / layers**0.5 + 0.1) * unrolled, (name, deq, checkpointed, unrolled)
        assert unrolled > 0.4 * layers * deq, (name, unrolled / deq)


def copy_memory(r: list[Any]) -> None:
    (run,) = r
    assert run.name == "deq" and 10_000 < run.parameters < 16_000
    assert run.loss < 1e-3 and run.accuracy == 1, run  # without memory: 0.173
    assert run.converged > 0.99 and run.steps < 1500 and run.residual < 1e-4, run
    two, varied = run.began
    assert 0 < two < varied < run.steps and max(run.evaluations) < 40, (
        run.began
    )  # trained at two layers only: 90 to 390


def digits(r: dict[str, Any]) -> None:
    (deq,), (resnet,) = r["multiscale DEQ"], r["ResNet"]
    assert min(deq.accuracy, resnet.accuracy) > 0.2 and deq.radius < 1  # one epoch
    assert deq.saliency_error < 1e-5
    assert min(deq.evaluations) >= 1
    assert all(0.01 < one.attended < 0.6 and one.on_digit > 0.3 for one in (deq, resnet))


def language(r: Any) -> None:
    results, corpus = r
    named = {result.entry.name: result for result in results}
    assert len(named) == 9 and not any(run.failure for result in results for run in result.steps)
    alone = corpus.test.limit(0)
    for name, result in named.items():  # the writer's own: 30; the rest is learnt in 120 steps
        (run,) = result.steps
        assert corpus.test.oracle < run.perplexity < 0.75 * alone, (name, run.perplexity)
        assert 0.4 < run.agreement <= 1 and run.unsolved <= 3 and run.residual < 1e-3, name
    for kind in ("Transformer", "TrellisNet"):
        deq, tied, untied, narrow = (named[n] for n in named if kind in n)
        assert deq.inside == tied.inside and untied.inside == 4 * tied.inside, kind
        assert abs(narrow.inside / tied.inside - 1) < 0.25 and abs(named["LSTM"].inside / deq.inside - 1) < 0.25
        assert deq.saved < 0.6 * tied.saved, kind
        assert deq.steps[0].perplexity < 1.15 * tied.steps[0].perplexity, kind
        assert deq.steps[0].converged > 0.99 < deq.steps[0].backward_converged, kind


class Experiment(NamedTuple):
    """A script of ``examples/``: what is asserted of its results, its figures, further arguments, is it slow."""

    check: Callable[[Any], None]
    figures: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    output: str = ""  # the name in the output folder that --output wants; "" is the folder itself
    slow: bool = False
    quick: bool = True  # is it run with --quick?


EXPERIMENTS = {
    "deq_convergence": Experiment(convergence, ("deq_convergence.png", "deq_convergence_length.png"), slow=True),
    "deq_graph": Experiment(graph, ("deq_graph.png",), slow=True),
    "deq_memory": Experiment(memory, ("deq_memory.png",), slow=True),
    "deq_copy_memory": Experiment(
        copy_memory,
        ("copy.png",),
        ("--gap", "100", "--models", "deq", "--goal", "7e-4"),
        output="copy.png",
        slow=True,
        quick=False,
    ),
    "deq_mnist_like": Experiment(digits, ("deq_mnist_like.png",), slow=True),
    "deq_language": Experiment(language, ("deq_language.png",), slow=True),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if e.slow else []) for n, e in EXPERIMENTS.items()]
)
def test_experiment(name: str, tmp_path: Path) -> None:
    row = EXPERIMENTS[name]
    script = importlib.import_module(name)
    quick = ["--quick"] if row.quick else []
    results = script.main([*quick, "--output", str(tmp_path / row.output), *row.arguments])
    with expect(name, "numbers"):
        row.check(results)
    for figure in row.figures:
        check_figure(name, tmp_path / figure)


def test_help_of_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (*EXPERIMENTS, "deq_theory"):
        script = importlib.import_module(name)
        with pytest.raises(SystemExit) as stop:
            script.main(["--help"])
        text = capsys.readouterr().out
        assert stop.value.code == 0 and "--quick" in text and "--output" in text, name
        assert (script.__doc__ or "").splitlines()[0].split(":")[0][:30] in " ".join(text.split()), name


def test_copy_memory_hands_over_what_has_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    script = importlib.import_module("deq_copy_memory")
    torch.manual_seed(0)
    model, run = script.DEQTransformer(500), script.Run("deq", 0)
    x, _ = script.sequences(2, 10, torch.Generator().manual_seed(0))
    z, inputs = torch.zeros(2, 30, 32), model.code(x)
    with torch.no_grad():
        for _ in range(3):
            z = model.layer.cell(z, inputs)
        r = model.layer.residual(z, inputs)
    want = (r.flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)).max()
    assert model.unrest(x, 3) == pytest.approx(float(want), rel=1e-4)
    phases = script.Phases(model, run, 10, 500, 8, 0.005)
    alone = script.without_memory(10)
    assert alone == pytest.approx(10 * math.log(8) / 30)

    def after(steps: int, loss: float, unrest: float) -> tuple[list[int], int | None]:
        run.steps, run.curve = steps, [(0.0, 9.0 * alone)] + [(0.0, loss * alone)] * script.LOOKS
        monkeypatch.setattr(model, "unrest", lambda x, layers: unrest if layers == 16 else 9.0)
        phases.look(x)
        plan = model.layer.pretraining
        return list(run.began), (plan and plan.depth(0) and plan.deepest)

    assert after(20, 0.9, 0.0) == ([], None) and model.layer.pretraining is not None
    assert after(30, 0.1, 0.0) == ([], None), "no look at this step"
    assert after(40, 0.1, 1.0) == ([40], 8)
    assert after(60, 0.1, 0.0) == ([40], 8), "it still learns"
    assert after(80, 1e-3, 0.1) == ([40], 8), "not at rest"
    assert after(100, 1e-3, 1e-3) == ([40, 100], None) and model.layer.pretraining is None
    fresh = script.Run("deq", 0)
    phases = script.Phases(model, fresh, 10, 505, 8, 0.005)
    run = fresh
    assert after(504, 0.9, 1.0)[0] == [] and not script.done(fresh, 9.0, True), "no loss of the equilibrium yet"
    assert script.done(fresh, 9.0, False), "a model without phases"
    assert after(505, 0.9, 1.0)[0] == [505, 505], "late, but no later"
    assert [script.done(replace(fresh, steps=n), 9.0, True) for n in (525, 526)] == [False, True]


@pytest.mark.slow
def test_copy_memory_goes_on_where_it_was_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = importlib.import_module("deq_copy_memory")
    monkeypatch.setattr(script, "LEFT", 100.0)  # no plateau: varied depth from the first look on
    given: dict[str, Any] = {"minutes": 9.0, "batch": 4, "goal": 0.0, "seed": 0, "device": "cpu", "shallow": 22}
    whole = script.train("deq", 10, steps=30, **given)
    assert len(whole.solved) == len(whole.evaluations) == 30 - 22  # layers before, which solve nothing
    assert whole.began == [20, 22]
    real, drawn = script.sequences, []

    def killed(batch: int, gap: int, generator: Any) -> Any:
        drawn.append(batch)
        if len(drawn) == 24:
            raise KeyboardInterrupt
        return real(batch, gap, generator)

    monkeypatch.setattr(script, "sequences", killed)
    with pytest.raises(KeyboardInterrupt):
        script.train("deq", 10, steps=30, keep=tmp_path, **given)
    again = script.train("deq", 10, steps=30, keep=tmp_path, **given)
    assert [loss for _, loss in again.curve] == [loss for _, loss in whole.curve] and again.loss == whole.loss
    assert again.evaluations == whole.evaluations  # killed among the layers, with which it goes on
    assert again.began == whole.began
    assert drawn[24:].count(4) == 10  # from step 20 on; the test draws 64 at a time
    with pytest.raises(ValueError, match=r"deq\.pt is of a run with .*'steps': 30.*move it away"):
        script.train("deq", 10, steps=31, keep=tmp_path, **given)
