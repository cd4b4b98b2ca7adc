"""Initial value problems as a layer, beside torchdiffeq (``pip install torchdiffeq``): value, gradient, memory, seconds.

    python benchmarks/bench_initial_value.py

Each row is one solver at its own relative tolerance of 1e-6 (absolute 1e-9), float64, loss = sum of squares of the states
at 20 times; ``value`` and ``gradient`` are relative errors against collocation of order 13 on many steps.  ``held``:
megabytes that the graph holds between forward and backward.  ``ms``: CPU time, the least of several calls in turn, forward
and forward with backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import results as kept
import torch
from torch import Tensor, nn

import implicitkit as ik

try:
    import torchdiffeq
except ImportError:
    torchdiffeq = None

Problem = tuple[Callable[..., Tensor], Tensor, Tensor, list[Tensor]]


def pendulum() -> Problem:
    """One pendulum with friction."""
    k = torch.tensor([1.0, 0.2], requires_grad=True)
    return (
        lambda t, y: torch.stack([y[..., 1], -k[0] * y[..., 0].sin() - k[1] * y[..., 1]], -1),
        torch.tensor([[1.5, 0.0]]),
        torch.linspace(0, 10, 20),
        [k],
    )


def neural() -> Problem:
    """A neural ODE: 64 samples of two numbers, 32 hidden units."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    return lambda t, y: net(y**3), torch.randn(64, 2), torch.linspace(0, 3, 20), list(net.parameters())


def wide() -> Problem:
    """A neural ODE: 64 samples of 64 numbers, 128 hidden units."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    return lambda t, y: net(y), torch.randn(64, 64), torch.linspace(0, 1, 5), list(net.parameters())


def stiff() -> Problem:
    """Van der Pol's oscillator, mu = 30, for half a period: an explicit integrator takes thousands of steps."""
    k = torch.tensor([30.0], requires_grad=True)
    return (
        lambda t, y: torch.stack([y[..., 1], k * (1 - y[..., 0] ** 2) * y[..., 1] - y[..., 0]], -1),
        torch.tensor([[2.0, 0.0]]),
        torch.linspace(0, 10, 20),
        [k],
    )


PROBLEMS = {
    "pendulum": pendulum,
    "neural ODE 64 x 2": neural,
    "neural ODE 64 x 64": wide,
    "van der Pol, mu = 30": stiff,
}


def ours(rhs: Any, y0: Tensor, t: Tensor, **options: Any) -> Tensor:
    """``(times, batch, n)``."""
    problem = ik.InitialValue(rhs, t, **options)
    return ik.solve(problem, y0, batch_dims=1).value.movedim(1, 0)


def solvers(params: list[Tensor]) -> dict[str, Callable[..., Tensor]]:
    """Name -> ``(rhs, y0, t) -> path``."""
    rows: dict[str, Callable[..., Tensor]] = {
        "ik.InitialValue": ours,
        "  integrator scipy.Radau": lambda *a: ours(*a, integrator="scipy.Radau"),
    }
    if torchdiffeq is not None:
        tolerances = {"rtol": 1e-6, "atol": 1e-9}
        rows["torchdiffeq odeint"] = lambda *a: torchdiffeq.odeint(*a, **tolerances)
        rows["torchdiffeq odeint_adjoint"] = lambda *a: torchdiffeq.odeint_adjoint(
            *a, **tolerances, adjoint_params=params
        )
    return rows


def reference(rhs: Any, y0: Tensor, t: Tensor, params: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Path and gradient at tight tolerances: collocation of order 13 on the steps of SciPy's Radau at 1e-9."""
    path = ours(rhs, y0, t, accuracy=1e-9, stages=7, integrator="scipy.Radau")
    return path.detach(), flat(path.square().sum(), params)


def flat(loss: Tensor, params: list[Tensor]) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, params)])


def measure(solve: Any, call: tuple[Any, ...], params: list[Tensor]) -> tuple[tuple[Tensor, Tensor], float, float]:
    """Path and gradient; CPU seconds of the forward, and of both."""
    start = time.process_time()
    found = solve(*call)
    middle = time.process_time()
    slope = flat(found.square().sum(), params)
    return (found.detach(), slope), middle - start, time.process_time() - start


def held(run: Callable[..., Tensor], *call: Any) -> float:
    """Megabytes of distinct tensors that the graph keeps."""
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        keep = run(*call)
    del keep
    return sum(storages.values()) / 2**20


def main(repeats: int = 3) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rows_kept = []
    for title, make in PROBLEMS.items():
        rhs, y0, t, params = make()
        path, gradient = reference(rhs, y0, t, params)
        print(f"\n{title}\n{'':28s} {'value':>9s} {'gradient':>9s} {'held MB':>8s} {'forward':>9s} {'and back':>9s} ms")
        rows = solvers(params)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
        results: dict[str, tuple[Tensor, Tensor]] = {}
        for name in list(rows) * repeats:
            try:
                results[name], *spent = measure(rows[name], (rhs, y0, t), params)
            except (AssertionError, ik.ConvergenceError) as error:
                print(f"{name:28s} failed: {error}")
                continue
            seconds[name].append((spent[0], spent[1]))
        for name, (found, slope) in results.items():
            errors = [float((a - b).norm() / b.norm()) for a, b in ((found, path), (slope, gradient))]
            forward, both = (1e3 * min(column) for column in zip(*seconds[name], strict=True))
            memory = held(rows[name], rhs, y0, t)
            line = f"{name:28s} {errors[0]:9.1e} {errors[1]:9.1e} {memory:8.3f}"
            print(f"{line} {forward:9.1f} {both:9.1f}", flush=True)
            more = {"forward": forward, "error": errors[0], "gradient_error": errors[1], "held_MB": memory}
            rows_kept.append(kept.row(f"{title}, {name.strip()}", both, "ms", **more))
    kept.save("bench_initial_value", rows_kept, (__doc__ or "").split("\n\n", 2)[2])


if __name__ == "__main__":
    main()
