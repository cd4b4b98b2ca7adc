"""The copy-memory task: remember ten symbols for T steps.  DEQ-Transformer, TCN, LSTM and GRU of the same size.

    python examples/deq_copy_memory.py --quick            # T = 50, about two minutes
    python examples/deq_copy_memory.py --gap 400          # the published setting
    python examples/deq_copy_memory.py --gap 100 --models deq --goal 7e-4     # two to three minutes of one core
    python examples/deq_copy_memory.py --gap 400 --models deq --batch 4 --goal 1e-4 --keep copy     # a kill is gone on from
    python examples/deq_copy_memory.py --gap 400 --models deq --shallow 0     # the equilibrium from the first step on

A sequence of length T + 20: ten symbols out of eight, blanks, and eleven marks from position T + 9 on; the ten symbols are
to be said again in the last ten positions.  The loss is the cross-entropy averaged over all positions, so that a model
without memory, which knows the blanks and guesses the symbols, has 10 ln 8 / (T + 20).

Before it has learnt where to look attention is a mean over all positions, in which a symbol is one of T + 20: with the usual
small weights that is lost, and at T = 400 the loss was still that of a model without memory, 0.050, after 810 steps.  So
values and output are four times as large (``VALUES``).  What is trained (``Phases``):

1. two layers, the fewer the sooner the plateau ends;
2. from half the loss without memory on two to eight layers, another number in each step, so that the iteration learns to
   come to rest: what two layers learn alone has an equilibrium of another loss, or none that is found;
3. from a loss of a quarter of a percent of that without memory on, and a residual below 1e-2 after 16 layers, the
   equilibrium.

What came out at T = 400, and with only the first, or only the last of these: docs/trainings.md.  TCN, GRU and LSTM (T = 400,
seed 0, the same rate) stand at 4.95e-2, 4.96e-2 and 4.97e-2, without memory, after all 3,000 steps, which take them 39, 148
and 20 CPU seconds; with --steps 15000 (194 seconds), or with --rate 0.016, TCN stands there too.

At T = 100 the equilibrium is not the best: TCN learns it, in less time and further.  (Here the equilibrium is trained from
the first step on, --shallow 0 --goal 1e-3.)  The rates of the others are the best of 1e-3, 4e-3 and 1.6e-2 at a third of
the equilibrium's seconds (seed 0).  That of the equilibrium is the largest of 2e-3,
4e-3, 8e-3 and 1.6e-2 with which every seed comes through: at 8e-3 and 1.6e-2 the plateau ends sooner (step 231 to 243, 129),
and two seeds of three end in a step, or in the test, in which too many samples have no equilibrium that Broyden's method
finds, or the layer's default solver; at 2e-3 it ends at step 412 (seed 0) and 661 (seed 1).

    model  rate     training loss near step 480 to 500       as many CPU seconds as the equilibrium, about, or fewer
    deq    0.004    6.5e-4 (seed 0), 2e-3 (seed 1)           8.0e-4, 8.8e-4, 8.7e-4 in 440, 572, 417 steps, 37 to 79 s
    tcn    0.016    3.6e-3, 1.7e-1, 1.8e-2 (seeds 0, 1, 2)   4.3e-6, 1.5e-5, 7.8e-6 in 2,577 steps, 30 to 35 s
    gru    0.016    1.7e-1 (seed 0)                          1.4e-1 in 3,913 steps, 103 s: 29 % of the symbols right
    lstm   0.004    1.8e-1 (seed 0)                          1.7e-1 in 17,669 steps, 72 s: none remembered

So by steps the equilibrium is ahead of TCN until some 500, by seconds never; its plateau ends at step 278, 409 and 242
(seeds 0, 1, 2), TCN's before step 400 (seed 0) to 1,000 (seed 1).

Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", section 4.1, table 1; Bai, Kolter & Koltun (2018), "An
empirical evaluation of generic convolutional and recurrent networks for sequence modeling", section 4.2.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import figure
from torch import Tensor, nn
from tqdm.auto import tqdm

import implicitkit as ik
from implicitkit_deq import DEQ, Pretraining, cells

SYMBOLS, LENGTH = 8, 10
CLASSES = SYMBOLS + 2  # blank, symbols, mark
RATES = {"deq": 4e-3, "tcn": 4e-3, "lstm": 4e-3, "gru": 4e-3}  # after 100 steps of warm-up; decays to a twentieth
VALUES = 4.0  # times the usual initial weights of what attention passes on: a mean of T + 20 positions at first
LAYERS, DEEPEST = 2, 8  # of the network that is trained before the equilibrium
LEFT, HAND_OVER = (
    0.5,
    0.0025,
)  # of the loss without memory: below it the plateau has ended; the equilibrium is asked for
RESTS = 1e-2  # relative residual after 2 DEEPEST layers: below it there is an equilibrium to hand over to
LOOKS = 20  # steps between two looks, and losses in a mean
PUBLISHED = {"deq": (3.5e-6, "14K"), "tcn": (2.7e-5, "16K"), "lstm": (0.0501, "14K"), "gru": (0.0491, "14K")}


def sequences(batch: int, gap: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Inputs and targets, each ``(batch, gap + 20)``: 0 is blank, 1..8 are symbols, 9 is the mark."""
    symbols = torch.randint(1, SYMBOLS + 1, (batch, LENGTH), generator=generator)
    x = torch.zeros(batch, gap + 2 * LENGTH, dtype=torch.int64)
    y = torch.zeros_like(x)
    x[:, :LENGTH], x[:, gap + LENGTH - 1 :], y[:, -LENGTH:] = symbols, CLASSES - 1, symbols
    return x, y


class DEQTransformer(nn.Module):
    """The equilibrium of one causal transformer block; while ``layer.pretraining`` says so, layers of it."""

    def __init__(self, shallow: int = 0, features: int = 32, heads: int = 4) -> None:
        super().__init__()
        cell = cells.Transformer(CLASSES, features, heads, hidden=3 * features, fused=True, scale=0.5)
        with torch.no_grad():
            cell.out.weight *= VALUES
            cell.injection.weight[2 * features : 3 * features] *= VALUES
        self.layer = DEQ(
            cell,
            solver="broyden",  # as in the paper, here per position
            rule=ik.Implicit("gmres", rtol=1e-2),
            rtol=1e-3,
            atol=0.0,
            evaluation={"rtol": 1e-4},
            pretraining=Pretraining(shallow, LAYERS) if shallow else None,
        )
        self.read = nn.Linear(features, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.layer(self.code(x)))

    def code(self, x: Tensor) -> Tensor:
        """What the layer gets."""
        return nn.functional.one_hot(x, CLASSES).to(self.read.weight.dtype)

    @torch.no_grad()
    def unrest(self, x: Tensor, layers: int) -> float:
        """``max |f(z) - z| / |z|`` over the samples, ``z`` being the output of so many layers."""
        injected = self.layer.cell.inject(self.code(x))
        z = x.new_zeros(*x.shape, self.layer.cell.features, dtype=self.read.weight.dtype)
        for _ in range(layers):
            z = self.layer.cell.update(z, *injected)
        r = self.layer.cell.update(z, *injected) - z
        return float((torch.linalg.vector_norm(r, dim=(1, 2)) / torch.linalg.vector_norm(z, dim=(1, 2))).max())


class Block(nn.Module):
    """Two dilated causal convolutions and a skip."""

    def __init__(self, before: int, width: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.pad = (kernel - 1) * dilation
        weight_norm = nn.utils.parametrizations.weight_norm
        self.first = weight_norm(nn.Conv1d(before, width, kernel, dilation=dilation))
        self.second = weight_norm(nn.Conv1d(width, width, kernel, dilation=dilation))
        self.skip = nn.Conv1d(before, width, 1) if before != width else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in (self.first, self.second):
            h = torch.relu(layer(nn.functional.pad(h, (self.pad, 0))))
        return torch.relu(h + self.skip(x))


class TCN(nn.Module):
    """As many dilated blocks as the sequence needs to be seen whole."""

    def __init__(self, gap: int, kernel: int = 8, parameters: int = 14_000) -> None:
        super().__init__()
        levels = max(2, math.ceil(math.log2((gap + 2 * LENGTH) / (2 * (kernel - 1)) + 1)))
        width = round((parameters / (2 * kernel * levels)) ** 0.5)
        self.blocks = nn.Sequential(*(Block(CLASSES if i == 0 else width, width, kernel, 2**i) for i in range(levels)))
        self.read = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.blocks(nn.functional.one_hot(x, CLASSES).to(self.read.weight.dtype).mT).mT)


class Recurrent(nn.Module):
    """LSTM or GRU."""

    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.core, self.read = kind(CLASSES, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.core(nn.functional.one_hot(x, CLASSES).to(self.read.weight.dtype))[0])


def build(name: str, gap: int, shallow: int = 0) -> nn.Module:
    """A model of about 14,000 parameters."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "deq": lambda: DEQTransformer(shallow),
        "tcn": lambda: TCN(gap),
        "lstm": lambda: Recurrent(nn.LSTM, 54),
        "gru": lambda: Recurrent(nn.GRU, 62),
    }
    return makers[name]()


@dataclass
class Run:
    """What came of training one model; ``curve``: (seconds, training loss)."""

    name: str
    parameters: int
    steps: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    accuracy: float = math.nan
    residual: float = math.nan  # of an equilibrium, relative, largest of the test's
    converged: float = math.nan  # share of the samples solved in training
    began: list[int] = field(default_factory=list)  # steps before layers of varied depth, and before the equilibrium
    curve: list[tuple[float, float]] = field(default_factory=list)
    solved: list[float] = field(default_factory=list)  # that share, step by step
    evaluations: list[int] = field(default_factory=list)  # of the cell, forward, step by step


class Kept:
    """What training needs to go on after it was killed, in a file; ``None``: nothing is kept."""

    def __init__(self, path: Path | None, settings: dict[str, float], **parts: Any) -> None:
        self.path, self.settings, self.parts = path, settings, parts

    def restore(self, run: Run, data: torch.Generator) -> Run:
        """The run so far, with every part in the state in which it was.

        Raises:
            ValueError: the file is that of a run with other settings.
        """
        if self.path is None or not self.path.exists():
            return run
        found = torch.load(self.path, weights_only=True)
        if found["settings"] != self.settings:
            raise ValueError(
                f"{self.path} is of a run with {found['settings']}, not with {self.settings}: move it away"
            )
        for name, part in self.parts.items():
            part.load_state_dict(found[name])
        data.set_state(found["data"])
        return Run(**found["run"])

    def save(self, run: Run, data: torch.Generator) -> None:
        """Write everything, then put it in place of what was there."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        states = {name: part.state_dict() for name, part in self.parts.items()}
        new = self.path.with_suffix(".new")
        torch.save({**states, "settings": self.settings, "data": data.get_state(), "run": asdict(run)}, new)
        new.replace(self.path)


class Phases:
    """Two layers until the plateau has ended, then a varied number of them until the equilibrium is there, then that.

    Two layers leave the plateau soonest, but what they learn holds for two; at a number that changes from step to step the
    output cannot depend on it, so that the iteration comes to rest.  Whether it has is measured (``model.unrest``).
    """

    def __init__(self, model: DEQTransformer, run: Run, gap: int, shallow: int, deepest: int, hand_over: float) -> None:
        self.model, self.run, self.shallow, self.deepest, self.hand_over = model, run, shallow, deepest, hand_over
        self.alone = without_memory(gap)
        self._set()

    def _set(self) -> None:
        layers = (Pretraining(self.shallow, LAYERS), Pretraining(self.shallow, LAYERS, self.deepest), None)
        self.model.layer.pretraining = layers[len(self.run.began)] if self.shallow else None

    def look(self, x: Tensor) -> None:
        """Go on to the next phase, if it is time; ``x``: the last sequences."""
        run, began = self.run, len(self.run.began)
        if began == 2 or (run.steps % LOOKS and run.steps < self.shallow):
            return
        loss = sum(v for _, v in run.curve[-LOOKS:]) / LOOKS
        if run.steps >= self.shallow:  # late, but no later
            run.began += [run.steps] * (2 - began)
        elif (began == 0 and loss < LEFT * self.alone) or (
            began == 1 and loss < self.hand_over * self.alone and self.model.unrest(x, 2 * self.deepest) < RESTS
        ):
            run.began.append(run.steps)
        self._set()


def without_memory(gap: int) -> float:
    """The loss of a model that knows the blanks and guesses the symbols: ``10 ln 8 / (T + 20)``."""
    return LENGTH * math.log(SYMBOLS) / (gap + 2 * LENGTH)


def clock(device: str) -> float:
    """Seconds: of the process on a CPU, so that what else the machine does counts for nothing; else of the wall."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def train(
    name: str,
    gap: int,
    *,
    steps: int,
    minutes: float,
    batch: int,
    goal: float,
    seed: int,
    device: str,
    keep: Path | None = None,
    rate: float | None = None,
    shallow: int = 0,
    deepest: int = DEEPEST,
    hand_over: float = HAND_OVER,
) -> Run:
    """Train until ``steps``, ``minutes`` or ``goal`` (a test loss) is reached, and test on 512 new sequences."""
    torch.manual_seed(seed)
    rate = RATES[name] if rate is None else rate
    model = build(name, gap, shallow).to(device)
    run = Run(name, sum(p.numel() for p in model.parameters()))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, 1.0, 100)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.05 ** (1 / max(steps - 100, 1)))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [100])
    data = torch.Generator().manual_seed(seed)
    kept = Kept(
        keep and keep / f"{name}.pt",
        {
            "gap": gap,
            "steps": steps,
            "batch": batch,
            "seed": seed,
            "rate": rate,
            "shallow": shallow,
            "deepest": deepest,
        },
        model=model,
        optimizer=optimizer,
        schedule=schedule,
    )
    run = kept.restore(run, data)
    phases = Phases(model, run, gap, shallow, deepest, hand_over) if isinstance(model, DEQTransformer) else None
    start = clock(device) - run.seconds
    bar = tqdm(range(run.steps, steps), desc=name, unit="step", mininterval=2.0)
    for step in bar:
        if run.seconds > 60 * minutes or done(run, goal, phases is not None and shallow > 0):
            break
        x, y = (t.to(device) for t in sequences(batch, gap, data))
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.seconds, run.steps = clock(device) - start, step + 1
        run.curve.append((run.seconds, float(loss.detach())))
        if isinstance(model, DEQTransformer) and model.layer.solution is not None:
            run.solved.append(float(model.layer.solution.converged.float().mean()))
            run.evaluations.append(model.layer.solution.evaluations)
        if phases is not None and shallow:
            phases.look(x)
        if run.steps % 20 == 0:
            kept.save(run, data)
            bar.set_postfix(loss=f"{run.curve[-1][1]:.2e}")
    bar.close()
    kept.save(run, data)
    run.converged = sum(run.solved) / len(run.solved) if run.solved else math.nan
    run.loss, run.accuracy, run.residual = test(model, gap, seed, device)
    return run


def done(run: Run, goal: float, phases: bool) -> bool:
    """Are the last twenty losses below the goal, those of the equilibrium if it has ``phases``?"""
    count = run.steps - (run.began[1] if len(run.began) == 2 else run.steps if phases else 0)
    return count > LOOKS and max(v for _, v in run.curve[-LOOKS:]) < goal


@torch.no_grad()
def test(model: nn.Module, gap: int, seed: int, device: str) -> tuple[float, float, float]:
    """Loss over all positions, accuracy over the ten that matter and largest residual on 512 sequences not seen before."""
    model.eval()
    data = torch.Generator().manual_seed(seed + 10_000)
    losses, right, residuals = [], [], []
    for _ in range(8):
        x, y = (t.to(device) for t in sequences(64, gap, data))
        out = model(x)
        losses.append(float(nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())))
        right.append(float((out[:, -LENGTH:].argmax(-1) == y[:, -LENGTH:]).float().mean()))
        if isinstance(model, DEQTransformer):
            found = model.layer.solution
            size = torch.linalg.vector_norm(found.value.flatten(1), dim=1)
            residuals.append(float((found.residual_norm / size).max()))
    return sum(losses) / len(losses), sum(right) / len(right), max(residuals, default=math.nan)


def table(runs: list[Run], gap: int) -> str:
    """The results beside the published ones."""
    lines = [
        f"copy memory, T = {gap}; without memory: {without_memory(gap):.2e} (at T = 400: {without_memory(400):.2e})",
        f"{'model':6} {'parameters':>10} {'loss':>9} {'accuracy':>9} {'steps':>6} {'seconds':>8} {'solved':>7}   "
        "published at T = 400",
    ]
    for run in runs:
        loss, size = PUBLISHED[run.name]
        lines.append(
            f"{run.name:6} {run.parameters:10d} {run.loss:9.2e} {run.accuracy:9.3f} {run.steps:6d} "
            f"{run.seconds:8.0f} {run.converged:7.4f}   {loss:.1e} ({size})"
        )
        if run.began:
            few, most = min(run.evaluations, default=0), max(run.evaluations, default=0)
            lines.append(
                f"       {LAYERS} layers until step {run.began[0]}, varied until step {run.began[-1]}; "
                f"then {few} to {most} evaluations a step; residual of the test at most {run.residual:.1e}"
            )
    return "\n".join(lines)


def plot(runs: list[Run], gap: int, path: Path) -> None:
    """Training loss against steps and against seconds."""
    baseline = without_memory(gap)
    with figure(path, 2, title=f"Copy memory, T = {gap}") as panels:
        for panel, words in zip(panels, ("step", "seconds"), strict=True):
            for run in runs:
                seconds, losses = zip(*run.curve, strict=True)
                x = seconds if words == "seconds" else range(1, len(losses) + 1)
                panel.semilogy(x, losses, label=f"{run.name} ({run.parameters:,} parameters)", linewidth=1)
            panel.axhline(baseline, color="0.5", linestyle=":", label="without memory")
            panel.set(xlabel=words, ylabel="training loss")
        panels[0].legend()


def main(arguments: list[str] | None = None) -> list[Run]:
    """Run the experiment; returns the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="T = 50 and at most 40 seconds a model")
    parser.add_argument("--gap", type=int, default=100, help="T (default 100)")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most so long for each model")
    parser.add_argument("--steps", type=int, default=3_000, help="at most so many for each model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--goal", type=float, default=2e-6, help="stop when twenty batches in a row are below this loss"
    )
    parser.add_argument("--models", default="deq,tcn,lstm,gru")
    parser.add_argument("--rate", type=float, help="of all models of this run (default: their own)")
    parser.add_argument(
        "--shallow", type=int, default=2_500, help="steps of layers before the equilibrium, at most (0: none)"
    )
    parser.add_argument(
        "--deepest", type=int, default=DEEPEST, help=f"layers then, at most ({LAYERS}: always {LAYERS})"
    )
    parser.add_argument(
        "--hand-over",
        type=float,
        default=HAND_OVER,
        help="loss at which, over that without memory (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder: every 20 steps what a run needs to go on is written there")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output" / "deq_copy_memory.png")
    options = parser.parse_args(arguments)
    gap, minutes, goal = (50, 2 / 3, 1e-4) if options.quick else (options.gap, options.minutes, options.goal)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    runs = [
        train(
            name,
            gap,
            steps=options.steps,
            minutes=minutes,
            batch=options.batch,
            goal=goal,
            seed=options.seed,
            device=device,
            keep=options.keep,
            rate=options.rate,
            shallow=options.shallow,
            deepest=options.deepest,
            hand_over=options.hand_over,
        )
        for name in options.models.split(",")
    ]
    print(table(runs, gap))
    plot(runs, gap, options.output)
    return runs


if __name__ == "__main__":
    main()
