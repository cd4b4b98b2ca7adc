"""What a default costs beside the best choice: solvers in the forward, linear solvers in the backward.

    python benchmarks/bench_regret.py [--largest 100000] [--seconds 20] [--no-json] [part of a cell's name ...]

A cell is a kind of problem, a structure of its Jacobian, a size and a batch.  ``auto`` and every choice named below are run
with the same tolerances, each choice in turn; times are processor times, the best of three (one, above a second).  A cell
is marked where ``auto`` takes more than 1.5 times the best choice that succeeds (and a millisecond more), or fails where
another succeeds.

Kinds: roots of ``2.1 z + z^3 - N z = x``, where reaction dominates; stiff roots, ``2 z - N z + (z + z^3 - x) / 1000
= 0``, where the coupling does; fixed points of ``tanh(0.4 N z + x)``.  Structures of ``N``: the neighbours in a chain and
in a square grid, those in a random graph (four each; its factors fill), a dense matrix, and ``none``: the chain by Fourier
transforms, so that no pattern can be seen.

Left out: states of more than ``--largest`` numbers (a million by ``--largest 1000000``: an hour), dense matrices above 1,000
unknowns (they do not fit beside their batch), and a choice in cells larger than one where it took ``--seconds``.
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
    "stiff root": ("auto", "newton", "newton_krylov", "broyden", "anderson"),
    "fixed_point": ("auto", "picard", "anderson", "broyden", "newton_krylov"),
}
LINEAR = ("auto", "lu", "sparse_lu", "gmres", "bicgstab", "neumann")
_ACCURACY = 1e-5  # what the best choice and auto may differ by, relative to the largest entry
STRUCTURES = ("chain", "grid", "graph", "dense", "none")
SIZES = (10, 30, 65, 130, 300, 1000, 4000, 10_000, 100_000, 1_000_000)


@dataclass
class Cell:
    """``function(z, x)``, row by row; ``dense``: its Jacobian has no pattern."""

    name: str
    kind: str
    function: Callable[[Tensor, Tensor], Tensor]
    n: int
    batch: int


def _coupling(structure: str, n: int) -> Callable[[Tensor], Tensor]:
    """``N``; rows of ``z`` are samples.  Its spectrum lies within [-2, 2] but for the dense one, a disk of radius one."""
    generator = torch.Generator().manual_seed(0)
    if structure == "dense":
        W = torch.randn(n, n, generator=generator) / n**0.5
        return lambda z: z @ W.T
    if structure == "graph":
        first, second = (torch.randperm(n, generator=generator) for _ in range(2))
        back, again = first.argsort(), second.argsort()
        return lambda z: (z[:, first] + z[:, back] + z[:, second] + z[:, again]) / 2
    if structure == "none":
        symbol = 2 * torch.cos(2 * torch.pi * torch.arange(n // 2 + 1) / n)
        return lambda z: torch.fft.irfft(torch.fft.rfft(z) * symbol, n)
    if structure == "chain":
        return lambda z: z.roll(1, -1) + z.roll(-1, -1)
    side = int(n**0.5)

    def grid(z: Tensor) -> Tensor:
        Z = z.unflatten(-1, (side, side))
        return (Z.roll(1, -1) + Z.roll(-1, -1) + Z.roll(1, -2) + Z.roll(-1, -2)).flatten(-2) / 2

    return grid


def cell(kind: str, structure: str, n: int, batch: int) -> Cell:
    """One cell."""
    n = int(n**0.5) ** 2 if structure == "grid" else n
    N, far = _coupling(structure, n), 1.0 if structure == "dense" else 2.0  # of the spectrum
    function = {
        "root": lambda z, x: 2.1 * z + z**3 - N(z) - x,
        "stiff root": lambda z, x: far * z - N(z) + 1e-3 * (z + z**3 - x),
        "fixed_point": lambda z, x: torch.tanh(0.4 * N(z) + x),
    }[kind]
    return Cell(f"{kind}, {structure}, {n} x {batch}", kind, function, n, batch)


def cells(largest: int) -> list[Cell]:
    """All cells that fit."""
    found = []
    for kind in SOLVERS:
        for structure in STRUCTURES:
            for n in SIZES:
                for batch in (1, 64):
                    if n * batch <= largest and not (structure == "dense" and n > 1000):
                        found.append(cell(kind, structure, n, batch))
    return found


@dataclass
class Run:
    """``seconds`` of a choice, infinite where it failed; ``spent`` all the same; ``found``: what it came to."""

    seconds: float
    spent: float
    found: Tensor | None = None


def timed(f: Callable[[], Tensor]) -> Run:
    """Processor seconds, the best of three."""
    best, found = float("inf"), None
    for _ in range(3):
        start = time.process_time()
        try:
            found = f()
        except (ik.ConvergenceError, ik.CapabilityError, ValueError):
            return Run(float("inf"), time.process_time() - start)
        best = min(best, time.process_time() - start)
        if best > 1:
            break
    return Run(best, best, found)


def _solve(c: Cell, z0: Tensor, x: Tensor, **options: Any) -> Tensor:
    verb = ik.fixed_point if c.kind == "fixed_point" else ik.root
    return verb(c.function, z0, (x,), batch_dims=1, **options).value


def _data(c: Cell) -> tuple[Tensor, Tensor]:
    return torch.zeros(c.batch, c.n), torch.linspace(0.5, 1.5, c.n).expand(c.batch, c.n).contiguous()


def forward(c: Cell, solver: str) -> Run:
    """The solve alone."""
    return timed(lambda: _solve(c, *_data(c), solver=solver))


def backward(c: Cell, linear: str) -> Run:
    """One backward at the solution; the first may have to find a pattern."""
    z0, x = _data(c)
    near = _solve(c, z0, x)
    solver = "anderson" if c.kind == "fixed_point" else "newton_krylov"  # leaves no factors
    x.requires_grad_()
    loss = _solve(c, near, x, solver=solver, rule=ik.Implicit(linear_solver=linear)).square().sum()
    return timed(lambda: torch.autograd.grad(loss, x, retain_graph=True)[0])


def row(
    c: Cell, label: str, choices: tuple[str, ...], measure: Callable[[Cell, str], Run], slow: set[str], most: float
) -> dict[str, Any]:
    """One line of the table, as :func:`results.row` has it; ``slow``: what took more than ``most`` seconds before."""
    runs: dict[str, Run] = {}
    for choice in choices:
        name = f"{c.name.rpartition(',')[0]} {label} {choice}"
        if name in slow or (choice == "neumann" and c.kind != "fixed_point"):
            continue
        runs[choice] = measure(c, choice)
        if runs[choice].spent > most and choice != "auto":
            slow.add(name)
    best = min(runs, key=lambda choice: runs[choice].seconds)
    least, own = runs[best], runs["auto"]
    ratio = own.seconds / least.seconds if least.found is not None else 1.0
    target = max(1.5, (least.seconds + 1e-3) / least.seconds) if least.found is not None else None
    shown = " ".join(f"{name} {1e3 * run.seconds:.1f}" for name, run in runs.items())
    details: dict[str, Any] = {"best": best, "ms": shown}
    if own.found is not None and least.found is not None:
        details["differs"] = float((own.found - least.found).abs().max() / least.found.abs().max())
    return results.row(f"{c.name}, {label}", ratio, "times the best choice", target=target, **details)


def line(row: dict[str, Any]) -> str:
    """As it is printed."""
    mark = "  <--" if row["target"] is not None and row["value"] > row["target"] else ""
    mark += "  WRONG" if row.get("differs", 0.0) > _ACCURACY else ""
    return f"{row['row']:44s} {row['value']:7.2f} ({row['best']}) | {row['ms']}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only cells whose name has one of these in it")
    parser.add_argument("--no-json", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--largest", type=int, default=100_000, help="most numbers in a state")
    parser.add_argument("--seconds", type=float, default=20.0, help="for a choice to be tried in larger cells")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    slow: set[str] = set()
    rows: list[dict[str, Any]] = []
    forward(cell("root", "chain", 200, 1), "auto")  # whatever is imported is imported
    for c in cells(arguments.largest):
        if not arguments.parts or any(part in c.name for part in arguments.parts):
            for found in (
                row(c, "forward", SOLVERS[c.kind], forward, slow, arguments.seconds),
                row(c, "backward", LINEAR, backward, slow, arguments.seconds),
            ):
                rows.append(found)
                print(line(found), flush=True)
    if rows and not arguments.no_json:
        results.save("bench_regret", rows, (__doc__ or "").split("\n\n", 2)[2], part=True)


if __name__ == "__main__":
    main()
