r"""The positive semidefinite cone, self-dual, on scaled upper triangles by columns (``svec``).

``Pi(X) = (X + |X|) / 2`` with ``|X| = (X^2)^{1/2}``; on the central path ``(X + (X^2 + 4 mu I)^{1/2}) / 2``.  The root
``Y`` is the root of ``Y^2 = X^2 + 4 mu I``: its value comes from an eigendecomposition, its derivatives from chord steps
with the Lyapunov operator ``H -> Y_0 H + H Y_0`` in that basis, which never divides by a difference of eigenvalues.

Source: Sun & Sun (2002), "Semismooth matrix-valued functions", Math. Oper. Res. 27(1), section 4.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from implicitkit.extend import constants
from implicitkit_cvxpy.cones.numeric import ORDER


def order_of(size: int) -> int:
    """``n`` from ``n (n + 1) / 2``."""
    return (math.isqrt(8 * size + 1) - 1) // 2


@functools.lru_cache(maxsize=64)
def _positions(n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Row-major positions of the triangle's entries, the triangle's position of each entry, and the scaling; on the CPU."""
    row = np.array([i for j in range(n) for i in range(j + 1)], dtype=np.int64)
    column = np.array([j for j in range(n) for _ in range(j + 1)], dtype=np.int64)
    place = np.empty((n, n), dtype=np.int64)
    place[row, column] = place[column, row] = np.arange(len(row))
    scale = np.where(row == column, 1.0, math.sqrt(2.0))
    # by NumPy: of what torch.tensor makes inside a transform the level would be kept
    return torch.from_numpy(row * n + column), torch.from_numpy(place.reshape(-1)), torch.from_numpy(scale)


def svec(X: Tensor) -> Tensor:
    """``(..., n, n) -> (..., n (n + 1) / 2)``, an isometry on symmetric matrices."""
    index, _, scale = (t.to(X.device) for t in _positions(X.shape[-1]))
    return X.flatten(-2).index_select(-1, index) * scale.to(X.dtype)


def unsvec(v: Tensor) -> Tensor:
    """The inverse of :func:`svec`."""
    n = order_of(v.shape[-1])
    _, place, scale = (t.to(v.device) for t in _positions(n))
    return (v / scale.to(v.dtype)).index_select(-1, place).unflatten(-1, (n, n))


def _basis(X: Tensor) -> Tensor:
    """Eigenvectors with the eigenvalues as one row more, ``(..., n + 1, n)``; NaN where ``X`` is not finite."""
    finite = X.isfinite().flatten(-2).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, X, 0.0))
    return torch.where(finite, torch.cat([vectors, values.unsqueeze(-2)], -2), torch.nan)


def project_semidefinite(v: Tensor, mu: float = 0.0) -> Tensor:
    """Projection of each triangle of the last dimension, ``(..., n (n + 1) / 2)``."""
    X = unsvec(v)
    found = constants(_basis, X)
    U, values = found[..., :-1, :], found[..., -1, :]
    turned = U.mT @ X @ U
    zero = turned - turned.detach()  # worth nothing, but it has the derivatives of X
    D = torch.diag_embed(values)
    root = (values * values + 4 * mu).sqrt() if mu else values.abs()
    total = root.unsqueeze(-1) + root.unsqueeze(-2)
    inverse = torch.where(total > 0, 1 / torch.where(total > 0, total, 1.0), 0.0)
    change = D @ zero + zero @ D + zero @ zero  # X^2 - D^2 in this basis
    Y_0 = torch.diag_embed(root)
    step = torch.zeros_like(zero)
    for _ in range(ORDER):  # Y = Y_0 + step;  Y^2 - Y_0^2 = change
        step = (change - step @ step) * inverse
    return svec(U @ ((D + zero + Y_0 + step) * 0.5) @ U.mT)
