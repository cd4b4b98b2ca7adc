"""The cvxpy layer against cvxpylayers: forward plus backward of random dense quadratic programs, one process.

    python benchmarks/bench_cvxpy.py [--sizes 10,50,100] [--batches 1,32,128] [--quick]

``minimise |S x|^2 / 2 + q'x  subject to  G x <= h`` with ``m = n``, a quarter of the rows active at a planted solution, and
derivatives with respect to all of ``S, q, G, h``.  Medians of CPU time (a shared machine makes wall time meaningless): the
layers take turns, and the first run of a turn does not count, as in training, where the same layer runs again and again.
The last columns are the largest relative error of the gradients, against the active-set system.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import cvxpy as cp
import results
import torch
from torch import Tensor

from implicitkit_cvxpy import ConvexLayer


def program(n: int) -> tuple[Any, list[Any], list[Any]]:
    """The problem, its parameters and its variable."""
    S, q, G, h, x = cp.Parameter((n, n)), cp.Parameter(n), cp.Parameter((n, n)), cp.Parameter(n), cp.Variable(n)
    return cp.Problem(cp.Minimize(0.5 * cp.sum_squares(S @ x) + q @ x), [G @ x <= h]), [S, q, G, h], [x]


def data(batch: int, n: int) -> tuple[list[Tensor], int]:
    """``S, q, G, h`` around a KKT point, and the number of active rows (the first ones)."""
    generator = torch.Generator().manual_seed(n + batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    active = n // 4
    S, G, x = normal(batch, n, n) / n**0.5 + torch.eye(n), normal(batch, n, n) / n**0.5, normal(batch, n)
    slack, multiplier = normal(batch, n).abs() + 0.05, normal(batch, n).abs() + 0.05
    slack[:, :active], multiplier[:, active:] = 0, 0
    h = (G @ x.unsqueeze(2)).squeeze(2) + slack
    q = -(S.mT @ (S @ x.unsqueeze(2)) + G.mT @ multiplier.unsqueeze(2)).squeeze(2)
    return [t.requires_grad_() for t in (S, q, G, h)], active


def exact(args: list[Tensor], active: int, weight: Tensor) -> tuple[Tensor, ...]:
    """Gradients of ``weight . x`` through the linear system of the active rows."""
    S, q, G, h = args
    solutions = []
    for s, c, g, d in zip(S, q, G[:, :active], h[:, :active], strict=True):
        K = torch.cat([torch.cat([s.mT @ s, g.mT], 1), torch.cat([g, s.new_zeros(active, active)], 1)])
        solutions.append(torch.linalg.solve(K, torch.cat([-c, d]))[: len(c)])
    return torch.autograd.grad((torch.stack(solutions) * weight).sum(), args)


def error(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Largest error of any gradient relative to the largest entry of that gradient."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", default="10,50,100")
    parser.add_argument("--batches", default="1,32,128")
    parser.add_argument("--quick", action="store_true", help="one repetition each")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        from cvxpylayers.torch import CvxpyLayer
    except ImportError:
        CvxpyLayer = None
    print(f"{'n=m':>4} {'batch':>5} {'method':<24} {'CPU ms':>9} {'ratio':>6} {'gradient error':>15}")
    kept = []
    for n in map(int, options.sizes.split(",")):
        problem, parameters, variables = program(n)
        layers: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
        if CvxpyLayer is not None:
            layers["cvxpylayers (default)"] = CvxpyLayer(problem, parameters, variables)
        for solver in ("auto", "interior_point", "CLARABEL"):
            layers[f"ConvexLayer {solver}"] = ConvexLayer(problem, parameters, variables, solver=solver)
        for batch in map(int, options.batches.split(",")):
            args, active = data(batch, n)
            weight = torch.randn(batch, n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            wanted = exact(args, active, weight)
            repetitions = 1 if options.quick else max(1, min(9, 2000 // (n * batch)))
            times: dict[str, list[float]] = {name: [] for name in layers}
            errors: dict[str, float] = {}
            for _ in range(repetitions):
                for name, layer in layers.items():
                    runs = 2 if name == "cvxpylayers (default)" else 4
                    for k in range(runs):
                        start = time.process_time()
                        (x,) = layer(*args)
                        gradients = torch.autograd.grad((x * weight).sum(), args)
                        if k:
                            times[name].append(1e3 * (time.process_time() - start))
                    errors[name] = error(gradients, wanted)
            medians = {name: sorted(t)[len(t) // 2] for name, t in times.items()}
            baseline = medians.get("cvxpylayers (default)", float("nan"))
            for name, value in medians.items():
                print(
                    f"{n:>4} {batch:>5} {name:<24} {value:>9.2f} {baseline / value:>6.1f} {errors[name]:>15.1e}",
                    flush=True,
                )
                if name != "cvxpylayers (default)" and CvxpyLayer is not None:
                    row = f"n = {n}, batch {batch}, {name}"
                    more = {"ms": value, "error": errors[name]}
                    kept.append(results.row(row, baseline / value, "times as fast as cvxpylayers", more=True, **more))
    if kept:
        results.save("bench_cvxpy", kept, (__doc__ or "").split("\n\n", 1)[1])


if __name__ == "__main__":
    main()
