"""Large systems with defaults only, forward and backward, against Newton's method by hand on SciPy's sparse LU.

    python benchmarks/bench_large.py [--full] [--memory] [--no-json] [part of a name ...]

By hand: the analytic sparse Jacobian, ``scipy.sparse.linalg.splu`` in each step, and one more for the adjoint; for least
squares Gauss-Newton on the normal equations, and the full Hessian for the adjoint (``large_fits.py``), or where they are
linear one factorisation for both (``linear_fits.py``); within bounds and
constraints Newton steps for the optimality conditions of the active bounds (``large_programs.py``).  Each
solution is checked against the one by hand, and each derivative against that adjoint, in the largest entry and relative to
it: a row in which either differs by more than 1e-6 (1e-4 where the condition is 1e8) is marked WRONG, and the command
fails.  Times are processor times, the best of three; "first" is that of the first call, which finds the sparsity pattern.

The rows "jacrev" are whole Jacobians ``dz/dtheta`` of as many unknowns as parameters, the solve included, against one
factorisation and one solve with as many right-hand sides, at most three times that.

Memory is what one solve and its derivative, the search for the pattern included, add to the peak of a fresh process that has
imported everything and solved small systems of each kind; below some 10 MB that says nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import large_fits
import large_programs
import linear_fits
import numpy as np
import results
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik

torch.set_default_dtype(torch.float64)
Array = np.ndarray
UNIT = "times by hand"


@dataclass
class Row:
    """A system ``F(z, theta) = 0``, in torch and by hand.

    ``hand(z, theta)`` gives ``F`` and ``dF/dz``; ``pull(z, theta, u)`` gives ``(dF/dtheta)^T u``.  Least squares: ``hand``
    gives ``R'r`` and ``R'R``, and ``hessian(z, theta)`` the matrix of the adjoint.  ``hidden``: multipliers that
    by hand come behind the unknowns.  ``accuracy``: what solution and derivative may differ by, relative.  ``elsewhere``:
    finds both with another library's solver, from the cotangent and ``theta``.
    """

    name: str
    residual: Callable[[Tensor, Tensor], Tensor]
    z0: Tensor
    theta: Tensor
    hand: Callable[[Array, Array], tuple[Array, Any]]
    pull: Callable[[Array, Array, Array], Array]
    options: dict[str, Any] = field(default_factory=dict)
    solve: Callable[..., Any] = ik.root
    accuracy: float = 1e-6
    hessian: Callable[[Array, Array], Any] | None = None
    hidden: int = 0
    elsewhere: Callable[[Array, Array], tuple[Array, Array]] | None = None


def by_hand(row: Row, weights: Array) -> tuple[Array, Array]:
    """Newton with sparse LU until the residual is rounding or ``rtol`` of the first one, then the adjoint."""
    if row.elsewhere is not None:
        return row.elsewhere(weights, row.theta.detach().numpy())
    none = np.zeros(row.hidden)
    z, theta = np.r_[row.z0.numpy().reshape(-1), none], row.theta.detach().numpy()
    count = len(weights)
    first, before = None, np.inf
    for _ in range(60):
        F, J = row.hand(z, theta)
        norm = np.linalg.norm(F)
        first = norm if first is None else first
        rounding = 4e-16 * np.linalg.norm(abs(J) @ abs(z))
        if norm <= max(3.7e-11 * first, rounding) or (norm > 0.5 * before and norm < 1e-6 * first):
            break
        before = norm
        z = z - _lu(J, row.hessian is not None).solve(F)
    J = row.hand(z, theta)[1] if row.hessian is None else row.hessian(z, theta)
    u = _lu(J, row.hessian is not None).solve(np.r_[weights, none], "T")
    return z[:count], -row.pull(z, theta, u)


def _lu(J: Any, symmetric: bool = False) -> Any:
    if symmetric:
        return sla.splu(J.tocsc(), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    if sp.issparse(J):
        return sla.splu(J.tocsc())
    if isinstance(J, OneMatrix):
        return J.factors()
    import scipy.linalg as la

    class Dense:
        factor = la.lu_factor(J)

        def solve(self, b: Array, trans: str = "N") -> Array:
            return la.lu_solve(self.factor, b, trans=int(trans == "T"))

    return Dense()


# -------------------------------------------------------------------------------------------------------------- systems
def bratu(n: int) -> Row:
    h2 = (n + 1.0) ** 2

    def residual(u: Tensor, k: Tensor) -> Tensor:
        U = pad(u, (1, 1))
        return h2 * (2 * u - U[2:] - U[:-2]) - k * torch.exp(u)

    L = h2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(n, n), format="csr")
    k = torch.linspace(0.5, 1.5, n)
    return Row(
        f"Bratu 1-D, {n}",
        residual,
        torch.zeros(n),
        k,
        lambda u, k: (L @ u - k * np.exp(u), L - sp.diags(k * np.exp(u))),
        lambda u, k, w: -np.exp(u) * w,
    )


def bratu2(m: int) -> Row:
    h2 = (m + 1.0) ** 2

    def residual(u: Tensor, k: Tensor) -> Tensor:
        U = pad(u, (1, 1, 1, 1))
        return h2 * (4 * u - U[2:, 1:-1] - U[:-2, 1:-1] - U[1:-1, 2:] - U[1:-1, :-2]) - k * torch.exp(u)

    L1 = h2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(m, m))
    L = sp.csr_matrix(sp.kronsum(L1, L1))
    k = torch.linspace(0.5, 1.5, m * m).view(m, m)
    return Row(
        f"Bratu 2-D, {m} x {m}",
        residual,
        torch.zeros(m, m),
        k,
        lambda u, k: (L @ u - k.reshape(-1) * np.exp(u), L - sp.diags(k.reshape(-1) * np.exp(u))),
        lambda u, k, w: (-np.exp(u) * w).reshape(m, m),
    )


def space(m: int) -> Row:
    """Poisson and Boltzmann's equation in a cube, ``-laplace(u) + k sinh(u) = 5``; factors fill it."""
    h2 = (m + 1.0) ** 2

    def residual(u: Tensor, k: Tensor) -> Tensor:
        U = pad(u, (1,) * 6)
        here = slice(1, -1)
        near = U[2:, here, here] + U[:-2, here, here] + U[here, 2:, here] + U[here, :-2, here]
        return h2 * (6 * u - near - U[here, here, 2:] - U[here, here, :-2]) + k * torch.sinh(u) - 5

    L1 = h2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(m, m))
    L = sp.csr_matrix(sp.kronsum(sp.kronsum(L1, L1), L1))
    k = torch.linspace(0.5, 1.5, m**3).view(m, m, m)
    return Row(
        f"Poisson-Boltzmann 3-D, {m}^3",
        residual,
        torch.zeros(m, m, m),
        k,
        lambda u, k: (L @ u + k.reshape(-1) * np.sinh(u) - 5, L + sp.diags(k.reshape(-1) * np.cosh(u))),
        lambda u, k, w: (np.sinh(u) * w).reshape(m, m, m),
    )


def transport(n: int) -> Row:
    """``u u' - nu u'' = s``, upwind: convection dominates."""
    h, nu = 1.0 / n, 1e-3

    def residual(u: Tensor, s: Tensor) -> Tensor:
        U = pad(u, (1, 1), value=1.0)
        return u * (u - U[:-2]) / h - nu * (U[2:] - 2 * u + U[:-2]) / h**2 - s

    ends = np.zeros(n)
    ends[[0, -1]] = 1.0
    left = np.zeros(n)
    left[0] = 1.0
    B = sp.diags([1.0, -1.0], [0, -1], shape=(n, n), format="csr") / h
    L = sp.diags([1.0, -2.0, 1.0], [-1, 0, 1], shape=(n, n), format="csr") * (nu / h**2)

    def hand(u: Array, s: Array) -> tuple[Array, Any]:
        slope = B @ u - left / h
        return u * slope - L @ u - nu / h**2 * ends - s, sp.diags(slope) + sp.diags(u) @ B - L

    return Row(f"transport, {n}", residual, torch.ones(n), 0.5 + torch.linspace(0, 1, n), hand, lambda u, s, w: -w)


def reaction(m: int) -> Row:
    """Two species, diffusion on a periodic grid: ``(a, b)`` of Schnakenberg's kinetics, one implicit step."""
    dt, da, db = 0.1, 1.0 * m, 4.0 * m

    def laplace(x: Tensor) -> Tensor:
        return x.roll(1, 0) + x.roll(-1, 0) + x.roll(1, 1) + x.roll(-1, 1) - 4 * x

    def residual(z: Tensor, feed: Tensor) -> Tensor:
        a, b = z[0], z[1]
        reacts = a * a * b
        return torch.stack(
            [(a - 1) / dt - da * laplace(a) - (feed - a + reacts), (b - 1) / dt - db * laplace(b) - (0.9 - reacts)]
        )

    ring = sp.diags([1.0, 1.0, 1.0, 1.0], [1 - m, -1, 1, m - 1], shape=(m, m))
    L = sp.csr_matrix(sp.kronsum(ring, ring) - 4 * sp.identity(m * m))
    eye = sp.identity(m * m)

    def hand(z: Array, feed: Array) -> tuple[Array, Any]:
        a, b = z[: m * m], z[m * m :]
        r = a * a * b
        F = np.concatenate(
            [(a - 1) / dt - da * (L @ a) - (feed.reshape(-1) - a + r), (b - 1) / dt - db * (L @ b) - (0.9 - r)]
        )
        ra, rb = sp.diags(2 * a * b), sp.diags(a * a)
        return F, sp.bmat([[eye / dt - da * L + eye - ra, -rb], [ra, eye / dt - db * L + rb]])

    feed = 0.1 + 0.05 * torch.linspace(0, 1, m * m).view(m, m)
    return Row(
        f"two species, {m} x {m}", residual, torch.ones(2, m, m), feed, hand, lambda z, f, w: -w[: m * m].reshape(m, m)
    )


def resistors(n: int) -> Row:
    """Nonlinear conductors on a scale-free graph, each node with a small leak to the ground."""
    rng = np.random.default_rng(0)
    ends: list[int] = [0, 1]
    edges = [(0, 1)]
    for node in range(2, n):
        for other in {ends[k] for k in rng.integers(0, len(ends), 2 if n <= 5000 else 1)}:
            edges.append((node, other))
            ends += [node, other]
    i, j = np.array(edges).T
    ti, tj = torch.from_numpy(i), torch.from_numpy(j)
    each = np.arange(len(i))
    ones = np.ones(len(i))
    incidence = sp.csr_matrix((np.r_[ones, -ones], (np.r_[i, j], np.r_[each, each])), shape=(n, len(i)))
    source = np.sin(np.arange(n))

    def residual(v: Tensor, g: Tensor) -> Tensor:
        current = g * torch.sinh(v[ti] - v[tj])
        return (
            torch.zeros_like(v).index_add(0, ti, current).index_add(0, tj, -current)
            + 0.1 * v
            - torch.from_numpy(source)
        )

    def hand(v: Array, g: Array) -> tuple[Array, Any]:
        d = incidence.T @ v
        return incidence @ (g * np.sinh(d)) + 0.1 * v - source, incidence @ sp.diags(
            g * np.cosh(d)
        ) @ incidence.T + 0.1 * sp.identity(n)

    g = torch.linspace(0.5, 1.5, len(i))
    return Row(
        f"resistors, {n}",
        residual,
        torch.zeros(n),
        g,
        hand,
        lambda v, g, w: np.sinh(incidence.T @ v) * (incidence.T @ w),
    )


def collocation(n: int) -> Row:
    """A boundary-value problem of four unknowns a point (a beam on a nonlinear bed) by the trapezoidal rule."""
    h = 1.0 / n

    def residual(y: Tensor, load: Tensor) -> Tensor:
        slopes = torch.cat([y[:, 1:], (load - 50 * torch.sinh(y[:, :1]))], 1)
        inner = (y[1:] - y[:-1]) / h - 0.5 * (slopes[1:] + slopes[:-1])
        ends = torch.stack([y[0, 0], y[0, 1], y[-1, 0], y[-1, 1]])[None]
        return torch.cat([ends[:, :2].expand(1, 2).reshape(-1), inner.reshape(-1), ends[0, 2:]]).view(n + 1, 4)

    size = 4 * (n + 1)
    point = np.arange(n + 1) * 4

    def hand(y: Array, load: Array) -> tuple[Array, Any]:
        Y = y.reshape(n + 1, 4)
        slopes = np.concatenate([Y[:, 1:], load - 50 * np.sinh(Y[:, :1])], 1)
        inner = (Y[1:] - Y[:-1]) / h - 0.5 * (slopes[1:] + slopes[:-1])
        F = np.concatenate([Y[0, :2], inner.reshape(-1), Y[-1, :2]])
        rows, columns, values = (
            [np.array([0, 1, size - 2, size - 1])],
            [np.array([0, 1, 4 * n, 4 * n + 1])],
            [np.ones(4)],
        )
        for k in range(4):
            equation = 2 + point[:-1] + k
            for shift, sign in ((0, -1.0), (4, 1.0)):
                rows.append(equation), columns.append(point[:-1] + shift + k), values.append(np.full(n, sign / h))
                other = k + 1 if k < 3 else 0
                d = np.ones(n) if k < 3 else -50 * np.cosh(Y[:-1, 0] if shift == 0 else Y[1:, 0])
                rows.append(equation), columns.append(point[:-1] + shift + other), values.append(-0.5 * d)
        J = sp.csr_matrix((np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(size, size))
        return F, J

    def pull(y: Array, load: Array, w: Array) -> Array:
        last = w[2:-2].reshape(n, 4)[:, 3]
        out = np.zeros((n + 1, 1))
        out[1:, 0] -= 0.5 * last
        out[:-1, 0] -= 0.5 * last
        return out

    return Row(f"collocation, {size}", residual, torch.zeros(n + 1, 4), torch.full((n + 1, 1), 100.0), hand, pull)


def power_flow(n: int) -> Row:
    """AC power flow on a ring with chords: angles and voltages of load buses, bus 0 is the slack."""
    rng = np.random.default_rng(1)
    i = np.r_[np.arange(n), rng.integers(0, n, n // 2)]
    j = np.r_[(np.arange(n) + 1) % n, rng.integers(0, n, n // 2)]
    keep = i != j
    i, j = i[keep], j[keep]
    g, b = 1.0 + rng.random(len(i)), -10.0 - 5 * rng.random(len(i))
    ti, tj, tg, tb = (torch.from_numpy(t) for t in (i, j, g, b))
    free = np.arange(1, n)

    def residual(z: Tensor, load: Tensor) -> Tensor:
        angle, volt = pad(z[0], (1, 0)), pad(z[1], (1, 0), value=1.0)
        d = angle[ti] - angle[tj]
        vv = volt[ti] * volt[tj]
        cos, sin = torch.cos(d), torch.sin(d)
        zero = torch.zeros_like(angle)
        P = zero.index_add(0, ti, tg * (volt[ti] ** 2 - vv * cos) - tb * vv * sin)
        P = P.index_add(0, tj, tg * (volt[tj] ** 2 - vv * cos) + tb * vv * sin)
        Q = zero.index_add(0, ti, -tb * (volt[ti] ** 2 - vv * cos) - tg * vv * sin)
        Q = Q.index_add(0, tj, -tb * (volt[tj] ** 2 - vv * cos) + tg * vv * sin)
        return torch.stack([P[1:] + load[0], Q[1:] + load[1]])

    def scatter(r: Array, c: Array, v: Array) -> sp.csr_matrix:
        return sp.csr_matrix((v, (r, c)), shape=(n, n))

    def hand(z: Array, load: Array) -> tuple[Array, Any]:
        angle, volt = np.r_[0.0, z[: n - 1]], np.r_[1.0, z[n - 1 :]]
        d, vi, vj = angle[i] - angle[j], volt[i], volt[j]
        vv, c, s = vi * vj, np.cos(d), np.sin(d)
        add = lambda r, v: np.bincount(r, v, minlength=n)  # noqa: E731
        P = add(i, g * (vi**2 - vv * c) - b * vv * s) + add(j, g * (vj**2 - vv * c) + b * vv * s)
        Q = add(i, -b * (vi**2 - vv * c) - g * vv * s) + add(j, -b * (vj**2 - vv * c) + g * vv * s)
        Pi, Pj = g * vv * s - b * vv * c, g * vv * s + b * vv * c  # derivatives by d
        Qi, Qj = -b * vv * s - g * vv * c, -b * vv * s + g * vv * c
        PA = scatter(i, i, Pi) - scatter(i, j, Pi) + scatter(j, i, Pj) - scatter(j, j, Pj)
        QA = scatter(i, i, Qi) - scatter(i, j, Qi) + scatter(j, i, Qj) - scatter(j, j, Qj)
        PV = scatter(i, i, 2 * g * vi - g * vj * c - b * vj * s) + scatter(i, j, -g * vi * c - b * vi * s)
        PV = PV + scatter(j, j, 2 * g * vj - g * vi * c + b * vi * s) + scatter(j, i, -g * vj * c + b * vj * s)
        QV = scatter(i, i, -2 * b * vi + b * vj * c - g * vj * s) + scatter(i, j, b * vi * c - g * vi * s)
        QV = QV + scatter(j, j, -2 * b * vj + b * vi * c + g * vi * s) + scatter(j, i, b * vj * c + g * vj * s)
        J = sp.bmat([[PA[1:, 1:], PV[1:, 1:]], [QA[1:, 1:], QV[1:, 1:]]])
        return np.r_[P[1:] + load[0], Q[1:] + load[1]], J

    load = torch.stack([torch.full((n - 1,), 2.0 / n), torch.full((n - 1,), 0.5 / n)])
    z0 = torch.stack([torch.zeros(len(free)), torch.ones(len(free))])
    return Row(f"power flow, {2 * (n - 1)}", residual, z0, load, hand, lambda z, p, w: w.reshape(2, -1))


def dense(n: int) -> Row:
    """A dense system of condition 1e8."""
    generator = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(n, n, generator=generator))
    V, _ = torch.linalg.qr(torch.randn(n, n, generator=generator))
    A = U @ torch.diag(torch.logspace(0, -8, n)) @ V.T
    a = A.numpy()
    return Row(
        f"dense, condition 1e8, {n}",
        lambda z, b: A @ z + 1e-10 * z**3 - A @ b,
        torch.zeros(n),
        torch.ones(n),
        lambda z, b: (a @ z + 1e-10 * z**3 - a @ b, a + np.diag(3e-10 * z**2)),
        lambda z, b, w: -a.T @ w,
        accuracy=1e-4,
    )


def batch(count: int, n: int) -> Row:
    def residual(u: Tensor, x: Tensor) -> Tensor:
        U = pad(u, (1, 1))
        return 2.5 * u + u**3 - U[:, 2:] - U[:, :-2] - x

    L = sp.csr_matrix(sp.block_diag([sp.diags([-1.0, 2.5, -1.0], [-1, 0, 1], shape=(n, n))] * count))
    x = torch.linspace(0.5, 2, count * n).view(count, n)
    return Row(
        f"batch of {count}, tridiagonal {n}",
        residual,
        torch.zeros(count, n),
        x,
        lambda u, x: (L @ u + u**3 - x.reshape(-1), L + sp.diags(3 * u**2)),
        lambda u, x, w: -w.reshape(count, n),
        options={"batch_dims": 1},
    )


class OneMatrix:
    """``count`` times the matrix ``A`` along the diagonal."""

    def __init__(self, A: Any, count: int) -> None:
        self.A, self.count = A, count

    def __abs__(self) -> OneMatrix:
        return OneMatrix(abs(self.A), self.count)

    def __matmul__(self, z: Array) -> Array:
        return np.asarray(self.A @ z.reshape(self.count, -1).T).T.reshape(-1)

    def factors(self) -> Any:
        lu, count = sla.splu(self.A.tocsc()), self.count

        class Factors:
            def solve(self, b: Array, trans: str = "N") -> Array:
                return np.asarray(lu.solve(np.ascontiguousarray(b.reshape(count, -1).T), trans).T).reshape(-1)

        return Factors()


def loads(count: int, m: int) -> Row:
    """A linear equation on a grid for many right-hand sides, which nobody says it is."""
    h2 = (m + 1.0) ** 2

    def residual(u: Tensor, b: Tensor) -> Tensor:
        U = pad(u, (1, 1, 1, 1))
        return h2 * (4 * u - U[..., 2:, 1:-1] - U[..., :-2, 1:-1] - U[..., 1:-1, 2:] - U[..., 1:-1, :-2]) + u - b

    L1 = h2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(m, m))
    A = OneMatrix(sp.csr_matrix(sp.kronsum(L1, L1) + sp.identity(m * m)), count)
    return Row(
        f"{count} loads, {m} x {m}",
        residual,
        torch.zeros(count, m, m),
        torch.sin(torch.arange(count * m * m) * 0.37).view(count, m, m),
        lambda u, b: (A @ u - b.reshape(-1), A),
        lambda u, b, w: -w.reshape(b.shape),
        options={"batch_dims": 1},
    )


def sweeps(m: int) -> Row:
    """Jacobi's sweeps over a grid as a fixed-point map; by hand the equation itself."""
    h2 = (m + 1.0) ** 2

    def sweep(u: Tensor, b: Tensor) -> Tensor:
        U = pad(u, (1, 1, 1, 1))
        return (h2 * (U[2:, 1:-1] + U[:-2, 1:-1] + U[1:-1, 2:] + U[1:-1, :-2]) + b - 0.1 * u**3) / (4 * h2)

    L1 = h2 * sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(m, m))
    L = sp.csr_matrix(sp.kronsum(L1, L1))
    return Row(
        f"Jacobi's sweeps, {m} x {m}",
        sweep,
        torch.zeros(m, m),
        torch.linspace(1, 3, m * m).view(m, m),
        lambda u, b: (L @ u + 0.1 * u**3 - b.reshape(-1), L + sp.diags(0.3 * u**2)),
        lambda u, b, w: -w.reshape(m, m),
        solve=ik.fixed_point,
    )


ROWS: dict[str, Callable[[], Row]] = {
    **{f"bratu1 {n}": (lambda n=n: bratu(n)) for n in (100, 400, 1000, 4000, 20_000, 100_000)},
    **{f"bratu2 {m}": (lambda m=m: bratu2(m)) for m in (16, 64, 128, 256, 512)},
    **{f"space {m}": (lambda m=m: space(m)) for m in (10, 20, 30)},
    **{f"transport {n}": (lambda n=n: transport(n)) for n in (500, 2000, 20_000)},
    **{f"reaction {m}": (lambda m=m: reaction(m)) for m in (32, 96, 192)},
    **{f"resistors {n}": (lambda n=n: resistors(n)) for n in (500, 5000, 50_000)},
    **{f"power {n}": (lambda n=n: power_flow(n)) for n in (300, 3000)},
    **{f"collocation {n}": (lambda n=n: collocation(n)) for n in (100, 2000)},
    **{f"dense {n}": (lambda n=n: dense(n)) for n in (300, 1000)},
    "batch 64": lambda: batch(64, 200),
    "loads 20": lambda: loads(20, 100),
    **{f"sweeps {m}": (lambda m=m: sweeps(m)) for m in (30, 100)},
    **{f"poses {n}": (lambda n=n: Row(**large_fits.pose_graph(n))) for n in (200, 2000, 10_000)},
    **{f"bundle {c}": (lambda c=c, p=p: Row(**large_fits.bundle_adjustment(c, p))) for c, p in ((10, 100), (40, 2000))},
    "smoothing 50000": lambda: Row(**linear_fits.smoothing(50_000)),
    "labels 20000": lambda: Row(**linear_fits.labels(20_000)),
    "kalman 20000": lambda: Row(**linear_fits.kalman(5000)),
    "spline 20000": lambda: Row(**linear_fits.spline(20_000)),
    "deblurring 128": lambda: Row(**linear_fits.deblurring(128)),
    "sharpening 50000": lambda: Row(**linear_fits.sharpening(50_000)),
    **{f"control {n}": (lambda n=n: Row(**large_programs.pendulum(n))) for n in (100, 400, 2000, 7000)},
    **{f"predictive {n}": (lambda n=n: Row(**large_programs.tracking(12, 4, n))) for n in (20, 100, 400)},
    **{f"obstacle {m}": (lambda m=m: Row(**large_programs.membrane(m))) for m in (32, 64, 128)},
    **{f"network {m}": (lambda m=m: Row(**large_programs.network(m))) for m in (20, 50)},
    "portfolio 1000": lambda: Row(**large_programs.portfolio(1000, 30)),
    "dense program 500": lambda: Row(**large_programs.mixture(500, 50)),
    "nonnegative 1200": lambda: Row(**large_programs.nonnegative(3600, 1200)),
}
SLOW = ("bratu2 512", "reaction 192", "resistors 5000")


def peak(name: str, how: str) -> float:
    """Megabytes that one solve and its derivative add to a fresh process; ``how``: ``"ours"`` or ``"hand"``."""
    command = [sys.executable, __file__, "--peak", how, name]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return float(out.split()[-1])


def high_water() -> float:
    """The most memory of this process so far, in MB (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def timed(f: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    out = f()
    return out, time.process_time() - start


def cotangent(row: Row) -> Tensor:
    return torch.cos(torch.arange(row.z0.numel(), dtype=torch.float64)).view(row.z0.shape)


def ours(row: Row) -> tuple[Tensor, Tensor]:
    theta = row.theta.clone().requires_grad_()
    z = row.solve(row.residual, row.z0, (theta,), **row.options).value
    return z.detach(), torch.autograd.grad((cotangent(row) * z).sum(), theta)[0]


def hand(row: Row) -> tuple[Array, Array]:
    return by_hand(row, cotangent(row).numpy().reshape(-1))


def measure(row: Row, repeats: int, memory: tuple[float, float] | None = None) -> dict[str, Any]:
    """One row, as :func:`results.row` has it: the ratio, and what it may be."""
    try:
        (z, g), first = timed(lambda: ours(row))
    except (ik.ConvergenceError, ValueError) as error:
        return results.row(row.name, float("inf"), UNIT, target=1.5, failed=str(error)[:200])
    best = own = np.inf
    for _ in range(repeats):  # in turn: a noisy machine is noisy for both
        best = min(best, timed(lambda: ours(row))[1])
        (z_hand, g_hand), seconds = timed(lambda: hand(row))
        own = min(own, seconds)
    wrong, wrong_g = differs(z.numpy().reshape(-1), z_hand), differs(g.numpy(), g_hand)
    limit = 3 * own + 5e-3 if row.z0.numel() < 4000 else 1.5 * own
    held = {} if memory is None else {"MB": memory[0], "hand_MB": memory[1]}
    times = {"ms": 1e3 * best, "hand_ms": 1e3 * own, "first_ms": 1e3 * first}
    errors = {"wrong": wrong, "wrong_gradient": wrong_g, "right": wrong <= row.accuracy and wrong_g <= row.accuracy}
    return results.row(row.name, best / own, UNIT, target=limit / own, **times, **errors, **held)


def differs(found: Array, hand: Array) -> float:
    """The largest difference over the largest entry by hand."""
    assert found.shape == hand.shape, (found.shape, hand.shape)
    return float(np.abs(found - hand).max() / max(1e-300, np.abs(hand).max()))


def line(row: dict[str, Any]) -> str:
    """A row of the table that is printed."""
    if "failed" in row:
        return f"{row['row']:30s} FAILED: {row['failed']}"
    verdict = "ok" if row["value"] <= row["target"] else f"slow ({row['value']:.2f}x)"
    verdict = verdict if row["right"] else f"WRONG, {verdict}"
    held = f"{row['MB']:8.0f} {row['hand_MB']:8.0f}  " if "MB" in row else ""
    wrong = f"{row['wrong']:8.1e}" if "wrong" in row else ""
    return (
        f"{row['row']:30s} {row['first_ms']:9.1f} {row['ms']:9.1f} {row['hand_ms']:9.1f} {row['value']:6.2f}  "
        f"{wrong:8s} {row['wrong_gradient']:8.1e}  {held}{verdict}"
    )


JACOBIANS = {"jacrev bratu1 1000": lambda: bratu(1000), "jacrev dense 1000": lambda: dense(1000)}


def measure_jacobian(row: Row, repeats: int) -> dict[str, Any]:
    """``torch.func.jacrev`` of the solution, checked by one combination of its rows against the adjoint by hand."""

    def ours() -> Tensor:
        f = lambda theta: row.solve(row.residual, row.z0, (theta,), **row.options).value  # noqa: E731
        return torch.func.jacrev(f)(row.theta)

    weights = np.cos(np.arange(row.z0.numel()))
    z, gradient = by_hand(row, weights)
    J = row.hand(z, row.theta.numpy())[1]
    rows, first = timed(ours)
    best = min(timed(ours)[1] for _ in range(repeats))
    hand = min(timed(lambda: _lu(J).solve(np.eye(len(z)), "T"))[1] for _ in range(repeats))
    wrong = differs(weights @ rows.numpy(), gradient)
    times = {"ms": 1e3 * best, "hand_ms": 1e3 * hand, "first_ms": 1e3 * first}
    errors = {"wrong_gradient": wrong, "right": wrong <= row.accuracy}
    return results.row(f"jacrev, {row.name}", best / hand, UNIT, target=3.0, **times, **errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="only rows whose name has one of these in it")
    parser.add_argument("--full", action="store_true", help="the rows that take minutes, too")
    parser.add_argument("--memory", action="store_true", help="peaks of memory, each in a process of its own")
    parser.add_argument("--no-json", action="store_true", help="leave benchmarks/results as it is")
    parser.add_argument("--peak", choices=("ours", "hand"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", sp.SparseEfficiencyWarning)
    for row in (bratu(200), Row(**large_fits.pose_graph(120)), Row(**large_programs.membrane(17))):
        ours(row), hand(row)  # whatever is imported is imported
    if arguments.peak:
        row, run = ROWS[arguments.parts[0]](), {"ours": ours, "hand": hand}[arguments.peak]
        before = high_water()
        run(row)
        print(high_water() - before)
        return 0
    memory = f"{'MB':>8s} {'hand, MB':>8s}" if arguments.memory else ""
    print(
        f"{'':30s} {'first, ms':>9s} {'best, ms':>9s} {'hand, ms':>9s} {'ratio':>6s}  {'value':>8s} {'gradient':>8s}  "
        f"{memory}"
    )
    found: list[dict[str, Any]] = []
    for name, make in ROWS.items():
        wanted = not arguments.parts or any(part in name for part in arguments.parts)
        if wanted and (arguments.full or arguments.parts or name not in SLOW):
            held = (peak(name, "ours"), peak(name, "hand")) if arguments.memory else None
            found.append(measure(make(), 3, held))
            print(line(found[-1]), flush=True)
    for name, make in JACOBIANS.items():
        if not arguments.parts or any(part in name for part in arguments.parts):
            found.append(measure_jacobian(make(), 3))
            print(line(found[-1]), flush=True)
    if found and not arguments.no_json:
        results.save("bench_large", found, (__doc__ or "").split("\n\n", 2)[2], part=True, chosen=bool(arguments.parts))
    bad = [row["row"] for row in found if not row.get("right")]
    if bad:
        print(f"\nfailed, or differs from what is found by hand: {'; '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
