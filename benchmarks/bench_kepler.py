"""Kepler's equation, 100,000 orbits in one call, against SciPy's vectorised Newton-Halley with analytic derivatives.

    python benchmarks/bench_kepler.py [--orbits 100000] [--repeats 7] [--json]     (kept in benchmarks/results)

``E - e sin E = M``, eccentricity ``e`` uniform in [0, 0.99), mean anomaly ``M`` in (-pi, pi), float64, one thread, from
``E0 = M + 0.85 e sign(M)`` (Danby 1987).  Time is CPU time of the process, the median of runs taken in turn, and the ratio
is to ``scipy.optimize.newton`` with ``fprime`` and ``fprime2``.  Ours get the residual alone; autograd does the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import results
import torch
from scipy.optimize import newton
from torch import Tensor

import implicitkit as ik

ACCURACY = 1e-12


def kepler(E: Tensor, e: Tensor, M: Tensor) -> Tensor:
    """The residual of Kepler's equation."""
    return E - e * torch.sin(E) - M


def make(orbits: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """``E0, e, M``."""
    g = torch.Generator().manual_seed(seed)
    e = 0.99 * torch.rand(orbits, generator=g, dtype=torch.float64)
    M = torch.pi * (2 * torch.rand(orbits, generator=g, dtype=torch.float64) - 1)
    return M + 0.85 * e * torch.sign(M), e, M


def contestants(E0: Tensor, e: Tensor, M: Tensor) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name; each returns all eccentric anomalies."""
    start, eccentricity, mean = (t.numpy() for t in (E0, e, M))

    def scipy() -> Tensor:
        root = newton(
            lambda E: E - eccentricity * np.sin(E) - mean,
            start,
            fprime=lambda E: 1 - eccentricity * np.cos(E),
            fprime2=lambda E: eccentricity * np.sin(E),
            maxiter=100,
        )
        return torch.as_tensor(root)

    def ours(solver: Any) -> Callable[[], Tensor]:
        options: dict[str, Any] = {"batch_dims": 1, "in_dims": (0, 0), "rtol": 0.0, "atol": ACCURACY}
        return lambda: ik.root(kepler, E0, (e, M), solver=solver, **options).value

    solvers = {
        "newton": ik.Newton(),
        "newton, full steps": ik.Newton(line_search=False),
        "chandrupatla": ik.Chandrupatla(),
        "bisection": ik.Bisection(),
    }
    return {"scipy newton": scipy} | {name: ours(solver) for name, solver in solvers.items()}


def rows(orbits: int, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds, ratio to SciPy and worst residual of each."""
    E0, e, M = make(orbits)
    calls = contestants(E0, e, M)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    worst = {}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            begin = time.process_time()
            E = call()
            if turn:  # the first turn warms up
                seconds[name].append(time.process_time() - begin)
            worst[name] = float(kepler(E, e, M).abs().max())
    reference = statistics.median(seconds["scipy newton"])
    return {
        name: {
            "ms": 1e3 * statistics.median(s),
            "ratio": statistics.median(s) / reference,
            "worst residual": worst[name],
        }
        for name, s in seconds.items()
    }


def main() -> None:
    """Print the table; fail if a sample is worse than asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--orbits", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = rows(options.orbits, options.repeats)
    if options.json:
        print(json.dumps(table, indent=2))
    else:
        print(f"{'solver':20} {'ms':>8} {'ratio':>7} {'worst residual':>15}")
        for name, row in table.items():
            print(f"{name:20} {row['ms']:8.1f} {row['ratio']:7.2f} {row['worst residual']:15.1e}")
    kept = [
        results.row(name, row["ratio"], "times SciPy's time", ms=row["ms"], worst=row["worst residual"])
        for name, row in table.items()
    ]
    results.save("bench_kepler", kept, (__doc__ or "").split("\n\n", 2)[2])
    late = [name for name, row in table.items() if not row["worst residual"] <= ACCURACY]
    if late:
        raise SystemExit(f"residual above {ACCURACY}: {', '.join(late)}")


if __name__ == "__main__":
    main()
