"""TorchDEQ's model zoo, each model run through TorchDEQ and through implicitkit on the same weights and the same data.

    pip install -e '.[demo,peers]'
    python benchmarks/bench_zoo.py [--only flow] [--json] [--steps 5] [--no-keep]

The models are those of deq-zoo at small width (``benchmarks/zoo``): the DEQ-Transformer as a language model, MDEQ, IGNN on
chains, DEQ-Flow's update block, DEQ-INR.  Each is trained for a few seconds as a layer, which gives the weights; then both
libraries solve it for data that it has not seen.  What is right is found by neither: plain iteration to rounding and SciPy's
GMRES, in double precision.  ``gradient``: of the model's loss by the cell's input and by every parameter, the error relative
to its length.

1. *Same tolerance*: double precision, relative residual 1e-10 forward and backward.  TorchDEQ with the exact gradient
   (``ift``) and that of its solvers which takes the least time, implicitkit with ``relay``.  Where value or gradient of
   either differs from what is right by more than 1e-6, the script says so and ends with an error.
2. *Own defaults*: TorchDEQ as the script of its zoo for this model runs it, implicitkit as ``DEQ(model)``, with no option.
3. *Equal error*: single precision; each library with those of its solvers and tolerances (both ways the same) which bring
   the gradient to an error of at most 1e-3 (or, where rounding does not allow that, 1e-2) in the least time.

Times are of value and gradient together: the least of several CPU times, taken in turn.  ``cell``: applications of the cell
forward, ``vjp``: vectors that went back through it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import implicitkit as ik
from benchmarks import results
from benchmarks.zoo import (
    ZOO,
    Exact,
    Model,
    doubled,
    drop_in,
    exact,
    flat,
    gradient,
    layer_of,
    tallied,
    torchdeq_way,
    train,
)  # fmt: skip

TIGHT, BOUND = 1e-10, 1e-6
GOALS = (1e-3, 1e-2)
TOLERANCES = (1e-2, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6)
THEIRS, OURS = ("fixed_point_iter", "anderson", "broyden"), ("picard", "anderson", "broyden", "relay")


@dataclass(frozen=True)
class Task:
    """A model with data, and what is right for them."""

    model: Model
    inputs: tuple[Tensor, ...]
    target: Tensor
    right: Exact


@dataclass(frozen=True)
class Run:
    """One library on one task: how it solves, and how well and how fast it did."""

    solve: Callable[..., Any]
    said: str
    value: float
    gradient: float
    seconds: float
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)  # cells and vjps in the forward, then in the backward

    @property
    def figures(self) -> dict[str, Any]:
        """For a row of the JSON."""
        calls, _, again, products = self.counts
        counts = {"cells": calls + again, "vjps": products}
        return {"ms": 1e3 * self.seconds, "value error": self.value, "gradient error": self.gradient, **counts}


# --------------------------------------------------------------------------------------------------------- who solves how
def theirs(model: Model, solver: str, tolerance: float, steps: int = 300) -> Callable[..., Any]:
    """TorchDEQ's exact gradient, forward and backward alike."""
    both = {"solver": solver, "tol": tolerance, "stop_mode": "rel", "max_iter": steps}
    options = {f"{way}_{name}": value for way in "fb" for name, value in both.items()}
    return torchdeq_way(model, ift=True, **options)


def ours(model: Model, solver: str, tolerance: float) -> Callable[..., Any]:
    """The drop-in."""
    return drop_in(model, solver=solver, rtol=tolerance, atol=0.0, rule=ik.Implicit(rtol=tolerance))


# --------------------------------------------------------------------------------------------------------------- measuring
def once(task: Task, solve: Callable[..., Any]) -> tuple[Any, Tensor, float]:
    """Value, gradient, and the CPU time of both."""
    begin = time.process_time()
    z = solve(*task.inputs)
    g = gradient(task.model, task.inputs, task.model.loss(z, task.target))
    return z, g, time.process_time() - begin


def judged(task: Task, solve: Callable[..., Any], said: str) -> Run:
    """Errors of a run; a run that fails has infinite ones."""
    try:
        z, g, seconds = once(task, solve)
    except ik.ConvergenceError:
        return Run(solve, said, float("inf"), float("inf"), float("inf"))
    apart = lambda a, b: float((flat(a) - b).norm() / b.norm())  # noqa: E731
    return Run(solve, said, apart(z, task.right.state), apart(g, task.right.gradient), seconds)


def counted(task: Task, solve: Callable[..., Any]) -> tuple[int, int, int, int]:
    """Cells and vjps, forward, and those of the backward."""
    with tallied(task.model) as tally:
        loss = task.model.loss(solve(*task.inputs), task.target)
        forward = tally.calls, tally.products
        gradient(task.model, task.inputs, loss)
    return (*forward, tally.calls - forward[0], tally.products - forward[1])


def timed(task: Task, runs: Sequence[Run], repeats: int = 5) -> list[Run]:
    """The same runs, each with its least time of several, in turn, and its counts."""
    least = [float("inf")] * len(runs)
    for _ in range(repeats):
        for i, run in enumerate(runs):
            least[i] = min(least[i], once(task, run.solve)[2])
    return [
        Run(r.solve, r.said, r.value, r.gradient, seconds, counted(task, r.solve))
        for r, seconds in zip(runs, least, strict=True)
    ]


def cheapest(task: Task, candidates: Sequence[tuple[str, Callable[..., Any]]], goal: float) -> Run | None:
    """Of the runs whose gradient is that good the fastest: the first few by one time, then in turn."""
    good = [run for said, solve in candidates if (run := judged(task, solve, said)).gradient <= goal]
    few = sorted(good, key=lambda run: run.seconds)[:4]
    return min(timed(task, few, 3), key=lambda run: run.seconds) if few else None


# ---------------------------------------------------------------------------------------------------------- the three parts
def same_tolerance(name: str, task: Task) -> tuple[dict[str, Any], list[str]]:
    """Part 1: the row, and what is wrong."""
    model, inputs, target = doubled(task.model, task.inputs, task.target)
    task = Task(model, inputs, target, task.right)
    tried = [judged(task, theirs(model, solver, TIGHT, 1000), solver) for solver in THEIRS if solver != "anderson"]
    best = min(tried, key=lambda run: run.seconds)
    mine = judged(task, ours(model, "relay", TIGHT), "relay")
    wrong = [
        f"{name}: {who} ({run.said}) differs from the oracle by {run.value:.0e} (value), {run.gradient:.0e} (gradient)"
        for who, run in (("implicitkit", mine), ("torchdeq", best))
        if not (run.value <= BOUND and run.gradient <= BOUND)
    ]
    if wrong:
        return results.row(f"{name}, same tolerance", float("inf"), "times TorchDEQ's time", failed=wrong[0]), wrong
    mine, best = timed(task, [mine, best], 3)
    return _row(f"{name}, same tolerance", mine, best), []


def defaults(name: str, task: Task) -> dict[str, Any]:
    """Part 2."""
    runs = [
        judged(task, layer_of(task.model), "DEQ(model)"),
        judged(task, torchdeq_way(task.model, **task.model.zoo), "its zoo"),
    ]
    return _row(f"{name}, own defaults", *timed(task, runs))


def equal_error(name: str, task: Task) -> dict[str, Any]:
    """Part 3."""
    for goal in GOALS:
        best = [
            cheapest(task, [(f"{s} {t:g}", make(task.model, s, t)) for s in solvers for t in TOLERANCES], goal)
            for make, solvers in ((ours, OURS), (theirs, THEIRS))
        ]
        if best[0] is not None and best[1] is not None:
            mine, other = timed(task, [best[0], best[1]])
            return _row(f"{name}, equal error", mine, other) | {"goal": goal}
    return results.row(f"{name}, equal error", float("inf"), "times TorchDEQ's time", failed="no setting is that exact")


def _row(name: str, mine: Run, other: Run) -> dict[str, Any]:
    details = {f"{who} {k}": v for who, run in (("ours", mine), ("theirs", other)) for k, v in run.figures.items()}
    said = {"ours by": mine.said, "theirs by": other.said}
    return results.row(name, mine.seconds / other.seconds, "times TorchDEQ's time", **details, **said)


def prepare(name: str, steps: int | None) -> Task:
    """A trained model, and what is right for it."""
    torch.manual_seed(0)
    model = ZOO[name]()
    train(model, steps)
    inputs, target = model.example()
    return Task(model, inputs, target, exact(model, inputs, target))


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if "failed" in row:
        return f"{row['row']:32s} FAILED: {row['failed']}"
    sides = (
        f"{row[f'{who} ms']:7.1f} ms, value {row[f'{who} value error']:.0e}, gradient {row[f'{who} gradient error']:.0e}, "
        f"{row[f'{who} cells']} + {row[f'{who} vjps']} ({row[f'{who} by']})"
        for who in ("ours", "theirs")
    )
    return f"{row['row']:32s} {row['value']:5.2f}  " + "   |   ".join(sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ZOO), nargs="+", help="some models; nothing is kept")
    parser.add_argument("--steps", type=int, help="of training, for all; nothing is kept")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--no-keep", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args()
    if importlib.util.find_spec("torchdeq") is None:
        print("torchdeq is not installed: pip install -e '.[demo,peers]'")
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, wrong = [], []
    for name in options.only or ZOO:
        task = prepare(name, options.steps)
        first, found = same_tolerance(name, task)
        wrong += found
        for row in (first, defaults(name, task), equal_error(name, task)):
            rows.append(row)
            if not options.json:
                print(line(row), flush=True)
    if options.json:
        print(json.dumps(rows, indent=1))
    if not (options.only or options.steps is not None or options.no_keep):
        results.save("bench_zoo", rows, __doc__ or "")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
