"""Sparse programs as cvxpy layers: forward and backward, beside cvxpylayers and beside cvxpy's own solve, in one process.

    python benchmarks/bench_cvxpy_sparse.py [--quick]

Total variation of n numbers, model predictive control over 200 steps, a portfolio of 1,000 assets with 20 factors, and flow
on a directed grid.  Both layers solve by Clarabel with their defaults; medians of CPU time of three calls in turn after one
that does not count; "cvxpy" is ``problem.solve(solver="CLARABEL")``, forward only.  The last columns are the residual of the
optimality conditions that ``ConvexLayer`` reports, and by how much its derivative in a random direction differs from a
difference quotient, relative.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import cvxpy as cp
import networkx as nx
import numpy as np
import results
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit_cvxpy import ConvexLayer

Program = tuple[Any, list[Any], list[Any], list[Tensor]]


def total_variation(n: int) -> Program:
    """``|x - c|^2 + w |D x|_1``."""
    D = sp.diags([np.ones(n - 1), -np.ones(n - 1)], [0, 1], shape=(n - 1, n)).tocsr()
    x, c, w = cp.Variable(n), cp.Parameter(n), cp.Parameter(nonneg=True)
    problem = cp.Problem(cp.Minimize(cp.sum_squares(x - c) + w * cp.norm1(D @ x)))
    return problem, [c, w], [x], [0.1 * torch.randn(n).cumsum(0), torch.tensor(0.7)]


def control(steps: int = 200, n: int = 6, inputs: int = 2) -> Program:
    """A linear system driven towards ``r`` with bounded inputs."""
    rng = np.random.default_rng(0)
    A, B = np.eye(n) + 0.1 * rng.standard_normal((n, n)), rng.standard_normal((n, inputs))
    A *= 0.98 / np.abs(np.linalg.eigvals(A)).max()
    start, r, X, U = cp.Parameter(n), cp.Parameter(n), cp.Variable((steps + 1, n)), cp.Variable((steps, inputs))
    cost = cp.sum_squares(X - cp.reshape(r, (1, n), order="C")) + 0.1 * cp.sum_squares(U)
    rows = [X[0] == start, X[1:] == X[:-1] @ A.T + U @ B.T, cp.abs(U) <= 1]
    return cp.Problem(cp.Minimize(cost), rows), [start, r], [X, U], [torch.randn(n), torch.randn(n)]


def portfolio(n: int = 1000, k: int = 20) -> Program:
    """Risk by factors, no short positions."""
    rng = np.random.default_rng(0)
    F, d = rng.standard_normal((n, k)), rng.random(n) + 0.1
    x, f, mu, risk = cp.Variable(n), cp.Variable(k), cp.Parameter(n), cp.Parameter(nonneg=True)
    cost = risk * (cp.sum_squares(f) + cp.sum_squares(cp.multiply(np.sqrt(d), x))) - mu @ x
    problem = cp.Problem(cp.Minimize(cost), [cp.sum(x) == 1, x >= 0, f == F.T @ x])
    return problem, [mu, risk], [x], [torch.randn(n), torch.tensor(2.0)]


def flow(n: int = 30) -> Program:
    """From one corner of a grid to the other: few edges carry any, so that multipliers are not unique."""
    graph = nx.grid_2d_graph(n, n).to_directed()
    incidence = sp.csr_matrix(nx.incidence_matrix(graph, oriented=True))[:-1]
    supply = np.zeros(incidence.shape[0])
    supply[0] = -1.0
    x, c = cp.Variable(incidence.shape[1]), cp.Parameter(incidence.shape[1])
    problem = cp.Problem(cp.Minimize(c @ x + 0.5 * cp.sum_squares(x)), [incidence @ x == supply, x >= 0])
    return problem, [c], [x], [torch.rand(incidence.shape[1])]


def timed(layer: Any, args: list[Tensor], options: dict[str, Any]) -> tuple[float, tuple[Tensor, ...]]:
    leaves = [a.clone().requires_grad_() for a in args]
    begun = time.process_time()
    found = layer(*leaves, **options)
    gradients = torch.autograd.grad(sum(t.square().sum() for t in found), leaves)
    return 1e3 * (time.process_time() - begun), gradients


def error(layer: ConvexLayer, args: list[Tensor], gradients: tuple[Tensor, ...]) -> float:
    """Relative, of the derivative in a random direction against a central difference."""
    direction = [torch.randn_like(a) for a in args]

    def loss(step: float) -> Tensor:
        found = layer(*[a + step * d for a, d in zip(args, direction, strict=True)])
        return torch.stack([t.square().sum() for t in found]).sum()

    numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
    mine = torch.stack([(g * d).sum() for g, d in zip(gradients, direction, strict=True)]).sum()
    return float((mine - numeric).abs() / numeric.abs())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the small ones only, one repetition")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        from cvxpylayers.torch import CvxpyLayer
    except ImportError:
        CvxpyLayer = None
    programs = {"total variation, 1,000": lambda: total_variation(1000), "control, 200 steps": control}
    if not quick:
        programs |= {
            "portfolio, 1,000": portfolio,
            "flow, 30 x 30": flow,
            "total variation, 10,000": lambda: total_variation(10_000),
        }
    kept = []
    print(f"{'program':<26} {'ours ms':>9} {'cvxpylayers':>12} {'cvxpy':>9} {'residual':>9} {'gradient':>9}")
    for name, make in programs.items():
        torch.manual_seed(0)
        problem, parameters, variables, args = make()
        layers: dict[str, tuple[Any, dict[str, Any]]] = {
            "implicitkit": (ConvexLayer(problem, parameters=parameters, variables=variables), {})
        }
        if CvxpyLayer is not None:
            theirs = CvxpyLayer(problem, parameters=parameters, variables=variables)
            layers["cvxpylayers"] = theirs, {"solver_args": {"solve_method": "Clarabel"}}
        times: dict[str, list[float]] = {key: [] for key in (*layers, "cvxpy")}
        for parameter, value in zip(parameters, args, strict=True):
            parameter.value = value.numpy()
        for k in range(2 if quick else 4):
            for key, (layer, options) in layers.items():
                spent, gradients = timed(layer, args, options)
                if k:
                    times[key].append(spent)
                if key == "implicitkit":
                    mine = gradients
            begun = time.process_time()
            problem.solve(solver="CLARABEL")
            if k:
                times["cvxpy"].append(1e3 * (time.process_time() - begun))
        medians = {key: statistics.median(t) for key, t in times.items()}
        ours = layers["implicitkit"][0]
        ours(*args)
        left, wrong = float(ours.solution.residual_norm), error(ours, args, mine)
        other = medians.get("cvxpylayers", float("nan"))
        print(
            f"{name:<26} {medians['implicitkit']:>9.1f} {other:>12.1f} {medians['cvxpy']:>9.1f} {left:>9.0e} {wrong:>9.0e}",
            flush=True,
        )
        if CvxpyLayer is not None:
            more = {"ms": medians["implicitkit"], "cvxpy_ms": medians["cvxpy"], "residual": left, "error": wrong}
            kept.append(
                results.row(name, other / medians["implicitkit"], "times as fast as cvxpylayers", more=True, **more)
            )
    if kept and not quick:
        results.save("bench_cvxpy_sparse", kept, (__doc__ or "").split("\n\n", 1)[1])


if __name__ == "__main__":
    main()
