"""Quadratic programs as layers: forward plus backward against cvxpylayers' default, on the CPU, in one process.

    python benchmarks/bench_qp.py [--sizes 10 50 100] [--batches 1 32 128] [--seconds 2] [--solvers qp interior_point]

Random dense programs ``min |Sz|^2/2 + q'z, Gz <= h`` with ``n = m`` and about a quarter of the rows active; all of ``S``,
``q``, ``G``, ``h`` are differentiated.  Times are CPU times, medians, in milliseconds: the layers take
turns, and the first run of a turn does not count, as in training, where the same layer runs again and again.  The error of
``dL/dq`` is against an active-set solution refined to rounding.  Needs cvxpylayers (``pip install cvxpylayers``).
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable

import results
import torch
from torch import Tensor

import implicitkit as ik

Data = tuple[Tensor, Tensor, Tensor, Tensor]
Layer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def programs(batch: int, n: int, seed: int) -> Data:
    """``S``, ``q``, ``G``, ``h`` with a planted solution: a quarter of the rows active."""
    g = torch.Generator().manual_seed(seed)
    S = 0.4 * torch.randn(batch, n, n, generator=g) / n**0.5 + torch.eye(n)
    G = torch.randn(batch, n, n, generator=g)
    z = torch.randn(batch, n, 1, generator=g)
    active = torch.arange(n) < n // 4
    lam = torch.where(active, torch.rand(batch, n, generator=g) + 0.1, 0).unsqueeze(2)
    slack = torch.where(active, 0, n**0.5 * (torch.rand(batch, n, generator=g) + 0.1))
    q = -(S.mT @ (S @ z) + G.mT @ lam).squeeze(2)
    return S, q, G, (G @ z).squeeze(2) + slack


def ours(solver: str) -> Layer:
    def layer(S: Tensor, q: Tensor, G: Tensor, h: Tensor) -> Tensor:
        return ik.solve(ik.QuadraticProgram(S.mT @ S, q, G=G, h=h), solver=solver).value

    return layer


def cvxpylayers(n: int) -> Layer:
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    z = cp.Variable(n)
    S, q, G, h = cp.Parameter((n, n)), cp.Parameter(n), cp.Parameter((n, n)), cp.Parameter(n)
    layer = CvxpyLayer(
        cp.Problem(cp.Minimize(0.5 * cp.sum_squares(S @ z) + q @ z), [G @ z <= h]),
        parameters=[S, q, G, h],
        variables=[z],
    )
    return lambda *data: layer(*data)[0]


def run(layer: Layer, data: Data) -> tuple[float, Tensor]:
    """Seconds of CPU time for forward and backward, and ``dL/dq`` for ``L = sum of squares``."""
    leaves = [t.detach().clone().requires_grad_() for t in data]
    begin = time.process_time()
    layer(*leaves).square().sum().backward()
    taken = time.process_time() - begin
    grad = leaves[1].grad
    assert grad is not None
    return taken, grad


def exact(data: Data) -> Tensor:
    """``dL/dq = -N (N'PN)^{-1} N' 2z`` on the planted active set, by a dense solve of the KKT system of each program."""
    S, q, G, h = data
    rows = []
    for s, c, g, b in zip(S, q, G, h, strict=True):
        n = len(c)
        a = g[: n // 4]
        K = torch.zeros(n + len(a), n + len(a))
        K[:n, :n], K[:n, n:], K[n:, :n] = s.T @ s, a.T, a
        z = torch.linalg.solve(K, torch.cat([-c, b[: n // 4]]))[:n]
        rows.append(-torch.linalg.solve(K, torch.cat([2 * z, torch.zeros(len(a))]))[:n])
    return torch.stack(rows)


def main() -> None:
    """Print one row for each size and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--solvers", nargs="+", default=["qp", "interior_point"])
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each row, about")
    options = parser.parse_args()
    if importlib.util.find_spec("cvxpylayers") is None:
        print("cvxpylayers is not installed: pip install cvxpylayers")
        return
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{'n=m':>5} {'batch':>6} {'layer':>16} {'ms':>10} {'ratio':>8} {'gradient error':>16}")
    kept, plots = [], []
    for n in options.sizes:
        layers = {"cvxpylayers": cvxpylayers(n)} | {name: ours(name) for name in options.solvers}
        for batch in options.batches:
            data = programs(batch, n, 0)
            truth = exact(data)
            times: dict[str, list[float]] = {name: [] for name in layers}
            errors = {}
            for name, layer in layers.items():  # warm up
                errors[name] = float((run(layer, data)[1] - truth).abs().max() / truth.abs().max())
            end = time.perf_counter() + options.seconds
            while time.perf_counter() < end or len(times["cvxpylayers"]) < 3:
                for name, layer in layers.items():
                    runs = 2 if name == "cvxpylayers" else 4
                    times[name].extend([run(layer, data)[0] for _ in range(runs)][1:])
            reference = statistics.median(times["cvxpylayers"])
            for name in layers:
                median = statistics.median(times[name])
                print(
                    f"{n:5d} {batch:6d} {name:>16} {1e3 * median:10.2f} {reference / median:8.1f} {errors[name]:16.1e}",
                    flush=True,
                )
                words = {"who": "implicitkit" if name == options.solvers[0] else name}
                if name in (options.solvers[0], "cvxpylayers"):
                    fixed = {"size": batch == options.batches[-1], "batch": n == options.sizes[0]}
                    at = {"size": n, "batch": batch}
                    plots += [results.row(a, 1e3 * median, "ms", at=at[a], **words) for a in fixed if fixed[a]]
                if name != "cvxpylayers":
                    row = f"n = {n}, batch {batch}, {name}"
                    more = {"ms": 1e3 * median, "error": errors[name], "cvxpylayers' error": errors["cvxpylayers"]}
                    kept.append(results.row(row, reference / median, "times as fast as cvxpylayers", more=True, **more))
    results.save(
        "bench_qp",
        kept + sorted(plots, key=lambda row: row["who"] != "implicitkit"),
        (__doc__ or "").split("\n\n", 1)[1],
    )


if __name__ == "__main__":
    main()
