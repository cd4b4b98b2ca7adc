"""What a solve costs beyond the evaluations it makes: ratios to bare loops, medians of paired runs in one process.

    python benchmarks/bench_core.py [--repeats 25] [--json]     (the rows are kept in benchmarks/results/bench_core.json)

Problem: ``z = tanh(W z + U x + b)``, float32, (batch, dim) = (64, 128) and (256, 512), spectral radius of the Jacobian at
the solution 0.9, tolerance 1e-4 relative, one thread.

- forward: ``ik.fixed_point(..., solver="anderson")`` against a bare loop of as many evaluations under ``no_grad``;
- backward: ``loss.backward()`` with the implicit rule at 1e-4 against the forward solve;
- machinery: a solve whose solver takes no step (known solution) and whose linear solve is the identity, less the time in
  the driver and one evaluation, so that only what surrounds them is timed: explicit tensors, and a module whose parameters
  are lifted.  (The look for double roots that follows an exact linear solve, some 0.03 ms, is not among it.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import results
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.rule import request

RADIUS, TOLERANCE = 0.9, 1e-4
TARGETS = {
    "forward 64x128": 4.0, "forward 256x512": 1.5, "backward 64x128": 1.5, "backward 256x512": 1.5,
    "machinery forward, tensors (ms)": 0.25, "machinery backward, tensors (ms)": 0.5,
    "machinery forward, module (ms)": 0.5, "machinery backward, module (ms)": 0.8,
}  # fmt: skip


def tanh_map(z: Tensor, x: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Tensor:
    """The benchmark's cell."""
    return torch.tanh(torch.addmm(b, z, W) + x @ U)


def _jacobian_radius(W: Tensor, z: Tensor) -> float:
    """Largest spectral radius of ``diag(1 - z^2) W^T`` over the samples."""
    return max(torch.linalg.eigvals((1 - row**2)[:, None] * W.mT).abs().max().item() for row in z)


def make(batch: int, dim: int, seed: int = 0) -> tuple[Tensor, ...]:
    """``x, W, U, b`` with the stated spectral radius at the solution, by bisection on the scale of ``W``."""
    g = torch.Generator().manual_seed(seed)
    x, U = torch.randn(batch, dim, generator=g), torch.randn(dim, dim, generator=g) / dim**0.5
    W, b = torch.randn(dim, dim, generator=g) / dim**0.5, 0.1 * torch.randn(dim, generator=g)
    few, low, high = x[:16], 0.5, 4.0
    for _ in range(10):
        scale = 0.5 * (low + high)
        z = torch.zeros_like(few)
        for _ in range(300):
            z = tanh_map(z, few, scale * W, U, b)
        low, high = (scale, high) if _jacobian_radius(scale * W, z) < RADIUS else (low, scale)
    return x, low * W, U, b


def timed(f: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def solve_rows(batch: int, dim: int, repeats: int) -> dict[str, dict[str, float]]:
    """Forward and backward of one size."""
    x, W, U, b = make(batch, dim)
    leaves = [t.clone().requires_grad_() for t in (x, W, U, b)]
    z0 = torch.zeros_like(x)
    rule = ik.Implicit(rtol=TOLERANCE)

    def forward() -> ik.Solution:
        return ik.fixed_point(
            tanh_map, z0, tuple(leaves), solver="anderson", rule=rule, batch_dims=1, rtol=TOLERANCE, atol=0
        )

    solution = forward()
    evaluations = solution.evaluations

    def bare() -> Tensor:
        z = z0
        with torch.no_grad():
            for _ in range(evaluations):
                z = tanh_map(z, *leaves)
        return z

    ratios: list[float] = []
    back: list[float] = []
    seconds: list[float] = []
    for _ in range(repeats):
        loop, ours = timed(bare), timed(forward)
        held = forward()
        loss = held.value.square().sum()
        ratios.append(ours / loop)
        seconds.append(ours)
        back.append(timed(loss.backward) / ours)
    name = f"{batch}x{dim}"
    common = {"evaluations": evaluations, "ms": 1e3 * statistics.median(seconds)}
    assert held.backward is not None
    return {
        f"forward {name}": {"median": statistics.median(ratios), **common},
        f"backward {name}": {"median": statistics.median(back), "products": int(held.backward.steps.max())},
    }


@dataclass(frozen=True)
class _Identity(ik.LinearSolver):
    """Answers ``-b``: no linear solve at all, and it says so; what exact ones claim is looked at."""

    name = "identity"
    exact = False

    def solve(self, A: ik.extend.Operator, b: Tensor, **_: Any) -> ik.extend.LinearSolution:
        return ik.extend.LinearSolution(
            -b, b.new_zeros(len(b)), b.new_zeros(len(b), dtype=torch.int64), b[:, 0] == b[:, 0]
        )


class _Known(ik.Method):
    """Takes no step: the start is the solution."""

    name, solves = "known", "fixed_point"


class _Cell(torch.nn.Module):
    def __init__(self, W: Tensor, U: Tensor, b: Tensor) -> None:
        super().__init__()
        self.W, self.U, self.b = (torch.nn.Parameter(t.clone()) for t in (W, U, b))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return tanh_map(z, x, self.W, self.U, self.b)


def _time_the_driver() -> list[float]:
    """Seconds that each solve spends in the driver and the solver, appended as it happens."""
    seconds: list[float] = []
    find = request.find

    def watched(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return find(*args)
        finally:
            seconds.append(time.perf_counter() - start)

    request.find = watched
    return seconds


def machinery_rows(repeats: int) -> dict[str, dict[str, float]]:
    """What surrounds the solver and the linear solver, in milliseconds a call (n = 16), less what the map itself costs."""
    x, W, U, b = make(1, 16)
    z = torch.zeros_like(x)
    for _ in range(500):
        z = tanh_map(z, x, W, U, b)
    leaves = [t.clone().requires_grad_() for t in (x, W, U, b)]
    cell = _Cell(W, U, b)
    options: dict[str, Any] = {
        "solver": _Known(),
        "rule": ik.Implicit(linear_solver=_Identity()),
        "batch_dims": 1,
        "rtol": 1e-3,
    }
    calls: dict[str, Callable[[], Tensor]] = {
        "tensors": lambda: ik.fixed_point(tanh_map, z, tuple(leaves), **options).value,
        "module": lambda: ik.fixed_point(cell, z, (leaves[0],), **options).value,
    }
    rows = {}
    g = torch.ones_like(z)
    inside = _time_the_driver()
    for name, call in calls.items():
        forward, backward = [], []
        for _ in range(20 * repeats):
            native = timed(lambda: tanh_map(z, *leaves))
            start = time.perf_counter()
            out = call()
            forward.append(time.perf_counter() - start - native - inside.pop())
            reference = tanh_map(z, *leaves)
            native_backward = timed(lambda: tanh_map(z, *leaves)) + timed(lambda r=reference: r.backward(g))  # type: ignore[misc]
            start = time.perf_counter()
            out.backward(g)
            backward.append(time.perf_counter() - start - native_backward)
        rows[f"machinery forward, {name} (ms)"] = {"median": 1e3 * statistics.median(forward)}
        rows[f"machinery backward, {name} (ms)"] = {"median": 1e3 * statistics.median(backward)}
    return rows


def keep(rows: dict[str, dict[str, float]]) -> None:
    """Write the rows to ``benchmarks/results``."""
    kept = [
        results.row(name, row["median"], "ms" if name.endswith("(ms)") else "times the reference", target=TARGETS[name])
        for name, row in rows.items()
    ]
    results.save("bench_core", kept, (__doc__ or "").split("\n\n", 2)[2])


def main() -> None:
    """Run every row and print it beside its target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {
        **solve_rows(64, 128, options.repeats), **solve_rows(256, 512, max(3, options.repeats // 3)),
        **machinery_rows(options.repeats),
    }  # fmt: skip
    keep(rows)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'row':36} {'median':>8} {'target':>8}   details")
    for name, row in rows.items():
        details = ", ".join(f"{k} {v:.3g}" for k, v in row.items() if k != "median")
        print(f"{name:36} {row['median']:8.2f} {TARGETS[name]:8.2f}   {details}")


if __name__ == "__main__":
    main()
