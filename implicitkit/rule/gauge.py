r"""Derivatives of what a gauge leaves alone.

Where solutions come in families (potentials and ratings up to a constant, positions up to a motion) ``A = dF/dz`` is
singular at each of them.  In reverse mode

    A^T u = v

has a solution if and only if ``v`` is orthogonal to the null space of ``A``: what is asked for does not change along the
family.  Then for every way ``z(\theta)`` through the solutions ``A dz = -F_\theta d\theta``, and so

    v^T dz = u^T A dz = -u^T F_\theta d\theta

whichever solution ``u`` is taken; it is that of least norm.  Where a change of ``\theta`` leaves no solutions at all (one
more unit of current into a network, and none out of it) there is no derivative along it, and what comes out there means
nothing: that is said.

A double root, or one of any order, is singular, too, and no family: ``z(\theta)`` has no derivative there, and none of this
holds.  So a step is taken along the null space, and from there, with ``A`` as it is, the way back to a solution,

    y_0 = z + h n,   y_{k+1} = y_k - A^+ F(y_k),   A n = 0,   h = eps^{1/8} |z|,

which keeps what was moved along ``n``.  Where ``F`` does not vanish on this way there is no family, and the system is
refused (roots of the order seven, in single precision five, are told from one no more).  Of sparse matrices ``A^+`` and
``n`` come from sparse factors (:mod:`implicitkit.linear.conditions.least_norm`), of others, up to :data:`_LARGEST` unknowns,
from singular values.

In forward mode nothing shows what will be asked of ``dz``, and the system is refused.  Where a reverse pass is what asks
(in second derivatives: reverse over reverse, or forward over reverse), the next transposed system shows it: the tangent

    A w = -F_\theta d\theta

of least norm enters its right-hand side, which again has to be orthogonal to the null space.  It has solutions where some
remain along ``d\theta``; else it is refused.

Source: Golub & Pereyra (1973), SIAM J. Numer. Anal. 10(2), for the pseudoinverse; Golub & Van Loan (2013), section 5.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.linear_map import Map
from implicitkit.foundation.numbers import array
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution
from implicitkit.linear.conditions.least_norm import Doubled, LeastNorm
from implicitkit.linear.factors.dense import SINGULAR
from implicitkit.linear.factors.sparse_blocks import SparseBlocks

_LARGEST = 1024  # unknowns of which singular values are taken
_NUMBERS = 1 << 25  # in all matrices, at most
_BACK = 8  # corrections on the way back to a solution
_ROUNDED = 1e3  # units of rounding
_BENT = 100.0  # times the relative error of a solution: how far its null space may be from the one there
_SAID = (
    "the Jacobian of the equations is singular at the solution: solutions are not isolated there (a gauge, such as "
    "potentials or ratings up to a constant). The result does not change along them, and its derivative holds for every "
    'change of the parameters under which solutions remain. If that is intended, rule=ik.Implicit(linear_solver="lsmr") '
    "says so, and covers forward mode; otherwise add the equation that fixes the gauge"
)


def without_gauge(
    A: Operator,
    b: Tensor,
    found: LinearSolution,
    *,
    transposed: bool,
    rtol: float,
    near: float,
    residual: Map,
    z: Tensor,
) -> LinearSolution:
    """``found``, and where it failed at a singular block the ``x`` of least norm, if ``|A x - b| <= rtol |b|``; at a
    solution that is known to ``e = |A^{-T} F| / |z|`` its null space is, too: ``100 e`` in the place of ``rtol``.

    Args:
        A: the Jacobian of every sample, or its transpose. b: right-hand sides, the blocks running fastest, ``(k batch, n)``.
        rtol: singular values below this share of the largest are zero; of the residual, too. near: the most that counts of
            a solution that is known badly, or ``sqrt(eps)``.
        residual: ``F``. z: the solution ``(samples, n)``; the blocks of ``A`` are those of its samples, again and again.
    """
    open_ = ~found.converged & torch.isfinite(b).all(1)
    if found.reason != SINGULAR or not bool(open_.any()):
        return found
    inverse = _pseudoinverse(A if transposed else A.T, len(z), rtol)
    if inverse is None:
        return found
    x = inverse.of_transposed(b) if transposed else inverse.of(b)
    left = torch.linalg.vector_norm(torch.cat([A.mv(v) for v in x.nan_to_num().split(A.batch)]) - b, dim=1)
    times = len(b) // len(z)
    away, size = _away(inverse, residual, z), torch.linalg.vector_norm(z, dim=1)
    known = (_BENT * away / size).nan_to_num().clamp(rtol, max(rtol, near, torch.finfo(b.dtype).eps ** 0.5))
    limit = known.to(b).repeat(times) * torch.linalg.vector_norm(b, dim=1)
    if not transposed:  # of a parameter that moves nothing what is left is what z lacks, and rounding
        floor = inverse.size.to(z) * (_BENT * away + _ROUNDED * torch.finfo(z.dtype).eps * size)
        limit = torch.maximum(limit, floor.to(b).repeat(times))
    taken = open_ & x.isfinite().all(1) & (left <= limit)
    if bool(taken.any()):
        taken = taken & _in_families(inverse, residual, z).repeat(times)
    if not bool(taken.any()):
        return found
    x = torch.where(taken.unsqueeze(1), x, found.x)
    norm = torch.where(taken, left, found.residual_norm)
    return found._replace(x=x, residual_norm=norm, converged=found.converged | taken, doubt=found.doubt or _SAID)


def _away(inverse: _Pseudoinverse, residual: Map, z: Tensor) -> Tensor:
    """How far ``z`` is from a solution, by the corrections that ``F`` asks for, ``(samples,)``."""
    with torch.no_grad():
        return torch.linalg.vector_norm(inverse.of(residual(z)), dim=1).nan_to_num().to(z)


def _in_families(inverse: _Pseudoinverse, residual: Map, z: Tensor) -> Tensor:
    """Which samples have another solution beside ``z`` along their null space, ``(samples,)``."""
    eps = torch.finfo(z.dtype).eps
    along = inverse.null(seeded.normal(z.shape[1], seed=0x47).to(z).expand(len(z), -1))
    along = torch.nan_to_num(along / torch.linalg.vector_norm(along, dim=1, keepdim=True)).to(z)
    size = z.abs().amax(1, keepdim=True)
    h = eps**0.125 * torch.where(size > 0, size, 1)
    y, rounding = z + h * along, _ROUNDED * eps * inverse.size.to(z) * (size + h).squeeze(1)
    there = torch.zeros_like(rounding, dtype=torch.bool)
    with torch.no_grad():
        for correction in range(_BACK + 1):
            r = residual(y)
            left = torch.linalg.vector_norm(r, dim=1)
            there = there | (left <= rounding)  # not of NaN: the way led out of the domain
            if bool(there.all()) or correction == _BACK:
                break
            y = y - inverse.of(r).to(z)
    return there


class _Pseudoinverse(Protocol):
    """``J^+`` of the samples' Jacobians; ``A = J^T`` may have each several times over.  NaN where there is none.

    ``size``: their norms, ``(samples,)``.
    """

    size: Tensor

    def of_transposed(self, b: Tensor) -> Tensor:
        """``A^+ b`` for right-hand sides of all blocks of ``A``, again and again, ``(k batch, n)``."""

    def of(self, b: Tensor) -> Tensor:
        """``J^+ b`` for right-hand sides of all samples, again and again, ``(k samples, n)``."""

    def null(self, v: Tensor) -> Tensor:
        """The part of ``v`` in the null space of ``J``, ``(samples, n)``."""


def _pseudoinverse(A: Operator, samples: int, rtol: float) -> _Pseudoinverse | None:
    """``None`` of matrices that are not sparse, and too large."""
    blocks = A.sparse()
    if isinstance(blocks, SparseBlocks):
        return _ByFactors(blocks, samples)
    if A.size > _LARGEST or A.batch * A.size**2 > _NUMBERS:
        return None
    return _BySingularValues(A.dense()[:samples], rtol)


class _BySingularValues:
    """``A^+`` of dense matrices ``A`` ``(samples, n, n)``; singular values below ``rtol`` of the largest are zero."""

    def __init__(self, A: Tensor, rtol: float) -> None:
        self._left, values, self._right = torch.linalg.svd(torch.nan_to_num(A))
        self._null = values <= rtol * values[:, :1]
        self._inverse = torch.where(self._null, 0, 1 / torch.where(self._null, 1, values))
        self._inverse[~torch.isfinite(A).flatten(1).all(1)] = torch.nan
        self.size = values[:, 0]

    def of_transposed(self, b: Tensor) -> Tensor:
        return self._rows(self._right.mT, self._left.mT, b)

    def of(self, b: Tensor) -> Tensor:
        return self._rows(self._left, self._right, b)

    def _rows(self, out: Tensor, into: Tensor, b: Tensor) -> Tensor:
        columns = b.to(into).view(-1, len(into), b.shape[1]).permute(1, 2, 0)
        x = out @ (self._inverse.unsqueeze(2) * (into @ columns))
        return x.permute(2, 0, 1).reshape(b.shape)

    def null(self, v: Tensor) -> Tensor:
        return (self._left @ (self._null * v.to(self._left)).unsqueeze(2)).squeeze(2)


class _ByFactors:
    """``A^+`` of sparse matrices ``A``.  In ``b = x + A w``, ``J x = 0``, ``w`` is ``A^+ b`` where there is a solution."""

    def __init__(self, blocks: SparseBlocks, samples: int) -> None:
        J = blocks.T
        matrices = [J.ready.matrix(values) for values in J.values]
        doubled = J.ready.analysed(Doubled, J.transposed)
        finite = [np.isfinite(M.data).all() for M in matrices]
        self._each = [LeastNorm(M, doubled) if fine else None for M, fine in zip(matrices, finite, strict=True)]
        norms = [(sla.norm(M, 1) * sla.norm(M, np.inf)) ** 0.5 for M in matrices[:samples]]  # or more
        self.size = torch.tensor(norms, device="cpu")

    def of_transposed(self, b: Tensor) -> Tensor:
        return self._rows(b, lambda factors, v: factors.split(v)[1])

    def of(self, b: Tensor) -> Tensor:
        return self._rows(b, LeastNorm.solve)

    def null(self, v: Tensor) -> Tensor:
        return self._rows(v, lambda factors, v: factors.split(v)[0])

    def _rows(self, b: Tensor, solve: Callable[[LeastNorm, np.ndarray], np.ndarray]) -> Tensor:
        rows = array(b)
        found = np.full(rows.shape, np.nan)
        for i, row in enumerate(rows):
            factors = self._each[i % len(self._each)]
            if factors is not None and np.isfinite(row).all():
                found[i] = solve(factors, row)
        return torch.from_numpy(found).to(b)
