r"""Cone programs as a problem of implicitkit: one residual, from which every derivative follows.

    minimise  x'Px/2 + q'x   subject to   b - A x in K

Optimality as a root, with ``w = (x, y)`` and the natural map of the complementarity ``y in K*, s = b - A x in K, y's = 0``:

    P x + q + A'y = 0,          y - Pi_{K*}(y - (b - A x)) = 0

(Robinson 1992; Facchinei & Pang 2003, section 1.5).  Its Jacobian, with ``D`` the derivative of the projection, is

    J = [[ P, A' ], [ -D A, I - D ]]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend
from implicitkit_cvxpy.cones import DualCone
from implicitkit_cvxpy.kkt import sparse_operator
from implicitkit_cvxpy.storage import DENSE, Entries, Held


@dataclass(frozen=True, repr=False)
class ConeProgram(ik.Problem):
    """The optimality conditions of a batch of cone programs, ``F(w, P, q, A, b, *ignored)``.

    Source: Busseti, Moursi & Boyd (2019), "Solution refinement at regular points of conic problems".

    Args:
        dual: the cone ``K*``, with its smoothing. n: number of primal unknowns; ``w`` is ``(batch, n + m)``.
        P_held, A_held: how the matrices are held, both in one way.
    """

    dual: DualCone
    n: int
    P_held: Held = DENSE
    A_held: Held = DENSE

    def residual(self, w: Tensor, P: Tensor, q: Tensor, A: Tensor, b: Tensor, *ignored: Tensor) -> Tensor:
        x, y = w[:, : self.n], w[:, self.n :]
        stationarity = self.P_held.times(P, x) + q + self.A_held.back(A, y)
        if not y.shape[1]:
            return stationarity
        return torch.cat([stationarity, y - self.dual.project(y - b + self.A_held.times(A, x))], 1)

    def jacobian(
        self, w: Tensor, P: Tensor, A: Tensor, b: Tensor, near: float = 0.0
    ) -> tuple[ik.extend.Operator, Callable[[Tensor], Tensor]]:
        """``J`` at a plain ``w``, by its blocks, and ``v -> D v`` on ``(batch, m)``; of a sparse program ``J + near I``.

        Without curved cones it is that of a quadratic program whose rows are equalities where ``D`` is one.
        """
        x, y = w[:, : self.n], w[:, self.n :]
        diagonal, blocks = self.dual.derivative(y - b + self.A_held.times(A, x))
        project = functools.partial(_projected, diagonal, blocks)
        if isinstance(self.P_held, Entries) and isinstance(self.A_held, Entries):
            return sparse_operator(P, A, (self.P_held, self.A_held), diagonal, blocks, near), project
        if blocks:
            return KKTOperator(P, A, diagonal, blocks), project
        flat = extend.QPJacobian(P, A[:, :0], A, diagonal, torch.zeros_like(diagonal), diagonal)
        return flat.operator(), project

    def linearise(self, system: Any, z: Tensor, theta: Sequence[Tensor]) -> tuple[Tensor, ik.extend.Operator]:
        with torch.enable_grad():
            out = system.residual(z.detach().requires_grad_(), *theta)  # tracked, so that nobody thinks it cut off
        P, _, A, b = (t.detach() for t in one_batch(system, theta[:4]))
        return out, self.jacobian(z.detach(), P, A, b)[0]


ik.register_problem(ConeProgram, linear_solver="cone_kkt")


def one_batch(system: Any, theta: Sequence[Tensor]) -> list[Tensor]:
    """The arguments with the batch dimensions that ``torch.vmap`` added merged into their own."""
    flat, level = list(theta), 0
    while system.parent is not None:
        rows = system.batch // system.parent.batch
        for i, d in enumerate(system.dims[: len(flat)]):
            t = flat[i]
            flat[i] = (
                t.unsqueeze(level).expand(*t.shape[:level], rows, *t.shape[level:])
                if d is None
                else (t.movedim(d + level, level))
            )
        system, level = system.parent, level + 1
    return [t.flatten(0, level) for t in flat]


def _projected(diagonal: Tensor, blocks: list[Any], v: Tensor) -> Tensor:
    """``D v`` for ``(batch, m)``, or ``D V`` for ``(batch, m, k)``."""
    linear = diagonal.shape[1]
    parts = [v[:, :linear] * (diagonal if v.ndim == 2 else diagonal.unsqueeze(2))]
    for group, block in blocks:
        part = v[:, group.start : group.start + group.number * group.size]
        part = part.unflatten(1, (group.number, group.size))
        turned = (block @ part.unsqueeze(-1)).squeeze(-1) if v.ndim == 2 else block @ part
        parts.append(turned.flatten(1, 2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class KKTOperator(ik.extend.Operator):
    """``J`` (or its transpose) by its blocks.

    Attributes:
        P: ``(batch, n, n)``. A: ``(batch, m, n)``. diagonal: of ``D`` on the linear rows, ``(batch, linear)``.
        blocks: of ``D`` on the groups of other cones. transposed: is this ``J^T``?
    """

    __slots__ = ("A", "P", "blocks", "diagonal", "transposed")

    def __init__(self, P: Tensor, A: Tensor, diagonal: Tensor, blocks: list[Any], *, transposed: bool = False) -> None:
        self.P, self.A, self.diagonal, self.blocks, self.transposed = P, A, diagonal, blocks, transposed
        batch, n = P.shape[0], P.shape[1]
        forward, adjoint = (self._adjoint, self._forward) if transposed else (self._forward, self._adjoint)
        super().__init__(forward, adjoint, self._matrix_of, batch=batch, size=n + A.shape[1], like=diagonal)

    @property
    def T(self) -> KKTOperator:
        """The transposed operator, on the same blocks."""
        return KKTOperator(self.P, self.A, self.diagonal, self.blocks, transposed=not self.transposed)

    def project(self, v: Tensor) -> Tensor:
        """``D v`` for ``(batch, m)``, or ``D V`` for ``(batch, m, k)``."""
        return _projected(self.diagonal, self.blocks, v)

    def _forward(self, v: Tensor) -> Tensor:
        x, y = v[:, : self.P.shape[1]], v[:, self.P.shape[1] :]
        return torch.cat(
            [DENSE.times(self.P, x) + DENSE.back(self.A, y), y - self.project(y + DENSE.times(self.A, x))], 1
        )

    def _adjoint(self, w: Tensor) -> Tensor:
        x, y = w[:, : self.P.shape[1]], w[:, self.P.shape[1] :]
        turned = self.project(y)
        return torch.cat([DENSE.times(self.P, x) - DENSE.back(self.A, turned), DENSE.times(self.A, x) + y - turned], 1)

    def _matrix_of(self) -> Tensor:
        n, m = self.P.shape[1], self.A.shape[1]
        J = self.P.new_zeros(self.batch, n + m, n + m)
        J[:, :n, :n], J[:, :n, n:] = self.P, self.A.mT
        J[:, n:, :n] = -self.project(self.A)
        eye = torch.eye(m, dtype=J.dtype, device=J.device)
        J[:, n:, n:] = eye - self.project(eye.expand(self.batch, -1, -1))
        return J.mT if self.transposed else J
