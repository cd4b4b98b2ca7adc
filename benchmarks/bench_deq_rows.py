"""A DEQ layer where users live: evaluations beside those of the best possible method, seconds beside a bare loop's.

    pip install torchdeq                     # left out if missing
    python benchmarks/bench_deq_rows.py [--repeats 9] [--json]                 # a quarter of an hour
    python benchmarks/bench_deq_rows.py --sizes 64x128 --rows outliers rotation    # the others stay as they are

``z = tanh(W z + U x + b)``, float32, one thread, forward and backward, relative tolerance 1e-4 both ways. Rows:

- ``disk``: the spectrum of the Jacobian fills a disk of radius 0.9: no Krylov method can do much better than the plain loop.
- ``outliers``: three eigenvalues near 0.97, the others within 0.3.
- ``rotation``: eigenvalues near -1.5, as trained cells have them: the plain loop diverges.
- ``heterogeneous``: one sample in sixteen is as slow as ``outliers``, the others are saturated.
- ``training``: fifty steps of Adam on the same samples, warm starts.

``best``: products of full GMRES for ``(I - J) e = r_0`` at the solution, mean over the samples (of 256: every 17th): no
method that sees ``J`` by products needs fewer, for the linearised problem and for the backward; so 1 of it is asked.
``evaluations``: ours, forward + backward, mean over the samples. ``around``: CPU time of ours over that of a loop that makes
as many evaluations and products with the transposed, and nothing else; at most 2 is asked at (64, 128), 1.2 at (256, 512).
``vectors``: CPU time of that loop with what Anderson's method and GMRES do to whole vectors besides (differences, products
with the memory or the basis, combinations, one norm each), but without a test, a best point or anything sample by sample,
over that of the loop: where the row is solved by them, no ``around`` can be less.
``bare``: that of the plain loop with a stopping test on the whole batch, forward and backward by its own iteration, over
ours (``-`` where it diverges). ``torchdeq``: that of its fastest solver that reaches the tolerance, over ours; 3 is asked in
all rows but ``disk``. ``equal error``: the same at the loosest tolerance (a quarter of a decade) at which its gradient is as
exact as ours, ``error`` (``gradient_errors.py``): 3 is asked of that. In ``training`` TorchDEQ starts from the last
equilibria, ours, as by default, where the last ones lead.
JAXopt is not in it.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import results
import torch
from bench_deq import TanhCell
from deq_loops import as_many, bare, with_vectors
from gradient_errors import equal_tolerance, exact_gradient, relative_error
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import DEQ

TOL, LIMIT = 1e-4, 400
LOOKS = (10, 20, 40)  # steps of a training at which its gradient is compared with the exact one
SIZES = {(64, 128): 2.0, (256, 512): 1.2}  # and what ours may take beside a loop of as many evaluations
ROWS = ("disk", "outliers", "rotation", "heterogeneous", "training")
FASTER = 3.0  # than TorchDEQ, where users live
SOLVERS = ("fixed_point_iter", "anderson", "broyden")  # TorchDEQ's
#: Why a figure may be above what is asked, by row (or for all) and figure.
REASONS = {
    "evaluations": "Anderson's differences are of nonlinear steps, and 8 of them are kept; GMRES keeps all",
    "disk: evaluations": "most steps and products are plain ones on purpose: Krylov vectors win little here, and cost more",
    "around": "32 operations of torch an evaluation and 36 a product (below autograd, outliers, (64, 128)): mixing, "
    "orthogonalising and tests by sample, those of a call divided among them; 3 in the loop.  What the methods do to whole "
    "vectors, with no test at all, is most of what is asked (row vectors), or more than that at (256, 512); and a call that "
    "needs one evaluation takes 2 ms, more than the whole loop (64, 128)",
    "disk: around": "13 operations of torch an evaluation and 20 a product, those of a call divided among them; 3 in "
    "the loop (below autograd, (64, 128))",
    "heterogeneous: around": "counted are evaluations a sample: most of the calls are for the slow sixteenth alone",
    "rotation: torchdeq": "its Anderson takes twice our evaluations; at (256, 512) a loop of the fewest possible and "
    "nothing else would be 2.5 times as fast as it, and at (64, 128) what surrounds ours decides",
    "rotation: equal error": "as at equal tolerance; its gradient is as exact as ours at a tolerance twice as large",
    "training: torchdeq": "near starts, a map that contracts: its plain iteration takes more evaluations with less around; "
    "at (64, 128) a quarter of our time is that of two calls, whatever they solve",
    "training: equal error": "as at equal tolerance; its gradient is as exact as ours at three times the tolerance",
}
Problem = tuple[Tensor, Tensor, Tensor, Tensor]  # x, W, U, b


def _spectrum(dim: int, inner: float, outer: list[float], generator: torch.Generator) -> Tensor:
    """A matrix with these eigenvalues, the others in a disk; near to normal."""
    Q = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64)).Q
    core = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    core *= inner / torch.linalg.eigvals(core).abs().max()
    k = len(outer)
    core[:k], core[:, :k] = 0, 0
    core[:k, :k] = torch.diag(torch.tensor(outer, dtype=torch.float64))
    return (Q @ core @ Q.mT).float()


def problems(batch: int, dim: int) -> dict[str, Problem]:
    """Every row's data; inputs are small where slopes are to be near one."""
    g = torch.Generator().manual_seed(0)
    x, U, b = torch.randn(batch, dim, generator=g), torch.randn(dim, dim, generator=g) / dim**0.5, torch.zeros(dim)
    outliers = _spectrum(dim, 0.3, [0.97, 0.96, 0.95], g)
    sizes = torch.where(torch.arange(batch) % 16 == 0, 0.05, 4.0).unsqueeze(1)
    return {
        "disk": (0.05 * x, _spectrum(dim, 0.9, [], g), U, b),
        "outliers": (0.05 * x, outliers, U, b),
        "rotation": (0.05 * x, _spectrum(dim, 0.5, [-1.5, -1.4], g), U, b),
        "heterogeneous": (sizes * x, outliers, U, b),
        "training": (x, _spectrum(dim, 0.9, [], g), U, b),
    }


def layer_of(cell: TanhCell, dim: int, init: str | None = "zeros") -> DEQ:
    """The default layer at the tolerance of the comparison."""
    return DEQ(cell, (dim,), rtol=TOL, atol=0.0, rule=ik.Implicit(rtol=TOL), init=init)


def best_possible(cell: TanhCell, x: Tensor, z: Tensor) -> float:
    """Products of full GMRES from the residual of the start, mean over the samples, in float64."""
    W, b, U = (t.detach().double() for t in (cell.W, cell.b, cell.U))
    slope = 1 - z.double() ** 2
    A = torch.eye(len(W), dtype=torch.float64) - slope.unsqueeze(2) * W.mT
    r0 = torch.tanh(x.double() @ U + b)
    counts = []
    for i in range(0, len(z), 17 if len(z) > 64 else 1):
        basis = [r0[i] / r0[i].norm()]
        while len(basis) <= len(W):
            AK = A[i] @ torch.stack(basis, 1)
            rest = r0[i] - AK @ torch.linalg.lstsq(AK, r0[i].unsqueeze(1)).solution.squeeze(1)
            if rest.norm() <= TOL * z[i].double().norm():
                break
            new = AK[:, -1]
            for _ in range(2):
                new = new - sum((new @ q) * q for q in basis)
            basis.append(new / new.norm())
        counts.append(min(len(basis), len(W)))
    return statistics.fmean(counts)


def peer(solver: str, tol: float) -> Any:
    """TorchDEQ's layer with one solver and one relative tolerance both ways."""
    from torchdeq import get_deq

    limits = {"f_max_iter": LIMIT, "b_max_iter": LIMIT, "f_stop_mode": "rel", "b_stop_mode": "rel"}
    return get_deq(f_solver=solver, b_solver=solver, f_tol=tol, b_tol=tol, ift=True, **limits)


def torchdeq(cell: TanhCell, x: Tensor, c: Tensor, solver: str, tol: float = TOL) -> bool:
    """TorchDEQ with one solver both ways; did every sample reach the tolerance?"""
    (injected,) = cell.inject(x)
    z, info = peer(solver, tol)(lambda z: cell.update(z, injected), torch.zeros_like(injected))
    (z[-1] * c).sum().backward()
    return bool((info["rel_lowest"] <= 1.01 * tol).all())


def _ours(layer: DEQ, x: Tensor, c: Tensor) -> bool:
    (layer(x) * c).sum().backward()
    return bool(layer.solution.converged.all())  # type: ignore[union-attr]


def training(
    problem: Problem, c: Tensor, how: str, steps: int = 50, tol: float = TOL, looks: Sequence[int] = ()
) -> tuple[float, float, float, float]:
    """Milliseconds and evaluations of a step of Adam on the same samples, the last loss, and the relative error of the
    gradient, mean over the steps ``looks``.

    Args:
        how: ``"zeros"``, ``"last"`` (ours, from zero or as by default), or a solver of TorchDEQ from the last equilibrium.
    """
    x, W, U, b = problem
    cell, last = TanhCell(W, U, b), torch.zeros_like(c)
    if how in SOLVERS:
        deq = peer(how, tol)
    else:
        layer = layer_of(cell, len(W), "zeros" if how == "zeros" else None)
    optimiser = torch.optim.Adam(cell.parameters(), 1e-3)
    evaluations, errors, start = 0.0, [], time.process_time()
    for step in range(steps):
        if how in SOLVERS:
            (injected,) = cell.inject(x)
            (*_, z), info = deq(functools.partial(_swapped, cell, injected), last)
            last = z.detach()
            evaluations += float(info["nstep"].mean())
        else:
            z = layer(x)
            evaluations += layer.solution.evaluations  # type: ignore[union-attr]
        loss = (z - c.tanh()).square().mean()
        optimiser.zero_grad()
        loss.backward()
        if step in looks:
            exact = exact_gradient(cell, x, z, lambda z: 2 * (z - c.double().tanh()) / z.numel())
            errors.append(relative_error(cell, exact))
        optimiser.step()
    ms = 1e3 * (time.process_time() - start) / steps
    return ms, evaluations / steps, float(loss.detach()), statistics.fmean(errors) if errors else math.nan


def _swapped(cell: TanhCell, injected: Tensor, z: Tensor) -> Tensor:
    return cell.update(z, injected)


def trained(problem: Problem, c: Tensor, repeats: int) -> dict[str, Any]:
    """The figures of the row ``training``, medians of runs that take turns."""
    hows = ("zeros", "last", *(SOLVERS if importlib.util.find_spec("torchdeq") else ()))
    runs: dict[str, list[tuple[float, float, float, float]]] = {how: [] for how in hows}
    for _ in range(repeats):
        for how in hows:
            runs[how].append(training(problem, c, how))
    ms = {how: statistics.median(run[0] for run in found) for how, found in runs.items()}
    peers = {how: ms[how] for how in SOLVERS if how in ms}
    best = min(peers, key=peers.__getitem__) if peers else None
    error = training(problem, c, "last", looks=LOOKS)[3]
    figures = {"ms": ms["last"], "ms_from_zero": ms["zeros"], "evaluations": runs["last"][0][1]}
    figures |= {"evaluations_from_zero": runs["zeros"][0][1], "loss": runs["last"][0][2]}
    if best is not None:
        figures |= {"torchdeq": peers[best] / ms["last"], "torchdeq_solver": best}
        figures |= {"torchdeq_evaluations": runs[best][0][1], "torchdeq_loss": runs[best][0][2], "error": error}
        tol = equal_tolerance(lambda tol: training(problem, c, best, tol=tol, looks=LOOKS)[3], TOL, error)
        if tol is not None:
            turns = [
                [training(problem, c, how, tol=t)[0] for how, t in ((best, tol), ("last", TOL))] for _ in range(repeats)
            ]
            figures |= {"equal": statistics.median(theirs / ours for theirs, ours in turns), "equal_tolerance": tol}
    return figures


def row(problem: Problem, c: Tensor, repeats: int) -> dict[str, Any]:
    """The figures of another row."""
    x, W, U, b = problem
    cell = TanhCell(W, U, b)
    layer = layer_of(cell, len(W))
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: _ours(layer, x, c),
        "bare": lambda: bare(cell, x, c, TOL, LIMIT),
    }
    if importlib.util.find_spec("torchdeq"):
        for solver in SOLVERS:
            runs[solver] = functools.partial(torchdeq, cell, x, c, solver)
    good = [label for label, run in runs.items() if run()]
    solution = layer.solution
    assert solution is not None and solution.backward is not None
    forward, backward = (float(steps.double().mean()) for steps in (solution.steps, solution.backward.steps))
    # the calls that are made, whole batches where rows are not dropped
    calls = round(solution.sample_evaluations / len(x)), round(backward)
    runs["as many"] = lambda: as_many(cell, x, c, *calls)
    runs["vectors"] = lambda: with_vectors(cell, x, c, *calls)
    seconds: dict[str, list[float]] = {label: [] for label in (*good, "as many", "vectors")}
    for _ in range(repeats):
        for label, values in seconds.items():
            start = time.process_time()
            runs[label]()
            values.append(time.process_time() - start)
    median = {label: statistics.median(values) for label, values in seconds.items()}
    own, peers = median["ours"], {s: median[s] for s in SOLVERS if s in median}
    best = min(peers, key=peers.__getitem__) if peers else None
    exact = exact_gradient(cell, x, solution.value, lambda z: c.double())

    def error_of(run: Callable[[], Any]) -> float:
        cell.zero_grad()
        return relative_error(cell, exact) if run() else math.inf

    error, equal = error_of(runs["ours"]), []
    for solver in peers:  # at its own tolerance for as exact a gradient
        tol = equal_tolerance(lambda t: error_of(lambda: torchdeq(cell, x, c, solver, t)), TOL, error)  # noqa: B023
        if tol is not None:
            both = functools.partial(torchdeq, cell, x, c, solver, tol), runs["ours"]
            turns = [[*map(_seconds, both)] for _ in range(repeats)]
            equal.append((statistics.median(theirs / ours for theirs, ours in turns), solver, tol))
    return {
        "best": best_possible(cell, x, solution.value),
        "forward": forward,
        "backward": backward,
        "solver": solution.solver,
        "ms": 1e3 * own,
        "around": own / median["as many"],
        "vectors": median["vectors"] / median["as many"],
        "bare": median["bare"] / own if "bare" in median else None,
        "torchdeq": None if best is None else peers[best] / own,
        "torchdeq_solver": best,
        "error": error,
        **dict(zip(("equal", "equal_solver", "equal_tolerance"), min(equal), strict=True) if equal else ()),
    }


def _seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def kept(name: str, size: tuple[int, int], found: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that ``benchmarks/results`` keeps."""
    label, rows = f"{name}, {size[0]}x{size[1]}", []

    def add(what: str, value: float, unit: str, target: float | None, more: bool, **details: Any) -> None:
        missed = target is not None and (value < target if more else value > target)
        why = REASONS.get(f"{name}: {what}") or REASONS.get(what)
        reason = {"reason": why} if missed and why else {}
        rows.append(results.row(f"{label}: {what}", value, unit, target=target, more=more, **details, **reason))

    if "forward" in found:
        share = (found["forward"] + found["backward"]) / (2 * found["best"])
        counts = {key: found[key] for key in ("best", "forward", "backward", "solver")}
        add("evaluations", share, "times those of the best possible method", 1.0, False, **counts)
        add("around", found["around"], "times a loop of as many evaluations", SIZES[size], False, ms=found["ms"])
        add(
            "vectors", found["vectors"], "times the loop, with the vectors of acceleration and no decision", None, False
        )
        if found["bare"] is not None:
            add("plain loop", found["bare"], "times as fast as the plain loop", None, True)
    if found.get("torchdeq") is not None:
        details = {k: v for k, v in found.items() if k.startswith("torchdeq_") or k == "ms" or "zero" in k}
        details |= {k: found[k] for k in ("evaluations", "loss") if k in found}
        target = None if name == "disk" else FASTER
        add("torchdeq", found["torchdeq"], "times as fast as TorchDEQ's best", target, True, **details)
    if "equal" in found:
        details = {k: v for k, v in found.items() if k.startswith("equal_") or k == "error"}
        target = None if name == "disk" else FASTER
        add("equal error", found["equal"], "times as fast as TorchDEQ at as exact a gradient", target, True, **details)
    return rows


def main() -> None:
    """Print the table; keep the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    sizes = {f"{batch}x{dim}": (batch, dim) for batch, dim in SIZES}
    parser.add_argument("--sizes", nargs="+", default=list(sizes), choices=list(sizes))
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=ROWS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for size in map(sizes.__getitem__, arguments.sizes):
        if not arguments.json:
            print(f"{size}, relative tolerance {TOL:g}")
        data = problems(*size)
        for name in arguments.rows:
            problem = data[name]
            c = torch.randn(problem[0].shape, generator=torch.Generator().manual_seed(1))
            repeats = arguments.repeats if size == (64, 128) else max(3, arguments.repeats // 3)
            found = trained(problem, c, max(3, repeats // 3)) if name == "training" else row(problem, c, repeats)
            rows += kept(name, size, found)
            few = len(arguments.rows) < len(ROWS) or len(arguments.sizes) < len(SIZES)
            results.save("bench_deq_rows", rows, (__doc__ or "").split("\n\n", 1)[1], part=True, chosen=few)
            if not arguments.json:
                shown = (f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in found.items())
                print(f"{name:14} {', '.join(shown)}", flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
