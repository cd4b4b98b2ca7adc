r"""The positive semidefinite cone.

    P(X) = (X + |X|) / 2,    |X| = Q |\Lambda| Q'

The derivative of ``M = |X|`` is taken from ``M^2 = X^2``: ``dM M + M dM = dX X + X dX``, a Lyapunov equation, and that
of its solution is one more Lyapunov equation; so derivatives of every order are regular wherever ``X`` is nonsingular,
whatever eigenvalues it repeats (differentiating an eigendecomposition is not).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from implicitkit.sets.base import Projection

__all__ = ["PSDCone", "modulus", "positive_part"]


@dataclass(frozen=True)
class PSDCone(Projection):
    """``{X = X', X >= 0}``, on the last two dimensions; of a matrix that is not symmetric, its symmetric part.

    Raises:
        ValueError: the matrices are not square.
    """

    def project(self, v: Tensor) -> Tensor:
        if v.ndim < 2 or v.shape[-1] != v.shape[-2]:
            raise ValueError(f"PSDCone projects square matrices, got shape {tuple(v.shape)}")
        return positive_part(0.5 * (v + v.mT))


def positive_part(X: Tensor) -> Tensor:
    """``(X + |X|) / 2`` of symmetric matrices."""
    return 0.5 * (X + modulus(X))


def modulus(X: Tensor) -> Tensor:
    """``|X|`` of symmetric matrices, ``(*batch, n, n)``."""
    result: Tensor = _Modulus.apply(X)
    return result


class _Modulus(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        eigenvalues, Q = _eigh(X)
        return (Q * eigenvalues.abs().unsqueeze(-2)) @ Q.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        X, M = ctx.saved_tensors
        Y = _lyapunov(M, 0.5 * (g + g.mT))
        return X @ Y + Y @ X

    @staticmethod
    def jvp(ctx: Any, dX: Tensor) -> Tensor:
        X, M = ctx.saved_tensors
        return _lyapunov(M, dX @ X + X @ dX)


def _eigh(X: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; of matrices that are not finite NaN, and the others of the batch unharmed."""
    finite = X.isfinite().all(-1).all(-1)[..., None]
    eigenvalues, Q = torch.linalg.eigh(torch.where(finite[..., None], X, 0))
    return torch.where(finite, eigenvalues, torch.nan), Q


def _lyapunov(M: Tensor, C: Tensor) -> Tensor:
    """``Y`` with ``M Y + Y M = C``, for ``M`` symmetric positive semidefinite; of least norm where ``M`` is singular."""
    result: Tensor = _Lyapunov.apply(M, C)
    return result


class _Lyapunov(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(M: Tensor, C: Tensor) -> Tensor:
        eigenvalues, Q = _eigh(M)
        eigenvalues = eigenvalues.clamp_min(0)
        sums = eigenvalues.unsqueeze(-1) + eigenvalues.unsqueeze(-2)
        tiny = 1e-14 * eigenvalues.amax(-1)[..., None, None]
        inverse = torch.where(sums > tiny, 1 / torch.where(sums > tiny, sums, 1), 0)
        return Q @ ((Q.mT @ C @ Q) * inverse) @ Q.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        M, Y = ctx.saved_tensors
        W = _lyapunov(M, g)
        return -(W @ Y.mT + Y.mT @ W), W

    @staticmethod
    def jvp(ctx: Any, dM: Tensor | None, dC: Tensor | None) -> Tensor:
        M, Y = ctx.saved_tensors
        rhs = torch.zeros_like(Y) if dC is None else dC
        if dM is not None:
            rhs = rhs - dM @ Y - Y @ dM
        return _lyapunov(M, rhs)
