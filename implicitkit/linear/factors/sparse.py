r"""Direct solution with sparse factors, where the pattern of the matrix is known.

The matrix is found from a few products by its colouring (:mod:`implicitkit.sparsity`), confirmed by one more, and factored
(:mod:`implicitkit.linear.factors.sparse_factors`); the solution is refined and judged by products with the operator
itself, so that no pattern, however wrong, can make a wrong solution look right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.operators import Operator, repeated
from implicitkit.foundation.options import at_least, check_options
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.catalogue import register_linear_solver
from implicitkit.linear.factors.direct import MANY, DirectSolver, refined
from implicitkit.linear.factors.lu import LU
from implicitkit.linear.iterative.cycles import tolerance
from implicitkit.linear.iterative.gmres import GMRES

_ROUNDING = 64.0  # units of rounding that a direct solution may leave in |A| |x| + |b|
_SAME = 1e3  # units of rounding that matrices which are the same may differ by
_LOOKS = 4  # random combinations of solutions
SWEEPS = 4  # of refinement, at most
DIGITS = 1e-3  # of the tolerance of few solutions, to which they are refined, if that is to be had
_CLEAR = 0.1  # of the tolerances of all solutions together


@register_linear_solver("sparse_lu")
@dataclass(frozen=True)
class SparseLU(DirectSolver):
    """LU of the sparse blocks: banded by LAPACK, else by SuperLU.

    The pattern is the problem's (``jac_sparsity=``), or found automatically for 128 unknowns and more.  Where there is none,
    the blocks are solved by ``lu`` up to ``dense_size`` unknowns, and by ``gmres`` above.

    A sample has converged when its residual meets the tolerance, or is what rounding leaves in any direct solution,
    ``|b - A x| <= 64 eps | |A| |x| + |b| |``.  ``steps`` counts solves with the factors.

    Source: Demmel et al. (1999), "A supernodal approach to sparse partial pivoting".

    Args:
        dense_size: the largest ``n`` for which a dense matrix is formed in its place.
    """

    matrix_free: ClassVar[bool] = False
    dense_size: int = 4096

    def __post_init__(self) -> None:
        check_options(self, dense_size=at_least(0))

    def solve_many(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        blocks = A.sparse()
        if blocks is None:
            other: LinearSolver = LU(self.dense_size) if A.size <= self.dense_size else GMRES()
            return other.solve_many(A, b, rtol=rtol, atol=atol, max_steps=max_steps)
        return solve_with(blocks, A, b, rtol=rtol, atol=atol)


def solve_with(
    blocks: Any, A: Operator, b: Tensor, *, rtol: float, atol: float, sweeps: int = SWEEPS
) -> LinearSolution:
    """``A x = b`` by the factors of ``blocks`` and refinement with products.

    Args:
        blocks: of ``A`` or of something near it. b: ``(k, batch, n)``. sweeps: refinements at most.

    Many right-hand sides are refined and judged by products with the matrices of ``blocks``, if it has them, and the whole
    is then confirmed by a few products with ``A`` (:func:`_confirmed`).
    """
    k = len(b)
    columns = b.permute(1, 2, 0)
    factor = blocks.factor

    def rounding(x: Tensor) -> Tensor:
        size = blocks.size(x) + columns.abs()
        return _ROUNDING * torch.finfo(b.dtype).eps * torch.linalg.vector_norm(size, dim=1)

    target = tolerance(b.flatten(0, 1), rtol, atol).unflatten(0, (k, -1)).T
    ok = factor.ok.to(b.device)
    common = columns, target, rounding, ok, factor.reason
    if k > MANY and hasattr(blocks, "product"):
        if hasattr(blocks, "solve_many"):  # to judge each by a dense matrix costs as much as to solve
            found = blocks.solve_many(b, rtol=rtol, atol=atol)
        else:
            found = refined(blocks.solve, blocks.product, *common, sweeps, at_rounding=True)
        if _confirmed(A, blocks, found, target):
            return found
    many = A if k == 1 else repeated(A, k)

    def product(x: Tensor) -> Tensor:
        rows = many.mv(x.permute(2, 0, 1).flatten(0, 1))
        return rows.unflatten(0, (k, -1)).permute(1, 2, 0)

    # a sweep costs little beside the factors: three digits more than asked, if they are to be had
    digits = DIGITS if k <= MANY else None
    return refined(blocks.solve, product, *common, sweeps, digits)


def is_near(A: Operator, blocks: Any) -> bool:
    """Are these the matrices of ``A``, up to rounding?  Judged by the product with one random vector."""
    if not hasattr(blocks, "product"):
        return False
    v = seeded.uniform(A.batch, A.size, seed=0xC0DE).to(A.like) + 0.5
    wrong, size = (A.mv(v) - blocks.product(v)).abs(), blocks.size(v)
    return bool((wrong <= _SAME * torch.finfo(v.dtype).eps * size).all())


def _confirmed(A: Operator, blocks: Any, found: LinearSolution, target: Tensor) -> bool:
    r"""Do solutions judged by the matrices ``M`` of ``blocks`` hold for ``A``?

    For the solutions ``x_j`` that are said to have converged, with targets ``t_j``, and ``y = \sum_j w_j x_j / t_j``, ``w``
    normally distributed, ``E |(A - M) y|^2 = \sum_j |(A - M) x_j|^2 / t_j^2`` (Freivalds 1977; Girard 1989).  A few such
    ``y``, each one product, must all give a tenth at most, or no more than rounding.
    """
    k, least = target.shape[1], torch.finfo(target.dtype).tiny
    goal = target.T.reshape(-1)
    weights = torch.where(found.converged & (goal > 0), 1 / goal.clamp_min(least), 0).view(k, A.batch)
    normal = seeded.normal(_LOOKS, k, seed=0xC0DE).to(found.x)
    sums = combined(found.x.view(k, A.batch, A.size), weights, normal)
    if not bool(torch.isfinite(sums.sum())):  # what has not converged counts nothing, whatever it is
        scaled = torch.nan_to_num(found.x * weights.view(-1, 1)).view(k, -1)
        sums = (normal @ scaled).view(_LOOKS, A.batch, A.size)
    for y in sums:
        wrong = torch.linalg.vector_norm(A.mv(y) - blocks.product(y), dim=1)
        noise = torch.linalg.vector_norm(blocks.size(y), dim=1) * torch.finfo(y.dtype).eps
        if not bool((wrong <= _CLEAR + _ROUNDING * noise).all()):
            return False
    return True


def combined(x: Tensor, weights: Tensor, normal: Tensor) -> Tensor:
    """Sums ``(j, batch, n)`` of ``x`` ``(k, batch, n)``, weighted by ``normal`` ``(j, k)`` and ``weights`` ``(k, batch)``:
    what is large is ``x``, and is read once."""
    each = normal.unsqueeze(0) * weights.T.unsqueeze(1)
    return torch.bmm(each, x.transpose(0, 1)).transpose(0, 1)
