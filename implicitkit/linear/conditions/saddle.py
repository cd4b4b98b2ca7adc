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

from implicitkit.foundation.operators import MatVec, Operator
from implicitkit.linear.factors.dense import cholesky_batched


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
        size = P.diagonal(dim1=1, dim2=2).abs().amax(1, keepdim=True)
        size = torch.where(size > 0, size, 1)
        rows = C.square().sum(2).amax(1, keepdim=True).clamp_min(1e-30) if C.shape[1] else size
        delta = (self.regularise * rows / size).clamp(1e-12 * self.regularise, 1e12 * self.regularise)
        self.present = self.e < torch.inf
        self.weight = torch.reciprocal(self.e + delta)  # 1 / inf = 0
        self.partial = bool((self.present & (self.e > 0)).any())
        K = torch.baddbmm(P, (C * self.weight.unsqueeze(2)).mT, C) if C.shape[1] else P.clone()
        K.diagonal(dim1=1, dim2=2).add_(1e-2 * self.regularise * size)
        self.L, self.ok = cholesky_batched(K)

    # columns (batch, k, 1) inside
    def _once(self, a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        weight = self.weight.unsqueeze(2)
        x = torch.cholesky_solve(torch.baddbmm(a, self.C.mT, weight * c), self.L)
        return x, weight * (torch.bmm(self.C, x) - c)

    def solve(self, a: Tensor, c: Tensor, *, sweeps: int = 6, rtol: float = 1e-12) -> tuple[Tensor, Tensor, Tensor]:
        """``(x, v, residual)``: ``(batch, n)``, ``(batch, r)`` and the 2-norm of what is left, ``(batch,)``.

        Args:
            a: ``(batch, n)``. c: ``(batch, r)``, ignored in absent rows.
            sweeps: refinements at most. rtol: stop at ``residual <= rtol |(a, c)|``.
        """
        a, c = a.unsqueeze(2), torch.where(self.present, c, 0).unsqueeze(2)
        target = rtol * _both(a, c)
        x, v = self._once(a, c)
        ra, rc = self._residual(a, c, x, v)
        norm = _both(ra, rc)
        for _ in range(sweeps):
            open_ = norm > target
            if not bool(open_.any()):
                break
            dx, dv = self._once(ra, rc)
            nx, nv = x + dx, v + dv
            na, nc = self._residual(a, c, nx, nv)
            new = _both(na, nc)
            better = new < norm
            if not bool((open_ & better).any()):
                break
            if bool(better.all()):
                x, v, ra, rc, norm = nx, nv, na, nc, new
                continue
            keep = better[:, None, None]
            x, v = torch.where(keep, nx, x), torch.where(keep, nv, v)
            ra, rc, norm = torch.where(keep, na, ra), torch.where(keep, nc, rc), torch.where(better, new, norm)
        return x.squeeze(2), v.squeeze(2), torch.where(self.ok, norm, torch.inf)

    def _residual(self, a: Tensor, c: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        ra = torch.baddbmm(torch.baddbmm(a, self.P, x, alpha=-1), self.C.mT, v, alpha=-1)
        rc = torch.baddbmm(c, self.C, x, alpha=-1)
        if self.partial:
            rc = rc + torch.where(self.present, self.e, 0).unsqueeze(2) * v
        return ra, torch.where(self.present.unsqueeze(2), rc, 0)


def _both(a: Tensor, c: Tensor) -> Tensor:
    """``|(a, c)|_2`` of columns, ``(batch,)``."""
    return torch.linalg.vector_norm(torch.cat([a, c], 1), dim=(1, 2))


Inverse = Callable[[Tensor], tuple[Tensor, Tensor]]


class StructuredOperator(Operator):
    """An operator that knows how to solve with itself and with its transpose: ``inverse(b)``, ``transposed_inverse(b)``,
    each giving ``x`` ``(batch, n)`` and the norm of the residual ``(batch,)``.

    ``other``: makes the derivative on the other side of a kink, where the point is at one."""

    __slots__ = ("inverse", "other", "transposed_inverse")

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
        other: Callable[[], StructuredOperator] | None = None,
    ) -> None:
        super().__init__(mv, rmv, dense, batch=batch, size=size, like=like)
        self.inverse, self.transposed_inverse, self.other = inverse, transposed_inverse, other

    def solve(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` with ``A x = b``, and the norm of what is left, ``(batch,)``."""
        return self.inverse(b)

    @property
    def T(self) -> StructuredOperator:
        other = self.other
        return StructuredOperator(
            self.rmv,
            self.mv,
            lambda: self.dense().mT,
            inverse=self.transposed_inverse,
            transposed_inverse=self.inverse,
            batch=self.batch,
            size=self.size,
            like=self.like,
            other=None if other is None else lambda: other().T,
        )
