"""What a small call costs: ordinary problems of a few numbers, against the shortest correct code by hand.

    python benchmarks/bench_small.py [--only TEXT] [--mode MODE] [--repeats 15] [--counts] [--profile] [--save]

float64, one thread; time of the processor, best of interleaved repeats in one process.  By hand there is no check of any
kind: a loop, the derivative from the implicit function theorem, and nothing else.  Modes:

- ``forward``: the solution of detached tensors;
- ``backward``: the solution, and its gradient;
- ``vmap``: ``torch.func.vmap(torch.func.grad(...))`` over eight of them;
- ``training``: as ``backward``, with a function that is made anew in every call, as a training loop makes it.

``--counts``: calls of Python functions, operations of torch and evaluations of one call beside the times.
``--profile``: the functions in which the time is spent.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import results
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import implicitkit as ik

torch.set_default_dtype(torch.float64)
MODES = ("forward", "backward", "vmap", "training")
_g = torch.Generator().manual_seed(0)
W = torch.randn(16, 16, generator=_g) * 0.2
TIMES = torch.linspace(0, 3, 20)
Q = torch.eye(10) + 0.1 * torch.ones(10, 10)


# --------------------------------------------------------------------------------------------------------- by hand
def _jacobian(out: Tensor, leaf: Tensor) -> Tensor:
    """``(m, n)``, of an output with a graph."""
    rows = torch.autograd.grad(out, leaf, torch.eye(out.numel()).reshape(-1, *out.shape), is_grads_batched=True)[0]
    return rows.reshape(out.numel(), -1)


def _implicit(F: Callable[[Tensor, Tensor], Tensor], z: Tensor, a: Tensor) -> Tensor:
    """``z`` with the derivative by the implicit function theorem, of a state with one dimension or none."""
    if not (a.requires_grad and torch.is_grad_enabled()):
        return z
    z = z.detach().requires_grad_()
    J = _jacobian(F(z, a.detach()), z)
    z = z.detach()
    return z - torch.linalg.solve(J, F(z, a).reshape(-1)).reshape(z.shape)


@torch.enable_grad()
def _newton(F: Callable[[Tensor, Tensor], Tensor], z: Tensor, a: Tensor) -> Tensor:
    """Newton's method until ``|F| <= 1e-10``."""
    b = a.detach()
    for _ in range(50):
        leaf = z.detach().requires_grad_()
        r = F(leaf, b)
        if float(r.detach().abs().max()) < 1e-10:
            break
        z = leaf.detach() - torch.linalg.solve(_jacobian(r, leaf), r.detach().reshape(-1)).reshape(z.shape)
    return _implicit(F, z, a)


def _picard(f: Callable[[Tensor, Tensor], Tensor], z: Tensor, a: Tensor) -> Tensor:
    b = a.detach()
    with torch.no_grad():
        for _ in range(200):
            y = f(z, b)
            if float((y - z).norm()) < 1e-10 * (1 + float(y.norm())):
                break
            z = y
    return _implicit(lambda z, a: f(z, a) - z, z, a)


def _gauss_newton(r: Callable[[Tensor, Tensor], Tensor], z: Tensor, a: Tensor) -> Tensor:
    b = a.detach()
    for _ in range(50):
        leaf = z.detach().requires_grad_()
        with torch.enable_grad():
            value = r(leaf, b)
        step = torch.linalg.lstsq(_jacobian(value, leaf), value.detach().unsqueeze(1)).solution.squeeze(1)
        z = z - step
        if float(step.norm()) < 1e-9 * (1 + float(z.norm())):
            break
    return _implicit(_gradient(lambda z, a: 0.5 * r(z, a).square().sum()), z, a)


def _gradient(f: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    def gradient(z: Tensor, a: Tensor) -> Tensor:
        leaf = z if z.requires_grad else z.detach().requires_grad_()
        return torch.autograd.grad(f(leaf, a), leaf, create_graph=True)[0]

    return gradient


def _minimum(f: Callable[[Tensor, Tensor], Tensor], z: Tensor, a: Tensor) -> Tensor:
    with torch.enable_grad():
        return _newton(_gradient(f), z, a)


def _runge_kutta(f: Callable[[Tensor, Tensor, Tensor], Tensor], y: Tensor, a: Tensor) -> Tensor:
    """60 steps of the classical method, differentiated by going back through them."""
    h = TIMES[-1] / 60
    for i in range(60):
        t = h * i
        k = f(t, y, a)
        l = f(t + h / 2, y + h / 2 * k, a)  # noqa: E741
        m = f(t + h / 2, y + h / 2 * l, a)
        y = y + h / 6 * (k + 2 * l + 2 * m + f(t + h, y + h * m, a))
    return y


# -------------------------------------------------------------------------------------------------------- problems
def cube(z: Tensor, a: Tensor) -> Tensor:
    return z**3 - a


def circle(z: Tensor, a: Tensor) -> Tensor:
    return torch.stack((z[0] ** 2 + z[1] ** 2 - a, z[0] - z[1] ** 3))


def cell(z: Tensor, a: Tensor) -> Tensor:
    return torch.tanh(W @ z + a)


def peak(z: Tensor, a: Tensor) -> Tensor:
    return z[0] * torch.exp(-(((TIMES - z[1]) / z[2]) ** 2)) + z[3] + z[4] * TIMES - a


def bowl(z: Tensor, a: Tensor) -> Tensor:
    return torch.cosh(z - a).sum() + 0.5 * z @ (Q @ z)


def valley(z: Tensor, a: Tensor) -> Tensor:
    return 0.5 * z @ (Q @ z) - a @ z


def predators(t: Tensor, y: Tensor, a: Tensor) -> Tensor:
    return torch.stack((y[0] * (a - y[1]), y[1] * (y[0] - 1)))


class Cell(torch.nn.Module):
    """A small equilibrium layer's map."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
        self.inner.weight.data.mul_(0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(z) + x)


@dataclass(frozen=True)
class Row:
    """``call(f, z0, a)`` and ``hand(f, z0, a)`` return the solution of the problem of ``f``, differentiable by ``a``."""

    f: Callable[..., Any]
    z0: Tensor
    a: Tensor
    call: Callable[..., Tensor]
    hand: Callable[..., Tensor]


def _layer(f: Any, z: Tensor, a: Tensor) -> Tensor:
    @ik.implicit(ik.Root(f))
    def solver(z0: Tensor, a: Tensor) -> Tensor:
        z = z0
        for _ in range(50):
            z = z - (z**3 - a) / (3 * z**2)
        return z

    return solver(z, a)


def _layer_by_hand(f: Any, z: Tensor, a: Tensor) -> Tensor:
    b = a.detach()
    for _ in range(50):
        z = z - (z**3 - b) / (3 * z**2)
    return _implicit(f, z, a)


def _soft(f: Any, z: Tensor, a: Tensor) -> Tensor:
    return torch.sign(a) * torch.relu(a.abs() - 0.1)


def _shrinking(f: Any, z: Tensor, a: Tensor) -> Tensor:
    shrink = lambda v: torch.sign(v) * torch.relu(v.abs() - 0.05)  # noqa: E731
    return _picard(lambda z, a: shrink(z - 0.5 * (Q @ z - a)), z, a)


def _simplex(f: Any, z: Tensor, a: Tensor) -> Tensor:
    u = a.sort(descending=True).values
    c = (u.cumsum(0) - 1) / torch.arange(1, len(a) + 1)
    return torch.relu(a - c[(u > c).sum() - 1])


def _deq(x: Tensor, **options: Any) -> Tensor:
    return ik.fixed_point(_MODULE, torch.zeros_like(x), (x,), batch_dims=1, rtol=1e-6, **options).value


def _deq_by_hand(f: Any, z: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        for _ in range(200):
            y = _MODULE(z, x)
            if float((y - z).norm()) < 1e-6 * float(y.norm()):
                break
            z = y
    if not x.requires_grad:
        return z
    z = _MODULE(y, x)
    leaf = z.detach().requires_grad_()
    out = _MODULE(leaf, x.detach())

    def hook(g: Tensor) -> Tensor:
        u = g
        for _ in range(200):
            v = torch.autograd.grad(out, leaf, u, retain_graph=True)[0] + g
            if float((v - u).norm()) < 1e-6 * float(v.norm()):
                break
            u = v
        return u

    if z.requires_grad:
        z.register_hook(hook)
    return z


_MODULE = Cell()
_START = torch.tensor([1.0, 1.2, 0.7, 0.0, 0.0])
_DATA = peak(torch.tensor([1.5, 1.3, 0.5, 0.2, 0.1]), torch.zeros(20)) + 0.01 * torch.sin(40 * TIMES)
ROWS: dict[str, Row] = {
    "root, 1": Row(cube, torch.tensor(1.0), torch.tensor(2.0), lambda f, z, a: ik.root(f, z, (a,)).value, _newton),
    "root, 2": Row(
        circle, torch.tensor([1.0, 1.0]), torch.tensor(2.5), lambda f, z, a: ik.root(f, z, (a,)).value, _newton
    ),
    "fixed point, 16": Row(
        cell, torch.zeros(16), torch.linspace(-1, 1, 16), lambda f, z, a: ik.fixed_point(f, z, (a,)).value, _picard
    ),
    "least squares, 5": Row(
        peak, _START, _DATA, lambda f, z, a: ik.least_squares(f, z, (a,)).value, _gauss_newton
    ),
    "minimum, 10": Row(
        bowl, torch.zeros(10), torch.linspace(-1, 1, 10), lambda f, z, a: ik.argmin(f, z, (a,)).value, _minimum
    ),
    "initial value, 2": Row(
        predators,
        torch.tensor([1.0, 0.5]),
        torch.tensor(1.1),
        lambda f, z, a: ik.solve(ik.InitialValue(f, (0.0, 3.0)), z, (a,)).value[-1],
        _runge_kutta,
    ),
    "own solver, 1": Row(cube, torch.tensor(1.0), torch.tensor(2.0), _layer, _layer_by_hand),
    "prox.l1, 10": Row(cube, torch.zeros(10), torch.linspace(-1, 1, 10), lambda f, z, a: ik.prox.l1(0.1)(a), _soft),
    "argmin with prox, 10": Row(
        valley, torch.zeros(10), torch.linspace(-1, 1, 10),
        lambda f, z, a: ik.argmin(f, z, (a,), prox=ik.prox.l1(0.1)).value, _shrinking,
    ),
    "project.simplex, 10": Row(
        cube, torch.zeros(10), torch.linspace(-1, 1, 10), lambda f, z, a: ik.project.simplex()(a), _simplex
    ),
    "small DEQ, 8 x 16": Row(
        _MODULE,
        torch.zeros(8, 16),
        torch.linspace(-1, 1, 128).reshape(8, 16),
        lambda f, z, a: _deq(a),
        _deq_by_hand,
    ),
}  # fmt: skip


def once(row: Row, mode: str, ours: bool) -> Callable[[], Any]:
    """One call to be timed."""
    solve, f, z0 = (row.call if ours else row.hand), row.f, row.z0
    if mode == "forward":
        a = row.a.clone()

        def forward() -> Any:
            with torch.no_grad():
                return solve(f, z0, a)

        return forward
    if mode == "vmap":
        many = row.a + 0.01 * torch.arange(8.0).reshape(8, *[1] * row.a.ndim)

        def loss(a: Tensor) -> Tensor:
            return solve(f, z0, a).sum()

        if ours:
            return lambda: torch.func.vmap(torch.func.grad(loss))(many)

        def loop() -> Tensor:
            leaves = [a.clone().requires_grad_() for a in many]
            return torch.stack([torch.autograd.grad(loss(a), a)[0] for a in leaves])

        return loop
    leaf = row.a.clone().requires_grad_()
    if mode == "backward":
        return lambda: torch.autograd.grad(solve(f, z0, leaf).sum(), leaf)[0]

    def training() -> Tensor:
        g = f if isinstance(f, torch.nn.Module) else (lambda *args: f(*args))
        return torch.autograd.grad(solve(g, z0, leaf).sum(), leaf)[0]

    return training


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def counts(call: Callable[[], Any]) -> tuple[int, int]:
    """Calls of Python functions, and operations of torch."""
    call()
    profile = cProfile.Profile()
    profile.enable()
    call()
    profile.disable()
    with _Operations() as seen:
        call()
    return pstats.Stats(profile).total_calls, seen.count  # type: ignore[attr-defined]


def timed(call: Callable[[], Any], seconds: float = 0.02) -> float:
    """Seconds a call, the mean of as many as fit."""
    n, start = 0, time.process_time()
    while (now := time.process_time()) - start < seconds:
        call()
        n += 1
    return (now - start) / n


def main() -> None:
    """Print one line a row and mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--mode", default="")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--counts", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = []
    for name, row in ROWS.items():
        for mode in MODES if not options.mode else options.mode.split(","):
            if options.only not in name:
                continue
            ours, hand = once(row, mode, True), once(row, mode, False)
            torch.testing.assert_close(ours(), hand(), rtol=2e-3, atol=2e-4)
            pairs = [(timed(ours), timed(hand)) for _ in range(options.repeats)]
            best, least = (min(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            text = f"{name:22} {mode:9} {1e3 * best:8.3f} ms {1e3 * least:8.3f} by hand   {best / least:6.1f} times"
            if options.counts:
                text += "   calls {:6d}, operations {:5d}".format(*counts(ours))
                text += "   by hand {:6d}, {:5d}".format(*counts(hand))
            print(text, flush=True)
            kept.append(results.row(f"{name}: {mode}", ratio, "times by hand", ms=1e3 * best))
            if options.profile:
                profile = cProfile.Profile()
                profile.enable()
                for _ in range(50):
                    ours()
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    if options.save:
        results.save("bench_small", kept, (__doc__ or "").split("\n\n", 2)[2])


if __name__ == "__main__":
    main()
