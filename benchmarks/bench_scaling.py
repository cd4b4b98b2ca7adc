"""Time of a layer, forward and backward, against size, batch, tolerance and spectral radius.

    python benchmarks/bench_scaling.py [--repeats 5]

``z = tanh(W z + U x + b)`` as in ``bench_core.py``: float32, one thread. Each point is the median CPU time of the
process over runs that take turns. implicitkit (``anderson``, the implicit rule) is beside the loop that autograd
records, of as many plain steps as reach the same relative residual, and beside TorchDEQ (``anderson``, ``ift=True``,
relative stopping) where it is installed. The same tolerance is asked for everywhere; the residual reached is kept
beside the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import bench_core
import results
import torch
from torch import Tensor

import implicitkit as ik

BASE = {"size": 64, "batch": 32, "tolerance": 1e-4, "radius": 0.9}
AXES: dict[str, list[Any]] = {
    "size": [16, 32, 64, 128, 256, 512],
    "batch": [1, 8, 32, 128, 512],
    "tolerance": [1e-2, 1e-3, 1e-4, 1e-5],
    "radius": [0.3, 0.6, 0.8, 0.9, 0.95],
}
ROOM = 400


def loop(leaves: list[Tensor], tolerance: float) -> Tensor:
    """Recorded by autograd, until the residual is small."""
    z = torch.zeros_like(leaves[0])
    for _ in range(ROOM):
        new = bench_core.tanh_map(z, *leaves)
        with torch.no_grad():
            done = bool(((new - z).norm(dim=1) <= tolerance * new.norm(dim=1)).all())
        z = new
        if done:
            break
    return z


def ours(leaves: list[Tensor], tolerance: float) -> Tensor:
    """implicitkit."""
    options: dict[str, Any] = {"solver": "anderson", "rule": ik.Implicit(rtol=tolerance), "rtol": tolerance, "atol": 0}
    in_dims = (0, None, None, None)
    start = torch.zeros_like(leaves[0])
    return ik.fixed_point(bench_core.tanh_map, start, tuple(leaves), batch_dims=1, in_dims=in_dims, **options).value


def torchdeq() -> Callable[[list[Tensor], float], Tensor] | None:
    """TorchDEQ's layer, if it is installed."""
    try:
        from torchdeq import get_deq
    except ImportError:
        return None

    def theirs(leaves: list[Tensor], tolerance: float) -> Tensor:
        options: dict[str, Any] = {"f_max_iter": ROOM, "b_max_iter": ROOM, "f_tol": tolerance, "b_tol": tolerance}
        options |= {"f_stop_mode": "rel", "b_stop_mode": "rel"}
        deq = get_deq(f_solver="anderson", b_solver="anderson", ift=True, **options)
        start = torch.zeros_like(leaves[0])
        return deq(lambda z: bench_core.tanh_map(z, *leaves), start)[0][-1]

    return theirs


def point(axis: str, value: Any, repeats: int) -> list[dict[str, Any]]:
    """The rows of one setting."""
    setting = BASE | {axis: value}
    bench_core.RADIUS = setting["radius"]
    data = bench_core.make(setting["batch"], setting["size"])
    calls: dict[str, Any] = {"implicitkit": ours, "recorded loop": loop}
    if (theirs := torchdeq()) is not None:
        calls["TorchDEQ"] = theirs
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    residual: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            leaves = [t.clone().requires_grad_() for t in data]
            begin = time.process_time()
            z = call(leaves, setting["tolerance"])
            z.square().sum().backward()
            if turn:  # the first turn warms up
                seconds[name].append(time.process_time() - begin)
            else:
                with torch.no_grad():
                    gap = (bench_core.tanh_map(z, *leaves) - z).norm(dim=1) / z.norm(dim=1)
                residual[name] = float(gap.max())
    return [
        results.row(
            axis,
            1e3 * statistics.median(times),
            "ms",
            who=name,
            at=value,
            residual=residual[name],
            asked=setting["tolerance"],
        )
        for name, times in seconds.items()
    ]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for axis, values in AXES.items() for value in values for row in point(axis, value, options.repeats)]
    for row in rows:
        print(f"{row['row']:10} {row['at']:8} {row['who']:14} {row['value']:9.2f} ms   residual {row['residual']:.1e}")
    print(results.save("bench_scaling", rows, (__doc__ or "").split("\n\n", 2)[2]))


if __name__ == "__main__":
    main()
