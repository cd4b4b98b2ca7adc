"""A DEQ layer where users live: evaluations beside those of the best possible method, seconds beside a bare loop's.

    pip install torchdeq                     # left out if missing
    python benchmarks/bench_deq_rows.py [--repeats 9] [--batch 64 --dim 128]

``z = tanh(W z + U x + b)``, float32, one thread, forward and backward, relative tolerance 1e-4 both ways. Rows:

- ``disk``: the spectrum of the Jacobian fills a disk of radius 0.9: no Krylov method can do much better than the plain loop.
- ``outliers``: three eigenvalues near 0.97, the others within 0.3.
- ``rotation``: eigenvalues near -1.5, as trained cells have them: the plain loop diverges.
- ``heterogeneous``: one sample in sixteen is as slow as ``outliers``, the others are saturated.
- ``training``: fifty steps of Adam on the same samples, warm starts.

``best``: products of full GMRES for ``(I - J) e = r_0`` at the solution, mean over the samples: no method that sees ``J`` by
products needs fewer (for the linearised problem, and for the backward). ``evaluations``: ours, forward + backward, mean over
the samples. ``bare``: CPU time of the plain loop with a stopping test on the whole batch, forward and backward by its own
iteration, over ours (``-`` where it diverges); ``torchdeq``: that of its fastest solver which reaches the tolerance.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from bench_deq import TanhCell
from torch import Tensor

import implicitkit as ik
from implicitkit_deq import DEQ

TOL, LIMIT = 1e-4, 400
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


def layer_of(cell: TanhCell, dim: int, init: str = "zeros") -> DEQ:
    """The default layer at the tolerance of the comparison."""
    return DEQ(cell, (dim,), rtol=TOL, atol=0.0, rule=ik.Implicit(rtol=TOL), init=init)


def best_possible(cell: TanhCell, x: Tensor, z: Tensor) -> float:
    """Products of full GMRES from the residual of the start, mean over the samples, in float64."""
    W, b, U = (t.detach().double() for t in (cell.W, cell.b, cell.U))
    slope = 1 - z.double() ** 2
    A = torch.eye(len(W), dtype=torch.float64) - slope.unsqueeze(2) * W.mT
    r0 = torch.tanh(x.double() @ U + b)
    counts = []
    for i in range(len(z)):
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


def bare(cell: TanhCell, x: Tensor, c: Tensor) -> bool:
    """The plain loop both ways, stopped when the whole batch has met the tolerance; did it?"""
    with torch.no_grad():
        (injected,) = cell.inject(x)
        z = torch.zeros_like(injected)
        for _ in range(LIMIT):
            z, old = cell.update(z, injected), z
            if bool(((z - old).norm(dim=1) <= TOL * z.norm(dim=1)).all()):
                break
        else:
            return False
    z = z.requires_grad_()
    f = cell.update(z, *cell.inject(x))
    u = c
    for _ in range(LIMIT):
        (v,) = torch.autograd.grad(f, z, u, retain_graph=True)
        v, u = c + v, u
        if bool(((v - u).norm(dim=1) <= TOL * v.norm(dim=1)).all()):
            break
        u = v
    torch.autograd.grad(f, [cell.W, cell.U, cell.b], u)
    return True


def torchdeq(cell: TanhCell, x: Tensor, c: Tensor, solver: str) -> bool:
    """TorchDEQ with one solver both ways; did every sample reach the tolerance?"""
    from torchdeq import get_deq

    limits = {"f_max_iter": LIMIT, "b_max_iter": LIMIT, "f_stop_mode": "rel", "b_stop_mode": "rel"}
    deq = get_deq(f_solver=solver, b_solver=solver, f_tol=TOL, b_tol=TOL, ift=True, **limits)
    (injected,) = cell.inject(x)
    z, info = deq(lambda z: cell.update(z, injected), torch.zeros_like(injected))
    (z[-1] * c).sum().backward()
    return bool((info["rel_lowest"] <= 1.01 * TOL).all())


def _ours(layer: DEQ, x: Tensor, c: Tensor) -> bool:
    (layer(x) * c).sum().backward()
    return bool(layer.solution.converged.all())  # type: ignore[union-attr]


def training(problem: Problem, c: Tensor, init: str, steps: int = 50) -> tuple[float, float]:
    """Milliseconds and evaluations of a step of Adam on the same samples."""
    x, W, U, b = problem
    cell = TanhCell(W, U, b)
    layer, optimiser = layer_of(cell, len(W), init), torch.optim.Adam(cell.parameters(), 1e-3)
    evaluations, start = 0, time.process_time()
    for _ in range(steps):
        loss = (layer(x) - c.tanh()).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        evaluations += layer.solution.evaluations  # type: ignore[union-attr]
    return 1e3 * (time.process_time() - start) / steps, evaluations / steps


def row(problem: Problem, c: Tensor, repeats: int) -> str:
    """One row of the table."""
    x, W, U, b = problem
    cell = TanhCell(W, U, b)
    layer = layer_of(cell, len(W))
    runs: dict[str, Callable[[], bool]] = {"ours": lambda: _ours(layer, x, c), "bare": lambda: bare(cell, x, c)}
    if importlib.util.find_spec("torchdeq"):
        for solver in ("fixed_point_iter", "anderson", "broyden"):
            runs[solver] = functools.partial(torchdeq, cell, x, c, solver)
    good = [label for label, run in runs.items() if run()]
    seconds: dict[str, list[float]] = {label: [] for label in good}
    for _ in range(repeats):
        for label in good:
            start = time.process_time()
            runs[label]()
            seconds[label].append(time.process_time() - start)
    median = {label: statistics.median(values) for label, values in seconds.items()}
    own, solution = median["ours"], layer.solution
    assert solution is not None and solution.backward is not None
    peers = [median[s] for s in ("fixed_point_iter", "anderson", "broyden") if s in median]
    shown = [f"{median['bare'] / own:6.2f}" if "bare" in median else f"{'-':>6}"]
    shown.append(f"{min(peers) / own:9.2f}" if peers else f"{'-':>9}")
    counts = f"{float(solution.steps.double().mean()):.1f} + {float(solution.backward.steps.double().mean()):.1f}"
    best = best_possible(cell, x, solution.value)
    return f"{best:6.1f} {counts:>15} {solution.solver:28} {1e3 * own:8.1f} {' '.join(shown)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--dim", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"({arguments.batch}, {arguments.dim}), relative tolerance {TOL:g}")
    print(f"{'row':14} {'best':>6} {'evaluations':>15} {'solver':28} {'ms':>8} {'bare':>6} {'torchdeq':>9}")
    for name, problem in problems(arguments.batch, arguments.dim).items():
        c = torch.randn(problem[0].shape, generator=torch.Generator().manual_seed(1))
        if name != "training":
            print(f"{name:14} {row(problem, c, arguments.repeats)}", flush=True)
            continue
        (cold, cold_evaluations), (warm, warm_evaluations) = (training(problem, c, init) for init in ("zeros", "last"))
        print(
            f"{name:14} a step: cold {cold:.1f} ms, {cold_evaluations:.1f} evaluations; warm {warm:.1f} ms, "
            f"{warm_evaluations:.1f}"
        )


if __name__ == "__main__":
    main()
