"""Memory of training: a deep weight-tied network unrolled, unrolled with checkpoints, and as an equilibrium.

    python examples/deq_memory.py --quick             # narrow cells, seconds
    python examples/deq_memory.py                     # the published widths, a fifth of the batch: about ten minutes
    python examples/deq_memory.py --fraction 1.0      # the whole batch: 24 GB, and most of an hour
    python examples/deq_memory.py --fraction 1.0 --only "Transformer 16, medium" "Transformer 18, adaptive"

The protocol of Bai, Kolter & Koltun (2019), section 4.3: sequences of 150, batches of 15, embeddings excluded.  Each case
runs one forward and one backward pass in a process of its own.  Reported are the bytes that autograd saves for backward,
counted by hooks (with checkpoints: the states between segments, and what one segment saves when it is computed again), and
the peak of resident memory above that of the process with its model and data.  Ratios do not depend on the fraction of the
batch, except for the parameters and their gradients, which are the same in all three.
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


@dataclass(frozen=True)
class Case:
    """A network of the literature.  ``published``: gigabytes unrolled, with checkpoints, as a DEQ."""

    cell: str
    layers: int
    width: int
    inputs: int
    published: tuple[float, float | None, float]
    note: str


CASES = {
    "TrellisNet 60, PTB": Case("trellis", 60, 1480, 400, (8.5, None, 1.2), "20M parameters"),
    "TrellisNet 70, WikiText-103": Case("trellis", 70, 2300, 512, (24.7, 5.2, 3.3), "45M parameters"),
    "Transformer 16, medium": Case("transformer", 16, 700, 700, (8.5, None, 2.7), "published: 16 untied layers"),
    "Transformer 18, adaptive": Case("transformer", 18, 700, 700, (9.0, None, 3.7), "published: 18 untied layers"),
    "Transformer 16, small, tied": Case("transformer", 16, 512, 512, (6.8, None, 1.1), "4.5M parameters"),
}
MODES = ("unrolled", "checkpointed", "deq")


def make(case: Case, width: int) -> cells.Cell:
    """The cell at some width, contractive as it starts."""
    if case.cell == "trellis":
        return cells.TrellisNet(case.inputs, width)
    return cells.Transformer(case.inputs, width, heads=max(1, width // 64), hidden=2 * width, scale=0.3)


def step(cell: cells.Cell, x: Tensor, layers: int, mode: str) -> tuple[Tensor, ik.Solution | None]:
    """The state after ``layers`` layers, or at equilibrium."""
    if mode == "deq":
        layer = DEQ(cell, solver="anderson", rule=ik.Implicit("gmres", rtol=1e-3), rtol=1e-3, atol=0.0)
        return layer(x), layer.solution
    injected = cell.inject(x)
    z = x.new_zeros(len(x), *cell.state_shape(x))

    def run(z: Tensor, count: int) -> Tensor:
        for _ in range(count):
            z = cell.update(z, *injected)
        return z

    if mode == "unrolled":
        return cell.output(run(z, layers)), None
    segment = segment_of(layers)
    for start in range(0, layers, segment):
        z = checkpoint(run, z, min(segment, layers - start), use_reentrant=False)
    return cell.output(z), None


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
    """One forward and backward pass in this process: saved bytes, peak memory, seconds."""
    torch.manual_seed(seed)
    case = CASES[name]
    cell = make(case, width)
    x = torch.randn(batch, POSITIONS, case.inputs, requires_grad=True)
    narrow = make(case, 16)  # whatever a first call sets up
    step(narrow, torch.randn(1, 8, case.inputs, requires_grad=True), 2, mode)[0].sum().backward()
    own = {t.untyped_storage().data_ptr(): 0 for t in (*cell.parameters(), x)}
    rise, sizes = watch_peak(), dict(own)

    def count(t: Tensor) -> Tensor:
        sizes.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
        return t

    start = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        out, solution = step(cell, x, case.layers, mode)
    out.square().mean().backward()
    peak, seconds, saved = rise(), time.perf_counter() - start, sum(sizes.values())
    if mode == "checkpointed":  # backward computes one segment at a time again, and holds what that saves
        del out
        sizes = dict(own)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            out, _ = step(cell, x, segment_of(case.layers), "unrolled")
        saved += sum(sizes.values())
    steps = (
        None
        if solution is None
        else (solution.evaluations, int(solution.backward.steps.max()) if solution.backward else 0)
    )
    return {
        "saved": saved,
        "peak": peak,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in cell.parameters()),
        "steps": steps,
    }


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
            rows.append(
                (
                    name if mode == "unrolled" else "",
                    mode,
                    f"{one['saved'] / 2**20:.0f}",
                    f"{one['peak'] / 2**20:.0f}",
                    f"{one['saved'] / deq['saved']:.1f}",
                    f"{one['peak'] / deq['peak']:.1f}" if deq["peak"] else "-",
                    "-" if published is None else f"{published / case.published[2]:.1f}",
                    f"{one['seconds']:.1f}",
                    "-" if one["steps"] is None else "{} + {}".format(*one["steps"]),
                )
            )
    title = f"Training memory, {POSITIONS} positions, batch {batch}" + (
        ", widths / 8" if chosen.quick else ", published widths"
    )
    headings = (
        "network", "mode", "saved MiB", "peak MiB", "saved / DEQ", "peak / DEQ", "published / DEQ", "seconds", "evaluations"
    )  # fmt: skip
    print(table(title, headings, rows))
    with figure(chosen.output / "deq_memory.png", 2, title=title) as axes:
        for axis, what in zip(axes, ("saved", "peak"), strict=True):
            for i, mode in enumerate(MODES):
                heights = [results[name][mode][what] / 2**20 for name in cases]
                axis.bar([k + 0.27 * (i - 1) for k in range(len(cases))], heights, 0.25, label=mode)
            axis.set_xticks(range(len(cases)), [n.replace(", ", "\n") for n in cases], fontsize=7)
            axis.set(
                yscale="log", ylabel="MiB", title="saved for backward" if what == "saved" else "peak above the start"
            )
        axes[0].legend()
    return results


if __name__ == "__main__":
    main()
