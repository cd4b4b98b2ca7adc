"""A DEQ layer against TorchDEQ and JAXopt: time of forward and backward at equal accuracy of the gradient.

    pip install torchdeq jax jaxopt          # the peers; whichever is missing is left out
    python benchmarks/bench_deq.py [--repeats 15] [--json]

Problem: ``z = tanh(W z + U x + b)``, float32, (batch, dim) = (64, 128) and (256, 512), spectral radius of the Jacobian at
the solution 0.9, one thread, loss ``sum(c z)``.  The error is that of the gradient with respect to ``W`` in the Frobenius
norm, relative, against 2,000 steps each way in float64.

Every library runs with every solver it has, at tolerances from loose to tight (forward and backward alike), each until its
gradient is good to 1e-3; counted is its fastest configuration.  Times are CPU times, medians of runs that take turns in one
process, so that the load of the machine does not decide.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import results
import torch
from bench_core import make
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq import DEQ, Cell

SIZES = ((64, 128), (256, 512))
ACCURACY = 1e-3  # of the gradient
TOLERANCES = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5)  # from loose to tight, until a configuration is accurate enough
REASON = "the spectrum fills a disk: no method that uses values needs much fewer evaluations than the plain loop"
TARGETS = {"torchdeq": {(64, 128): 3.0, (256, 512): 3.0}, "jaxopt": {(256, 512): 1.0}}

Run = Callable[[], Tensor]  # one forward and backward; returns the gradient with respect to W
Configuration = tuple[str, Callable[[float], Run]]  # a solver, and how to run it at a tolerance


class TanhCell(Cell):
    """The benchmark's cell."""

    def __init__(self, W: Tensor, U: Tensor, b: Tensor) -> None:
        super().__init__()
        self.W, self.U, self.b = nn.Parameter(W.clone()), nn.Parameter(U.clone()), nn.Parameter(b.clone())

    def inject(self, x: Tensor) -> tuple[Tensor]:
        """``U x + b``."""
        return (torch.addmm(self.b, x, self.U),)

    def update(self, z: Tensor, injected: Tensor) -> Tensor:
        """``tanh(W z + injected)``."""
        return torch.tanh(torch.addmm(injected, z, self.W))


def exact(x: Tensor, W: Tensor, U: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The gradient, in float64: (I - J)^T u = c by 2,000 steps of its own iteration."""
    x, W, U, b, c = (t.double() for t in (x, W, U, b, c))
    z = torch.zeros_like(c)
    for _ in range(2000):
        z = torch.tanh(z @ W + x @ U + b)
    slope, u = 1 - z**2, c
    for _ in range(2000):
        u = c + (u * slope) @ W.mT
    return z.mT @ (u * slope)


def ours(x: Tensor, W: Tensor, U: Tensor, b: Tensor, c: Tensor) -> Iterator[Configuration]:
    """The layer with three solvers and two linear ones."""
    for solver, linear in itertools.product(("anderson", "picard", "broyden"), ("gmres", "bicgstab")):
        cell = TanhCell(W, U, b)

        def at(tol: float, solver: str = solver, linear: str = linear, cell: TanhCell = cell) -> Run:
            rule = ik.Implicit(linear_solver=linear, rtol=tol)
            layer = DEQ(cell, (W.shape[0],), solver=solver, rtol=tol, atol=0.0, rule=rule, init="zeros")
            return lambda: gradient(cell, lambda: layer(x), c)

        yield f"{solver} + {linear}", at


def gradient(cell: TanhCell, forward: Callable[[], Tensor], c: Tensor) -> Tensor:
    """One forward and backward."""
    cell.W.grad = cell.U.grad = cell.b.grad = None
    (forward() * c).sum().backward()
    assert cell.W.grad is not None
    return cell.W.grad


def torchdeq(x: Tensor, W: Tensor, U: Tensor, b: Tensor, c: Tensor) -> Iterator[Configuration]:
    """Every solver of TorchDEQ, exact gradient, over a range of tolerances; Anderson with three strengths of its ridge."""
    from torchdeq import get_deq
    from torchdeq.solver import get_solver, register_solver

    cell, solvers = TanhCell(W, U, b), ["fixed_point_iter", "anderson", "broyden"]
    for ridge in (1e-8, 1e-12):  # beside its own 1e-4
        register_solver(f"anderson lam={ridge:g}", functools.partial(get_solver("anderson"), lam=ridge))
        solvers.append(f"anderson lam={ridge:g}")
    for solver in solvers:

        def at(tol: float, solver: str = solver) -> Run:
            options = {"f_solver": solver, "b_solver": solver, "f_tol": tol, "b_tol": tol, "ift": True}
            limits = {"f_max_iter": 100, "b_max_iter": 100, "f_stop_mode": "rel", "b_stop_mode": "rel"}
            deq = get_deq(**options, **limits)

            def forward() -> Tensor:
                (injected,) = cell.inject(x)
                return deq(lambda z: cell.update(z, injected), torch.zeros_like(c))[0][-1]

            return lambda: gradient(cell, forward, c)

        yield solver, at


def jaxopt(x: Tensor, W: Tensor, U: Tensor, b: Tensor, c: Tensor) -> Iterator[Configuration]:
    """JAXopt's Anderson, compiled, with each of its iterative linear solvers, over a range of tolerances."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jaxopt import AndersonAcceleration, linear_solve

    arrays = tuple(jnp.asarray(t.numpy()) for t in (W, U, b, x, c))
    norm = float(torch.linalg.vector_norm(ours_solution(x, W, U, b)))  # JAXopt's tolerance is absolute, over the batch
    solvers = {
        "gmres": linear_solve.solve_gmres,
        "bicgstab": linear_solve.solve_bicgstab,
        "normal_cg": linear_solve.solve_normal_cg,
    }
    for name, linear in solvers.items():

        def at(tol: float, linear: Any = linear) -> Run:
            solver = AndersonAcceleration(
                lambda z, theta: jnp.tanh(z @ theta[0] + theta[3] @ theta[1] + theta[2]),
                history_size=5,
                tol=tol * norm,
                maxiter=200,
                ridge=1e-6,
                implicit_diff=True,
                implicit_diff_solve=lambda A, v, **_: linear(A, v, tol=tol),
            )

            def loss(theta: Any, c: Any) -> Any:
                return (solver.run(jnp.zeros_like(c), theta).params * c).sum()

            grad = jax.jit(jax.grad(loss))
            *theta, weights = arrays
            return lambda: torch.from_numpy(np.array(grad(tuple(theta), weights)[0].block_until_ready()))

        yield f"anderson + {name}", at


def ours_solution(x: Tensor, W: Tensor, U: Tensor, b: Tensor) -> Tensor:
    """The equilibrium, for its norm."""
    z = x.new_zeros(len(x), W.shape[0])
    for _ in range(300):
        z = torch.tanh(z @ W + x @ U + b)
    return z


PEERS = {"torchdeq": torchdeq, "jaxopt": jaxopt}


def seconds(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def compare(batch: int, dim: int, repeats: int) -> dict[str, Any]:
    """Ours and the best of each peer at one size."""
    x, W, U, b = make(batch, dim)
    c = torch.randn(batch, dim, generator=torch.Generator().manual_seed(1))
    truth = exact(x, W, U, b, c)

    def error(run: Run) -> float:
        return float((run().double() - truth).norm() / truth.norm())

    def best(candidates: Iterator[Configuration]) -> tuple[str, Run, float] | None:
        good = []
        for name, at in candidates:
            for tol in TOLERANCES:
                run = at(tol)
                if (e := error(run)) <= ACCURACY:
                    good.append((min(seconds(run) for _ in range(3)), f"{name}, {tol:g}", run, e))
                    break
        return min(good, key=lambda row: row[0])[1:] if good else None

    rows: dict[str, tuple[str, Run, float]] = {}
    for library, candidates in {"implicitkit": ours, **PEERS}.items():
        if importlib.util.find_spec(library) is None:
            continue
        found = best(candidates(x, W, U, b, c))
        if found is not None:
            rows[library] = found
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, (_, run, _) in rows.items():
            times[name].append(seconds(run))
    own = statistics.median(times["implicitkit"])
    return {
        name: {
            "configuration": label,
            "milliseconds": 1e3 * statistics.median(times[name]),
            "gradient error": e,
            "ratio": statistics.median(times[name]) / own,
            "target": TARGETS.get(name, {}).get((batch, dim)),
        }
        for name, (label, _, e) in rows.items()
    }


def keep(found: dict[str, dict[str, Any]]) -> None:
    """Write the rows to ``benchmarks/results``."""
    titles = {"torchdeq": "TorchDEQ", "jaxopt": "JAXopt"}
    kept = [
        results.row(
            f"{size}: {titles[name]}", row["ratio"], f"times as fast as {titles[name]}", target=row["target"], more=True,
            ours=rows["implicitkit"]["configuration"], ours_ms=rows["implicitkit"]["milliseconds"],
            theirs=row["configuration"], theirs_ms=row["milliseconds"],
            gradient_errors=f"{rows['implicitkit']['gradient error']:.1e} and {row['gradient error']:.1e}",
            **({"reason": REASON} if row["target"] is not None and row["ratio"] < row["target"] else {}),
        )
        for size, rows in found.items() for name, row in rows.items() if name in titles
    ]  # fmt: skip
    results.save("bench_deq", kept, (__doc__ or "").split("\n\n", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {f"{b}x{d}": compare(b, d, arguments.repeats) for b, d in SIZES}
    keep(found)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(
        f"{'size':9} {'library':12} {'configuration':34} {'ms':>8} {'gradient error':>15} {'times ours':>11} {'target':>7}"
    )
    for size, rows in found.items():
        for name, row in rows.items():
            target = "" if row["target"] is None else f">= {row['target']:g}"
            print(
                f"{size:9} {name:12} {row['configuration']:34} {row['milliseconds']:8.1f} {row['gradient error']:15.1e} "
                f"{row['ratio']:11.2f} {target:>7}"
            )


if __name__ == "__main__":
    main()
