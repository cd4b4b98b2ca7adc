"""Does a DEQ train with nothing but defaults?  Cells x seeds x learning rates, beside the same cells unrolled.

    python benchmarks/bench_deq_training.py                           # 5 cells, 20 seeds, 2 rates, 500 steps: half an hour
    python benchmarks/bench_deq_training.py --cells tanh GRU --rates 0.01 --starts warm
    python benchmarks/bench_deq_training.py --seeds 2 --steps 120     # a minute or two
    python benchmarks/bench_deq_training.py --keep rows               # a row that is killed goes on from rows/

No weight is bounded, no failure ignored: ``DEQ(cell, rtol=1e-3)``.  ``warm``: called as ``layer(x, index=numbers of the
samples)``, so that a solve starts from the sample's last equilibrium, as it does by ``layer(x)`` too where the same tensor
comes back in every step (tests/plugins/deq/test_training_table.py: the same losses over eight steps); ``cold``: called as
``layer(x.clone())``, as where samples never come back: every solve starts from zero.

``Forgive(every=)`` pauses the dear solvers for each seed by itself (:class:`RelayBySeed`), as it would alone.

The task is y = sin(x_1 + ... + x_4) from 64 samples, full batches, Adam.  The seeds of a row are trained side by side, as
one stack of cells (:class:`Stack`): samples are solved one by one and Adam is elementwise, so that each is trained as it
would be alone (``tests/plugins/deq/test_training_table.py`` compares).  A row is one cell at one rate:

- ``raised``: seeds in which some step had more unsolved samples than ``Forgive`` allows: alone such a run ends in an
  exception, here it goes on.  ``solved``: the share of all samples of all steps that converged; ``backward``: of those of
  the backward.
- ``loss``: over the seeds, of the mean over the last tenth of the steps; of 20 seeds ``lower`` is the 6th and ``upper`` the
  15th, between which the median is with 96 %.
- ``jumps``: steps whose loss is more than twice that of the step before, in the median seed.
- references from the same seeds at the same rate: ``unrolled``, 40 applications of the same cell, differentiated step by
  step (no equilibrium where its loss at 80 applications, beside it, is another), and there ``bounded``, the same DEQ with
  the spectral norms of the recurrent weights kept at 0.95 or less.

A row's figure is the median loss divided by that of the reference that is an equilibrium: at most 1.1 is asked for.
Finished rows go to ``benchmarks/results/bench_deq_training.json``, so that the table can be made in slices.
"""

from __future__ import annotations

import argparse
import json
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
BOUND, DEPTH = 0.95, 40
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

    def jumps(self) -> float:
        """Steps whose loss is more than twice that of the step before, the median over the seeds."""
        return statistics.median((self.losses[1:] > 2 * self.losses[:-1]).sum(0).tolist())

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


def begin(
    name: str, seeds: Sequence[int], rate: float, bounded: bool = False, every: int = Forgive().every
) -> Training:
    """DEQs with defaults but for ``Forgive(every=)``, and their optimiser."""
    side = Side(name, seeds, bounded)
    count = len(seeds)
    none = torch.zeros(count, dtype=torch.int64)
    relay = RelayBySeed(calls=side.cell.calls, pauses=none, asked=none.bool(), every=every)
    layer = DEQ(side.cell, (FEATURES,), rtol=1e-3, solver=relay, on_failure=BySeed(every=1), in_dims=(0, 0))
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
    keep: Path | None = None,
) -> Runs:
    """DEQs with defaults; ``warm``: told which samples they see, so that a solve starts from the last equilibrium.

    ``keep``: a file that is written every 20 steps, and gone on from if it is there.
    """
    going = begin(name, seeds, rate, bounded, every)
    if keep is not None and keep.exists():
        going = torch.load(keep, weights_only=False)  # a file of our own: modules, the table of last equilibria
    while len(going.losses) < steps:
        going.step(warm)
        if keep is not None and len(going.losses) % 20 == 0:
            keep.parent.mkdir(parents=True, exist_ok=True)
            torch.save(going, keep.with_suffix(".new"))
            keep.with_suffix(".new").replace(keep)
    missed = torch.stack(going.shares)
    return Runs(
        torch.stack(going.losses),
        (missed > SHARES).any(1).any(0),
        1 - float(missed[:, 0].mean()),
        1 - float(missed[:, 1].mean()),
        going.evaluations / steps,
        1e3 * going.seconds / steps / len(seeds),
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


def references(name: str, seeds: Sequence[int], rate: float, steps: int) -> dict[str, Any]:
    """Median losses of the unrolled cells and, where these are no equilibria, of the bounded DEQ."""
    unrolled = unroll(name, seeds, rate, steps)
    loss, long = statistics.median(unrolled.last()), statistics.median(unrolled.long)
    found = {"unrolled": loss, "unrolled at 80": long, "unrolled ms": unrolled.milliseconds}
    if long <= 1.1 * loss:
        return {"reference": loss, **found}
    bounded = train(name, seeds, rate, steps, warm=True, bounded=True)
    other = statistics.median(bounded.last())
    return {"reference": other, **found, "bounded": other, "bounded solved": bounded.solved}


def row(name: str, rate: float, start: str, runs: Runs, reference: dict[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    last = runs.last()
    middle = statistics.median(last)
    return results.row(
        f"{name}, rate {rate:g}, {start}",
        middle / reference["reference"],
        "of the reference's loss",
        target=1.1,
        raised=f"{int(runs.raised.sum())} of {len(last)}",
        solved=runs.solved,
        backward=runs.backward,
        loss=middle,
        least=min(last),
        largest=max(last),
        lower=sorted(last)[len(last) // 4],
        upper=sorted(last)[-1 - len(last) // 4],
        jumps=runs.jumps(),
        evaluations=runs.evaluations,
        ms=runs.milliseconds,
        **{k: v for k, v in reference.items() if k != "reference"},
    )


def finished() -> list[dict[str, Any]]:
    """Rows of earlier slices."""
    path = results.FOLDER / "bench_deq_training.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found


def earlier(name: str, rate: float) -> dict[str, Any] | None:
    """The references of an earlier slice of the whole table, which do not depend on where solves start."""
    for r in finished():
        if r["row"].startswith(f"{name}, rate {rate:g}, "):
            kept = {k: v for k, v in r.items() if k.startswith(("unrolled", "bounded"))}
            return {"reference": r["loss"] / r["value"], **kept}
    return None


def merge(rows: list[dict[str, Any]], about: str) -> None:
    """Keep these rows beside those of earlier slices."""
    known = {r["row"]: r for r in [*finished(), *rows]}
    order = [f"{name}, rate {rate:g}, {start}" for name in CELLS for rate in RATES for start in ("warm", "cold")]
    results.save("bench_deq_training", [known[k] for k in order if k in known], about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    parser.add_argument("--keep", type=Path, help="a folder for what a row that is killed needs to go on")
    parser.add_argument("--starts", nargs="*", default=["warm", "cold"], choices=["warm", "cold"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ForgivenWarning)
    about = (
        f"Training with defaults: 5 cells, {options.seeds} seeds, {options.steps} steps of Adam, 64 samples, rtol 1e-3. "
        "Medians over the seeds of the mean loss of the last tenth, over that of 40 unrolled applications, or, where these "
        "are no equilibrium (80 give another loss), of the same DEQ with bounded recurrent weights. Rows of cells that are "
        "not here have not been run at this size yet."
    )
    whole = options.seeds == 20 and options.steps == 500
    for name in options.cells:
        for rate in options.rates:
            seeds = range(options.seeds)
            reference = earlier(name, rate) if whole else None
            reference = reference or references(name, seeds, rate, options.steps)
            for start in options.starts:
                keep = options.keep and options.keep / f"{name} {rate} {start} {options.seeds} {options.steps}.pt"
                runs = train(name, seeds, rate, options.steps, warm=start == "warm", keep=keep)
                found = row(name, rate, start, runs, reference)
                print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items()))
                if whole:
                    merge([found], about)


if __name__ == "__main__":
    main()
