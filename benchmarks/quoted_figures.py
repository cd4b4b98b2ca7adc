"""The figures that pages quote and no table has: each by one command.

    python benchmarks/quoted_figures.py superlu   # docs/howto/choose_a_linear_solver.md: factors in space, by SuperLU
    python benchmarks/quoted_figures.py cholmod   # the same by CHOLMOD, which needs cvxopt, and by CG
    python benchmarks/quoted_figures.py stale     # docs/tutorials/large.md: ik.linear.Stale() in a training
    python benchmarks/quoted_figures.py csr       # docs/limits.md: a data matrix in torch's CSR format
    python benchmarks/quoted_figures.py digits    # docs/tutorials/deq.md: a ready-made layer in the training of that page

Times are processor times on one thread, the best of three (of a training: of one).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize
import scipy.sparse as sp
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import implicitkit as ik
from implicitkit_deq import DEQ, ForgivenWarning, bound_weights, cells

torch.set_default_dtype(torch.float64)


def timed(run: Callable[[], Any], repeats: int = 3) -> tuple[float, Any]:
    """The best of the processor times, and what came of the last run."""
    best, found = float("inf"), None
    for _ in range(repeats):
        begun = time.process_time()
        found = run()
        best = min(best, time.process_time() - begun)
    return best, found


# ------------------------------------------------------------------------------------------- linear solvers in space
def diffusion(m: int, orders: float) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """``div(k grad u) = f`` on ``m^3`` cells between walls of zero; ``k`` of a face is the mean of its cells' random
    conductivities, which lie between 1 and ``10^orders``: the residual, and ``log k`` ``(m, m, m)``."""
    logs = np.log(10) * orders * torch.rand(m, m, m, generator=torch.Generator().manual_seed(0))

    def residual(u: Tensor, logs: Tensor) -> Tensor:
        v, k = pad(u.reshape(m, m, m), (1,) * 6), pad(logs.exp()[None], (1,) * 6, mode="replicate")[0]
        out = torch.zeros_like(v)
        for axis in range(3):
            face = (k.narrow(axis, 1, m + 1) + k.narrow(axis, 0, m + 1)) / 2
            flow = face * (v.narrow(axis, 1, m + 1) - v.narrow(axis, 0, m + 1))
            inner = flow.narrow(axis, 0, m) - flow.narrow(axis, 1, m)
            out = out + pad(inner, [side for a in (2, 1, 0) for side in ((0, 0) if a != axis else (1, 1))])
        return out[1:-1, 1:-1, 1:-1].reshape(-1) - 1.0

    return residual, logs


def superlu() -> None:
    """The derivative in space by SuperLU, as where cvxopt is not installed."""
    sys.modules["cvxopt"] = None  # type: ignore[assignment]
    linear({"SuperLU": "sparse_lu"})


def cholmod() -> None:
    """The same by CHOLMOD, and by CG without factors."""
    linear({"CHOLMOD": "cholmod", "CG": "cg"})


def linear(solvers: dict[str, str]) -> None:
    """The derivative at a solution that is known: a matrix found and factored, and one system.  Each time with other
    conductivities, since factors of the same matrix would be used again."""
    for m, orders in ((24, 0.0), (32, 6.0)):
        residual, logs = diffusion(m, orders)
        draws = [logs + 0.1 * torch.randn(m, m, m, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        known = [(k, ik.root(residual, torch.zeros(m**3), (k,), solver="newton").value) for k in draws]
        for name, how in solvers.items():
            layer = ik.implicit(ik.Root(residual, positive_definite=True), rule=ik.Implicit(linear_solver=how))(
                lambda u0, k: u0
            )
            given = iter(known)

            def derivative(layer: Any = layer, given: Any = given) -> Tensor:
                k, u = next(given)
                k = k.detach().requires_grad_()
                return torch.autograd.grad(layer(u, k).sum(), k)[0]

            label = f"{m}^3 cells, conductivities over {orders:g} orders of magnitude, {name}:"
            try:
                print(f"{label} {1e3 * timed(derivative)[0]:.0f} ms", flush=True)
            except ik.ConvergenceError as error:
                print(f"{label} {str(error)[:110]}", flush=True)


# --------------------------------------------------------------------------------------------- factors that outlive a step
def bratu(side: int) -> Callable[[Tensor, Tensor], Tensor]:
    """``-Laplace u = heat exp(u)`` on ``side^2`` points of the unit square, zero on its boundary."""

    def residual(u: Tensor, heat: Tensor) -> Tensor:
        v = pad(u.reshape(side, side), (1, 1, 1, 1))
        laplace = 4 * v[1:-1, 1:-1] - v[:-2, 1:-1] - v[2:, 1:-1] - v[1:-1, :-2] - v[1:-1, 2:]
        return ((side + 1) ** 2 * laplace - heat * v[1:-1, 1:-1].exp()).reshape(-1)

    return residual


def train(side: int, steps: int, **how: Any) -> float:
    """Seconds a step of a training of ``heat``, whose aim changes, each from where the last ended; but the first."""
    residual, heat, u = bratu(side), torch.tensor(3.0, requires_grad=True), torch.zeros(side**2)
    optimiser = torch.optim.SGD([heat], lr=20.0)
    begun = 0.0
    for step in range(steps + 1):
        begun = time.process_time() if step == 1 else begun
        value = ik.root(residual, u, (heat,), **how).value
        optimiser.zero_grad()
        ((value.max() - 0.5 + 0.1 * (-1) ** step) ** 2).backward()
        optimiser.step()
        u = value.detach()
    return (time.process_time() - begun) / steps


def stale() -> None:
    """A step of a training on Bratu's problem: the default, and with factors that are kept."""
    for side in (64, 128, 256):
        usual = min(train(side, 11) for _ in range(3))
        kept = float("inf")
        for _ in range(3):
            keep = ik.linear.Stale()
            solver, rule = ik.NewtonKrylov(preconditioner=keep, forcing=0.01), ik.Implicit(preconditioner=keep)
            kept = min(kept, train(side, 11, solver=solver, rule=rule))
        text = f"{1e3 * usual:.0f} ms a step by default, {1e3 * kept:.0f} ms with Stale(): {usual / kept:.2f} times as fast"
        print(f"{side} x {side} points: {text}", flush=True)


# ------------------------------------------------------------------------------------------------ a matrix in CSR format
def csr() -> None:
    """What ``X @ w`` and its backward cost, and a logistic regression by ``ik.argmin``, beside SciPy's L-BFGS."""
    rng = np.random.default_rng(0)
    warnings.filterwarnings("ignore", "Sparse ")
    X = sp.random(20_000, 2_000, density=200_000 / 4e7, format="csr", random_state=rng)
    A, w = torch.sparse_csr_tensor(X.indptr, X.indices, X.data, X.shape), torch.ones(2_000, requires_grad=True)
    forward, out = timed(lambda: A @ w, 10)
    backward, _ = timed(lambda: torch.autograd.grad(out.sum(), w, retain_graph=True), 10)
    print(
        f"X @ w, 20,000 x 2,000 with 200,000 entries: {1e3 * forward:.2f} ms, its backward {1e3 * backward:.2f} ms",
        flush=True,
    )

    X = sp.random(20_000, 1_000, density=0.01, format="csr", random_state=rng)
    y = torch.from_numpy(np.sign(X @ rng.standard_normal(1_000) + 0.1 * rng.standard_normal(20_000)))
    A, (rows, columns) = (
        torch.sparse_csr_tensor(X.indptr, X.indices, X.data, X.shape),
        (torch.from_numpy(i) for i in X.nonzero()),
    )
    entries = torch.from_numpy(X.data)

    def loss(product: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda w: torch.nn.functional.softplus(-y * product(w)).mean() + 0.5e-3 * w.square().sum()

    def by_scipy(w: np.ndarray) -> tuple[float, np.ndarray]:
        margin = y.numpy() * (X @ w)
        slope = -y.numpy() / (1 + np.exp(margin)) / len(margin)
        return float(np.logaddexp(0, -margin).mean() + 0.5e-3 * w @ w), X.T @ slope + 1e-3 * w

    options = {"gtol": 1e-8, "ftol": 0.0}
    hand, found = timed(
        lambda: scipy.optimize.minimize(by_scipy, np.zeros(1_000), jac=True, method="L-BFGS-B", options=options)
    )
    print(f"logistic regression, 20,000 x 1,000, by SciPy on its matrices: {1e3 * hand:.0f} ms", flush=True)

    def spread(w: Tensor) -> Tensor:
        return w.new_zeros(X.shape[0]).index_add(0, rows, entries * w[columns])

    for name, product in (("torch's CSR", A.matmul), ("index_add", spread)):
        objective = loss(product)
        seconds, solution = timed(lambda f=objective: ik.argmin(f, torch.zeros(1_000)))  # type: ignore[misc]
        off = float(np.abs(solution.value.numpy() - found.x).max())
        print(
            f"the same by ik.argmin, {name}: {1e3 * seconds:.0f} ms, {seconds / hand:.0f} times SciPy's (apart {off:.0e})",
            flush=True,
        )


# ------------------------------------------------------------------------------------------ a layer on handwritten digits
def digits() -> None:
    """``DEQ(cells.MLP(64, 32))`` in eight epochs of 14 steps, with ``index=`` and bounded weights or without."""
    from sklearn.datasets import load_digits

    torch.set_default_dtype(torch.float32)
    warnings.simplefilter("ignore", ForgivenWarning)
    data = load_digits()
    images, labels = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    for bounded, indexed in ((False, False), (False, True), (True, False), (True, True)):
        torch.manual_seed(0)
        layer = DEQ(cells.MLP(64, 32))
        if bounded:
            bound_weights(layer.cell, 0.95)
        order = torch.randperm(len(images))
        train, test = order[:1400], order[1400:]
        head = nn.Linear(32, 10)
        optimiser = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=5e-3)
        begun, evaluations = time.process_time(), 0
        for epoch in range(8):
            for batch in train[torch.randperm(len(train))].split(100):
                loss = cross_entropy(head(layer(images[batch], index=batch if indexed else None)), labels[batch])
                evaluations += layer.solution.evaluations if epoch == 7 else 0
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
        seconds = time.process_time() - begun
        layer.eval()
        with torch.no_grad():
            right = (head(layer(images[test])).argmax(1) == labels[test]).double().mean().item()
        text = f"{evaluations / 14:.0f} evaluations a step, {seconds:.1f} s, accuracy {100 * right:.1f} %"
        print(f"bounded {bounded}, index= {indexed}: {text}", flush=True)


def main() -> None:
    """The figures that are asked for."""
    parts = {"superlu": superlu, "cholmod": cholmod, "stale": stale, "csr": csr, "digits": digits}
    parser = argparse.ArgumentParser(description="The figures that pages quote and no table has.")
    parser.add_argument("part", choices=parts, help="which")
    torch.set_num_threads(1)
    parts[parser.parse_args().part]()


if __name__ == "__main__":
    main()
