"""Memory of training: deep networks unrolled, unrolled with checkpoints, and as an equilibrium.

    python examples/deq_memory.py --quick             # narrow cells, seconds
    python examples/deq_memory.py                     # the published widths, a fifth of the batch
    python examples/deq_memory.py --fraction 1.0      # the whole batch: 24 GB, and most of an hour
    python examples/deq_memory.py --only "Transformer 16, medium" "Transformer 4, small"

The protocol of Bai, Kolter & Koltun (2019), section 4.3: sequences of 150, batches of 15, embeddings excluded.  Where the
source has a cell for each layer, so has the unrolled network here.  Transformers attend to the 150 positions before the
sequence as well: each layer to a state of its own, the equilibrium to one (Dai et al. 2019, "Transformer-XL").  Weights are
so large that a solve takes tens of evaluations, as of a trained cell: Broyden's method then holds its 30 pairs, 60 numbers
for each of the state, which at first, in a contraction of four evaluations, it does not.

Each case runs one forward and one backward pass in a process of its own.  Reported are the bytes that autograd saves for
backward, counted by hooks (with checkpoints: the states between segments, and what one segment saves when it is computed
again), and the peak of resident memory above that of the process with its model and data.

What came out at a fifth of the batch (seed 0, one core; the four Transformers, 35 CPU seconds in all):

    network                           saved MiB       peak MiB        saved  peak  published   evaluations
                                      unrolled, DEQ   unrolled, DEQ   unrolled / DEQ           of the DEQ
    Transformer 16, medium, untied    423  37         854  205        11.5   4.2   3.1         30 + 18
    Transformer 18, adaptive, untied  476  37         963  214        12.9   4.5   2.4         30 + 18
    Transformer 4, small, untied      79   27         152  142        2.9    1.1   4.4         57 + 23
    Transformer 16, small, tied       315  27         532  138        11.5   3.9   6.2         57 + 23
    TrellisNet 60, PTB (--fraction .07, 46 CPU seconds):
                                      357  11         833  234        31.7   3.6   7.1         154 + 6

All samples were solved, to a residual of 4e-4.  With checkpoints the unrolled peaks are 763, 843, 145, 242 and 361
MiB.  Untied networks are as wide as the equilibrium here and have 4 to 18 times its parameters, whose gradients are
most of what checkpoints do not save; the source's have as many parameters as its equilibrium, and are narrower, so
that ratios of the first two rows are above the published ones.  Those of the others are below, because the
equilibrium's peak is mostly its solvers': 30 pairs of Broyden's method are 53 MiB of the small transformer's 138, the
vectors of GMRES 20, gradients of the weights 13; of TrellisNet's 234 the pairs are 102 and the gradients 85, which do
not grow with the batch (one sequence of 15 there).  Four layers take no more than that: a shallow network has no
reason to be an equilibrium to save memory.  The 70-layer TrellisNet is as published in width, too, and takes some
minutes a case.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import figure, options, table
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import implicitkit as ik
from implicitkit_deq import DEQ, cells

POSITIONS, BATCH = 150, 15
TRELLIS_SCALE, TRANSFORMER_SCALE = 0.5, 1.85  # Broyden takes 20 to 150 evaluations then, as of trained cells


@dataclass(frozen=True)
class Case:
    """A network of the literature.

    ``published``: gigabytes unrolled, with checkpoints, as a DEQ.  ``tied``: has the unrolled one a single cell?
    ``memory``: positions of the segment before, of which every layer keeps its state (Transformer-XL).
    ``scale``: of the weights of the DEQ's cell, so that a solve is as long as that of a trained one.
    """

    cell: str
    layers: int
    width: int
    inputs: int
    published: tuple[float, float | None, float]
    tied: bool = True
    memory: int = 0
    scale: float = TRELLIS_SCALE


CASES = {
    "TrellisNet 60, PTB": Case("trellis", 60, 1480, 400, (8.5, None, 1.2)),
    "TrellisNet 70, WikiText-103": Case("trellis", 70, 2300, 512, (24.7, 5.2, 3.3)),
    "Transformer 16, medium": Case("transformer", 16, 700, 700, (8.5, None, 2.7), False, 150, TRANSFORMER_SCALE),
    "Transformer 18, adaptive": Case("transformer", 18, 700, 700, (9.0, None, 3.7), False, 150, TRANSFORMER_SCALE),
    "Transformer 4, small": Case("transformer", 4, 512, 512, (4.8, None, 1.1), False, 150, TRANSFORMER_SCALE),
    "Transformer 16, small, tied": Case("transformer", 16, 512, 512, (6.8, None, 1.1), True, 150, TRANSFORMER_SCALE),
}
MODES = ("unrolled", "checkpointed", "deq")


def make(case: Case, width: int) -> cells.Cell:
    """The cell at some width."""
    if case.cell == "trellis":
        return cells.TrellisNet(case.inputs, width, scale=case.scale)
    return cells.Transformer(case.inputs, width, heads=max(1, width // 64), hidden=2 * width, scale=case.scale)


class Network:
    """The unrolled network of a case, or its DEQ: :meth:`forward` is what is measured."""

    def __init__(self, case: Case, mode: str, width: int) -> None:
        self.case, self.mode, self.width = case, mode, width
        layers = 1 if case.tied or mode == "deq" else case.layers
        self.cells = [make(case, width) for _ in range(layers)]
        # Broyden with 30 pairs and the two tolerances: as in the source
        how: dict[str, Any] = {"solver": ik.Broyden(memory=30), "rule": ik.Implicit("gmres", rtol=1e-2)}
        self.layer = DEQ(self.cells[0], rtol=1e-3, atol=0.0, **how)

    def parameters(self) -> list[Tensor]:
        """Of all cells."""
        return [p for cell in self.cells for p in cell.parameters()]

    def past(self, x: Tensor) -> tuple[Tensor, ...]:
        """State and input of the segment before, one for each layer's own: each layer is given another state."""
        if not self.case.memory:
            return ()
        state = torch.randn(len(x), self.case.memory, self.width)
        return state, torch.randn(len(x), self.case.memory, self.case.inputs)

    def forward(self, x: Tensor, layers: int) -> Tensor:
        """The state after ``layers`` layers, or at equilibrium."""
        if self.mode == "deq":
            return self.layer(x, *self.past(x))
        pasts = [self.past(x) for _ in range(layers)]
        first = self.cells[0]
        once = None if len(self.cells) > 1 or pasts[0] else first.inject(x)
        z = x.new_zeros(len(x), *first.state_shape(x))

        def run(z: Tensor, start: int, count: int) -> Tensor:
            for k in range(start, start + count):
                cell = self.cells[k % len(self.cells)]
                z = cell.update(z, *(once or cell.inject(x, *pasts[k])))
            return z

        if self.mode == "unrolled":
            return first.output(run(z, 0, layers))
        segment = segment_of(layers)
        for start in range(0, layers, segment):
            z = checkpoint(run, z, start, min(segment, layers - start), use_reentrant=False)
        return first.output(z)


def segment_of(layers: int) -> int:
    """Layers between two checkpoints."""
    return round(layers**0.5)


def watch_peak() -> Callable[[], int]:
    """Call it, then call what it returns: by how many bytes resident memory has risen at most in between.

    On Linux the kernel's high-water mark is reset to what is resident now; elsewhere what was used before hides as much.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return lambda: unit * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start)

    def status(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

    resident = status("VmRSS")
    return lambda: status("VmHWM") - resident


def measure(name: str, mode: str, width: int, batch: int, seed: int) -> dict[str, Any]:
    """One forward and backward pass in this process: saved bytes, peak memory, seconds, and how the solve went."""
    torch.manual_seed(seed)
    case = CASES[name]
    network = Network(case, mode, width)
    x = torch.randn(batch, POSITIONS, case.inputs, requires_grad=True)
    narrow = Network(case, mode, 16)  # whatever a first call sets up
    narrow.forward(torch.randn(1, 8, case.inputs, requires_grad=True), case.layers).sum().backward()
    weights = torch.randn(width)  # not a norm: those of a LayerNorm's outputs are constant
    own = {t.untyped_storage().data_ptr(): 0 for t in (*network.parameters(), x, weights)}
    rise, sizes = watch_peak(), dict(own)

    def count(t: Tensor) -> Tensor:
        sizes.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        return t

    start = time.process_time()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        out = network.forward(x, case.layers)
    (out @ weights).mean().backward()
    peak, seconds, saved = rise(), time.process_time() - start, sum(sizes.values())
    if mode == "checkpointed":  # backward computes one segment at a time again, and holds what that saves
        del out
        network.mode, sizes = "unrolled", dict(own)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            out = network.forward(x, segment_of(case.layers))
        saved += sum(sizes.values())
    found: dict[str, Any] = {"saved": saved, "peak": peak, "seconds": seconds}
    solution = network.layer.solution
    if mode == "deq" and solution is not None and solution.backward is not None:
        size = solution.value.flatten(1).norm(dim=1)
        found["steps"] = (solution.evaluations, int(solution.backward.steps.max()))
        found["converged"] = float((solution.converged & solution.backward.converged).double().mean())
        found["residual"] = float((solution.residual_norm / size).max())
    return found | {"parameters": sum(p.numel() for p in network.parameters())}


def draw(path: Path, results: dict[str, dict[str, dict[str, Any]]], title: str) -> None:
    """The peaks, and the unrolled network's memory in units of the equilibrium's, beside the published ones."""
    names = list(results)[::-1]
    with figure(path, 2, title=title, size=(7.2, 1.4 + 0.55 * len(names))) as (left, right):
        for mode, marker in zip(MODES, "Ds^", strict=True):
            peaks = [results[name][mode]["peak"] / 2**20 for name in names]
            left.plot(peaks, range(len(names)), marker, label=mode)
        ratios: dict[str, list[float]] = {
            "saved for backward": [results[n]["unrolled"]["saved"] / results[n]["deq"]["saved"] for n in names],
            "peak": [results[n]["unrolled"]["peak"] / max(1, results[n]["deq"]["peak"]) for n in names],
            "published": [CASES[n].published[0] / CASES[n].published[2] for n in names],
        }
        for (label, values), marker in zip(ratios.items(), "o^s", strict=True):
            right.plot(values, range(len(names)), marker, label=label)
        left.set_xlabel("peak above the start (MiB)")
        right.set_xlabel("unrolled / equilibrium")
        right.axvline(1, color="0.6", linewidth=0.8)
        left.set_yticks(range(len(names)), [n.replace(", ", ",\n") for n in names], fontsize=7)
        right.set_yticks(range(len(names)), [""] * len(names))
        marks = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)
        for axis in (left, right):
            axis.set(xscale="log", ylim=(-0.5, len(names) - 0.5))
            low, high = axis.get_xlim()
            axis.set_xticks([m for m in marks if low <= m <= high], [str(m) for m in marks if low <= m <= high])
            axis.minorticks_off()
            axis.grid(axis="y", color="0.9", linewidth=0.8)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, fontsize=6.5, frameon=False)


def main(arguments: list[str] | None = None) -> dict[str, dict[str, dict[str, Any]]]:
    """Measure every case in every mode; returns the figures."""
    parser = options(__doc__)
    parser.add_argument("--fraction", type=float, default=0.2, help="of the batch of 15 (default 0.2: three sequences)")
    parser.add_argument("--only", nargs="+", choices=sorted(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--one", nargs=4, metavar=("CASE", "MODE", "WIDTH", "BATCH"), help="one measurement, as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.one:
        name, mode, width, batch = chosen.one
        print(json.dumps(measure(name, mode, int(width), int(batch), chosen.seed)))
        return {}
    if not 0 < chosen.fraction <= 1:
        parser.error(f"--fraction must lie in (0, 1], got {chosen.fraction}")
    batch = 2 if chosen.quick else max(1, round(BATCH * chosen.fraction))
    results: dict[str, dict[str, dict[str, Any]]] = {}
    rows = []
    cases = {name: case for name, case in CASES.items() if name in (chosen.only or CASES)}
    for name, case in cases.items():
        width = case.width // 16 * 2 if chosen.quick else case.width
        results[name] = {}
        for mode in MODES:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name, mode, str(width), str(batch), "--seed", str(chosen.seed)],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"{name}, {mode}: {done.stderr.strip()[-2000:]}")
            results[name][mode] = json.loads(done.stdout)
        figures = results[name]
        for mode, published in zip(MODES, case.published, strict=True):
            one, deq = figures[mode], figures["deq"]
            solve = "-"
            if mode == "deq":
                solve = "{} + {}".format(*one["steps"]) + f", {one['converged']:.0%}, {one['residual']:.0e}"
            rows.append((
                f"{name}{'' if case.tied else ', untied'}" if mode == "unrolled" else "",
                mode,
                f"{one['parameters'] / 1e6:.1f}",
                f"{one['saved'] / 2**20:.0f}",
                f"{one['peak'] / 2**20:.0f}",
                f"{one['saved'] / deq['saved']:.1f}",
                f"{one['peak'] / deq['peak']:.1f}" if deq["peak"] else "-",
                "-" if published is None else f"{published / case.published[2]:.1f}",
                f"{one['seconds']:.1f}",
                solve,
            ))  # fmt: skip
    title = f"Training memory, {POSITIONS} positions, batch {batch}" + (
        ", widths / 8" if chosen.quick else ", published widths"
    )
    headings = (
        "network", "mode", "M parameters", "saved MiB", "peak MiB", "saved / DEQ", "peak / DEQ", "published / DEQ", "CPU s",
        "evaluations, solved, residual",
    )  # fmt: skip
    print(table(title, headings, rows))
    draw(chosen.output / "deq_memory.png", results, title)
    return results


if __name__ == "__main__":
    main()
