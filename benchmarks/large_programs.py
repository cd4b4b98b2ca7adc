"""Constrained rows of ``bench_large.py``: optimal and predictive control within bounds, a membrane over an obstacle, flow in
a network, a nonnegative fit, a portfolio with a factor model, and a dense quadratic program.

By hand: Newton's method for the optimality conditions with the analytic Hessian of the Lagrangian and the analytic Jacobian
of the constraints.  A bound is active where ``z - dL/dz`` lies beyond it; its unknown's equation is then ``z = bound`` (the
primal-dual active set method).  One sparse LU a step, and one more for the adjoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.nn.functional import pad

import implicitkit as ik

Array = np.ndarray
_WEIGHT, _DAMPING, _LENGTH, _FORCE = 10.0, 0.1, 5.0, 1.0


def pendulum(points: int) -> dict[str, Any]:
    """A damped pendulum is to follow a target with little force ``|u| <= 1``: ``(angle, speed, u)`` at every point of time
    as unknowns, explicit Euler steps as constraints; by the target."""
    n, h = points, _LENGTH / points
    start = np.array([1.5, 0.0])
    t_start = torch.from_numpy(start)

    def objective(z: Tensor, target: Tensor) -> Tensor:
        angle, speed, u = z.view(n, 3).unbind(1)
        return 0.5 * h * (u.square() + _WEIGHT * (angle - target).square() + speed.square()).sum()

    def dynamics(z: Tensor, target: Tensor) -> Tensor:
        x, u = z.view(n, 3)[:, :2], z.view(n, 3)[:, 2]
        before = torch.cat([t_start[None], x[:-1]])
        force = -torch.sin(before[:, 0]) - _DAMPING * before[:, 1] + u
        return x - before - h * torch.stack([before[:, 1], force], 1)

    low = torch.tensor([-torch.inf, -torch.inf, -_FORCE], dtype=torch.float64).repeat(n)
    k = np.arange(n)
    angle, speed, u, later = 3 * k, 3 * k + 1, 3 * k + 2, k[1:]
    one = np.ones(n)

    def constraints(z: Array) -> tuple[Array, sp.csr_matrix]:
        x, force = z.reshape(n, 3)[:, :2], z.reshape(n, 3)[:, 2]
        before = np.concatenate([start[None], x[:-1]])
        f = np.stack([before[:, 1], -np.sin(before[:, 0]) - _DAMPING * before[:, 1] + force], 1)
        rows = [2 * k, 2 * k + 1, 2 * k + 1, 2 * later, 2 * later, 2 * later + 1, 2 * later + 1]
        columns = [angle, speed, u, angle[:-1], speed[:-1], angle[:-1], speed[:-1]]
        short = one[1:]
        values = [one, one, -h * one, -short, -h * short, h * np.cos(before[1:, 0]), (h * _DAMPING - 1) * short]
        C = sp.csr_matrix(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))), shape=(2 * n, 3 * n)
        )
        return (x - before - h * f).reshape(-1), C

    def slope_and_hessian(z: Array, y: Array, target: Array, C: Any) -> tuple[Array, Any]:
        v = z.reshape(n, 3)
        slope = h * np.stack([_WEIGHT * (v[:, 0] - target), v[:, 1], v[:, 2]], 1).reshape(-1) + C.T @ y
        diagonal = h * np.tile([_WEIGHT, 1.0, 1.0], n)
        diagonal[angle[:-1]] -= h * np.sin(v[:-1, 0]) * y[3::2]
        return slope, sp.diags(diagonal)

    def hand(w: Array, target: Array) -> tuple[Array, Any]:
        z, y = w[: 3 * n], w[3 * n :]
        c, C = constraints(z)
        return _conditions(z, *slope_and_hessian(z, y, target, C), c, C, low.numpy(), -low.numpy())

    return {
        "name": f"control, {3 * n} unknowns",
        "residual": objective,
        "z0": torch.zeros(3 * n, dtype=torch.float64),
        "theta": 0.3 * torch.sin(torch.linspace(0, 6, n, dtype=torch.float64)),
        "hand": hand,
        "pull": lambda w, target, a: -h * _WEIGHT * a[angle],
        "options": {"constraints": [ik.Equality(dynamics)], "bounds": (low, -low)},
        "solve": ik.argmin,
        "hidden": 2 * n,
    }


def tracking(states: int, inputs: int, steps: int) -> dict[str, Any]:
    """Model predictive control: a linear system is to come to rest, all states and inputs within bounds, as a quadratic
    program with sparse matrices; by the state that it starts from.  By hand Clarabel finds what is active, and the solution
    and the adjoint are those of these conditions, by one more LU."""
    import clarabel

    rng = np.random.default_rng(0)
    n, m = (steps + 1) * states + steps * inputs, (steps + 1) * states
    forward = np.eye(states) + 0.1 * rng.standard_normal((states, states)) / states**0.5
    push = rng.standard_normal((states, inputs)) / states**0.5
    weights = np.r_[np.tile(rng.uniform(0.1, 10, states), steps + 1), np.full(steps * inputs, 0.1)]
    P, later = sp.diags_array(weights).tocsr(), sp.eye(steps + 1, steps, k=-1)
    A = sp.hstack([sp.kron(sp.eye(steps + 1, k=-1), forward) - sp.identity(m), sp.kron(later, push)]).tocsr()
    high = np.r_[np.full(m, 2.0), np.full(steps * inputs, 0.3)]
    q, t_high, bounds = torch.zeros(n, dtype=torch.float64), torch.from_numpy(high), sp.identity(n).tocsr()

    def solve(_: Any, z0: Tensor, args: tuple[Tensor]) -> Any:
        b = torch.cat([-args[0], args[0].new_zeros(m - states)])
        return ik.solve(ik.QuadraticProgram(P, q, A, b, bounds, t_high, -t_high))

    def hand(weights: Array, start: Array) -> tuple[Array, Array]:
        b, eye = np.r_[-start, np.zeros(m - states)], sp.identity(n)
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-11
        rows, ends = sp.csc_matrix(sp.vstack([A, eye, -eye])), np.r_[b, high, high]
        cones = [clarabel.ZeroConeT(m), clarabel.NonnegativeConeT(2 * n)]
        found = clarabel.DefaultSolver(sp.csc_matrix(P), q.numpy(), rows, ends, cones, settings).solve()
        above, below = (np.array(found.z) > np.array(found.s))[m:].reshape(2, n)
        active = np.flatnonzero(above | below)
        held = sp.csr_matrix(eye)[active]
        lu = sla.splu(sp.bmat([[P, A.T, held.T], [A, None, None], [held, None, None]], format="csc"))
        z = lu.solve(np.r_[-q.numpy(), b, np.where(above, high, -high)[active]])[:n]
        return z, -lu.solve(np.r_[weights, np.zeros(m + len(active))])[n : n + states]

    return {
        "name": f"predictive control, {n} unknowns",
        "residual": lambda z, start: z,
        "z0": torch.zeros(n, dtype=torch.float64),
        "theta": torch.from_numpy(rng.uniform(-1, 1, states)),
        "hand": lambda w, start: (np.zeros(n + m), None),
        "pull": lambda w, start, a: a[n : n + states],
        "elsewhere": hand,
        "solve": solve,
    }


def membrane(m: int) -> dict[str, Any]:
    """A membrane under a load over an obstacle: a convex energy within bounds; by the load."""
    h2 = (m + 1.0) ** -2
    axis = torch.linspace(0, 1, m + 2, dtype=torch.float64)[1:-1]
    X, Y = torch.meshgrid(axis, axis, indexing="ij")
    obstacle = 0.2 - 4 * ((X - 0.5) ** 2 + (Y - 0.5) ** 2)

    def energy(z: Tensor, load: Tensor) -> Tensor:
        U = pad(z, (1, 1, 1, 1))
        return 0.5 * (U.diff(dim=0).square().sum() + U.diff(dim=1).square().sum()) - h2 * (load * z).sum()

    L1 = sp.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(m, m))
    L = sp.csr_matrix(sp.kronsum(L1, L1))
    low = obstacle.numpy().reshape(-1)
    high, none = np.full(m * m, np.inf), sp.csr_matrix((0, m * m))

    def hand(z: Array, load: Array) -> tuple[Array, Any]:
        return _conditions(z, L @ z - h2 * load.reshape(-1), L, np.zeros(0), none, low, high)

    def pull(z: Array, load: Array, a: Array) -> Array:
        slope = L @ z - h2 * load.reshape(-1)
        return -h2 * (a * (z - slope >= low)).reshape(m, m)

    return {
        "name": f"obstacle, {m} x {m}",
        "residual": energy,
        "z0": torch.zeros(m, m, dtype=torch.float64),
        "theta": -torch.ones(m, m, dtype=torch.float64),
        "hand": hand,
        "pull": pull,
        "options": {"bounds": (obstacle, None)},
        "solve": ik.argmin,
    }


def network(side: int) -> dict[str, Any]:
    """Flow of least cost ``c (f^2 / 2 + f^4 / 4)`` in a grid with the balances of all nodes, one more than there need be; by
    the costs.  By hand the last one is left out."""
    at = np.arange(side * side).reshape(side, side)
    i, j = np.r_[at[:, :-1].ravel(), at[:-1].ravel()], np.r_[at[:, 1:].ravel(), at[1:].ravel()]
    nodes, edges, one = side * side, len(i), np.ones(len(i))
    A = sp.csr_matrix((np.r_[one, -one], (np.r_[i, j], np.tile(np.arange(edges), 2))), shape=(nodes, edges))
    B, source = A[:-1], np.sin(np.arange(nodes))
    source -= source.mean()
    ti, tj, given = torch.from_numpy(i), torch.from_numpy(j), torch.from_numpy(source)

    def balance(f: Tensor, c: Tensor) -> Tensor:
        return torch.zeros_like(given).index_add(0, ti, f).index_add(0, tj, -f) - given

    def hand(w: Array, c: Array) -> tuple[Array, Any]:
        f, y = w[:edges], w[edges:]
        out = np.r_[c * (f + f**3) + B.T @ y, B @ f - source[:-1]]
        return out, sp.bmat([[sp.diags(c * (1 + 3 * f**2)), B.T], [B, None]])

    return {
        "name": f"flow in a network, {edges} edges",
        "residual": lambda f, c: (c * (f.square() / 2 + f**4 / 4)).sum(),
        "z0": torch.zeros(edges, dtype=torch.float64),
        "theta": torch.linspace(0.5, 1.5, edges, dtype=torch.float64),
        "hand": hand,
        "pull": lambda w, c, u: (w[:edges] + w[:edges] ** 3) * u[:edges],
        "options": {"constraints": [ik.Equality(balance)]},
        "solve": ik.argmin,
        "hidden": nodes - 1,
    }


def nonnegative(rows: int, columns: int) -> dict[str, Any]:
    """A linear fit of nonnegative numbers to a design of random entries, whose factors are hardly sparse; by the data."""
    rng = np.random.default_rng(0)
    A = sp.csr_matrix(sp.random(rows, columns, 6 / columns, random_state=rng))
    data = A @ np.maximum(rng.standard_normal(columns), 0) + rng.standard_normal(rows)
    i = torch.from_numpy(np.repeat(np.arange(rows), np.diff(A.indptr)))
    j, entries = torch.from_numpy(A.indices.astype(np.int64)), torch.from_numpy(A.data)
    H, none = sp.csr_matrix(A.T @ A), sp.csr_matrix((0, columns))
    low, high = np.zeros(columns), np.full(columns, np.inf)

    def hand(z: Array, b: Array) -> tuple[Array, Any]:
        return _conditions(z, H @ z - A.T @ b, H, np.zeros(0), none, low, high)

    return {
        "name": f"nonnegative fit, {rows} x {columns}",
        "residual": lambda z, b: torch.zeros_like(b).index_add(0, i, entries * z[j]) - b,
        "z0": torch.ones(columns, dtype=torch.float64),
        "theta": torch.from_numpy(data),
        "hand": hand,
        "pull": lambda z, b, u: -A @ (u * (z - (H @ z - A.T @ b) >= 0)),
        "options": {"bounds": (0.0, None)},
        "solve": ik.least_squares,
    }


def portfolio(assets: int, factors: int) -> dict[str, Any]:
    """Risk ``z'(D + F F') z / 2 - r'z`` of a long-only portfolio with a budget and a factor model; by the returns ``r``.  By
    hand the active set that signs say, its systems by Woodbury's formula."""
    rng = np.random.default_rng(0)
    F, D = rng.standard_normal((assets, factors)) / factors**0.5, rng.uniform(0.1, 1.1, assets)
    t_F, t_D, one = torch.from_numpy(F), torch.from_numpy(D), np.ones(assets)

    def risk(z: Tensor, r: Tensor) -> Tensor:
        return 0.5 * (t_D * z * z).sum() + 0.5 * (z @ t_F).square().sum() - r @ z

    def hand(weights: Array, r: Array) -> tuple[Array, Array]:
        held = one > 0
        for _ in range(50):
            d, f = D[held, None], F[held]
            X = np.stack([r, one, weights], 1)[held] / d
            X = X - (f / d) @ np.linalg.solve(np.eye(factors) + f.T @ (f / d), f.T @ X)
            price = (X[:, 0].sum() - 1) / X[:, 1].sum()
            z, u = np.zeros(assets), np.zeros(assets)
            z[held] = X[:, 0] - price * X[:, 1]
            new = np.where(held, z > 0, D * z + F @ (F.T @ z) - r + price < 0)
            if (new == held).all():
                break
            held = new
        u[held] = X[:, 2] - X[:, 1] * (X[:, 2].sum() / X[:, 1].sum())
        return z, u

    return {
        "name": f"portfolio, {assets} assets, {factors} factors",
        "residual": risk,
        "z0": torch.full((assets,), 1 / assets, dtype=torch.float64),
        "theta": torch.from_numpy(0.1 * rng.standard_normal(assets)),
        "hand": lambda z, r: (np.zeros(assets + 1), None),
        "pull": lambda z, r, u: -u[:assets],
        "elsewhere": hand,
        "options": {"constraints": [ik.Equality(lambda z, r: z.sum() - 1)], "bounds": (0.0, None)},
        "solve": ik.argmin,
    }


def mixture(unknowns: int, sums: int) -> dict[str, Any]:
    """A quadratic program ``z'Pz / 2 + q'z``, ``Az = b``, ``z >= 0`` without a zero in ``P`` and ``A``, as a function; by
    ``q``.  By hand the active set that signs say, its systems by dense LU."""
    import scipy.linalg as la

    rng = np.random.default_rng(0)
    M, A = rng.standard_normal((unknowns, unknowns)), rng.standard_normal((sums, unknowns))
    P, b = M @ M.T / unknowns + 0.1 * np.eye(unknowns), A @ np.abs(rng.standard_normal(unknowns))
    t_P, t_A, t_b = torch.from_numpy(P), torch.from_numpy(A), torch.from_numpy(b)

    def hand(weights: Array, q: Array) -> tuple[Array, Array]:
        held, none = np.zeros(unknowns, dtype=bool), np.zeros((sums, sums))
        z, u = np.zeros(unknowns), np.zeros(unknowns)
        for _ in range(50):
            free = np.flatnonzero(~held)
            lu = la.lu_factor(np.block([[P[np.ix_(free, free)], A[:, free].T], [A[:, free], none]]))
            x = la.lu_solve(lu, np.r_[-q[free], b])
            z[:] = 0
            z[free] = x[: len(free)]
            new = np.where(held, P @ z + q + A.T @ x[len(free) :] > 0, z < 0)
            if (new == held).all():
                break
            held = new
        u[free] = la.lu_solve(lu, np.r_[weights[free], np.zeros(sums)])[: len(free)]
        return z, -u

    return {
        "name": f"dense program, {unknowns} unknowns, {sums} equalities",
        "residual": lambda z, q: 0.5 * z @ (t_P @ z) + q @ z,
        "z0": torch.zeros(unknowns, dtype=torch.float64),
        "theta": torch.from_numpy(rng.standard_normal(unknowns)),
        "hand": lambda z, q: (np.zeros(unknowns + sums), None),
        "pull": lambda z, q, u: u[:unknowns],
        "elsewhere": hand,
        "options": {"constraints": [ik.Equality(lambda z, q: t_A @ z - t_b)], "bounds": (0.0, None)},
        "solve": ik.argmin,
    }


def _conditions(z: Array, slope: Array, H: Any, c: Array, C: Any, low: Array, high: Array) -> tuple[Array, Any]:
    """The natural map ``(z - clip(z - dL/dz), c)`` and its derivative."""
    aim = z - slope
    free = sp.diags(((aim >= low) & (aim <= high)).astype(float))
    F = np.concatenate([z - np.clip(aim, low, high), c])
    top = [free @ H + (sp.identity(len(z)) - free), free @ C.T]
    return F, sp.bmat([top, [C, None]]) if len(c) else top[0]
