"""Compositions: evaluations, depth, matrix-vector products and overhead, against solving and differentiating by hand.

    python benchmarks/bench_compose.py [--seeds 8] [--json]

- stacked: two tanh equilibria of dimension 64, Jacobian spectral radius 0.9 at the solution, relative error 1e-4 in the last
  state; each scheme at the loosest tolerance of a grid that gets there ("by hand": one solve after the other, with one
  tolerance for both, and with the best pair);
- adjoint: node-level reverse passes of one gradient of that pair, by blocks, jointly, and layer after layer;
- feedback: a linear pair whose exact block Gauss-Seidel rate is 0.6, relative error 1e-6;
- overhead: 50 modules in a chain and 200 nodes with loops, width 64, batch 64: time outside the nodes' maps and outside the
  solver's own arithmetic, as a share of the time of the maps.

Counts are medians over seeds; times are medians of repeats, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik

D = torch.float64
TOLERANCES = [10 ** (-k / 8) for k in range(16, 57)]


# ------------------------------------------------------------------------------------------------------------ problems
@dataclass
class Pair:
    """Two maps, their starts, the input and the exact states."""

    f: Callable[..., Tensor]
    v: Callable[..., Tensor]
    x: Tensor
    start: Tensor
    exact: dict[str, Tensor]
    weights: tuple[Tensor, ...]

    def joint(self) -> Any:
        """The composition."""
        return ik.compose({"f": (self.f, "x"), "v": (self.v, "f")}, output="v")

    def error(self, value: dict[str, Tensor]) -> float:
        """Relative error of the last state."""
        return float((value["v"] - self.exact["v"]).norm() / self.exact["v"].norm())


def radius(z: Tensor, W: Tensor) -> float:
    """Spectral radius of the Jacobian of ``tanh(W z + c)`` at its value ``z`` ``(1, n)``."""
    return torch.linalg.eigvals((1 - z[0] ** 2)[:, None] * W).abs().max().item()


def scaled(W: Tensor, c: Tensor, goal: float) -> tuple[Tensor, Tensor]:
    """``W`` scaled so that the Jacobian has spectral radius ``goal`` at ``z = tanh(W z + c)``; and that ``z``."""
    low, high = 0.1, 4.0
    z = torch.zeros_like(c)
    for _ in range(30):
        scale = 0.5 * (low + high)
        for _ in range(200):
            z = torch.tanh(z @ (scale * W).mT + c)
        low, high = (scale, high) if radius(z, scale * W) < goal else (low, scale)
    for _ in range(1000):
        z = torch.tanh(z @ (low * W).mT + c)
    return low * W, z


def stacked(seed: int, n: int = 64, goals: tuple[float, float] = (0.9, 0.9)) -> Pair:
    """Two tanh equilibria in a row."""
    g = torch.Generator().manual_seed(seed)
    W1, W2, U = (torch.randn(n, n, generator=g, dtype=D) / n**0.5 for _ in range(3))
    x = 0.5 * torch.randn(1, n, generator=g, dtype=D)
    W1, z1 = scaled(W1, x, goals[0])
    W2, z2 = scaled(W2, z1 @ U.mT, goals[1])
    return Pair(
        lambda z, x: torch.tanh(z @ W1.mT + x),
        lambda z, w: torch.tanh(z @ W2.mT + w @ U.mT),
        x,
        torch.zeros(1, n, dtype=D),
        {"f": z1, "v": z2},
        (W1, W2, U),
    )


def feedback(seed: int, n: int = 64, rate: float = 0.6) -> tuple[Any, dict[str, Tensor], Tensor, Tensor]:
    """A linear pair with a loop, whose exact block Gauss-Seidel iteration converges by ``rate``; with start, input and the
    exact state of the output."""
    g = torch.Generator().manual_seed(seed)
    A, E, B, C = (torch.randn(n, n, generator=g, dtype=D) / n**0.5 for _ in range(4))
    A, E = (0.6 * M / torch.linalg.eigvals(M).abs().max() for M in (A, E))
    eye = torch.eye(n, dtype=D)
    loop = torch.linalg.solve(eye - E, C) @ torch.linalg.solve(eye - A, B)
    s = (rate / torch.linalg.eigvals(loop).abs().max()) ** 0.5
    B, C = s * B, s * C
    x = torch.randn(1, n, generator=g, dtype=D)
    whole = torch.cat([torch.cat([eye - A, -B], 1), torch.cat([-C, eye - E], 1)])
    exact = torch.linalg.solve(whole, torch.cat([x[0], x.new_zeros(n)]))[n:]
    joint = ik.compose(
        {"a": (lambda z, b, x: z @ A.mT + b @ B.mT + x, "b", "x"), "b": (lambda z, a: z @ E.mT + a @ C.mT, "a")},
        output="b",
    )
    return joint, {"a": torch.zeros(1, n, dtype=D), "b": torch.zeros(1, n, dtype=D)}, x, exact[None]


# --------------------------------------------------------------------------------------------------------- experiments
def by_hand(pair: Pair, first: float, second: float, solver: Any = "anderson") -> tuple[int, float]:
    """One solve after the other: evaluations and error."""
    options = {"solver": solver, "batch_dims": 1, "atol": 0.0, "on_failure": "ignore"}
    w = ik.fixed_point(pair.f, pair.start, (pair.x,), rtol=first, **options)
    z = ik.fixed_point(pair.v, pair.start, (w.value,), rtol=second, **options)
    return w.evaluations + z.evaluations, pair.error({"v": z.value})


def loosest(run: Callable[[float], tuple[Any, float]], goal: float) -> Any:
    """The figures at the loosest tolerance that reaches the goal."""
    for rtol in TOLERANCES:
        figures, error = run(rtol)
        if error <= goal:
            return figures
    raise RuntimeError(f"no tolerance reaches an error of {goal}")


def composed(problem: Any, start: dict[str, Tensor], x: Tensor, error: Callable[[Any], float], solver: Any) -> Any:
    """``rtol -> ((evaluations, depth), error)`` of a joint solve, by blocks or not."""

    def run(rtol: float) -> tuple[tuple[int, int], float]:
        s = ik.solve(problem, start, (x,), solver=solver, batch_dims=1, rtol=rtol, atol=0.0, on_failure="ignore")
        if s.blocks is not None:
            return (s.blocks.total, s.blocks.depth), error(s.value)
        return (s.evaluations * len(problem.graph), s.evaluations), error(s.value)

    return run


def stacked_rows(seeds: int, goals: tuple[float, float] = (0.9, 0.9), goal: float = 1e-4) -> dict[str, list[Any]]:
    """Evaluations and depth of every scheme, one entry a seed."""
    rows: dict[str, list[Any]] = {}
    for seed in range(seeds):
        pair = stacked(seed, goals=goals)
        joint, start = pair.joint(), {"f": pair.start, "v": pair.start}
        count = loosest(lambda t: by_hand(pair, t, t), goal)  # noqa: B023
        rows.setdefault("by hand", []).append((count, count))
        best = min(
            count
            for t in TOLERANCES[::2]
            for s in TOLERANCES[::2]
            for count, error in [by_hand(pair, t, s)]
            if error <= goal
        )
        rows.setdefault("by hand, best pair", []).append((best, best))
        schemes = {
            "blocks": ik.Blocks(),
            "concurrent": ik.Blocks(mode="concurrent"),
            "joint anderson": "anderson",
            "joint picard": "picard",
        }
        for name, solver in schemes.items():
            rows.setdefault(name, []).append(loosest(composed(joint, start, pair.x, pair.error, solver), goal))
    return rows


def medians(rows: dict[str, list[Any]]) -> dict[str, tuple[float, float]]:
    """Median evaluations and median depth of each scheme."""
    return {
        name: (statistics.median(e for e, _ in found), statistics.median(d for _, d in found))
        for name, found in rows.items()
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(medians(stacked_rows(8)))
