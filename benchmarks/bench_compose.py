"""Compositions: evaluations, depth, matrix-vector products and overhead, against solving and differentiating by hand.

    python benchmarks/bench_compose.py [--seeds 8] [--json]

- stacked: two tanh equilibria of dimension 64, Jacobian spectral radius 0.9 at the solution, relative error 1e-4 in the last
  state; each scheme at the loosest tolerance of a grid that gets there ("by hand": one solve after the other, with one
  tolerance for both, and with the best pair);
- adjoint: node-level reverse passes of one gradient of that pair, by blocks, jointly, and layer after layer;
- feedback: a linear pair whose exact block Gauss-Seidel rate is 0.6, relative error 1e-6;
- overhead: 50 modules in a chain and 200 nodes with loops, width 64, batch 64: time outside the nodes' maps and outside the
  solver's own arithmetic, as a share of the time of the maps.

Counts are medians over seeds; times are the smallest of repeats, processor time, one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import results
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
    """The figures at the loosest tolerance, from five times the goal on, that reaches it."""
    for rtol in (t for t in TOLERANCES if t <= 5 * goal):
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
            for t in TOLERANCES[::3]
            for s in TOLERANCES[::3]
            if goal / 30 <= min(s, t) and max(s, t) <= 5 * goal
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


def broyden(g: Callable[[Tensor], Tensor], z: Tensor, steps: int) -> list[Tensor]:
    """The iterates of Broyden's good method from ``H = -I`` on ``g(z) = 0``, ``z (n,)``: dense, by the book (Nocedal &
    Wright 2006, section 11.1), one evaluation each."""
    H = -torch.eye(len(z), dtype=z.dtype)
    r, path = g(z), [z]
    for _ in range(steps):
        step = -H @ r
        z = z + step
        new = g(z)
        Hy = H @ (new - r)
        H = H + torch.outer(step - Hy, step @ H) / (step @ Hy)
        r = new
        path.append(z)
    return path


def feedback_rows(seeds: int, rate: float = 0.6, goal: float = 1e-6) -> dict[str, list[Any]]:
    """Evaluations and depth on the pair with a loop."""
    rows: dict[str, list[Any]] = {}
    for seed in range(seeds):
        joint, start, x, exact = feedback(seed, rate=rate)

        def error(value: dict[str, Tensor], exact: Tensor = exact) -> float:
            return float((value["b"] - exact).norm() / exact.norm())

        schemes: dict[str, Any] = {
            "accelerated sweep": ik.Blocks(),
            "plain sweep": ik.Blocks(cyclic="picard"),
            "joint anderson": "anderson",
            "joint picard": "picard",
        }
        if "broyden" in ik.solvers():
            schemes["joint broyden (registered)"] = "broyden"
        for name, solver in schemes.items():
            rows.setdefault(name, []).append(loosest(composed(joint, start, x, error, solver), goal))
        n = x.shape[1]

        def split(z: Tensor, n: int = n) -> dict[str, Tensor]:
            return {"a": z[None, :n], "b": z[None, n:]}

        def residual(z: Tensor, joint: Any = joint, x: Tensor = x, split: Any = split) -> Tensor:
            return torch.cat([t[0] for t in joint.gamma(split(z), x).values()]) - z

        path = broyden(residual, x.new_zeros(2 * n), 150)
        count = next(i for i, z in enumerate(path, 1) if error(split(z)) <= goal)
        rows.setdefault("joint broyden (by the book)", []).append((2 * count, count))
        rows.setdefault("nested", []).append(loosest(lambda t: nested(joint, start, x, error, t), goal))  # noqa: B023
    return rows


def nested(
    joint: Any, start: dict[str, Tensor], x: Tensor, error: Callable[[Any], float], rtol: float
) -> tuple[tuple[int, int], float]:
    """Node a solved by Anderson with node b solved, by Anderson from its last state, in every step."""
    options: dict[str, Any] = {"solver": "anderson", "batch_dims": 1, "atol": 0.0, "on_failure": "ignore"}
    a, b = (joint.graph.nodes[name]["map"] for name in ("a", "b"))
    inner, calls = start["b"], 0

    def outer(z: Tensor) -> Tensor:
        nonlocal inner, calls
        found = ik.fixed_point(b, inner, (z,), rtol=0.1 * rtol, **options)
        inner, calls = found.value, calls + found.evaluations
        return a(z, inner, x)

    with torch.no_grad():
        s = ik.fixed_point(outer, start["a"], (), rtol=rtol, **options)
    total = calls + s.evaluations
    return (total, total), error({"b": inner})


class Counted(torch.autograd.Function):
    """The identity; counts the reverse passes through it."""

    passes: ClassVar[dict[str, int]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        """``x``."""
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        """``g``."""
        Counted.passes[ctx.name] = Counted.passes.get(ctx.name, 0) + 1
        return g, None


def adjoint_passes(pair: Pair, way: str, rtol: float = 1e-6) -> tuple[dict[str, int], tuple[Tensor, ...]]:
    """Reverse passes through each node's map for one gradient with respect to weights and input, and that gradient.

    ``way``: ``"layers"`` (one solve after the other), ``"blocks"`` or ``"joint"`` (GMRES on all of it).
    """
    for t in (*pair.weights, pair.x):
        t.requires_grad_()
    f, v = lambda z, x: Counted.apply(pair.f(z, x), "f"), lambda z, w: Counted.apply(pair.v(z, w), "v")
    options: dict[str, Any] = {"batch_dims": 1, "rtol": 1e-9, "atol": 0.0}
    if way == "layers":
        rule = ik.Implicit(linear_solver="gmres", rtol=rtol)
        w = ik.fixed_point(f, pair.start, (pair.x,), solver="anderson", rule=rule, **options).value
        z = ik.fixed_point(v, pair.start, (w,), solver="anderson", rule=rule, **options).value
    else:
        linear = ik.linear.BlockSubstitution("gmres") if way == "blocks" else "gmres"
        joint = ik.compose({"f": (f, "x"), "v": (v, "f")}, output="v")
        rule = ik.Implicit(linear_solver=linear, rtol=rtol)
        start = {"f": pair.start, "v": pair.start}
        z = ik.solve(joint, start, (pair.x,), solver=ik.Blocks(), rule=rule, **options).value["v"]
    Counted.passes = {}
    gradient = torch.autograd.grad(z.sum(), (*pair.weights, pair.x))
    return dict(Counted.passes), gradient


# ------------------------------------------------------------------------------------------------------------ overhead
class Cell(torch.nn.Module):
    """``tanh(z W + sum_i u_i U_i)``, spectral norm of ``W`` below one."""

    def __init__(self, width: int, reads: int, gain: float, generator: torch.Generator) -> None:
        super().__init__()
        W = torch.randn(width, width, generator=generator)
        self.W = torch.nn.Parameter(gain * W / torch.linalg.matrix_norm(W, 2))
        self.U = torch.nn.ParameterList(
            0.5 * torch.randn(width, width, generator=generator) / (width * max(1, reads)) ** 0.5 for _ in range(reads)
        )

    def forward(self, z: Tensor, *reads: Tensor) -> Tensor:
        """The map."""
        total = z @ self.W
        for read, U in zip(reads, self.U, strict=True):
            total = total + read @ U
        return torch.tanh(total)


class Timed:
    """A map that adds up the processor time of its calls."""

    def __init__(self, function: Any) -> None:
        self.function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, z: Tensor, *reads: Tensor) -> Tensor:
        begin = time.thread_time()
        out: Tensor = self.function(z, *reads)
        self.seconds += time.thread_time() - begin
        self.calls += 1
        return out


def long_chain(count: int = 50, width: int = 64, gain: float = 0.9, seed: int = 0) -> dict[str, Any]:
    """Nodes of a chain, each reading the one before."""
    g = torch.Generator().manual_seed(seed)
    return {f"n{i}": (Timed(Cell(width, 1, gain, g)), "x" if i == 0 else f"n{i - 1}") for i in range(count)}


def random_graph(count: int = 200, width: int = 64, gain: float = 0.8, seed: int = 0) -> dict[str, Any]:
    """Nodes that read one or two of the ten before them, and every tenth one the node three further on: loops."""
    pick, g = random.Random(seed), torch.Generator().manual_seed(seed)
    nodes: dict[str, Any] = {}
    for i in range(count):
        reads = [f"n{j}" for j in pick.sample(range(max(0, i - 10), i), min(i, 1 + i % 2))] or ["x"]
        if i % 10 == 5:
            reads.append(f"n{i + 3}")
        nodes[f"n{i}"] = (Timed(Cell(width, len(reads), gain, g)), *reads)
    last = f"n{count - 1}"
    read = {r for _, *reads in nodes.values() for r in reads}
    unread = [name for name in nodes if name not in read and name != last]
    nodes["out"] = (Timed(Cell(width, 1 + len(unread), gain, g)), last, *unread)  # every node can reach the output
    return nodes


def in_turn(joint: Any, x: Tensor, start: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The composition by hand: ``ik.fixed_point`` for one component after another, a loop as one fixed point over a dict."""
    states: dict[str, Tensor] = {}
    for block in joint.blocks:
        plans = {n: (joint.graph.nodes[n]["map"], joint.graph.nodes[n]["reads"]) for n in block}
        if len(block) == 1:
            ((name, (function, reads)),) = plans.items()
            known = tuple(x if r in joint.inputs else states[r] for r in reads)
            states[name] = ik.fixed_point(function, start[name], known, **options).value
            continue

        def sweep(z: dict[str, Tensor], plans: Any = plans) -> dict[str, Tensor]:
            z = dict(z)
            for name, (function, reads) in plans.items():
                z[name] = function(z[name], *(x if r in joint.inputs else z.get(r, states.get(r)) for r in reads))
            return z

        states.update(ik.fixed_point(sweep, {n: start[n] for n in block}, (), **options).value)
    return states


@dataclass
class Overhead:
    """Processor times in seconds. maps: inside the maps. blocks, by_hand: whole solves. sweep: calls of the joint map;
    sweep_maps: the same calls of the maps without it."""

    maps: float
    blocks: float
    by_hand: float
    sweep: float
    sweep_maps: float
    calls: int
    calls_by_hand: int

    @property
    def evaluation(self) -> float:
        """What the graph adds to one evaluation of all nodes, as a share of theirs."""
        return (self.sweep - self.sweep_maps) / self.sweep_maps

    @property
    def solve(self) -> float:
        """What the graph adds to the same solves made by hand, as a share of the time of the maps; calls of maps that only
        one of the two makes are left out, at the time of a map each."""
        extra = (self.calls - self.calls_by_hand) * self.maps / self.calls
        return (self.blocks - self.by_hand - extra) / self.maps


def overhead(nodes: dict[str, Any], batch: int = 64, width: int = 64, repeats: int = 5) -> Overhead:
    """The smallest of repeats, processor time."""
    joint = ik.compose(nodes, output=list(nodes)[-1])
    maps = [entry[0] for entry in nodes.values()]
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(1))
    start = {name: torch.zeros(batch, width) for name in joint.graph}
    options: dict[str, Any] = {"batch_dims": 1, "rtol": 1e-4, "atol": 0.0}

    def watch(run: Callable[[], Any]) -> tuple[float, float, int]:
        for m in maps:
            m.seconds, m.calls = 0.0, 0
        begin = time.thread_time()
        run()
        return time.thread_time() - begin, sum(m.seconds for m in maps), sum(m.calls for m in maps)

    plain = ik.compose({n: (entry[0].function, *entry[1:]) for n, entry in nodes.items()}, output=joint.output_node)
    bare = [
        (entry[0].function, (start[name], *(start.get(read, x) for read in entry[1:]))) for name, entry in nodes.items()
    ]
    runs = (
        lambda: ik.solve(joint, start, (x,), solver=ik.Blocks(), **options),
        lambda: in_turn(joint, x, start, solver="anderson", **options),
        lambda: [plain.gamma(start, x) for _ in range(10)],
        lambda: [[f(*known) for f, known in bare] for _ in range(10)],
    )
    with torch.no_grad():
        for run in runs:
            run()
        # interleaved, and the smallest: other processes only ever add
        found = [[watch(run) for run in runs] for _ in range(repeats)]
    (blocks, in_maps, calls), (by_hand, _, calls_by_hand), (sweep, *_), (sweep_maps, *_) = (
        min(row) for row in zip(*found, strict=True)
    )
    return Overhead(in_maps, blocks, by_hand, sweep, sweep_maps, calls, calls_by_hand)


# ---------------------------------------------------------------------------------------------------------------- report
def medians(rows: dict[str, list[Any]]) -> dict[str, tuple[float, float]]:
    """Median evaluations and median depth of each scheme."""
    return {
        name: (statistics.median(e for e, _ in found), statistics.median(d for _, d in found))
        for name, found in rows.items()
    }


def keep(report: dict[str, Any]) -> None:
    """Write the figures to ``benchmarks/results``."""
    kept = []
    for title, rows in report.items():
        for name, found in rows.items():
            value, more = (found[0], {"depth": found[1]}) if isinstance(found, tuple) else (found, {})
            timed = title.startswith("overhead")
            unit = ("times" if "/" in name else "of the maps' time") if timed else "evaluations"
            kept.append(results.row(f"{title}: {name}", value, unit, **more))
    results.save("bench_compose", kept, __doc__.split("\n\n", 2)[2])  # type: ignore[union-attr]


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "stacked pair": medians(stacked_rows(arguments.seeds)),
        "feedback pair": medians(feedback_rows(arguments.seeds)),
        "reverse passes": {
            way: statistics.median(sum(adjoint_passes(stacked(s), way)[0].values()) for s in range(arguments.seeds))
            for way in ("layers", "blocks", "joint")
        },
    }
    for name, nodes in (("50 in a chain", long_chain()), ("200 with loops", random_graph())):
        found = overhead(nodes)
        report[f"overhead, {name}"] = {
            "of an evaluation of all nodes": round(found.evaluation, 4),
            "of a solve, beyond the same solves by hand": round(found.solve, 4),
            "time by blocks / by hand": round(found.blocks / found.by_hand, 3),
        }
    keep(report)
    if arguments.json:
        print(json.dumps(report, indent=1))
        return
    for title, rows in report.items():
        print(title)
        for name, figures in rows.items():
            if isinstance(figures, tuple):
                print(f"  {name:<32} {figures[0]:7.1f} evaluations   depth {figures[1]:7.1f}")
            else:
                print(f"  {name:<44} {figures}")


if __name__ == "__main__":
    main()
