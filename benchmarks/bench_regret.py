"""What a default costs beside the best choice: solvers in the forward, linear solvers in the backward.

    python benchmarks/bench_regret.py [--largest 10000] [--no-json] [part of a cell's name ...]

A cell is a kind of problem, a structure of its Jacobian, a size and a batch.  ``auto`` and every choice named below are run
with the same tolerances; times are processor times, the best of three (one, above a second).  A cell is marked where
``auto`` takes more than 1.5 times the best choice that succeeds (and a millisecond more), or fails where another succeeds.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import results
import torch
from torch import Tensor

import implicitkit as ik

torch.set_default_dtype(torch.float64)
SOLVERS = {
    "root": ("auto", "newton", "newton_krylov", "broyden", "anderson"),
    "fixed_point": ("auto", "picard", "anderson", "broyden", "newton_krylov"),
}
LINEAR = ("auto", "lu", "sparse_lu", "gmres", "bicgstab", "neumann")
_PATIENCE = 20.0  # seconds for which a choice may run before larger cells are not tried with it


@dataclass
class Cell:
    """``function(z, x)``, row by row; ``dense``: its Jacobian has no pattern."""

    name: str
    kind: str
    function: Callable[[Tensor, Tensor], Tensor]
    n: int
    batch: int


def _neighbours(z: Tensor, structure: str) -> Tensor:
    """The sum over neighbours in a chain, or in a square grid; rows of ``z`` are samples."""
    if structure == "chain":
        return z.roll(1, -1) + z.roll(-1, -1)
    side = int(z.shape[-1] ** 0.5)
    grid = z.unflatten(-1, (side, side))
    return (grid.roll(1, -1) + grid.roll(-1, -1) + grid.roll(1, -2) + grid.roll(-1, -2)).flatten(-2) / 2


def cell(kind: str, structure: str, n: int, batch: int) -> Cell:
    """One cell: equations ``2.1 z + z^3 - neighbours = x``, or a contraction."""
    n = int(n**0.5) ** 2 if structure == "grid" else n
    if structure == "dense":
        W = torch.randn(n, n, generator=torch.Generator().manual_seed(0)) / n**0.5
        mix = lambda z: z @ W.T  # noqa: E731
    else:
        mix = lambda z: _neighbours(z, structure)  # noqa: E731
    function = (
        (lambda z, x: 2.1 * z + z**3 - mix(z) - x) if kind == "root" else (lambda z, x: torch.tanh(0.4 * mix(z) + x))
    )
    return Cell(f"{kind} {structure} {n} x {batch}", kind, function, n, batch)


def cells(largest: int) -> list[Cell]:
    """All cells that fit."""
    found = []
    for kind in SOLVERS:
        for structure in ("chain", "grid", "dense"):
            for n in (10, 30, 65, 130, 300, 1000, 4000, 10_000, 100_000):
                for batch in (1, 64):
                    if n * batch <= largest and not (structure == "dense" and n > 1000):
                        found.append(cell(kind, structure, n, batch))
    return found


def timed(f: Callable[[], Any]) -> float:
    """Processor seconds, the best of three; infinite for a failure."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        try:
            f()
        except (ik.ConvergenceError, ik.CapabilityError, ValueError):
            return float("inf")
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return best


def forward(c: Cell, solver: str) -> float:
    """The solve alone."""
    x = torch.linspace(0.5, 1.5, c.n).expand(c.batch, c.n).contiguous()
    verb = ik.root if c.kind == "root" else ik.fixed_point
    return timed(lambda: verb(c.function, torch.zeros(c.batch, c.n), (x,), solver=solver, batch_dims=1))


def backward(c: Cell, linear: str) -> float:
    """One backward after the solve, the best of three: the first may have to find a pattern."""
    x = torch.linspace(0.5, 1.5, c.n).expand(c.batch, c.n).contiguous().requires_grad_()
    verb = ik.root if c.kind == "root" else ik.fixed_point
    solver = "newton_krylov" if c.kind == "root" else "anderson"  # leaves no factors
    rule = ik.Implicit(linear_solver=linear)
    try:
        z = verb(c.function, torch.zeros(c.batch, c.n), (x,), solver=solver, batch_dims=1, rule=rule).value
    except ik.ConvergenceError:
        return float("inf")
    loss = z.square().sum()
    return timed(lambda: loss.backward(retain_graph=True))


def row(
    c: Cell, label: str, choices: tuple[str, ...], measure: Callable[[Cell, str], float], slow: set[str]
) -> dict[str, Any]:
    """One line of the table, as :func:`results.row` has it."""
    times = {}
    for choice in choices:
        if f"{label} {choice}" in slow or (choice == "neumann" and c.kind == "root"):
            continue
        times[choice] = measure(c, choice)
        if times[choice] > _PATIENCE and choice != "auto":
            slow.add(f"{label} {choice}")
    best = min(times, key=times.__getitem__)
    ratio = times["auto"] / times[best] if times[best] < float("inf") else 1.0
    target = max(1.5, (times[best] + 1e-3) / times[best]) if times[best] < float("inf") else None
    shown = " ".join(f"{name} {1e3 * t:.1f}" for name, t in times.items())
    return results.row(f"{c.name}, {label}", ratio, "times the best choice", target=target, best=best, ms=shown)


def line(row: dict[str, Any]) -> str:
    """As it is printed."""
    mark = "  <--" if row["target"] is not None and row["value"] > row["target"] else ""
    return f"{row['row']:40s} {row['value']:7.2f} ({row['best']}) | {row['ms']}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only cells whose name has one of these in it")
    parser.add_argument("--no-json", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--largest", type=int, default=10_000, help="most numbers in a state")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    slow: set[str] = set()
    rows: list[dict[str, Any]] = []
    forward(cell("root", "chain", 200, 1), "auto")  # whatever is imported is imported
    for c in cells(arguments.largest):
        if not arguments.parts or any(part in c.name for part in arguments.parts):
            for found in (
                row(c, "forward", SOLVERS[c.kind], forward, slow),
                row(c, "backward", LINEAR, backward, slow),
            ):
                rows.append(found)
                print(line(found), flush=True)
    if rows and not arguments.no_json:
        results.save("bench_regret", rows, (__doc__ or "").split("\n\n", 2)[2], part=True)


if __name__ == "__main__":
    main()
