"""Linear rows of ``bench_large.py``, which nobody says are linear: smoothing on a graph, a Kalman smoother as one fit, a
spline, an image and a signal that are made sharp again, labels that spread over a graph.

By hand: ``min |A z - B m|^2 / 2`` by one sparse LU of ``A'A``, which serves the solution and the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor
from torch.nn.functional import conv1d, conv2d

import implicitkit as ik

Array = np.ndarray


def _row(name: str, f: Callable[..., Any], z0: Tensor, m: Tensor, A: Any, B: Any, solve: Any) -> dict[str, Any]:
    def by_hand(weights: Array, m: Array) -> tuple[Array, Array]:
        options = {"SymmetricMode": True}
        lu = sla.splu(sp.csc_matrix(A.T @ A), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options=options)
        return lu.solve(A.T @ (B @ m.reshape(-1))), (B.T @ (A @ lu.solve(weights))).reshape(m.shape)

    none: Any = lambda *_: None  # noqa: E731
    return {"name": name, "residual": f, "z0": z0, "theta": m, "hand": none, "pull": none, "solve": solve,
            "elsewhere": by_hand}  # fmt: skip


def _below(A: Any, *others: Any) -> tuple[Any, Any]:
    """``A`` with the others below it, and the matrix that puts data beside ``A``."""
    whole = sp.csr_matrix(sp.vstack([A, *others]))
    return whole, sp.eye(whole.shape[0], A.shape[0], format="csr")


def _links(n: int, each: int) -> tuple[Array, Array, Any]:
    """Each of ``n`` points of a square with its neighbours, and the differences along these links."""
    from scipy.spatial import cKDTree

    points = np.random.default_rng(0).random((n, 2))
    i, j = np.repeat(np.arange(n), each), cKDTree(points).query(points, each + 1)[1][:, 1:].reshape(-1)
    link, one = np.arange(len(i)), np.ones(len(i))
    return i, j, sp.csr_matrix((np.r_[one, -one], (np.r_[link, link], np.r_[i, j])), shape=(len(i), n))


def smoothing(n: int) -> dict[str, Any]:
    i, j, D = _links(n, 4)
    ti, tj, m = torch.from_numpy(i), torch.from_numpy(j), torch.sin(0.37 * torch.arange(n, dtype=torch.float64))
    f = lambda z, m: (z - m, 2 * (z[ti] - z[tj]))  # noqa: E731
    return _row(
        f"smoothing on a graph, {n}", f, torch.zeros_like(m), m, *_below(sp.identity(n), 2 * D), ik.least_squares
    )


def labels(n: int) -> dict[str, Any]:
    """As an objective: one node in twenty has a label."""
    i, j, D = _links(n, 5)
    seeds = np.random.default_rng(1).choice(n, n // 20, replace=False)
    ti, tj, ts = (torch.from_numpy(t) for t in (i, j, seeds))
    S = sp.csr_matrix((np.ones(len(seeds)), (np.arange(len(seeds)), seeds)), shape=(len(seeds), n))

    def energy(z: Tensor, m: Tensor) -> Tensor:
        return (z[ti] - z[tj]).square().sum() + 4 * (z[ts] - m).square().sum() + 1e-3 * z.square().sum()

    A, B = _below(2 * S, D, 1e-3**0.5 * sp.identity(n))
    m = torch.from_numpy(np.random.default_rng(2).standard_normal(len(seeds)))
    return _row(f"labels on a graph, {n}", energy, torch.zeros(n), m, A, 2 * B, ik.argmin)


def kalman(n: int) -> dict[str, Any]:
    """Place and speed in the plane at ``n`` times, the places seen."""
    F = torch.eye(4, dtype=torch.float64)
    F[0, 2] = F[1, 3] = 0.1
    f = lambda x, m: (2 * (x[:, :2] - m), 10 * (x[1:] - x[:-1] @ F.T), 0.1 * x[0])  # noqa: E731
    moved = 10 * (sp.eye(4 * n - 4, 4 * n, 4) - sp.kron(sp.eye(n - 1, n), F.numpy()))
    A, B = _below(2 * sp.kron(sp.identity(n), np.eye(2, 4)), moved, 0.1 * sp.eye(4, 4 * n))
    m = torch.from_numpy(np.random.default_rng(0).standard_normal((n, 2)).cumsum(0) * 0.1)
    return _row(f"Kalman smoother, {4 * n}", f, torch.zeros(n, 4), m, A, 2 * B, ik.least_squares)


def spline(n: int) -> dict[str, Any]:
    """``n`` cubic B-splines, twice as many data, rough second differences."""
    x = np.sort(np.random.default_rng(0).random(2 * n)) * (n - 3)
    k = np.minimum(x.astype(int), n - 4)
    t = x - k
    W = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3], 1) / 6
    at = k[:, None] + np.arange(4)
    basis = sp.csr_matrix((W.reshape(-1), (np.repeat(np.arange(2 * n), 4), at.reshape(-1))), shape=(2 * n, n))
    tw, ta = torch.from_numpy(W), torch.from_numpy(at)
    f = lambda c, m: ((tw * c[ta]).sum(1) - m, 3 * c.diff(n=2))  # noqa: E731
    bent = 3 * sp.diags([1.0, -2.0, 1.0], [0, 1, 2], shape=(n - 2, n))
    m = torch.from_numpy(np.sin(x / 500))
    return _row(f"spline, {n}", f, torch.zeros(n), m, *_below(basis, bent), ik.least_squares)


def deblurring(side: int) -> dict[str, Any]:
    one = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    kernel = torch.outer(one, one)[None, None]
    f = lambda u, m: (conv2d(u[None, None], kernel, padding=1)[0, 0] - m, 0.3 * u.diff(dim=0), 0.3 * u.diff())  # noqa: E731
    K = sp.diags([0.25, 0.5, 0.25], [-1, 0, 1], shape=(side, side))
    D, eye = 0.3 * sp.diags([-1.0, 1.0], [0, 1], shape=(side - 1, side)), sp.identity(side)
    m = torch.rand(side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A, B = _below(sp.kron(K, K), sp.kron(D, eye), sp.kron(eye, D))
    return _row(f"deblurring, {side} x {side}", f, torch.zeros_like(m), m, A, B, ik.least_squares)


def sharpening(n: int) -> dict[str, Any]:
    """A signal behind a wide filter."""
    taps = np.exp(-(np.arange(-4, 5) ** 2) / 8.0)
    kernel = torch.from_numpy(taps / taps.sum())[None, None]
    f = lambda u, m: (conv1d(u[None, None], kernel, padding=4)[0, 0] - m, u.diff(n=2))  # noqa: E731
    K = sp.diags(list(taps / taps.sum()), list(range(-4, 5)), shape=(n, n))
    bent = sp.diags([1.0, -2.0, 1.0], [0, 1, 2], shape=(n - 2, n))
    m = torch.sin(1e-3 * torch.arange(n, dtype=torch.float64))
    return _row(f"sharpening, {n}", f, torch.zeros(n), m, *_below(K, bent), ik.least_squares)
