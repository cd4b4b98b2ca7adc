r"""The linear systems of derivatives: ``J u = g`` and ``J'u = g`` with the KKT matrix, and what to do where it is singular.

They are solved as those of any other constrained problem (:class:`implicitkit.extend.KKT`): LU where they are small, one
Cholesky factor of an ``n x n`` matrix for quadratic programs, sparse factors of sparse programs, and where the matrix is
singular the policy that was asked for, which here names the samples.

The Jacobian of a sparse program's optimality conditions is made entry by entry:

    J = [[ P, A' ], [ -D A, I - D ]]

``D`` is diagonal on the linear rows.  On a cone of ``s`` rows it is a block, ``(D A)_{ij} = sum over rows k of the cone of
D_ik A_kj``: every entry of ``A`` there makes ``s`` entries of the product, which are added where they share a place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

import implicitkit as ik
from implicitkit import extend
from implicitkit_cvxpy.storage import Entries

_RTOL = 1e-9


class DegenerateError(ik.ConvergenceError):
    """The solution is not a differentiable function of the parameters at some sample (under ``degenerate="raise"``)."""


@ik.register_linear_solver("cone_kkt")
@dataclass(frozen=True)
class ConeKKT(ik.LinearSolver):
    """The conditions of a cone program, solved directly, with a policy for singular ones.

    A sample whose right-hand side is zero has the answer zero, whatever its matrix.

    Source: Agrawal, Barratt, Boyd, Busseti & Moursi (2019), "Differentiating through a cone program".

    Args:
        degenerate: ``"lstsq"`` (and ``"smooth"``, whose matrices are regular): the minimum-norm least-squares solution
            where the matrix is singular; ``"raise"``: :class:`DegenerateError`, which names the samples.
    """

    matrix_free: ClassVar[bool] = False
    has_units: ClassVar[bool] = True
    degenerate: str = "lstsq"
    _solver: extend.KKT = field(init=False, repr=False, compare=False)
    _of_sparse: extend.KKT = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        extend.check_degenerate(self.degenerate)
        policy = "raise" if self.degenerate == "raise" else "lstsq"
        object.__setattr__(self, "_solver", extend.KKT(policy, dense_size=2**31))
        object.__setattr__(self, "_of_sparse", extend.KKT(policy))

    def solve(
        self, A: ik.extend.Operator, b: Tensor, *, rtol: float = _RTOL, atol: float = 0.0, max_steps: int | None = None
    ) -> ik.extend.LinearSolution:
        """``u`` as every linear solver returns it; warns where a derivative is determined in the sense of least squares
        only."""
        found = self._found(A, b, rtol, atol, max_steps)
        if found.doubt:
            extend.warn(found.doubt, extend.DegenerateWarning)
        return found if self.degenerate != "raise" else found._replace(error=_degenerate)

    def derivative(self, A: ik.extend.Operator, b: Tensor) -> Tensor:
        """The solution alone, ``(batch, n)``, or what it raises where there is none."""
        found = self.solve(A, b)
        if found.error is not None and not bool(found.converged.all()):
            raise found.error(tuple((~found.converged).nonzero().squeeze(1).tolist()))
        return found.x

    def answer(self, A: ik.extend.Operator, b: Tensor) -> Tensor:
        """The solution alone, ``(batch, n)``, of a system that is nobody's derivative."""
        return self._found(A, b, _RTOL, 0.0, None).x

    def _found(
        self, A: ik.extend.Operator, b: Tensor, rtol: float, atol: float, max_steps: int | None
    ) -> ik.extend.LinearSolution:
        solver = self._solver if A.sparse() is None else self._of_sparse
        return solver.solve(A, b, rtol=max(rtol, _RTOL), atol=atol, max_steps=max_steps)


def _degenerate(samples: tuple[int, ...]) -> DegenerateError:
    listed = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    return DegenerateError(
        f"the solution of sample(s) {listed} is not differentiable: {extend.SINGULAR}", None, samples
    )


def sparse_operator(
    P: Tensor, A: Tensor, at: tuple[Entries, Entries], diagonal: Tensor, blocks: list[Any], near: float
) -> extend.Operator:
    """``J + near I`` of a batch of programs.

    Args:
        P, A: entries, ``(batch, nnz)``. at: how they are held. diagonal: of ``D`` on the linear rows, ``(batch, linear)``.
        blocks: of ``D`` on the groups of other cones, each ``(batch, number, size, size)``.
    """
    P_at, A_at = at[0].on(P), at[1].on(A)
    m, n = A_at.extent
    batch, linear = diagonal.shape
    row, column = A_at.at_row, A_at.at_column
    every = torch.arange(n, n + m, device=A.device)
    plain = row < linear
    D = diagonal.index_select(1, row[plain])
    pieces: list[tuple[Tensor, Tensor, Tensor]] = [
        (P_at.at_row, P_at.at_column, P),
        (column, n + row, A),
        (n + row[plain], column[plain], -D * A[:, plain]),
        (every[:linear], every[:linear], 1 - diagonal),
        (every[linear:], every[linear:], torch.ones_like(A[:, :1]).expand(batch, m - linear)),
    ]
    for group, block in blocks:
        size = group.size
        first, last = group.start, group.start + group.number * size
        inside = (row >= first) & (row < last)
        cone, place = (row[inside] - first) // size, (row[inside] - first) % size
        local = torch.arange(size, device=A.device)
        # D A: row `place` of the block, which is symmetric, times the entry; and D itself
        times = block[:, cone, place] * A[:, inside].unsqueeze(2)
        rows = n + first + cone.unsqueeze(1) * size + local
        pieces.append((rows.flatten(), column[inside].repeat_interleave(size), -times.flatten(1)))
        start = n + first + size * torch.arange(group.number, device=A.device).view(-1, 1, 1)
        shape = (group.number, size, size)
        own = (start + local.view(1, -1, 1)).expand(shape), (start + local.view(1, 1, -1)).expand(shape)
        pieces.append((own[0].flatten(), own[1].flatten(), -block.flatten(1)))
    if near:
        everywhere = torch.arange(n + m, device=A.device)
        pieces.append((everywhere, everywhere, near * torch.ones_like(A[:, :1]).expand(batch, n + m)))
    rows, columns, values = (torch.cat(parts, -1) for parts in zip(*pieces, strict=True))
    return extend.of_entries(rows, columns, values, torch.cat([A.new_zeros(batch, n), A.new_zeros(batch, m)], 1))
