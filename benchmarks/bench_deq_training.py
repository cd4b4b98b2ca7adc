"""Does a DEQ train with nothing but defaults?  Cells x seeds x learning rates, beside the same cells unrolled.

    python benchmarks/bench_deq_training.py                           # 5 cells, 20 seeds, 2 rates, 500 steps: hours
    python benchmarks/bench_deq_training.py --seeds 2 --steps 120     # minutes
    python benchmarks/bench_deq_training.py --cold                    # every solve from zero

No weight is bounded, no failure ignored: ``DEQ(cell, rtol=1e-3)``, called as ``layer(x, index=numbers of the samples)``,
so that a solve starts from the sample's last equilibrium.  That decides at the high rate: a cell that is trained freely has
several equilibria, and a solve from zero finds now this, now that one, from step to step and from sample to sample, so
that the loss is no smooth function of the weights; a warm start stays with one.

The task is y = sin(x_1 + ... + x_4) from 64 samples, full batches, Adam; a row is one cell at one rate:

- ``raised``: runs that ended in an exception. ``unsolved``: samples forgiven, of all; ``backward``: those of the backward.
- ``loss``: median over the seeds, and least and largest, of the mean over the last tenth of the steps; ``unrolled``: the
  same of 40 applications of the same cell, differentiated step by step (which is no equilibrium: the median loss at 80
  applications stands beside it), from the same seeds at the same rate.
- ``evaluations``, ``ms``: a step, forward and backward; of the unrolled network in brackets.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, ForgivenWarning, cells

IN, FEATURES, SAMPLES = 4, 16, 64
RATES = (1e-3, 1e-2)


class Tanh(nn.Module):
    """tanh(W z + U x), PyTorch's own initialisation."""

    def __init__(self) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(FEATURES, FEATURES), nn.Linear(IN, FEATURES)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.W(z) + self.U(x))


class GRU(nn.Module):
    """A gated recurrent unit."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(IN, FEATURES)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.cell(x, z)


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


@dataclass
class Run:
    """One training run."""

    loss: float
    unsolved: float
    backward: float
    evaluations: float
    milliseconds: float
    error: str = ""


def _data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(SAMPLES, IN, generator=generator)
    return x, torch.sin(x.sum(1, keepdim=True))


def train(name: str, seed: int, rate: float, steps: int, *, warm: bool = True) -> Run:
    """A DEQ with defaults; ``warm``: it is told which samples it sees, and starts from their last equilibria."""
    torch.manual_seed(seed)
    layer = DEQ(CELLS[name](), (FEATURES,), rtol=1e-3)
    head, (x, y), index = nn.Linear(FEATURES, 1), _data(seed), torch.arange(SAMPLES) if warm else None
    optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], rate)
    losses, unsolved, backward, evaluations, error = [], 0, 0, 0, ""
    start = time.process_time()
    for _ in range(steps):
        try:
            loss = (head(layer(x, index=index)) - y).square().mean()
            optimiser.zero_grad()
            loss.backward()
        except ik.ConvergenceError as caught:
            error = str(caught)
            break
        optimiser.step()
        assert layer.solution is not None and layer.solution.backward is not None
        losses.append(float(loss.detach()))
        unsolved += int((~layer.solution.converged).sum())
        backward += int((~layer.solution.backward.converged).sum())
        evaluations += layer.solution.evaluations
    done = max(len(losses), 1)
    last = losses[-max(done // 10, 1) :] or [math.nan]
    seconds = time.process_time() - start
    return Run(
        sum(last) / len(last),
        unsolved / (done * SAMPLES),
        backward / (done * SAMPLES),
        evaluations / done,
        1e3 * seconds / done,
        error,
    )


def unroll(name: str, seed: int, rate: float, steps: int, depth: int = 40) -> tuple[float, float, float]:
    """Loss of the same cell applied ``depth`` times, the same after twice as many, and milliseconds a step."""
    torch.manual_seed(seed)
    cell = CELLS[name]()
    head, (x, y) = nn.Linear(FEATURES, 1), _data(seed)
    optimiser = torch.optim.Adam([*cell.parameters(), *head.parameters()], rate)
    losses: list[float] = []

    def apply(times: int) -> Tensor:
        z = x.new_zeros(SAMPLES, FEATURES)
        for _ in range(times):
            z = cell(z, x)
        return (head(z) - y).square().mean()

    start = time.process_time()
    for _ in range(steps):
        loss = apply(depth)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    seconds = time.process_time() - start
    last = losses[-max(steps // 10, 1) :]
    with torch.no_grad():
        return sum(last) / len(last), float(apply(2 * depth)), 1e3 * seconds / steps


def spread(losses: list[float]) -> str:
    """Median, least and largest."""
    return f"{statistics.median(losses):9.2e} ({min(losses):.1e}, {max(losses):.1e})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="*", default=list(CELLS), choices=list(CELLS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rates", nargs="*", type=float, default=list(RATES))
    parser.add_argument("--cold", action="store_true", help="every solve starts from zero")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ForgivenWarning)
    print(f"{arguments.seeds} seeds, {arguments.steps} steps, {'cold' if arguments.cold else 'warm'} starts")
    print(
        f"{'cell':16s} {'rate':>6s} {'raised':>7s} {'unsolved':>9s} {'backward':>9s} {'loss (least, largest)':>29s} "
        f"{'unrolled':>29s} {'(80)':>9s} {'evaluations':>12s} {'ms':>7s}"
    )
    for name in arguments.cells:
        for rate in arguments.rates:
            runs = [
                train(name, seed, rate, arguments.steps, warm=not arguments.cold) for seed in range(arguments.seeds)
            ]
            plain = [unroll(name, seed, rate, arguments.steps) for seed in range(arguments.seeds)]
            mean = lambda attribute: statistics.fmean(getattr(r, attribute) for r in runs)  # noqa: E731, B023
            _, long, ms = (statistics.median(column) for column in zip(*plain, strict=True))
            loss, unrolled = (spread(column) for column in ([r.loss for r in runs], [p[0] for p in plain]))
            print(
                f"{name:16s} {rate:6g} {sum(bool(r.error) for r in runs):3d}/{len(runs):<3d} {mean('unsolved'):9.2%} "
                f"{mean('backward'):9.2%} {loss} {unrolled} {long:9.2e} "
                f"{mean('evaluations'):12.1f} {mean('milliseconds'):7.1f} ({ms:.1f})",
                flush=True,
            )
            for r in runs:
                if r.error:
                    print(f"    {r.error[:200]}")


if __name__ == "__main__":
    main()
