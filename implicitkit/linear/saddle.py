r"""Saddle-point systems of quadratic programs, reduced to positive definite ones.

    [ P   C^T ] [ x ]   [ a ]
    [ C   -E  ] [ v ] = [ c ]          P symmetric positive semidefinite,  E = diag(e),  0 <= e <= inf

``e_i = 0`` is an equality, ``e_i = inf`` a row that is absent (``v_i = 0``).  With ``W = (E + delta I)^{-1}`` the second
row gives ``v = W (C x - c)`` up to the regularisation ``delta``, so that one Cholesky factor of the ``n x n`` matrix

    K = P + rho I + C^T W C

serves; iterative refinement on the unregularised system removes what ``rho`` and ``delta`` put in, by a factor of about
``delta`` a sweep (it is the proximal method of multipliers for the underlying quadratic program).  Where ``C`` has
dependent rows, the multipliers are those of least norm.

Sources: Benzi, Golub & Liesen (2005), "Numerical solution of saddle point problems", Acta Numerica 14, section 5;
Friedlander & Orban (2012), "A primal-dual regularized interior-point method for convex quadratic programs",
Math. Prog. Comp. 4, section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from implicitkit.linear.base import MatVec, Operator
from implicitkit.linear.dense import cholesky_batched

__all__ = ["Saddle", "StructuredOperator", "mv"]


def mv(A: Tensor, x: Tensor) -> Tensor:
    """``A x`` block by block: ``(batch, m, n), (batch, n) -> (batch, m)``."""
    return torch.bmm(A, x.unsqueeze(2)).squeeze(2)


@dataclass
class Saddle:
    """The factored system.

    Args:
        P: ``(batch, n, n)``. C: ``(batch, r, n)``. e: ``(batch, r)``, the diagonal of ``E``, ``inf`` allowed.
        regularise: ``delta``, relative to the scale of ``C`` and ``P``.
    """

    P: Tensor
    C: Tensor
    e: Tensor
    regularise: float = 1e-7

    def __post_init__(self) -> None:
        P, C = self.P, self.C
        size = P.diagonal(dim1=1, dim2=2).abs().amax(1)
        size = torch.where(size > 0, size, 1)
        rows = C.square().sum(2).amax(1) if C.shape[1] else size
        self.present = torch.isfinite(self.e)
        delta = self.regularise * (rows.clamp_min(1e-30) / size).clamp(1e-12, 1e12)
        self.weight = torch.where(self.present, 1 / (self.e + delta.unsqueeze(1)), 0)
        self.exact = torch.where(self.present, self.e, 0)
        K = torch.baddbmm(P, C.mT * self.weight.unsqueeze(1), C) if C.shape[1] else P.clone()
        K.diagonal(dim1=1, dim2=2).add_((1e-2 * self.regularise * size).unsqueeze(1))
        self.L, self.ok = cholesky_batched(K)

    def _once(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        rhs = a + mv(self.C.mT, self.weight * c)
        x = torch.cholesky_solve(rhs.unsqueeze(2), self.L).squeeze(2)
        return x, self.weight * (mv(self.C, x) - c)

    def solve(self, a: Tensor, c: Tensor, *, sweeps: int = 6, rtol: float = 1e-12) -> tuple[Tensor, Tensor, Tensor]:
        """``(x, v, residual)``: ``(batch, n)``, ``(batch, r)`` and the 2-norm of what is left, ``(batch,)``.

        Args:
            a: ``(batch, n)``. c: ``(batch, r)``, ignored in absent rows.
            sweeps: refinements at most. rtol: stop at ``residual <= rtol |(a, c)|``.
        """
        c = torch.where(self.present, c, 0)
        x, v = self._once(a, c)
        ra, rc, norm = self._residual(a, c, x, v)
        target = rtol * (torch.linalg.vector_norm(a, dim=1) + torch.linalg.vector_norm(c, dim=1))
        for _ in range(sweeps):
            open_ = norm > target
            if not bool(open_.any()):
                break
            dx, dv = self._once(ra, rc)
            nx, nv = x + dx, v + dv
            na, nc, new = self._residual(a, c, nx, nv)
            better = open_ & (new < norm)
            if not bool(better.any()):
                break
            keep = better.unsqueeze(1)
            x, v = torch.where(keep, nx, x), torch.where(keep, nv, v)
            ra, rc, norm = torch.where(keep, na, ra), torch.where(keep, nc, rc), torch.where(better, new, norm)
        return x, v, torch.where(self.ok, norm, torch.inf)

    def _residual(self, a: Tensor, c: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ra = a - mv(self.P, x) - mv(self.C.mT, v)
        rc = torch.where(self.present, c - mv(self.C, x) + self.exact * v, 0)
        norm = torch.linalg.vector_norm(ra, dim=1) + torch.linalg.vector_norm(rc, dim=1)
        return ra, rc, norm


Inverse = Callable[[Tensor], tuple[Tensor, Tensor]]


class StructuredOperator(Operator):
    """An operator that knows how to solve with itself and with its transpose: ``inverse(b)``, ``transposed_inverse(b)``,
    each giving ``x`` ``(batch, n)`` and the norm of the residual ``(batch,)``."""

    __slots__ = ("inverse", "transposed_inverse")

    def __init__(
        self,
        mv: MatVec,
        rmv: MatVec,
        dense: Callable[[], Tensor],
        *,
        inverse: Inverse,
        transposed_inverse: Inverse,
        batch: int,
        size: int,
        like: Tensor,
    ) -> None:
        super().__init__(mv, rmv, dense, batch=batch, size=size, like=like)
        self.inverse, self.transposed_inverse = inverse, transposed_inverse

    def solve(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` with ``A x = b``, and the norm of what is left, ``(batch,)``."""
        return self.inverse(b)

    @property
    def T(self) -> StructuredOperator:
        return StructuredOperator(
            self.rmv,
            self.mv,
            lambda: self.dense().mT,
            inverse=self.transposed_inverse,
            transposed_inverse=self.inverse,
            batch=self.batch,
            size=self.size,
            like=self.like,
        )
