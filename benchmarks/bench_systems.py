"""Which method solves which system: every built-in root method and ``auto`` beside every method of ``scipy.optimize.root``.

    python benchmarks/bench_systems.py [--factors 1 10 100] [--groups mgh classic ...] [--solvers auto newton ...] [--json]
                                       [--no-keep]

A system is solved when ``|F|_inf <= 1e-8`` at the point returned, evaluated afresh; a false claim is a success flag where
that does not hold.  SciPy gets its best-known settings: explicit residual tolerances (``tol=`` alone would not test the
residual), the exact Jacobian where the method takes one, 10,000 evaluations and ``--cap`` seconds a system; samples of a
batch are one system to it.  One thread, float64.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import implicitkit as ik
from benchmarks import results as kept
from benchmarks.systems import TestSystem, systems

TOLERANCE = 1e-8
GROUPS = ("mgh", "classic", "equilibrium", "engineering", "large")
OURS: dict[str, Any] = {
    "auto": "auto",
    "newton": "newton",
    "newton, full steps": ik.Newton(line_search=False),
    "chord": "chord",
    "newton_krylov": "newton_krylov",
    "trust_region, dogleg": ik.TrustRegion(subproblem="dogleg"),
    "trust_region, LM": ik.TrustRegion(subproblem="levenberg_marquardt"),
    "df_sane": "df_sane",
}
MATRIX_FREE = ("auto", "newton_krylov", "df_sane")  # of ours, for more than 512 unknowns a sample
NONLIN = {"fatol": 0.5 * TOLERANCE, "maxiter": 10_000}
SCIPY: dict[str, dict[str, Any]] = {
    "hybr": {"xtol": 1e-12, "maxfev": 10_000},
    "lm": {"xtol": 1e-14, "ftol": 1e-14, "maxiter": 10_000},
    "broyden1": NONLIN,
    "broyden2": NONLIN,
    "anderson": NONLIN,
    "linearmixing": NONLIN,
    "diagbroyden": NONLIN,
    "excitingmixing": NONLIN,
    "krylov": NONLIN,
    "df-sane": {"fatol": 0.5 * TOLERANCE, "ftol": 0.0, "maxfev": 10_000},
}


class Result(NamedTuple):
    """How one method did on one system."""

    solved: bool
    claimed: bool
    residual: float
    seconds: float
    note: str


class _TooLong(Exception):
    pass


def ours(system: TestSystem, solver: Any) -> Result:
    """A solver of implicitkit."""
    start = time.perf_counter()
    try:
        solution = system.solve(solver=solver, rtol=0.0, atol=TOLERANCE, on_failure="ignore")
    except ik.CapabilityError as error:
        return Result(False, False, np.inf, 0.0, str(error))
    seconds = time.perf_counter() - start
    worst = system.residual(solution.value).abs().max().item()
    return Result(worst <= TOLERANCE, bool(solution.converged.all()), worst, seconds, solution.solver)


def scipys(system: TestSystem, method: str, jacobian: bool, cap: float) -> Result:
    """A method of ``scipy.optimize.root``."""
    shape, begun, calls = system.start.shape, time.perf_counter(), 0

    def residual(x: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls > 20_000 or time.perf_counter() - begun > cap:
            raise _TooLong
        return system.residual(torch.from_numpy(np.array(x)).reshape(shape)).numpy().reshape(-1).copy()

    def jac(x: np.ndarray) -> np.ndarray:
        return torch.func.jacrev(system.residual)(torch.from_numpy(np.array(x))).numpy()

    x0, note, claimed, x = system.start.numpy().reshape(-1).copy(), "", False, None
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            answer = scipy.optimize.root(
                residual, x0, method=method, jac=jac if jacobian else None, options=dict(SCIPY[method])
            )
        x, claimed = answer.x, bool(answer.success)
    except Exception as error:
        note = type(error).__name__
    seconds = time.perf_counter() - begun
    worst = np.inf if x is None else system.residual(torch.from_numpy(np.array(x)).reshape(shape)).abs().max().item()
    return Result(worst <= TOLERANCE, claimed, worst, seconds, note)


def methods(names: list[str] | None, cap: float) -> dict[str, Callable[[TestSystem], Result | None]]:
    """Every method by name; ``None`` where it is not tried because of the size."""
    table: dict[str, Callable[[TestSystem], Result | None]] = {}
    for name, solver in OURS.items():
        small_only = name not in MATRIX_FREE
        table[name] = lambda s, v=solver, small=small_only: None if small and s.size > 512 else ours(s, v)
    for name in SCIPY:
        dense = name in ("hybr", "lm")
        table[f"scipy {name}"] = lambda s, m=name, d=dense: (
            None if d and s.start.numel() > 2000 else scipys(s, m, False, cap)
        )
        if dense:
            table[f"scipy {name}, exact Jacobian"] = lambda s, m=name: (
                None if s.start.numel() > 2000 else scipys(s, m, True, cap)
            )
    return table if not names else {k: v for k, v in table.items() if k in names or k.split()[0] in names}


def run(groups: list[str], factors: list[float], names: list[str] | None, cap: float) -> dict[str, dict[str, Result]]:
    """Results by system and method."""
    results: dict[str, dict[str, Result]] = {}
    for factor in factors:
        for group in groups:
            for plain in systems(group):
                system = plain.from_start(factor)
                row = {name: solve(system) for name, solve in methods(names, cap).items()}
                results[system.name] = {name: r for name, r in row.items() if r is not None}
                print(f"{system.name}: {sum(r.solved for r in results[system.name].values())} methods", file=sys.stderr)
    return results


def report(results: dict[str, dict[str, Result]]) -> None:
    """The table, and where ``auto`` stands against the union of SciPy's methods."""
    names = list(dict.fromkeys(name for row in results.values() for name in row))
    print(f"{'method':32}{'solved':>12}{'false claims':>14}{'seconds':>10}   not solved")
    for name in names:
        tried = {k: row[name] for k, row in results.items() if name in row}
        missed = [k for k, r in tried.items() if not r.solved]
        false = sum(r.claimed and not r.solved for r in tried.values())
        seconds = sum(r.seconds for r in tried.values())
        shown = ", ".join(missed[:6]) + (f", ... ({len(missed)})" if len(missed) > 6 else "")
        print(f"{name:32}{len(tried) - len(missed):>6} of {len(tried):<3}{false:>12}{seconds:>10.1f}   {shown}")
    by_scipy = {k for k, row in results.items() if any(r.solved for n, r in row.items() if n.startswith("scipy"))}
    if "auto" in names:
        by_auto = {k for k, row in results.items() if row["auto"].solved}
        print(f"\nauto: {len(by_auto)} of {len(results)} ({100 * len(by_auto) / len(results):.1f} %); "
              f"some method of SciPy: {len(by_scipy)}")  # fmt: skip
        print(f"solved by SciPy and not by auto: {', '.join(sorted(by_scipy - by_auto)) or 'none'}")
        print(f"solved by auto and by no method of SciPy: {', '.join(sorted(by_auto - by_scipy)) or 'none'}")
        nobody = [k for k, row in results.items() if not any(r.solved for r in row.values())]
        print(f"solved by nobody: {', '.join(nobody) or 'none'}")


def summary(results: dict[str, dict[str, Result]]) -> list[dict[str, Any]]:
    """How many systems each method solves, for the page of benchmarks; of ``auto`` as many as all of SciPy's together are
    asked."""
    by_scipy = sum(any(r.solved for n, r in row.items() if n.startswith("scipy")) for row in results.values())
    rows = []
    for name in dict.fromkeys(name for row in results.values() for name in row):
        tried = [row[name] for row in results.values() if name in row]
        rows.append(
            kept.row(
                name,
                sum(r.solved for r in tried),
                f"of {len(tried)} solved",
                target=by_scipy if name == "auto" else None,
                more=True,
                false_claims=sum(r.claimed and not r.solved for r in tried),
                seconds=sum(r.seconds for r in tried),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--groups", nargs="+", default=list(GROUPS), choices=GROUPS)
    parser.add_argument("--solvers", nargs="+", help="names from the first column; 'scipy' is all of SciPy's")
    parser.add_argument("--cap", type=float, default=4.0, help="seconds a system for a method of SciPy")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-keep", action="store_true", help="leave benchmarks/results as it is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = run(options.groups, options.factors, options.solvers, options.cap)
    if not options.no_keep:
        kept.save("bench_systems", summary(results), (__doc__ or "").split("\n\n", 2)[2])
    if options.json:
        print(json.dumps({k: {n: r._asdict() for n, r in row.items()} for k, row in results.items()}, indent=1))
    else:
        report(results)


if __name__ == "__main__":
    main()
