"""Least-squares rows of ``bench_large.py``: a pose graph and a bundle adjustment, in torch and by hand.

By hand: Gauss-Newton with the analytic Jacobian ``R`` and a sparse LU of ``R'R`` in each step, then the adjoint by a sparse
LU of the full Hessian ``R'R + sum_i r_i d^2 r_i``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik

Array = np.ndarray


def pose_graph(n: int) -> dict[str, Any]:
    """Poses ``(x, y, angle)`` on loops of a circle, seen from their neighbours and from those one loop before; a prior
    holds the first."""
    rng = np.random.default_rng(0)
    loop = 100
    angle = np.arange(n) * (2 * np.pi / loop)
    true = np.stack([5 * np.cos(angle), 5 * np.sin(angle), angle + np.pi / 2], -1)
    i = np.r_[np.arange(n - 1), np.arange(n - loop)]
    j = np.r_[np.arange(1, n), np.arange(loop, n)]
    edges, ti, tj = len(i), torch.from_numpy(i), torch.from_numpy(j)
    weight = 100.0

    def between(a: Any, b: Any, lib: Any) -> tuple[Any, Any, Any]:
        c, s, d = lib.cos(a[:, 2]), lib.sin(a[:, 2]), b - a
        return c * d[:, 0] + s * d[:, 1], -s * d[:, 0] + c * d[:, 1], d[:, 2]

    measured = np.stack(between(true[i], true[j], np), -1) + 0.02 * rng.standard_normal((edges, 3))
    start = true + 0.1 * rng.standard_normal(true.shape)
    held = torch.from_numpy(true[0])

    def residuals(p: Tensor, m: Tensor) -> dict[str, Tensor]:
        return {"edges": torch.stack(between(p[ti], p[tj], torch), -1) - m, "prior": weight * (p[0] - held)}

    def parts(z: Array) -> tuple[Array, ...]:
        p = z.reshape(n, 3)
        u, v, w = between(p[i], p[j], np)
        return p, u, v, w, np.cos(p[i, 2]), np.sin(p[i, 2])

    one, edge = np.ones(edges), 3 * np.arange(edges)

    def jacobian(z: Array) -> sp.csr_matrix:
        _, u, v, _, c, s = parts(z)
        entries = [
            (0, 3 * i, -c), (0, 3 * i + 1, -s), (0, 3 * i + 2, v), (0, 3 * j, c), (0, 3 * j + 1, s),
            (1, 3 * i, s), (1, 3 * i + 1, -c), (1, 3 * i + 2, -u), (1, 3 * j, -s), (1, 3 * j + 1, c),
            (2, 3 * i + 2, -one), (2, 3 * j + 2, one),
        ]  # fmt: skip
        rows = np.concatenate([edge + k for k, _, _ in entries] + [3 * edges + np.arange(3)])
        columns = np.concatenate([c for _, c, _ in entries] + [np.arange(3)])
        values = np.concatenate([v for _, _, v in entries] + [np.full(3, weight)])
        return sp.csr_matrix((values, (rows, columns)), shape=(3 * edges + 3, 3 * n))

    def value(z: Array, m: Array) -> Array:
        p, u, v, w, _, _ = parts(z)
        return np.r_[(np.stack([u, v, w], -1) - m).reshape(-1), weight * (p[0] - true[0])]

    def hand(z: Array, m: Array) -> tuple[Array, Any]:
        R = jacobian(z)
        return R.T @ value(z, m), R.T @ R

    def hessian(z: Array, m: Array) -> Any:
        _, u, v, _, c, s = parts(z)
        R, r = jacobian(z), value(z, m)
        r0, r1 = r[: 3 * edges].reshape(-1, 3)[:, :2].T
        turn = 3 * i + 2
        cross = [(3 * i, s * r0 + c * r1), (3 * i + 1, -c * r0 + s * r1), (3 * j, -s * r0 - c * r1),
                 (3 * j + 1, c * r0 - s * r1)]  # fmt: skip
        rows = np.concatenate([turn, *(np.r_[turn, at] for at, _ in cross)])
        columns = np.concatenate([turn, *(np.r_[at, turn] for at, _ in cross)])
        values = np.concatenate([-u * r0 - v * r1, *(np.r_[d, d] for _, d in cross)])
        return R.T @ R + sp.csr_matrix((values, (rows, columns)), shape=(3 * n, 3 * n))

    return {
        "name": f"pose graph, {n} poses",
        "residual": residuals,
        "z0": torch.from_numpy(start),
        "theta": torch.from_numpy(measured),
        "hand": hand,
        "hessian": hessian,
        "pull": lambda z, m, u: -(jacobian(z) @ u)[: 3 * edges].reshape(-1, 3),
        "solve": ik.least_squares,
    }


def _rotated(w: Any, x: Any, lib: Any) -> Any:
    """``exp([w]x) x`` (Rodrigues); ``|w|`` is not small here."""
    size = (w * w).sum(-1)[..., None] ** 0.5
    axis = w / size
    c, s = lib.cos(size), lib.sin(size)
    inner = (axis * x).sum(-1)[..., None]
    return c * x + s * lib.cross(axis, x) + (1 - c) * inner * axis


def _cross_matrix(x: Array) -> Array:
    zero = np.zeros(len(x))
    return np.stack([zero, -x[:, 2], x[:, 1], x[:, 2], zero, -x[:, 0], -x[:, 1], x[:, 0], zero], -1).reshape(-1, 3, 3)


def bundle_adjustment(cameras: int, points: int) -> dict[str, Any]:
    """Cameras on a ring around a cloud of points, each point seen by six neighbouring cameras: rotation vectors,
    translations, points; pinhole projection of focal length one with one pixel in 500 of noise.  A prior holds the first
    camera and the second one's place, and so the gauge."""
    rng = np.random.default_rng(0)
    seen = 6
    turn = 2 * np.pi * np.arange(cameras) / cameras
    # camera k stands at distance 6 on the ring and looks at the centre: x_cam = R x + t with t = (0, 0, 6)
    down = np.diag([1.0, -1.0, -1.0])
    rotations = []
    for a in turn:
        about = np.array([[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]])
        rotations.append(_log(down @ about))
    true_cameras = np.concatenate([np.stack(rotations), np.tile([0.0, 0.0, 6.0], (cameras, 1))], 1)
    true_points = rng.uniform(-1.5, 1.5, (points, 3))
    first = rng.integers(0, cameras, points)
    cam = ((first[:, None] + np.arange(seen)) % cameras).reshape(-1)
    pt = np.repeat(np.arange(points), seen)
    count, tcam, tpt = len(cam), torch.from_numpy(cam), torch.from_numpy(pt)
    size = 6 * cameras + 3 * points
    weight = 10.0

    def project(c: Any, x: Any, lib: Any) -> Any:
        y = _rotated(c[..., :3], x, lib) + c[..., 3:]
        return y[..., :2] / y[..., 2:]

    held = np.r_[np.arange(6), np.arange(9, 12)]
    measured = project(true_cameras[cam], true_points[pt], np) + 0.002 * rng.standard_normal((count, 2))
    known = true_cameras.reshape(-1)[held]
    t_known, t_held = torch.from_numpy(known), torch.from_numpy(held)
    start = np.r_[
        (true_cameras + 0.01 * rng.standard_normal(true_cameras.shape)).reshape(-1),
        (true_points + 0.02 * rng.standard_normal(true_points.shape)).reshape(-1),
    ]

    def residuals(z: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        c, x = z[: 6 * cameras].view(-1, 6), z[6 * cameras :].view(-1, 3)
        return project(c[tcam], x[tpt], _Torch) - m, weight * (z[t_held] - t_known)

    rows = np.concatenate([np.repeat(np.arange(2 * count), 9), 2 * count + np.arange(9)])
    unknowns = np.concatenate([6 * cam[:, None] + np.arange(6), 6 * cameras + 3 * pt[:, None] + np.arange(3)], 1)
    columns = np.concatenate([np.repeat(unknowns[:, None], 2, 1).reshape(-1), held])

    def jacobian(z: Array) -> sp.csr_matrix:
        c, x = z[: 6 * cameras].reshape(-1, 6)[cam], z[6 * cameras :].reshape(-1, 3)[pt]
        w = c[:, :3]
        theta = np.linalg.norm(w, axis=1)[:, None, None]
        K = _cross_matrix(w)
        # exp([w]x) and its right Jacobian
        rotation = np.eye(3) + np.sin(theta) / theta * K + (1 - np.cos(theta)) / theta**2 * (K @ K)
        right = np.eye(3) - (1 - np.cos(theta)) / theta**2 * K + (theta - np.sin(theta)) / theta**3 * (K @ K)
        y = (rotation @ x[:, :, None])[:, :, 0] + c[:, 3:]
        inverse = 1 / y[:, 2]
        zero = np.zeros(count)
        P = np.stack([inverse, zero, -y[:, 0] * inverse**2, zero, inverse, -y[:, 1] * inverse**2], -1).reshape(-1, 2, 3)
        turned = -(rotation @ _cross_matrix(x) @ right)
        blocks = np.concatenate([P @ turned, P, P @ rotation], 2)
        values = np.concatenate([blocks.reshape(-1), np.full(9, weight)])
        return sp.csr_matrix((values, (rows, columns)), shape=(2 * count + 9, size))

    def value(z: Array, m: Array) -> Array:
        c, x = z[: 6 * cameras].reshape(-1, 6), z[6 * cameras :].reshape(-1, 3)
        return np.r_[(project(c[cam], x[pt], np) - m).reshape(-1), weight * (z[held] - known)]

    def hand(z: Array, m: Array) -> tuple[Array, Any]:
        R = jacobian(z)
        return R.T @ value(z, m), R.T @ R

    def hessian(z: Array, m: Array) -> Any:
        R, r = jacobian(z), value(z, m)
        both = torch.from_numpy(np.concatenate([z[: 6 * cameras].reshape(-1, 6)[cam],
                                                z[6 * cameras :].reshape(-1, 3)[pt]], 1))  # fmt: skip
        weights = torch.from_numpy(r[: 2 * count].reshape(-1, 2))
        one = lambda b, w: (w * project(b[:6], b[6:], _Torch)).sum()  # noqa: E731
        second = torch.func.vmap(torch.func.hessian(one))(both, weights).numpy()
        at = np.repeat(unknowns[:, :, None], 9, 2)
        pairs = (at.reshape(-1), at.transpose(0, 2, 1).reshape(-1))
        return R.T @ R + sp.csr_matrix((second.reshape(-1), pairs), shape=(size, size))

    return {
        "name": f"bundle, {cameras} cameras, {points} points",
        "residual": residuals,
        "z0": torch.from_numpy(start),
        "theta": torch.from_numpy(measured),
        "hand": hand,
        "hessian": hessian,
        "pull": lambda z, m, u: -(jacobian(z) @ u)[: 2 * count].reshape(-1, 2),
        "solve": ik.least_squares,
    }


class _Torch:
    """What :func:`_rotated` asks of a library, of torch."""

    cos: Callable[[Tensor], Tensor] = torch.cos
    sin: Callable[[Tensor], Tensor] = torch.sin
    cross: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda a, b: torch.linalg.cross(a, b))


def _log(rotation: Array) -> Array:
    from scipy.spatial.transform import Rotation

    return Rotation.from_matrix(rotation).as_rotvec()
