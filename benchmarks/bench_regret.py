"""What a default costs beside the best choice: solvers in the forward, linear solvers in the backward.

    python benchmarks/bench_regret.py [--largest 1000000] [--unknowns 1000000] [--seconds 20] [--no-json] [part ...]

A cell is a kind of problem, a structure of its Jacobian, a size and a batch.  ``auto`` and every choice named below are run
with the same tolerances, each in turn; times are processor times, the best of five (of as many as fit into a second, and of
two at least where they fit into the limit).  A cell is marked where ``auto`` takes more than 1.5 times the best choice that
succeeds (and a millisecond more), or fails where another succeeds; it is then measured once more.

Each choice has a process of its own, of 8 GB at most, which ends with its time: ``--seconds`` for ``auto``, and for the
others where that fails; else no more than ``auto`` took and two seconds, since a choice that takes longer says nothing.  It
is shown as ``> seconds``, one that fails as ``failed``.

Kinds: roots of ``2.1 z + z^3 - N z = x``, where reaction dominates; stiff roots, ``2 z - N z + (z + z^3 - x) / 1000
= 0``, where the coupling does; fixed points of ``tanh(0.4 N z + x)``; least squares of the first equation and of ``z / 10``;
minima of ``1.05 z'z + sum z^4 / 4 - z'N z / 2 - x'z``, which is convex; wells, minima of ``sum (z^2 - 1)^2 - z'N z / 2 -
x'z / 10``, which is not, nor at the start; valleys, minima of ``100 |N z / 2 - z^2|^2 + |x - z|^2``, which bend.  Structures
of ``N``: the neighbours in a chain (a band) and in a square grid, those in a random graph (four each; its factors fill), a
dense matrix, ``own``: a dense matrix of each sample's own, and ``none``: the chain by Fourier transforms, so that no pattern
can be seen.  Wells and valleys have many minima, and each choice may come to another: those are not compared.

The samples of a batch are different problems of one structure: ``N`` is the same, ``x`` is a ramp from 0.5 to 1.5 that is
turned by another angle in each sample and up to 2.5 times as high; solutions, and Jacobians wherever the equation is
nonlinear, differ as much.

A row says on which day it was ``measured``, and how many processes were at work; one that does not, before 25 November 2026.

Left out: states of more than ``--largest`` numbers, and dense matrices above 4,000 unknowns (1,000, of a batch; 300, where
each sample has one).
"""

from __future__ import annotations

import argparse
import datetime
import os
import pickle
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import results
import torch
from torch import Tensor

import implicitkit as ik

torch.set_default_dtype(torch.float64)
MINIMISERS = ("auto", "lbfgs", "newton_cg", "nonlinear_cg", "bfgs")
SOLVERS = {
    "root": ("auto", "newton", "newton_krylov", "broyden", "anderson"),
    "stiff root": ("auto", "newton", "newton_krylov", "broyden", "anderson"),
    "fixed_point": ("auto", "picard", "anderson", "broyden", "newton_krylov"),
    "least_squares": ("auto", "levenberg_marquardt", "gauss_newton", "dogleg", "newton_cg", "lbfgs"),
    "argmin": MINIMISERS,
    "wells": MINIMISERS,
    "valley": MINIMISERS,
}
VERBS: dict[str, Callable[..., Any]] = {
    "root": ik.root,
    "stiff root": ik.root,
    "fixed_point": ik.fixed_point,
    "least_squares": ik.least_squares,
    **dict.fromkeys(("argmin", "wells", "valley"), ik.argmin),
}
#: One that leaves no factors to the derivative, to start the backward from.
PLAIN = {
    "fixed_point": "anderson",
    "least_squares": "newton_cg",
    **dict.fromkeys(("argmin", "wells", "valley"), "lbfgs"),
}
LINEAR = ("auto", "lu", "sparse_lu", "gmres", "bicgstab")
_ACCURACY = 1e-5  # what the best choice and auto may differ by, relative to the largest entry
_MEMORY = 8 << 30
_SHOWN = 4096  # numbers of a solution that are compared
_DENSE, _DENSE_BATCH, _OWN = 4000, 1000, 300
STRUCTURES = ("chain", "grid", "graph", "dense", "own", "none")
SIZES = (10, 30, 65, 130, 300, 1000, 4000, 10_000, 100_000, 1_000_000)


@dataclass
class Cell:
    """``function(z, x)``, row by row."""

    name: str
    kind: str
    function: Callable[[Tensor, Tensor], Tensor]
    n: int
    batch: int


def _coupling(structure: str, n: int, batch: int) -> Callable[[Tensor], Tensor]:
    """``N``; rows of ``z`` are samples.  Its spectrum lies within [-2, 2] but for dense ones, a disk of radius one."""
    generator = torch.Generator().manual_seed(0)
    if structure == "own":
        V = torch.randn(batch, n, n, generator=generator) / n**0.5
        return lambda z: torch.einsum("bij,bj->bi", V, z)
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
    N, far = _coupling(structure, n, batch), 1.0 if structure in ("dense", "own") else 2.0  # of the spectrum

    def root(z: Tensor, x: Tensor) -> Tensor:
        return 2.1 * z + z**3 - N(z) - x

    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "root": root,
        "stiff root": lambda z, x: far * z - N(z) + 1e-3 * (z + z**3 - x),
        "fixed_point": lambda z, x: torch.tanh(0.4 * N(z) + x),
        "least_squares": lambda z, x: torch.cat([root(z, x), 0.1 * z], -1),
        "argmin": lambda z, x: (1.05 * z * z + 0.25 * z**4 - 0.5 * z * N(z) - x * z).sum(-1),
        "wells": lambda z, x: ((z * z - 1) ** 2 - 0.5 * z * N(z) - 0.1 * x * z).sum(-1),
        "valley": lambda z, x: (100 * (0.5 * N(z) - z * z) ** 2 + (x - z) ** 2).sum(-1),
    }
    return Cell(f"{kind}, {structure}, {n} x {batch}", kind, functions[kind], n, batch)


def cells(largest: int, unknowns: int, parts: list[str]) -> list[tuple[str, str, int, int]]:
    """All cells that fit and are asked for."""
    found = []
    for kind in SOLVERS:
        for structure in STRUCTURES:
            for n in SIZES:
                for batch in (1, 64):
                    most = _DENSE if batch == 1 else _DENSE_BATCH
                    most = min(largest, _OWN) if structure == "own" else most if structure == "dense" else largest
                    name = f"{kind}, {structure}, {int(n**0.5) ** 2 if structure == 'grid' else n} x {batch}"
                    if (
                        n * batch <= largest
                        and n <= min(most, unknowns)
                        and (not parts or any(part in name for part in parts))
                    ):
                        found.append((kind, structure, n, batch))
    return found


@dataclass
class Run:
    """``seconds`` of a choice, infinite where it failed, and ``spent`` on all its runs; ``found``: what it came to, some of
    its numbers; ``late``: its time was over."""

    seconds: float
    spent: float
    found: np.ndarray | None = None
    late: bool = False


def timed(f: Callable[[], Tensor], limit: float) -> Run:
    """Processor seconds, the best of as many runs as fit into a second, of five at most and two at least."""
    best, spent, found = float("inf"), 0.0, None
    for k in range(5):
        start = time.process_time()
        try:
            found = f()
        except (ik.ConvergenceError, ik.CapabilityError, ValueError, RuntimeError, MemoryError):
            return Run(float("inf"), spent + time.process_time() - start)
        seconds = time.process_time() - start
        best, spent = min(best, seconds), spent + seconds
        if (k > 0 and spent + best > 1) or spent + 1.2 * best > limit:
            break
    assert found is not None
    flat = found.detach().reshape(-1)
    return Run(best, spent, flat[:: max(1, len(flat) // _SHOWN)].numpy().copy())


def apart(prepare: Callable[[], Callable[[], Tensor]], limit: float) -> Run:
    """:func:`timed` in a process of its own, of what ``prepare`` makes there, for ``limit`` seconds at most."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            work = prepare()
            os.write(write, b"0")
            run = timed(work, limit)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(run, pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        begun = pipe.read(1) and _spent(child)
        while not select.select([pipe], [], [], 0.2)[0]:
            if _spent(child) > begun + limit:  # not by a timer of the child, which makes its clock a coarse one
                os.kill(child, signal.SIGKILL)
        sent = pipe.read()
    os.waitpid(child, 0)
    return pickle.loads(sent) if sent else Run(float("inf"), limit, late=True)


def _spent(process: int) -> float:
    """Its processor seconds so far (Linux)."""
    with open(f"/proc/{process}/stat") as stat:
        user, system = stat.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _solve(c: Cell, z0: Tensor, x: Tensor, **options: Any) -> Tensor:
    return VERBS[c.kind](c.function, z0, (x,), batch_dims=1, **options).value


def _data(c: Cell) -> tuple[Tensor, Tensor]:
    """Where a solve starts, and ``x``: a ramp, of each sample turned by another angle and of another height."""
    ramp, which = torch.linspace(0.5, 1.5, c.n), torch.arange(c.batch)
    turned = (torch.arange(c.n) + (which * c.n // c.batch).unsqueeze(1)) % c.n
    return torch.zeros(c.batch, c.n), ramp[turned] * (1 + 1.5 * which / c.batch).unsqueeze(1)


def forward(c: Cell, solver: str) -> Callable[[], Tensor]:
    """The solve alone."""
    return lambda: _solve(c, *_data(c), solver=solver)


def backward(c: Cell, near: Tensor, linear: str) -> Callable[[], Tensor]:
    """One backward at the solution."""
    x = _data(c)[1].requires_grad_()
    rule = ik.Implicit(linear_solver=linear)
    loss = _solve(c, near, x, solver=PLAIN.get(c.kind, "newton_krylov"), rule=rule).square().sum()
    return lambda: torch.autograd.grad(loss, x, retain_graph=True)[0]


def row(
    name: str, choices: tuple[str, ...], make: Callable[[str], Callable[[], Callable[[], Tensor]]], most: float
) -> dict[str, Any]:
    """One line of the table, as :func:`results.row` has it."""
    runs = {"auto": apart(make("auto"), most)}
    for choice in choices[1:]:
        enough = runs["auto"].spent + 2 if runs["auto"].found is not None else most
        runs[choice] = apart(make(choice), min(most, enough))
    best = min(runs, key=lambda choice: runs[choice].seconds)
    if runs["auto"].found is not None and runs["auto"].seconds > max(
        1.5 * runs[best].seconds, 1e-3 + runs[best].seconds
    ):
        for choice in ("auto", best):
            again = apart(make(choice), most)
            if again.seconds < runs[choice].seconds:
                runs[choice] = again
    least, own = runs[best], runs["auto"]
    ratio = own.seconds / least.seconds if least.found is not None else 1.0
    target = max(1.5, (least.seconds + 1e-3) / least.seconds) if least.found is not None else None
    shown = " ".join(f"{choice} {_time(run)}" for choice, run in runs.items())
    details: dict[str, Any] = {"best": best if least.found is not None else "none", "ms": shown}
    details |= {"measured": datetime.date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
    if own.found is not None and least.found is not None and not name.startswith(("wells", "valley")):
        details["differs"] = float(np.abs(own.found - least.found).max() / np.abs(least.found).max())
    return results.row(name, ratio, "times the best choice", target=target, **details)


def _time(run: Run) -> str:
    return f"{1e3 * run.seconds:.1f}" if run.found is not None else f"> {run.spent:.0f} s" if run.late else "failed"


def line(row: dict[str, Any]) -> str:
    """As it is printed."""
    mark = "  <--" if row["target"] is not None and row["value"] > row["target"] else ""
    mark += "  WRONG" if row.get("differs", 0.0) > _ACCURACY else ""
    return f"{row['row']:44s} {row['value']:7.2f} ({row['best']}) | {row['ms']}{mark}"


def both(c: Cell, most: float) -> list[dict[str, Any]]:
    """Forward and, where ``auto`` finds a solution, backward."""
    found = [row(f"{c.name}, forward", SOLVERS[c.kind], lambda choice: lambda: forward(c, choice), most)]
    if np.isfinite(found[0]["value"]) and not found[0]["ms"].startswith(("auto >", "auto failed")):
        near = _solve(c, *_data(c))
        linear = (*LINEAR, *(("neumann",) if c.kind == "fixed_point" else ()))
        linear = (*linear, *(("cg",) if VERBS[c.kind] in (ik.least_squares, ik.argmin) else ()))
        found.append(row(f"{c.name}, backward", linear, lambda choice: lambda: backward(c, near, choice), most))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only cells whose name has one of these in it")
    parser.add_argument("--no-json", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--largest", type=int, default=1_000_000, help="most numbers in a state")
    parser.add_argument("--unknowns", type=int, default=1_000_000, help="most unknowns of a sample")
    parser.add_argument("--seconds", type=float, default=20.0, help="for one choice")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _solve(cell("root", "chain", 200, 1), *_data(cell("root", "chain", 200, 1)))  # whatever is imported is imported
    for wanted in cells(arguments.largest, arguments.unknowns, arguments.parts):
        rows = both(cell(*wanted), arguments.seconds)
        for found in rows:
            print(line(found), flush=True)
        if not arguments.no_json:
            results.save(
                "bench_regret", rows, (__doc__ or "").split("\n\n", 2)[2], part=True, chosen=bool(arguments.parts)
            )


if __name__ == "__main__":
    main()
