r"""The linear systems of derivatives: ``J u = g`` and ``J'u = g`` with the KKT matrix, and what to do where it is singular.

For a quadratic program ``D`` only says which rows are active, ``C``.  Inactive multipliers drop out, and with ``P = L L'``

    [ P  C' ] [ x ]   [ c ]              Z = L^{-1} C',    (Z'Z) v = Z' L^{-1} c - d,    x = L^{-T} (L^{-1} c - Z v)
    [ C  0  ] [ v ] = [ d ]

takes two Cholesky factors (the range-space method: Nocedal & Wright 2006, section 16.2).  Everything else, and what that
cannot do to the tolerance, is LU of the dense matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit_cvxpy.program import KKTOperator, mv

__all__ = ["POLICIES", "ConeKKT", "DegenerateError"]

POLICIES = ("lstsq", "raise", "smooth")
_RCOND = 1e-11


class DegenerateError(ik.ConvergenceError):
    """The solution is not a differentiable function of the parameters at some sample (under ``degenerate="raise"``)."""


@ik.register_linear_solver("cone_kkt")
@dataclass(frozen=True)
class ConeKKT(ik.LinearSolver):
    """Direct solution of KKT systems, with a policy for singular ones.

    A sample whose right-hand side is zero has the answer zero, whatever its matrix.

    Args:
        degenerate: ``"lstsq"`` (and ``"smooth"``, whose matrices are regular): the minimum-norm least-squares solution
            where the matrix is singular; ``"raise"``: :class:`DegenerateError`, which names the samples.
        reduce: the size above which the reduced form is used where there is one.
    """

    degenerate: str = "lstsq"
    reduce: int = 64
    matrix_free: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.degenerate not in POLICIES:
            raise ValueError(f"degenerate must be one of {', '.join(map(repr, POLICIES))}, got {self.degenerate!r}")

    def solve(
        self, A: ik.Operator, b: Tensor, *, rtol: float = 1e-10, atol: float = 0.0, max_steps: int | None = None
    ) -> ik.LinearSolution:
        x = self.answer(A, b)
        residual = torch.linalg.vector_norm(b - A.mv(x), dim=1)
        steps = (b != 0).any(1).long()
        return ik.LinearSolution(x, residual, steps, x.isfinite().all(1), "the matrix is not finite")

    def answer(self, A: ik.Operator, b: Tensor) -> Tensor:
        """The solution alone, ``(batch, n)``, without its residual."""
        x, wanted = torch.zeros_like(b), (b != 0).any(1)
        open_ = wanted
        if A.size > self.reduce and isinstance(A, KKTOperator) and A.polyhedral:
            found, ok = reduced(A, b)
            good = ok & wanted
            x = torch.where(good.unsqueeze(1), found, x)
            open_ = wanted & ~ok
        rows = open_.nonzero().squeeze(1)
        if len(rows) == len(b):
            x = self._dense(A.dense(), b, rows)
        elif len(rows):
            part = A.select(rows).dense() if isinstance(A, KKTOperator) else A.dense().index_select(0, rows)
            x = x.index_copy(0, rows, self._dense(part, b.index_select(0, rows), rows))
        return x

    def _dense(self, M: Tensor, b: Tensor, samples: Tensor) -> Tensor:
        factor = ik.linear.factor_batched(M)
        low, high = factor.lu.diagonal(dim1=1, dim2=2).abs().aminmax(dim=1)
        regular = factor.ok & (low > _RCOND * high)
        x = factor.solve(b)
        if not bool(regular.all()):
            bad = (~regular).nonzero().squeeze(1)
            if self.degenerate == "raise":
                names = samples[bad].tolist()
                raise DegenerateError(
                    f"the solution of sample(s) {', '.join(map(str, names[:8]))}{', ...' if len(names) > 8 else ''} is not "
                    "differentiable: the KKT matrix is singular (constraints active and redundant, or weakly active, or a "
                    'solution that is not unique). degenerate="lstsq" takes the minimum-norm derivative, '
                    'degenerate="smooth" that of a smoothed program',
                    None,
                    tuple(names),
                )
            small, _, _ = ik.linear.lstsq_batched(M[bad], b[bad], rcond=_RCOND)
            x = x.index_copy(0, bad, small)
        return x


def reduced(J: KKTOperator, g: Tensor) -> tuple[Tensor, Tensor]:
    """The solution of a quadratic program's system by two Cholesky factors, ``(batch, n + m)``, and where it is good."""
    P, A, n = J.P, J.A, J.P.shape[1]
    active = J.diagonal > 0.5
    L, ok = ik.linear.cholesky_batched(P)
    size = L.diagonal(dim1=1, dim2=2)
    ok &= size.amin(1) > 1e-6 * size.amax(1)
    g_x, g_y = g[:, :n], g[:, n:]
    count = int(active.sum(1).max()) if active.shape[1] else 0
    if count:
        index = torch.topk(active.to(torch.int8), count, dim=1).indices
        valid = active.gather(1, index)
        C = A.gather(1, index.unsqueeze(2).expand(-1, -1, n)) * valid.unsqueeze(2)
        Z = torch.linalg.solve_triangular(L, C.mT, upper=False)
        S = Z.mT @ Z
        S.diagonal(dim1=1, dim2=2).add_((~valid).to(S.dtype))
        M, independent = ik.linear.cholesky_batched(S)
        pivot = M.diagonal(dim1=1, dim2=2)
        ok &= independent & (pivot.amin(1) > 1e-6 * pivot.amax(1))

    def saddle(c: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.linalg.solve_triangular(L, c.unsqueeze(2), upper=False)
        if not count:
            return torch.linalg.solve_triangular(L.mT, half, upper=True).squeeze(2), torch.zeros_like(d)
        target = torch.where(valid, d.gather(1, index), 0.0)
        v = torch.cholesky_solve(Z.mT @ half - target.unsqueeze(2), M)
        x = torch.linalg.solve_triangular(L.mT, half - Z @ v, upper=True).squeeze(2)
        return x, torch.zeros_like(d).scatter(1, index, torch.where(valid, v.squeeze(2), 0.0))

    def once(r_x: Tensor, r_y: Tensor) -> Tensor:
        off = torch.where(active, 0.0, r_y)
        if not J.transposed:
            x, v = saddle(r_x - mv(A.mT, off), -r_y)
            return torch.cat([x, v + off], 1)
        x, v = saddle(r_x, r_y)
        return torch.cat([x, torch.where(active, -v, r_y - mv(A, x))], 1)

    u = once(g_x, g_y)
    norm = torch.linalg.vector_norm(g, dim=1)
    residual = g - J.mv(u)
    left = torch.linalg.vector_norm(residual, dim=1)
    if bool((ok & (left > 1e-12 * norm)).any()):
        better = u + once(residual[:, :n], residual[:, n:])
        after = torch.linalg.vector_norm(g - J.mv(better), dim=1)
        u = torch.where((after < left).unsqueeze(1), better, u)
        left = torch.minimum(left, after)
    return u, ok & (left <= 1e-9 * norm)
