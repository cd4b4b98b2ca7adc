"""Side by side with other libraries, in one process: the same value, the same derivative, and the ratio of times.

    pip install -e '.[peers]'
    python benchmarks/bench_peers.py [--only jaxopt] [--seconds 1]

Every row is one problem, solved and differentiated by us and by one peer, in float64, on one thread, to tolerances at
which both values agree.  ``value``, ``vjp`` and ``jvp`` are the largest differences between the two, relative to the
largest number; ``-`` where the peer has no such mode.  Times are of value and gradient together (of the value alone where
the peer has no gradient): the least of many CPU times, taken in turn (JAX after its compilation).  ``ratio`` is ours over
theirs; above 1.2 a reason stands beside it, and a note where the two derivatives are not the same thing.

A peer that is not installed is left out, and said.  A run of all writes ``benchmarks/results/bench_peers.json``.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import results
import torch
from torch import Tensor

import implicitkit as ik

Array = np.ndarray
F64 = torch.float64
G = torch.Generator().manual_seed(0)
N = 20
W = torch.randn(N, N, generator=G, dtype=F64) * 0.6 / N**0.5
X = torch.randn(N, generator=G, dtype=F64)
A = torch.randn(50, N, generator=G, dtype=F64)
Y = torch.randn(50, generator=G, dtype=F64)
T = torch.linspace(0, 1, 40, dtype=F64)
DATA = 2 * torch.exp(-1.5 * T) + 0.05 * torch.randn(40, generator=G, dtype=F64)
SO3 = ik.manifold.SO3()
S, Q, GQ, HQ = (
    torch.eye(10, dtype=F64) + 0.1 * torch.randn(10, 10, generator=G, dtype=F64),
    torch.randn(10, generator=G, dtype=F64),
    torch.randn(10, 10, generator=G, dtype=F64),
    torch.rand(10, generator=G, dtype=F64),
)


@dataclass(frozen=True)
class Side:
    """One library on one problem: the solution as a function of its one argument; ``vjp`` of the sum of squares."""

    value: Callable[[], Array]
    vjp: Callable[[], Array]
    jvp: Callable[[], Array] | None = None


@dataclass(frozen=True)
class Row:
    """A problem, who else solves it, how, and why ours is slower where it is."""

    peer: str
    problem: str
    ours: Side
    theirs: Callable[[], Side]
    reason: str = ""


def of_torch(f: Callable[[Tensor], Tensor], x: Tensor, forward: bool = True) -> Side:
    """A function of a tensor, differentiated by torch; its forward mode along the point itself, shifted by one."""

    def vjp() -> Array:
        leaf = x.clone().requires_grad_()
        f(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad.numpy()

    def jvp() -> Array:
        return torch.func.jvp(f, (x,), (x.roll(1),))[1].detach().numpy()

    return Side(lambda: f(x).detach().numpy(), vjp, jvp if forward else None)


def of_jax(f: Callable[[Any], Any], x: Tensor, forward: bool = True) -> Side:
    """A function of a JAX array, compiled."""
    import jax
    import jax.numpy as jnp

    point = jnp.asarray(x.numpy())
    value = jax.jit(f)
    gradient = jax.jit(jax.grad(lambda y: (f(y) ** 2).sum()))
    along = jax.jit(lambda y: jax.jvp(f, (y,), (jnp.roll(y, 1),))[1])
    take = lambda g: np.asarray(g(point))  # noqa: E731
    return Side(lambda: take(value), lambda: take(gradient), (lambda: take(along)) if forward else None)


# ------------------------------------------------------------------------------------------------------------ the problems
def cell(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z @ W.mT + x)


def decay(z: Tensor, y: Tensor) -> Tensor:
    return z[0] * torch.exp(-z[1] * T) - y


def ridge(w: Tensor, y: Tensor) -> Tensor:
    return 0.5 * (A @ w - y).square().sum() + 0.5 * w.square().sum()


FIXED = of_torch(lambda x: ik.fixed_point(cell, torch.zeros(N, dtype=F64), (x,)).value, X)
ROOT = of_torch(
    lambda x: ik.root(lambda z, x: z - cell(z, x), torch.zeros(N, dtype=F64), (x,), solver="newton").value, X
)
FIT = of_torch(lambda y: ik.least_squares(decay, torch.ones(2, dtype=F64), (y,)).value, DATA)
RIDGE = of_torch(lambda y: ik.argmin(ridge, torch.zeros(N, dtype=F64), (y,)).value, Y)
SIMPLEX = of_torch(ik.project.simplex(), X)
QP = of_torch(lambda q: ik.solve(ik.QuadraticProgram(S.mT @ S, q, G=GQ, h=HQ)).value, Q)

TURNS = SO3.retract(torch.eye(3, dtype=F64).expand(30, 3, 3), 0.3 * torch.randn(30, 3, generator=G, dtype=F64))
EYE = torch.eye(3, dtype=F64)
MEAN = Side(*(2 * [lambda: ik.least_squares(SO3.local, EYE, (TURNS,), manifold=SO3).value.numpy()]))

COMPILED = "the whole loop is one compiled XLA program; ours is eager: Python for every step"


def jax_numpy() -> Any:
    import jax

    jax.config.update("jax_enable_x64", True)
    import jax.numpy as jnp

    return jnp


def jaxopt_fixed_point() -> Side:
    jnp = jax_numpy()
    import jaxopt

    w = jnp.asarray(W.numpy())
    solver = jaxopt.AndersonAcceleration(lambda z, x: jnp.tanh(w @ z + x), tol=1e-11, maxiter=200)
    return of_jax(lambda x: solver.run(jnp.zeros(N), x).params, X, forward=False)


def jaxopt_ridge() -> Side:
    jnp = jax_numpy()
    import jaxopt

    a = jnp.asarray(A.numpy())
    solver = jaxopt.LBFGS(lambda w, y: 0.5 * ((a @ w - y) ** 2).sum() + 0.5 * (w**2).sum(), tol=1e-10, maxiter=500)
    return of_jax(lambda y: solver.run(jnp.zeros(N), y).params, Y, forward=False)


def jaxopt_simplex() -> Side:
    jax_numpy()
    import jaxopt

    return of_jax(lambda x: jaxopt.projection.projection_simplex(x), X)


def jaxopt_fit() -> Side:
    jnp = jax_numpy()
    import jaxopt

    t = jnp.asarray(T.numpy())
    solver = jaxopt.LevenbergMarquardt(lambda z, y: z[0] * jnp.exp(-z[1] * t) - y, tol=1e-12, maxiter=200)
    return of_jax(lambda y: solver.run(jnp.ones(2), y).params, DATA, forward=False)


def optimistix_root() -> Side:
    jnp = jax_numpy()
    import optimistix as optx

    w = jnp.asarray(W.numpy())
    f = lambda z, x: z - jnp.tanh(w @ z + x)  # noqa: E731
    return of_jax(lambda x: optx.root_find(f, optx.Newton(1e-11, 1e-11), jnp.zeros(N), x).value, X)


def optimistix_fit() -> Side:
    jnp = jax_numpy()
    import optimistix as optx

    t = jnp.asarray(T.numpy())
    f = lambda z, y: z[0] * jnp.exp(-z[1] * t) - y  # noqa: E731
    return of_jax(lambda y: optx.least_squares(f, optx.LevenbergMarquardt(1e-12, 1e-12), jnp.ones(2), y).value, DATA)


def torchdeq_fixed_point() -> Side:
    from torchdeq import get_deq

    deq = get_deq(ift=True, f_solver="broyden", b_solver="broyden", f_tol=1e-10, b_tol=1e-10, f_max_iter=200,
                  b_max_iter=200, norm_type="none")  # fmt: skip
    deq.train()
    return of_torch(lambda x: deq(lambda z: cell(z, x), torch.zeros(1, N, dtype=F64))[0][-1][0], X, forward=False)


def xitorch_root() -> Side:
    from xitorch.optimize import rootfinder

    f = lambda z, x: z - cell(z, x)  # noqa: E731
    options = {"method": "broyden1", "f_tol": 1e-12, "maxiter": 500}
    return of_torch(lambda x: rootfinder(f, torch.zeros(N, dtype=F64), params=(x,), **options), X, forward=False)


def torchopt_ridge() -> Side:
    import torchopt

    @torchopt.diff.implicit.custom_root(
        lambda w, y: torch.func.grad(ridge)(w, y),
        argnums=1,
        solve=torchopt.linear_solve.solve_cg(maxiter=200, rtol=1e-10),
    )
    def solve(w: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.solve(A.mT @ A + torch.eye(N, dtype=F64), A.mT @ y)

    return of_torch(lambda y: solve(torch.zeros(N, dtype=F64), y), Y, forward=False)


def cvxpylayers_qp() -> Side:
    import cvxpy as cp
    from cvxpylayers.torch import CvxpyLayer

    z, q = cp.Variable(10), cp.Parameter(10)
    objective = 0.5 * cp.sum_squares(S.numpy() @ z) + q @ z
    layer = CvxpyLayer(
        cp.Problem(cp.Minimize(objective), [GQ.numpy() @ z <= HQ.numpy()]), parameters=[q], variables=[z]
    )
    options = {"eps": 1e-10}
    return of_torch(lambda q: layer(q, solver_args=options)[0], Q, forward=False)


def qpth_qp() -> Side:
    from qpth.qp import QPFunction

    P, none = S.mT @ S, torch.empty(0, dtype=F64)
    return of_torch(lambda q: QPFunction(verbose=-1, eps=1e-12)(P, q, GQ, HQ, none, none)[0], Q, forward=False)


def theseus_fit() -> Side:
    import theseus as th

    z, y = th.Vector(2, name="z", dtype=F64), th.Variable(DATA[None], name="y")
    weight = th.ScaleCostWeight(th.Variable(torch.ones(1, 1, dtype=F64), name="w"))

    def errors(optim_vars: Any, aux_vars: Any) -> Tensor:
        p = optim_vars[0].tensor
        return p[:, :1] * torch.exp(-p[:, 1:] * T) - aux_vars[0].tensor

    objective = th.Objective(dtype=F64)
    objective.add(th.AutoDiffCostFunction([z], errors, 40, cost_weight=weight, aux_vars=[y]))
    options = {"max_iterations": 50, "abs_err_tolerance": 1e-16, "rel_err_tolerance": 1e-14}
    layer = th.TheseusLayer(th.LevenbergMarquardt(objective, **options))
    start = torch.ones(1, 2, dtype=F64)

    def solve(data: Tensor) -> Tensor:
        return layer.forward({"z": start, "y": data[None]}, optimizer_kwargs={"backward_mode": "implicit"})[0]["z"][0]

    return of_torch(solve, DATA, forward=False)


def pypose_mean() -> Side:
    import pypose

    turns = pypose.mat2SO3(TURNS)

    class Residuals(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pose = pypose.Parameter(pypose.identity_SO3(dtype=F64))

        def forward(self, measured: Any) -> Tensor:
            return (self.pose.Inv() @ measured).Log().tensor()

    def value() -> Array:
        model = Residuals()
        optimiser = pypose.optim.GN(model)
        for _ in range(8):  # the gradient is 1e-12 then, as ours
            optimiser.step(turns)
        return model.pose.detach().matrix().numpy()

    return Side(value, value)


def scipy_root() -> Side:
    import scipy.optimize

    w, x = W.numpy(), X.numpy()

    def value() -> Array:
        return scipy.optimize.root(lambda z: z - np.tanh(w @ z + x), np.zeros(N), tol=1e-12).x

    def vjp() -> Array:  # what a user writes by hand
        z = value()
        J = np.eye(N) - (1 - z**2)[:, None] * w
        return (1 - z**2) * np.linalg.solve(J.T, 2 * z)

    return Side(value, vjp)


TARGET = 1.2
ROWS = (
    Row("jaxopt", "fixed point, Anderson", FIXED, jaxopt_fixed_point, COMPILED),
    Row("jaxopt", "ridge, L-BFGS", RIDGE, jaxopt_ridge, COMPILED),
    Row("jaxopt", "curve, Levenberg-Marquardt", FIT, jaxopt_fit, COMPILED),
    Row("jaxopt", "projection on a simplex", SIMPLEX, jaxopt_simplex, "one compiled kernel against a dozen of torch's"),
    Row("optimistix", "root, Newton", ROOT, optimistix_root, COMPILED),
    Row("optimistix", "curve, Levenberg-Marquardt", FIT, optimistix_fit, COMPILED),
    Row("torchdeq", "fixed point, Broyden", FIXED, torchdeq_fixed_point),
    Row("xitorch", "root", ROOT, xitorch_root),
    Row(
        "torchopt", "ridge", RIDGE, torchopt_ridge,
        "its solver is one call of linalg.solve given by the user, ours finds the minimum and judges it",
    ),
    Row("cvxpylayers", "quadratic program, n = 10", QP, cvxpylayers_qp),
    Row("qpth", "quadratic program, n = 10", QP, qpth_qp),
    Row(
        "theseus", "curve, Levenberg-Marquardt", FIT, theseus_fit,
        "theirs is the derivative with the Gauss-Newton matrix, ours with the Hessian: they differ where a residual is left",
    ),
    Row(
        "pypose", "mean of rotations, value only", MEAN, pypose_mean,
        "its logarithm has a Jacobian by hand, ours is differentiated by autograd; and its eight steps are not judged",
    ),
    Row("scipy", "root, hybr and a derivative by hand", ROOT, scipy_root, "NumPy by hand for this one function: no tracing"),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- measuring
def difference(a: Array, b: Array) -> float:
    """Relative to the largest number."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def times(ours: Side, theirs: Side, seconds: float) -> tuple[float, float]:
    """The least CPU time of value and gradient for each, in turn."""
    best = [np.inf, np.inf]
    end = time.process_time() + seconds
    while time.process_time() < end:
        for i, side in enumerate((ours, theirs)):
            begin = time.process_time()
            side.vjp()
            best[i] = min(best[i], time.process_time() - begin)
    return best[0], best[1]


def measure(row: Row, seconds: float) -> dict[str, Any]:
    """The row of the JSON: the ratio, both times, the differences, and the reason where there is something to explain."""
    theirs = row.theirs()
    jvp = None
    if row.ours.jvp is not None and theirs.jvp is not None:
        jvp = difference(row.ours.jvp(), theirs.jvp())
    value, vjp = difference(row.ours.value(), theirs.value()), difference(row.ours.vjp(), theirs.vjp())
    mine, other = times(row.ours, theirs, seconds)
    ratio = mine / other
    explained = ratio > TARGET or vjp > 1e-5
    return results.row(
        row.problem,
        ratio,
        "times the peer's time",
        target=TARGET,
        peer=row.peer,
        ours_ms=1e3 * mine,
        theirs_ms=1e3 * other,
        value_differs=value,
        vjp_differs=vjp,
        jvp_differs=jvp,
        reason=(row.reason or "no reason is known") if explained else "",
    )


def line(found: dict[str, Any]) -> str:
    """A row as a line of the table."""
    jvp = "-" if found["jvp_differs"] is None else f"{found['jvp_differs']:.0e}"
    return (
        f"{found['peer']:12s} {found['row']:36s} {found['value_differs']:8.0e} {found['vjp_differs']:8.0e} {jvp:>8s} "
        f"{found['ours_ms']:9.3f} {found['theirs_ms']:9.3f} {found['value']:7.2f}   {found['reason']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one peer")
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU time a row")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(
        f"{'peer':12s} {'problem':36s} {'value':>8s} {'vjp':>8s} {'jvp':>8s} {'ours/ms':>9s} {'theirs/ms':>9s} {'ratio':>7s}"
    )
    measured = []
    for row in ROWS:
        if options.only not in ("", row.peer):
            continue
        if importlib.util.find_spec(row.peer) is None:
            print(f"{row.peer:12s} {row.problem:36s} not installed")
            continue
        measured.append(measure(row, options.seconds))
        print(line(measured[-1]), flush=True)
    if not options.only:
        results.save("bench_peers", measured, __doc__ or "")


if __name__ == "__main__":
    main()
