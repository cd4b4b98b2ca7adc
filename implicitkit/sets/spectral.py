r"""The positive semidefinite cone.

    P(X) = (X + |X|) / 2,    |X| = Q |\Lambda| Q'

The derivative of ``M = |X|`` is taken from ``M^2 = X^2``: ``dM M + M dM = dX X + X dX``, a Lyapunov equation, and that
of its solution is one more Lyapunov equation; so derivatives of every order are regular wherever ``X`` is nonsingular,
whatever eigenvalues it repeats (differentiating an eigendecomposition is not).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function

from implicitkit.foundation import compat, trees
from implicitkit.foundation.autocast import uncast
from implicitkit.sets.base import Projection


@dataclass(frozen=True)
class PSDCone(Projection):
    """``{X = X', X >= 0}``, on the last two dimensions; of a matrix that is not symmetric, its symmetric part.

    Raises:
        ValueError: the matrices are not square.
    """

    compares: ClassVar[bool] = True

    def project(self, v: Tensor) -> Tensor:
        if v.ndim < 2 or v.shape[-1] != v.shape[-2]:
            raise ValueError(f"PSDCone projects square matrices, got shape {tuple(v.shape)}")
        return positive_part(0.5 * (v + v.mT))

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z - slope)`` of a tensor, or of each leaf of a pytree, without its cancellation: the symmetric part of
        ``slope``, the rest of ``z``, and ``-P(slope - z)``, which is zero inside the cone."""
        return trees.tree_map(self._natural, z, slope)

    @uncast
    def _natural(self, z: Tensor, slope: Tensor) -> Tensor:
        symmetric, rest = 0.5 * (slope + slope.mT), 0.5 * (z - z.mT)
        return rest + symmetric - positive_part(symmetric - 0.5 * (z + z.mT))


def positive_part(X: Tensor) -> Tensor:
    """``(X + |X|) / 2`` of symmetric matrices, ``(*batch, n, n)``, its value from the positive eigenvalues alone."""
    result: Tensor = _PositivePart.apply(compat.own_tangents(X))
    return result


class _PositivePart(Function):
    """``P`` and its derivatives; ``|X| = 2 P - X``."""

    @staticmethod
    def forward(X: Tensor) -> Tensor:
        eigenvalues, Q = _eigh(X)
        return (Q * eigenvalues.clamp_min(0).unsqueeze(-2)) @ Q.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        X, P = ctx.saved_tensors
        Y = _lyapunov(2 * P - X, 0.5 * (g + g.mT))
        return 0.5 * (g + X @ Y + Y @ X)

    @staticmethod
    def jvp(ctx: Any, dX: Tensor) -> Tensor:
        with compat.forward_ad_enabled(ctx.saved_tensors) as (X, P):
            return 0.5 * (dX + _lyapunov(2 * P - X, dX @ X + X @ dX))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], X: Tensor) -> tuple[Tensor, int]:
        return positive_part(X.movedim(in_dims[0], 0)), 0


def _eigh(X: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors; of matrices that are not finite NaN, and the others of the batch unharmed.  Those of
    half precision are computed in float32."""
    finite = X.isfinite().all(-1).all(-1)[..., None]
    matrix = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
    eigenvalues, Q = torch.linalg.eigh(torch.where(finite[..., None], matrix, 0))
    return torch.where(finite, eigenvalues, torch.nan).to(X.dtype), Q.to(X.dtype)


def _lyapunov(M: Tensor, C: Tensor) -> Tensor:
    """``Y`` with ``M Y + Y M = C``, for ``M`` symmetric positive semidefinite; of least norm where ``M`` is singular."""
    if compat.is_legacy_batched(C):  # what a Function records of such a batch is lost
        return compat.below_legacy_batch(lambda plain: _lyapunov(M, plain), C)
    result: Tensor = _Lyapunov.apply(M, C)
    return result


class _Lyapunov(Function):
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
        with compat.forward_ad_enabled(ctx.saved_tensors) as (M, Y):
            rhs = torch.zeros_like(Y) if dC is None else dC
            if dM is not None:
                rhs = rhs - dM @ Y - Y @ dM
            return _lyapunov(M, rhs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], M: Tensor, C: Tensor) -> tuple[Tensor, int]:
        # dimensions of a batch stand in front of the matrices and broadcast; the one of vmap before them
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip((M, C), in_dims, strict=True)]
        rank = max(t.ndim - (d is not None) for t, d in zip(moved, in_dims, strict=True))
        M, C = (
            t if d is None else t.reshape(t.shape[:1] + (1,) * (rank + 1 - t.ndim) + t.shape[1:])
            for t, d in zip(moved, in_dims, strict=True)
        )
        return _lyapunov(M, C), 0
