"""Does a DEQ train with nothing but defaults?  Cells x seeds x learning rates, beside the same cells unrolled.

    python benchmarks/bench_deq_training.py                           # 5 cells, 20 seeds, 2 rates, 500 steps: an hour
    python benchmarks/bench_deq_training.py --cells tanh GRU --rates 0.01 --starts warm
    python benchmarks/bench_deq_training.py --seeds 5 --first 5       # a slice: seeds 5 to 9 are added to what is there
    python benchmarks/bench_deq_training.py --seeds 2 --steps 120     # a minute or two, nothing is kept
    python benchmarks/bench_deq_training.py --keep rows               # a row that is killed goes on from rows/
    python benchmarks/bench_deq_training.py --rtol 1e-5               # at another tolerance, nothing is kept

No weight is bounded, no failure ignored: ``DEQ(cell, rtol=1e-3)``.  ``warm``: called as ``layer(x, index=numbers of the
samples)``, so that a solve starts from the sample's last equilibrium, 30 times of 31, as it does by ``layer(x)`` too where
the same tensor comes back in every step (tests/plugins/deq/test_training_table.py: the same losses over 34 steps); ``cold``:
called as ``layer(x.clone())``, as where samples never come back: every solve starts from zero.

``Forgive(every=)`` pauses the dear solvers for each seed by itself (:class:`RelayBySeed`), as it would alone.

The task is y = sin(x_1 + ... + x_4) from 64 samples, full batches, Adam.  The seeds of a row are trained side by side, as
one stack of cells (:class:`Stack`): samples are solved one by one and Adam is elementwise, so that each is trained as it
would be alone (``tests/plugins/deq/test_training_table.py`` compares).  A row is one cell at one rate:

- ``raised``: seeds in which some step had more unsolved samples than ``Forgive`` allows: alone such a run ends in an
  exception, here it goes on.  ``solved``: the share of all samples of all steps that converged; ``backward``: of those of
  the backward.
- ``loss``: over the seeds, of the mean over the last tenth of the steps; ``lower`` and ``upper``: the quartiles of the seeds
  (of 20 the 6th and the 15th, between which the median is with 96 %).
- ``evaluated``: the loss of the trained layer on the same samples in ``eval()`` mode, which solves every sample from zero:
  where a cell has several equilibria these need not be those of the training; ``unsolved``: the share that has none.
- ``jumps``: steps whose loss is more than twice that of the step before, in the median seed.
- references from the same seeds at the same rate: ``unrolled``, 40 applications of the same cell, differentiated step by
  step (no equilibrium where its loss at 80 applications, beside it, is another), and ``bounded``, the same DEQ, started in
  the same way, with the spectral norms of the recurrent weights kept at 0.95 or less, also ``bounded evaluated``.

A row's figure is the median loss divided by that of the bounded DEQ: at most 1.1 is asked for; other ratios are beside it,
and ``decades``, the mean of log10 of that ratio seed by seed, with its standard error (losses spread over decades).
Finished rows go to ``benchmarks/results/bench_deq_training.json`` with each seed's figures, so that the table can be made in
slices.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import results
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrize
from training_by_seed import SAMPLES, BySeed, RelayBySeed

import implicitkit as ik
from implicitkit_deq import DEQ, Forgive, ForgivenWarning, cells

IN, FEATURES = 4, 16
RATES = (1e-3, 1e-2)
BOUND, DEPTH, RTOL = 0.95, 40, 1e-3
SHARES = torch.tensor([[Forgive().share], [Forgive().backward_share]])  # forward and backward


class Tanh(nn.Module):
    """tanh(W z + U x), PyTorch's own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(FEATURES, FEATURES), nn.Linear(IN, FEATURES)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


class GRU(nn.Module):
    """A gated recurrent unit, as ``nn.GRUCell`` (whose kernel ``torch.vmap`` cannot map)."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(IN, FEATURES)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        from_x = nn.functional.linear(x, self.cell.weight_ih, self.cell.bias_ih).chunk(3, -1)
        from_z = nn.functional.linear(z, self.cell.weight_hh, self.cell.bias_hh).chunk(3, -1)
        reset, update = (torch.sigmoid(a + b) for a, b in zip(from_x[:2], from_z[:2], strict=True))
        new = torch.tanh(from_x[2] + reset * from_z[2])
        return new + update * (z - new)


class LayerNormOfReLU(nn.Module):
    """LayerNorm(ReLU(W z + U x)): bounded, so that an equilibrium exists (Brouwer), and only piecewise smooth."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U, self.norm = nn.Linear(FEATURES, FEATURES), nn.Linear(IN, FEATURES), nn.LayerNorm(FEATURES)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.W(z) + self.U(x)))


class Residual(nn.Module):
    """LayerNorm(z + B ReLU(A z + U x)): a block of a transformer without its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.A, self.B = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)
        self.U, self.norm = nn.Linear(IN, 2 * FEATURES), nn.LayerNorm(FEATURES)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(z + self.B(torch.relu(self.A(z) + self.U(x))))


CELLS: dict[str, Callable[[], nn.Module]] = {
    "cells.MLP": lambda: cells.MLP(IN, FEATURES),
    "tanh": Tanh,
    "GRU": GRU,
    "LayerNorm(ReLU)": LayerNormOfReLU,
    "residual": Residual,
}
RECURRENT = ("recurrent.weight", "W.weight", "cell.weight_hh", "A.weight", "B.weight")


class Bound(nn.Module):
    """Each (16, 16) block of each of the stacked weights within a spectral norm: the three gates of a GRU each by itself."""

    def forward(self, V: Tensor) -> Tensor:
        blocks = V.unflatten(1, (-1, FEATURES)).unflatten(3, (-1, FEATURES)).movedim(3, 2)
        norms = torch.linalg.matrix_norm(blocks, 2, keepdim=True)
        return (blocks * (BOUND / norms).clamp_max(1.0)).movedim(2, 3).flatten(3, 4).flatten(1, 2)


class Stack(nn.Module):
    """Cells of one kind side by side: a sample goes with ``which`` of them it belongs to.

    Shapes: ``z (n, 16)``, ``x (n, 4)``, ``which (n,)``; all ``count * 64`` samples, in the order of the cells, or any
    subset of them.
    """

    def __init__(self, modules: Sequence[nn.Module], bounded: bool = False) -> None:
        super().__init__()
        self._one, self.count = (modules[0],), len(modules)  # in a tuple: its own parameters are not meant
        self.calls = torch.zeros(self.count, dtype=torch.int64)  # with samples of each cell
        values, _ = stack_module_state(list(modules))
        self._names = list(values)
        for i, name in enumerate(self._names):
            self.register_parameter(f"p{i}", nn.Parameter(values[name].detach()))
            if bounded and name in RECURRENT:
                parametrize.register_parametrization(self, f"p{i}", Bound())

    def forward(self, z: Tensor, x: Tensor, which: Tensor) -> Tensor:
        values = [getattr(self, f"p{i}") for i in range(len(self._names))]
        self.calls += torch.bincount(which, minlength=self.count) > 0
        whole = len(z) == self.count * SAMPLES
        if whole:
            z, x = (t.view(self.count, SAMPLES, -1) for t in (z, x))
        else:
            values = [v[which] for v in values]

        def one(values: list[Tensor], z: Tensor, x: Tensor) -> Tensor:
            out: Tensor = functional_call(self._one[0], dict(zip(self._names, values, strict=True)), (z, x))
            return out

        out = vmap(one)(values, z, x)
        return out.flatten(0, 1) if whole else out


class Side(nn.Module):
    """What the seeds have side by side: cells, readouts and data."""

    def __init__(self, name: str, seeds: Sequence[int], bounded: bool = False) -> None:
        super().__init__()
        modules, heads = [], []
        for seed in seeds:
            torch.manual_seed(seed)
            modules.append(CELLS[name]())
            heads.append(nn.Linear(FEATURES, 1))
        self.cell = Stack(modules, bounded)
        self.weight = nn.Parameter(torch.stack([h.weight.detach() for h in heads]))
        self.bias = nn.Parameter(torch.stack([h.bias.detach() for h in heads]))
        x, y = zip(*map(data, seeds), strict=True)
        self.x, self.y = torch.cat(x), torch.stack(y)
        self.which = torch.arange(len(seeds)).repeat_interleave(SAMPLES)

    def losses(self, z: Tensor) -> Tensor:
        """Of every seed."""
        out = z.view(len(self.y), SAMPLES, FEATURES) @ self.weight.mT + self.bias.unsqueeze(1)
        return (out - self.y).square().mean((1, 2))


def data(seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one seed."""
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(SAMPLES, IN, generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True))


@dataclass
class Runs:
    """What came of the seeds of one row; ``losses``: one row a step, one column a seed."""

    losses: Tensor
    raised: Tensor
    solved: float = 1.0
    backward: float = 1.0
    evaluations: float = 0.0
    milliseconds: float = 0.0  # a step of one seed
    long: list[float] = field(default_factory=list)  # losses after twice as many applications
    evaluated: list[float] = field(default_factory=list)  # losses in eval() mode
    unsolved: list[float] = field(default_factory=list)  # the share of the samples that has no solution there

    def jumps(self) -> list[int]:
        """Steps whose loss is more than twice that of the step before, for every seed."""
        found: list[int] = (self.losses[1:] > 2 * self.losses[:-1]).sum(0).tolist()
        return found

    def last(self) -> list[float]:
        """The mean over the last tenth of the steps, for every seed."""
        return self.losses[-max(len(self.losses) // 10, 1) :].mean(0).tolist()


@dataclass
class Training:
    """A training under way: all that it takes to go on with it."""

    side: Side
    layer: DEQ
    optimiser: torch.optim.Optimizer
    losses: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)  # of the samples that were missed, forward and backward
    evaluations: int = 0
    seconds: float = 0.0

    def step(self, warm: bool) -> None:
        """One step of Adam for every seed."""
        side, start = self.side, time.process_time()
        index, x = (torch.arange(len(side.x)), side.x) if warm else (None, side.x.clone())
        try:
            z = self.layer(x, side.which, index=index)
        except ik.ConvergenceError:  # of one seed, which is counted below: the others go on
            with self.layer.using(on_failure=Forgive(share=1.0)):
                z = self.layer(x, side.which, index=index)
        found = side.losses(z)
        self.optimiser.zero_grad()
        found.sum().backward()
        self.optimiser.step()
        solution = self.layer.solution
        assert solution is not None and solution.backward is not None
        pair = torch.stack([solution.converged, solution.backward.converged])
        self.losses.append(found.detach())
        self.shares.append((~pair).view(2, -1, SAMPLES).double().mean(2))
        self.evaluations += solution.evaluations
        self.seconds += time.process_time() - start

    def evaluate(self) -> tuple[list[float], list[float]]:
        """The loss of every seed in ``eval()`` mode, from zero, and the share of its samples that are not solved."""
        layer = self.layer.eval()
        with torch.no_grad(), layer.using(solver="relay", on_failure="ignore"):
            found = self.side.losses(layer(self.side.x, self.side.which))
        layer.train()
        assert layer.solution is not None
        return found.tolist(), (~layer.solution.converged).view(-1, SAMPLES).double().mean(1).tolist()


def begin(
    name: str,
    seeds: Sequence[int],
    rate: float,
    bounded: bool = False,
    every: int = Forgive().every,
    rtol: float = RTOL,
) -> Training:
    """DEQs with defaults but for ``Forgive(every=)`` and ``rtol``, and their optimiser."""
    side = Side(name, seeds, bounded)
    count = len(seeds)
    none = torch.zeros(count, dtype=torch.int64)
    relay = RelayBySeed(calls=side.cell.calls, pauses=none, vain=none.bool(), asked=none.bool(), every=every)
    layer = DEQ(side.cell, (FEATURES,), rtol=rtol, solver=relay, on_failure=BySeed(every=1), in_dims=(0, 0))
    return Training(side, layer, torch.optim.Adam(side.parameters(), rate))


def train(
    name: str,
    seeds: Sequence[int],
    rate: float,
    steps: int,
    *,
    warm: bool,
    bounded: bool = False,
    every: int = Forgive().every,
    rtol: float = RTOL,
    keep: Path | None = None,
) -> Runs:
    """DEQs with defaults; ``warm``: told which samples they see, so that a solve starts from the last equilibrium.

    ``keep``: a file that is written every 20 steps, and gone on from if it is there.
    """
    going = begin(name, seeds, rate, bounded, every, rtol)
    if keep is not None and keep.exists():
        going = torch.load(keep, weights_only=False)  # a file of our own: modules, the table of last equilibria
    while len(going.losses) < steps:
        going.step(warm)
        if keep is not None and len(going.losses) % 20 == 0:
            keep.parent.mkdir(parents=True, exist_ok=True)
            torch.save(going, keep.with_suffix(".new"))
            keep.with_suffix(".new").replace(keep)
    missed, (evaluated, unsolved) = torch.stack(going.shares), going.evaluate()
    return Runs(
        torch.stack(going.losses),
        (missed > SHARES).any(1).any(0),
        1 - float(missed[:, 0].mean()),
        1 - float(missed[:, 1].mean()),
        going.evaluations / steps,
        1e3 * going.seconds / steps / len(seeds),
        evaluated=evaluated,
        unsolved=unsolved,
    )


def unroll(name: str, seeds: Sequence[int], rate: float, steps: int, depth: int = DEPTH) -> Runs:
    """The same cells applied ``depth`` times, differentiated step by step."""
    side = Side(name, seeds)
    optimiser = torch.optim.Adam(side.parameters(), rate)

    def apply(times: int) -> Tensor:
        z = side.x.new_zeros(len(side.x), FEATURES)
        for _ in range(times):
            z = side.cell(z, side.x, side.which)
        return side.losses(z)

    losses, start = [], time.process_time()
    for _ in range(steps):
        found = apply(depth)
        optimiser.zero_grad()
        found.sum().backward()
        optimiser.step()
        losses.append(found.detach())
    seconds = time.process_time() - start
    with torch.no_grad():
        long = apply(2 * depth).tolist()
    none = torch.zeros(len(seeds), dtype=torch.bool)
    return Runs(torch.stack(losses), none, milliseconds=1e3 * seconds / steps / len(seeds), long=long)


def slice_of(
    name: str, seeds: Sequence[int], rate: float, steps: int, start: str, rtol: float, keep: Path | None
) -> dict[str, Any]:
    """What came of some seeds of one row: a list for each figure, one entry a seed; shares and times are the slice's."""
    warm = start == "warm"
    runs = train(name, seeds, rate, steps, warm=warm, rtol=rtol, keep=keep)
    bounded = train(name, seeds, rate, steps, warm=warm, bounded=True, rtol=rtol)
    unrolled = unroll(name, seeds, rate, steps)

    def all_of(value: Any) -> list[Any]:
        return [value] * len(seeds)

    return {
        "seed": list(seeds),
        "loss": runs.last(),
        "evaluated": runs.evaluated,
        "unsolved": runs.unsolved,
        "bounded": bounded.last(),
        "bounded evaluated": bounded.evaluated,
        "unrolled": unrolled.last(),
        "unrolled at 80": unrolled.long,
        "raised": runs.raised.int().tolist(),
        "jumps": runs.jumps(),
        "solved": all_of(runs.solved),
        "backward": all_of(runs.backward),
        "bounded solved": all_of(bounded.solved),
        "evaluations": all_of(runs.evaluations),
        "ms": all_of(runs.milliseconds),
        "bounded ms": all_of(bounded.milliseconds),
        "unrolled ms": all_of(unrolled.milliseconds),
    }


_MEANS = ("unsolved", "solved", "backward", "bounded solved", "evaluations", "ms", "bounded ms", "unrolled ms")


def by_pairs(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """The mean of ``log10(above / below)``, seed by seed, and its standard error."""
    logs = [math.log10(a / b) for a, b in zip(above, below, strict=True)]
    return statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf


def row(name: str, seeds: dict[str, Any]) -> dict[str, Any]:
    """One line of the table, from the figures of its seeds."""
    middle = {k: statistics.median(v) for k, v in seeds.items() if k not in ("seed", "raised", *_MEANS)}
    means = {k: statistics.fmean(seeds[k]) for k in _MEANS}
    last = sorted(seeds["loss"])
    decades, error = by_pairs(seeds["loss"], seeds["bounded"])
    evaluated, unsure = by_pairs(seeds["evaluated"], seeds["bounded evaluated"])
    return results.row(
        name,
        middle["loss"] / middle["bounded"],
        "of the bounded DEQ's loss",
        target=1.1,
        raised=f"{sum(seeds['raised'])} of {len(last)}",
        evaluated_ratio=middle["evaluated"] / middle["bounded evaluated"],
        unrolled_ratio=middle["loss"] / middle["unrolled"],
        decades=f"{decades:+.2f} +- {error:.2f}",
        evaluated_decades=f"{evaluated:+.2f} +- {unsure:.2f}",
        least=last[0],
        largest=last[-1],
        lower=last[len(last) // 4],
        upper=last[-1 - len(last) // 4],
        **middle,
        **means,
        seeds=seeds,
    )


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Figures by seed: the new ones, and the old ones of other seeds, in the order of the seeds."""
    kept = [i for i, seed in enumerate(old.get("seed", ())) if seed not in new["seed"]]
    both = {k: [*(old[k][i] for i in kept), *v] for k, v in new.items()}
    order = sorted(range(len(both["seed"])), key=both["seed"].__getitem__)
    return {k: [v[i] for i in order] for k, v in both.items()}


def merge(name: str, seeds: dict[str, Any], about: str) -> dict[str, Any]:
    """Keep these figures beside those of earlier slices; the row of all of them."""
    path = results.FOLDER / "bench_deq_training.json"
    known = {r["row"]: r for r in json.loads(path.read_text())["rows"]} if path.exists() else {}
    known[name] = row(name, joined(known.get(name, {}).get("seeds", {}), seeds))
    order = [f"{cell}, rate {rate:g}, {start}" for cell in CELLS for rate in RATES for start in ("warm", "cold")]
    results.save("bench_deq_training", [known[k] for k in order if k in known], about)
    return known[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    parser.add_argument("--keep", type=Path, help="a folder for what a row that is killed needs to go on")
    parser.add_argument("--starts", nargs="*", default=["warm", "cold"], choices=["warm", "cold"])
    parser.add_argument("--rtol", type=float, default=RTOL)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ForgivenWarning)
    about = (
        "Training with defaults: 5 cells, 500 steps of Adam, 64 samples, rtol 1e-3; the seeds of a row are counted in "
        '"raised". Medians over the seeds of the mean loss of the last tenth, over that of the same DEQ with bounded '
        'recurrent weights; "evaluated": the loss in eval() mode, which solves from zero. Rows that are not here have not '
        "been run at this size yet."
    )
    seeds = range(options.first, options.first + options.seeds)
    for name, rate, start in itertools.product(options.cells, options.rates, options.starts):
        title = f"{name}, rate {rate:g}, {start}"
        sizes = f"{options.first} {options.seeds} {options.steps}"
        keep = options.keep and options.keep / f"{title} {sizes} {options.rtol:g}.pt"
        found = slice_of(name, seeds, rate, options.steps, start, options.rtol, keep)
        whole = merge(title, found, about) if (options.steps, options.rtol) == (500, RTOL) else row(title, found)
        said = {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in whole.items() if k != "seeds"}
        print(", ".join(f"{k} {v}" for k, v in said.items()), flush=True)


if __name__ == "__main__":
    main()
