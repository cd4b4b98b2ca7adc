"""A character-level language model on English text that every machine has: the documentation topics inside Python.

    python examples/deq_language.py --quick
    python examples/deq_language.py                   # about half an hour on two cores

DEQ-Transformer and DEQ-TrellisNet against the same cells unrolled with tied weights, and an LSTM of as many parameters.
All read the same batches in the same order and start from the same weights.  Perplexity is that of a character of the
last tenth of the text, which is not trained on.

Source: Bai, Kolter & Koltun (2019), "Deep equilibrium models", section 4.2 (there on words, at 10^2 to 10^3 times the size).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from common import figure, options, table
from torch import Tensor, nn
from tqdm.auto import tqdm

import implicitkit as ik
from implicitkit_deq import DEQ, cells

DEPTH = 12  # layers of the unrolled models


def corpus() -> tuple[Tensor, list[str]]:
    """The text as numbers, and its characters (those that occur fewer than 20 times are one)."""
    text = "\n".join(topics[key] for key in sorted(topics))
    counts: dict[str, int] = {}
    for c in text:
        counts[c] = counts.get(c, 0) + 1
    alphabet = ["\ufffd", *sorted(c for c, n in counts.items() if n >= 20)]
    number = {c: i for i, c in enumerate(alphabet)}
    return torch.tensor([number.get(c, 0) for c in text]), alphabet


class Model(nn.Module):
    """Embedding, equilibrium (or ``depth`` layers) of a cell, linear readout."""

    def __init__(self, make: Callable[[int], cells.Cell], width: int, symbols: int, depth: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.layer = DEQ(
            make(width),
            rule=ik.Implicit("gmres", rtol=1e-2),
            rtol=1e-2,
            atol=0.0,
            evaluation={"rtol": 1e-3},
        )
        self.read, self.depth = nn.Linear(width, symbols), depth

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.embed(x)
        if self.depth is None:
            return self.read(self.layer(inputs))
        cell = self.layer.cell
        injected = cell.inject(inputs)
        z = inputs.new_zeros(len(x), *cell.state_shape(inputs))
        for _ in range(self.depth):
            z = cell.update(z, *injected)
        return self.read(cell.output(z))


class LSTM(nn.Module):
    """One layer, with as many parameters as the others."""

    def __init__(self, parameters: int, symbols: int) -> None:
        super().__init__()
        # embedding s w, LSTM 8 w^2 + 8 w, readout (w + 1) s
        width = round((math.sqrt((2 * symbols + 8) ** 2 + 32 * parameters) - 2 * symbols - 8) / 16)
        self.embed, self.read = nn.Embedding(symbols, width), nn.Linear(width, symbols)
        self.core = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.core(self.embed(x))[0])


@dataclass
class Run:
    """What came of one model."""

    name: str
    parameters: int
    perplexity: float
    saved: int
    evaluations: str
    seconds: float
    curve: list[float]


def windows(text: Tensor, positions: int, batch: int, steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random pieces of the text and what follows each of their characters."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(steps):
        starts = torch.randint(len(text) - positions - 1, (batch, 1), generator=generator)
        piece = text[starts + torch.arange(positions + 1)]
        found.append((piece[:, :-1], piece[:, 1:]))
    return found


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes that one training step saves for backward, parameters excepted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x).square().mean()
    loss.backward()
    model.zero_grad()
    return sum(seen.values())


def train(name: str, model: nn.Module, batches: list[tuple[Tensor, Tensor]], test: list[tuple[Tensor, Tensor]]) -> Run:
    """Adam with warm-up and cosine decay; the perplexity on ``test``."""
    saved = saved_bytes(model, batches[0][0])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    warm = max(1, len(batches) // 20)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * step / len(batches)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    curve, spent, start = [], [], time.perf_counter()
    for x, y in tqdm(batches, desc=name, mininterval=5):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append(float(loss.detach()))
        solution = model.layer.solution if isinstance(model, Model) and model.depth is None else None
        if solution is not None and solution.backward is not None:
            spent.append((solution.evaluations, int(solution.backward.steps.max())))
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())) for x, y in test]
    evaluations = "-"
    if spent:
        evaluations = " + ".join(f"{sum(s) / len(spent):.0f}" for s in zip(*spent, strict=True))
    elif isinstance(model, Model):
        evaluations = f"{model.depth} + {model.depth}"
    parameters = sum(p.numel() for p in model.parameters())
    return Run(name, parameters, math.exp(sum(losses) / len(losses)), saved, evaluations, seconds, curve)


def main(arguments: list[str] | None = None) -> list[Run]:
    """Train and compare; returns the results."""
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=1500)
    chosen = parser.parse_args(arguments)
    steps, positions, batch, width = (25, 32, 8, 32) if chosen.quick else (chosen.steps, 96, 24, 96)
    text, alphabet = corpus()
    cut = len(text) * 9 // 10
    batches = windows(text[:cut], positions, batch, steps, chosen.seed)
    test = windows(text[cut:], positions, batch, 4 if chosen.quick else 40, chosen.seed + 1)
    makers: dict[str, Callable[[int], cells.Cell]] = {
        "Transformer": lambda w: cells.Transformer(w, w, heads=4, hidden=2 * w, scale=0.5),
        "TrellisNet": lambda w: cells.TrellisNet(w, w, scale=0.5),
    }
    runs = []
    for cell, make in makers.items():
        for label, depth in ((f"DEQ-{cell}", None), (f"{cell}, {DEPTH} tied layers", DEPTH)):
            torch.manual_seed(chosen.seed)
            runs.append(train(label, Model(make, width, len(alphabet), depth), batches, test))
    torch.manual_seed(chosen.seed)
    runs.append(train("LSTM", LSTM(runs[0].parameters, len(alphabet)), batches, test))
    rows = [
        (r.name, r.parameters, f"{r.perplexity:.3f}", r.saved // 1024, r.evaluations, f"{r.seconds:.0f}") for r in runs
    ]
    headings = ("model", "parameters", "perplexity", "saved KiB", "evaluations", "seconds")
    title = f"{len(text):,} characters, {len(alphabet)} symbols, {steps} steps of {batch} x {positions}"
    print(table(title, headings, rows))
    for deq, unrolled in (runs[:2], runs[2:4]):
        difference = deq.perplexity / unrolled.perplexity - 1
        print(
            f"{deq.name}: perplexity {difference:+.1%} of the unrolled model's, memory / {unrolled.saved / deq.saved:.1f}"
        )
    with figure(chosen.output / "deq_language.png", title=title) as axes:
        for run in runs:
            span = max(1, len(run.curve) // 50)
            smooth = [sum(run.curve[i : i + span]) / span for i in range(0, len(run.curve) - span + 1, span)]
            axes.plot([i * span for i in range(len(smooth))], smooth, label=run.name)
        axes.set(xlabel="step", ylabel="training loss per character")
        axes.legend()
    return runs


if __name__ == "__main__":
    main()
