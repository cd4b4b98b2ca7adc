"""Fixed-point solvers against TorchDEQ's on one problem, in one process: time, evaluations and accuracy.

    python benchmarks/bench_fixed_point.py [--repeats 9] [--json]

``z = tanh(W z + U x + b)`` as in ``bench_core.py``: float32, relative tolerance 1e-4, spectral radius 0.9 at the solution,
one thread.  TorchDEQ's solver functions are called as they are (``stop_mode="rel"``, room for 200 iterations, no statistics
asked for); ours through ``ik.fixed_point``, with the batch of ``x`` declared by ``in_dims`` so that converged samples are
dropped, and once without.  Time is CPU time of the process; runs are taken in turn, and each figure is a median.

The rows at the end are what is claimed: our time against TorchDEQ's, at no more evaluations than it needs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import results
import torch
from bench_core import TOLERANCE, make, tanh_map
from torch import Tensor

import implicitkit as ik

SIZES = ((64, 128), (256, 512))
ROOM = 200
CLAIMS = {  # ours, TorchDEQ's, at least so many times faster
    "anderson : torchdeq anderson": (("anderson", "anderson, every step"), "torchdeq anderson", 4.0),
    "accelerated : torchdeq broyden": (("anderson, memory 20", "broyden, bad"), "torchdeq broyden", 6.0),
}


def torchdeq_solvers() -> dict[str, Callable[..., Any]]:
    """TorchDEQ's solver functions by name; empty if it is not installed."""
    try:
        from torchdeq.solver.anderson import anderson_solver
        from torchdeq.solver.broyden import broyden_solver
        from torchdeq.solver.fp_iter import fixed_point_iter
    except ImportError:
        print("torchdeq is not installed (pip install torchdeq): its rows are left out")
        return {}
    return {
        "torchdeq fixed_point_iter": fixed_point_iter,
        "torchdeq anderson": anderson_solver,
        "torchdeq broyden": broyden_solver,
    }


def contestants(batch: int, dim: int) -> dict[str, Callable[[], tuple[Tensor, int]]]:
    """By name, a call that returns the point and the evaluations it took."""
    x, W, U, b = make(batch, dim)
    z0 = torch.zeros_like(x)

    def theirs(solver: Callable[..., Any]) -> Callable[[], tuple[Tensor, int]]:
        def call() -> tuple[Tensor, int]:
            count = [0]

            def f(z: Tensor) -> Tensor:
                count[0] += 1
                return tanh_map(z, x, W, U, b)

            return solver(f, z0, max_iter=ROOM, tol=TOLERANCE, stop_mode="rel")[0], count[0]

        return call

    def ours(solver: Any, **options: Any) -> Callable[[], tuple[Tensor, int]]:
        def call() -> tuple[Tensor, int]:
            solution = ik.fixed_point(
                tanh_map, z0, (x, W, U, b), solver=solver, batch_dims=1, rtol=TOLERANCE, atol=0, **options
            )
            return solution.value, solution.evaluations

        return call

    drop = {"in_dims": (0, None, None, None)}
    solvers = {
        "picard": ik.Picard(),
        "anderson": ik.Anderson(),
        "anderson, every step": ik.Anderson(memory=5, period=1),
        "anderson, memory 20": ik.Anderson(memory=20),
        "broyden, good": ik.Broyden(),
        "broyden, bad": ik.Broyden(update="bad"),
        "aitken": ik.Aitken(),
    }
    calls = {name: theirs(solver) for name, solver in torchdeq_solvers().items()}
    calls |= {name: ours(solver, **drop) for name, solver in solvers.items()}
    return calls | {"anderson, none dropped": ours(ik.Anderson())}


def rows(batch: int, dim: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds, evaluations and the worst relative residual of each, at one size."""
    calls = contestants(batch, dim)
    x, W, U, b = make(batch, dim)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    table: dict[str, dict[str, float]] = {}
    with torch.no_grad():
        for turn in range(repeats + 1):
            for name, call in calls.items():
                begin = time.process_time()
                z, evaluations = call()
                if turn:  # the first turn warms up
                    seconds[name].append(time.process_time() - begin)
                    continue
                residual = torch.linalg.vector_norm(tanh_map(z, x, W, U, b) - z, dim=1)
                worst = float((residual / torch.linalg.vector_norm(z, dim=1)).max())
                table[name] = {"ms": 0.0, "evaluations": evaluations, "worst relative residual": worst}
    for name, values in seconds.items():
        table[name]["ms"] = 1e3 * statistics.median(values)
    return table


def claims(table: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """For each claim the best of ours that needs no more evaluations: how many times faster, and what is aimed at."""
    found = {}
    for claim, (ours, reference, target) in CLAIMS.items():
        if reference not in table:
            continue
        fair = [name for name in ours if table[name]["evaluations"] <= table[reference]["evaluations"]]
        times = [table[name]["ms"] for name in fair]
        found[claim] = {"times faster": table[reference]["ms"] / min(times) if times else 0.0, "target": target}
    return found


def keep(result: dict[str, Any]) -> None:
    """Write the times and the claims to ``benchmarks/results``."""
    kept = []
    for size, part in result.items():
        for name, row in part["solvers"].items():
            details = {"evaluations": row["evaluations"], "residual": row["worst relative residual"]}
            kept.append(results.row(f"{name}, {size}", row["ms"], "ms", **details))
        for claim, row in part["claims"].items():
            times, target = row["times faster"], row["target"]
            kept.append(results.row(f"{claim}, {size}", times, "times faster", target=target, more=True))
    results.save("bench_fixed_point", kept, (__doc__ or "").split("\n\n", 2)[2])


def main() -> None:
    """Print one table a size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    for batch, dim in SIZES:
        table = rows(batch, dim, options.repeats if dim < 256 else max(3, options.repeats // 3))
        result[f"{batch}x{dim}"] = {"solvers": table, "claims": claims(table)}
    keep(result)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for size, part in result.items():
        print(f"\n{size:28} {'ms':>8} {'evaluations':>12} {'worst relative residual':>24}")
        for name, row in part["solvers"].items():
            print(f"{name:28} {row['ms']:8.1f} {row['evaluations']:12.0f} {row['worst relative residual']:24.1e}")
        for claim, row in part["claims"].items():
            print(f"{claim:36} {row['times faster']:5.1f} times faster (target {row['target']:.0f})")


if __name__ == "__main__":
    main()
