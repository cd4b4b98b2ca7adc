"""Bratu's problem in two dimensions, up to 1,000,000 unknowns: torch ``newton_krylov`` beside SciPy's.

    python benchmarks/bench_bratu.py [--sides 50 100 200 1000] [--cap 300] [--threads 1] [--no-scipy] [--json] [--no-keep]

``-Laplace u = 6 exp(u)`` on the unit square, zero on the boundary, ``side^2`` interior points; start zero; both stop at
``h^2 |F|_2 <= 1e-8`` for ours and the same bound spread evenly, ``|F|_inf <= 1e-8 / side``, for SciPy.  Rows:

- ``implicitkit``: exact products, GMRES, no preconditioner (to 200 x 200);
- ``implicitkit, fast Poisson``: the inverse Laplacian by sine transforms (``torch.fft``) as preconditioner;
- ``scipy``: ``scipy.optimize.newton_krylov``, finite-difference products, LGMRES (its default), no preconditioner;
- ``scipy, fast Poisson``: the same with the inverse Laplacian (``scipy.fft.dstn``) as ``inner_M``.

Each row runs in a process of its own, which reports its peak memory; one that takes longer than ``--cap`` seconds is
stopped.  One thread unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.fft
import scipy.optimize
import scipy.sparse.linalg
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import implicitkit as ik
from benchmarks import results
from benchmarks.systems.large import bratu2d

TOLERANCE = 1e-8
ROWS = ("implicitkit", "implicitkit, fast Poisson", "scipy", "scipy, fast Poisson")
UNPRECONDITIONED = 200  # side up to which the rows without preconditioner are run


def laplacian_eigenvalues(side: int) -> Tensor:
    """Of the five-point matrix (4 on the diagonal), ``(side, side)``: those of its sine modes."""
    one = 2 - 2 * torch.cos(math.pi * torch.arange(1, side + 1, dtype=torch.float64) / (side + 1))
    return one.unsqueeze(1) + one


def sine_transform(x: Tensor) -> Tensor:
    """``sum_j x_j sin(pi j k / (n + 1))``, ``k = 1..n``, along the last dimension (the DST-I up to a factor): a sine
    transform is the imaginary part of a Fourier transform of the zero-padded row."""
    n = x.shape[-1]
    return torch.fft.rfft(torch.nn.functional.pad(x, (1, n + 1))).imag[..., 1 : n + 1]


def fast_poisson(side: int, device: str = "cpu") -> Callable[[Tensor, Tensor], Tensor]:
    """``(z, v) -> L^{-1} v`` for ``v`` ``(batch, side^2)``: a direct solve in ``O(n log n)``."""
    scale = ((side + 1) ** 2 / 4 * laplacian_eigenvalues(side)).to(device)

    def apply(z: Tensor, v: Tensor) -> Tensor:
        grid = v.reshape(-1, side, side)
        modes = sine_transform(sine_transform(grid).mT) / scale  # symmetric: the modes may stay transposed
        return sine_transform(sine_transform(modes).mT).reshape(v.shape)

    return apply


def solve(row: str, side: int, threads: int) -> dict[str, Any]:
    """One row: seconds, evaluations, residual."""
    torch.set_num_threads(threads)
    if side > 10:
        solve(row, 10, threads)  # imports and first calls
    system = bratu2d(side)
    begun = time.perf_counter()
    if row.startswith("implicitkit"):
        method = ik.NewtonKrylov(preconditioner=fast_poisson(side) if "Poisson" in row else None)
        solution = system.solve(solver=method, rtol=0.0, atol=TOLERANCE, on_failure="ignore")
        z, evaluations = solution.value, solution.evaluations
    else:
        z, evaluations = by_scipy(system, side, "Poisson" in row)
    seconds = time.perf_counter() - begun
    return {
        "row": row,
        "side": side,
        "seconds": seconds,
        "evaluations": evaluations,
        "residual": system.residual(z).abs().max().item(),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def by_scipy(system: Any, side: int, preconditioned: bool) -> tuple[Tensor, int]:
    """``scipy.optimize.newton_krylov``."""
    calls = 0

    def residual(x: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        return system.residual(torch.from_numpy(x)).numpy()

    options: dict[str, Any] = {}
    if preconditioned:
        scale = laplacian_eigenvalues(side).numpy()

        def apply(v: np.ndarray) -> np.ndarray:
            return scipy.fft.idstn(scipy.fft.dstn(v.reshape(side, side), 1) / scale, 1).reshape(-1)

        options["inner_M"] = scipy.sparse.linalg.LinearOperator((side**2, side**2), matvec=apply, dtype=np.float64)
    found = scipy.optimize.newton_krylov(residual, np.zeros(side**2), f_tol=TOLERANCE / side, **options)
    return torch.from_numpy(found), calls


def run(row: str, side: int, threads: int, cap: float) -> dict[str, Any]:
    """:func:`solve` in a process of its own."""
    command = [sys.executable, __file__, "--one", row, "--sides", str(side), "--threads", str(threads)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=cap)
    except subprocess.TimeoutExpired:
        return {"row": row, "side": side, "failure": f"more than {cap:g} s"}
    if done.returncode:
        return {"row": row, "side": side, "failure": (done.stderr.strip().splitlines() or ["?"])[-1][:80]}
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", type=int, nargs="+", default=[50, 100, 200, 1000])
    parser.add_argument("--cap", type=float, default=300.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-scipy", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-keep", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--one", choices=ROWS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(solve(options.one, options.sides[0], options.threads)))
        return
    found = []
    for side in options.sides:
        for row in ROWS:
            if (options.no_scipy and "scipy" in row) or (row == ROWS[0] and side > UNPRECONDITIONED):
                continue
            found.append(run(row, side, options.threads, options.cap))
            if not options.json:
                r = found[-1]
                figures = r.get("failure") or (
                    f"{r['seconds']:8.2f} s {r['evaluations']:6d} evaluations  |F|_inf {r['residual']:.1e}  "
                    f"peak {r['peak MB']:.0f} MB"
                )
                print(f"{side:5d} x {side:<5d}{row:28}{figures}", flush=True)
    if options.json:
        print(json.dumps(found, indent=1))
    if not options.no_keep:
        torch.set_num_threads(options.threads)
        results.save("bench_bratu", [kept(r) for r in found], (__doc__ or "").split("\n\n", 2)[2], part=True)


def kept(r: dict[str, Any]) -> dict[str, Any]:
    """A row as the page of benchmarks has it."""
    name = f"{r['side']} x {r['side']}, {r['row']}"
    if "failure" in r:
        return results.row(name, float("inf"), "s", failed=r["failure"])
    return results.row(name, r["seconds"], "s", evaluations=r["evaluations"], residual=r["residual"], MB=r["peak MB"])


if __name__ == "__main__":
    main()
