r"""Jacobians of equations as solvers use them, and Newton steps that use their factors for as long as they pay.

A Jacobian is taken as it is cheapest: dense for few unknowns; by its sparsity pattern and sparse factors where it has one;
else dense while it fits, and by its products alone (GMRES) above :data:`DENSE` unknowns.

    z <- z + t d,  J d = -F           a Newton step with halving, then
    z <- z - J^{-1} F(z)              with the same factors, while |F| falls to a fifth (Kelley 1995, section 5.4.1)

The last factors are left with the system, for the derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator
from implicitkit.linear.conditions.least_norm import least_norm
from implicitkit.linear.factors.dense import lstsq_batched, mv
from implicitkit.linear.factors.dense_blocks import DenseBlocks
from implicitkit.linear.factors.direct import Verdict
from implicitkit.linear.iterative.gmres import GMRES
from implicitkit.solver.evaluations import Evaluations
from implicitkit.sparsity.patterns import SMALLEST

DENSE = 4096  # unknowns a sample above which no dense Jacobian is formed
_NUMBERS = 1 << 27  # numbers in the dense Jacobians of all samples, at most
_FEW = 48  # unknowns from which a pattern that is given is used
_ROUNDING = 4.0  # units of rounding in |J| |z| that are all that is left of a residual
_ROW = 256.0  # ... of what a single equation adds up
_CONTRACTION = 0.2  # what a step with old factors must leave of |F| at most
_STEPS = 10  # with the same factors
BEYOND = 1e-3  # times the tolerance: a Newton step would have overshot it, and steps with old factors cost little
_FORCING = 1e-3  # of the residual that GMRES leaves, where there are no factors


@dataclass(frozen=True)
class Jacobian:
    """``J = dF/dz`` at a point.

    Attributes:
        A: its products. blocks: what solves with it: ``solve(b)``, ``size(x)``, ``columns`` and ``factor.ok``.
    """

    A: Operator
    blocks: Any

    @property
    def dense(self) -> Tensor | None:
        """The matrices ``(batch, n, n)``, where they have been formed."""
        return self.blocks.matrix if isinstance(self.blocks, DenseBlocks) else None

    @property
    def sparse(self) -> Any:
        """The :class:`~implicitkit.linear.factors.sparse_blocks.SparseBlocks`, where there is a pattern."""
        return None if isinstance(self.blocks, (DenseBlocks, _Products)) else self.blocks

    @property
    def exact(self) -> bool:
        """Are there factors, so that a direction solves ``J d = -F`` to rounding?"""
        return not isinstance(self.blocks, _Products)

    @property
    def columns(self) -> Tensor:
        """The norms of the columns, ``(batch, n)``; ones where there are only products."""
        columns: Tensor = self.blocks.columns
        return columns.nan_to_num(0, 0, 0)

    def times(self, x: Tensor) -> Tensor:
        """``J x``."""
        return self.A.mv(x) if self.dense is None else mv(self.dense, x)

    def adjoint(self, w: Tensor) -> Tensor:
        """``J' w``."""
        return self.A.rmv(w) if self.dense is None else mv(self.dense.mT, w)

    def direction(self, f: Evaluations, residual: Tensor) -> Tensor:
        """``d`` with ``J d = -F`` (:func:`factored_direction`)."""
        return factored_direction(f, self.A, self.blocks, residual)


def is_large(f: Evaluations, z: Tensor) -> bool:
    """Are there so many unknowns that factors are kept: 128, or 48 and a pattern that is given?"""
    n = z.shape[1]
    return n >= SMALLEST or (n >= _FEW and f.is_sparse(z))


def jacobian_at(f: Evaluations, z: Tensor, dense: int = DENSE, *, A: Operator | None = None) -> Jacobian:
    """The Jacobian of ``f`` at ``z``, ``A`` by its products; ``dense``: unknowns up to which it is formed where it has no
    pattern."""
    A = f.linearize(z) if A is None else A
    batch, n = z.shape
    if not is_large(f, z):
        return Jacobian(A, DenseBlocks(A.dense()))
    blocks = A.sparse()
    if blocks is None and n <= dense and batch * n * n <= _NUMBERS:
        blocks = DenseBlocks(A.dense())
    return Jacobian(A, _Products(A) if blocks is None else blocks)


class _Products:
    """A Jacobian without factors: each system by GMRES, to a thousandth."""

    def __init__(self, A: Operator) -> None:
        self.A = A
        self.factor = Verdict(torch.ones(A.batch, dtype=torch.bool, device=A.like.device))

    @property
    def columns(self) -> Tensor:
        """Not known."""
        return self.A.like.new_ones(self.A.batch, self.A.size)

    def solve(self, b: Tensor) -> Tensor:
        """``J x = b``, ``(batch, n)``."""
        sound = torch.isfinite(b).all(1, keepdim=True)
        return GMRES(restart=50).solve(self.A, torch.where(sound, b, 0), rtol=_FORCING, atol=0.0, max_steps=500).x

    def size(self, x: Tensor) -> Tensor:
        """Zeros: what is added up in a product is not known."""
        return torch.zeros_like(x)


def factored_direction(f: Evaluations, A: Operator, blocks: Any, residual: Tensor) -> Tensor:
    """``d`` with ``A d = -F``.

    Where a block is singular it is the least-squares solution of least norm, if the block is dense; of a sparse one what
    GMRES finds, to a thousandth of ``|F|``, or where it does not get there that of least norm, if that is nearer; zero where
    nothing is finite.
    """
    d: Tensor = -blocks.solve(residual)
    regular = blocks.factor.ok.to(d.device)
    if len(d) == f.system.batch and bool(regular.all()) and hasattr(blocks, "T"):
        f.system.factored = blocks
    bad = ~regular & torch.isfinite(residual).all(1)
    if bool(bad.any()) and isinstance(blocks, DenseBlocks):
        bad = bad & torch.isfinite(blocks.matrix).flatten(1).all(1)
        d = d.clone()
        d[bad] = lstsq_batched(blocks.matrix[bad], -residual[bad])[0]
    elif bool(bad.any()):
        d = torch.where(bad.unsqueeze(1), _of_singular(A, blocks, torch.where(bad.unsqueeze(1), -residual, 0)), d)
    return torch.where(torch.isfinite(d), d, 0)


def _of_singular(A: Operator, blocks: Any, b: Tensor) -> Tensor:
    """``A x = b`` as far as it goes, of blocks that sparse factors found singular; ``b`` is zero for the others."""
    found = GMRES().solve(A, b, rtol=_FORCING, atol=0.0, max_steps=200)
    left = torch.where(found.converged.unsqueeze(1), 0, b)
    least = least_norm(blocks, left) if bool(left.any()) else None
    if least is None:
        return found.x
    nearer = torch.linalg.vector_norm(b - A.mv(least.nan_to_num()), dim=1) < found.residual_norm
    nearer = nearer & ~found.converged & least.isfinite().all(1)
    return torch.where(nearer.unsqueeze(1), least, found.x)


def is_noise(blocks: Any, z: Tensor, norm: Tensor, F: Tensor) -> Tensor:
    """Where ``F`` is nothing but rounding errors, ``|F| <= 4 eps | |A| |z| |``, and no ``F_i`` is more than 256 eps of what
    is added up in it (it may be small beside others): no step can do better; ``(batch,)``."""
    eps, most = torch.finfo(z.dtype).eps, getattr(blocks, "most", None)
    if most is not None and not bool((norm <= _ROUNDING * eps * most(z)).any()):  # as it is but at the very end
        return torch.zeros_like(norm, dtype=torch.bool)
    size = blocks.size(z)
    small = norm <= _ROUNDING * eps * torch.linalg.vector_norm(size, dim=1)
    return small & (F.abs() <= _ROW * eps * size).all(1)


def at_rounding(f: Evaluations, blocks: Any, z: Tensor) -> Tensor:
    """Which samples at work are where no step can do better (:func:`is_noise`), ``(batch,)``; of few unknowns none: there
    the driver's own judgement does."""
    if not is_large(f, z):
        return torch.zeros_like(f.active)
    return is_noise(blocks, z, f.norm.to(z.dtype), f.residual(z)) & f.active


def leave(f: Evaluations, settled: Tensor) -> None:
    """These samples go no further, and have converged."""
    f.at_rounding = settled if f.at_rounding is None else f.at_rounding | settled
    f.stuck = f.at_rounding if f.stuck is None else f.stuck | f.at_rounding


def _length(blocks: Any, step: Tensor) -> Tensor:
    """The length of a step, ``(batch,)``, in the units of the factors, if they have some."""
    units = getattr(blocks, "units", None)
    return torch.linalg.vector_norm(step if units is None else units.to(step) * step, dim=1)


def chord_steps(f: Evaluations, blocks: Any, z: Tensor, before: Tensor, start: Tensor) -> Tensor:
    """Go on from ``z``, where a Newton step from ``start`` has led, with the same factors, sample by sample.

    Only samples whose Newton step has brought ``|F|`` (``before``) down to a fifth go on, and only by steps ``c`` that are
    shorter than the one before, in the units that the factors have: where the same factors ask for a longer one they are
    those of another valley, and ``F(z - c)`` need not be evaluated (Deuflhard 2004, section 2.1.2: the natural test of
    monotonicity).  Those that end with nothing but rounding errors are marked in ``f.at_rounding``.  What is known at a
    point from which no sample goes on is not forgotten: the next step begins there.
    """
    residual = f(z)
    norm, goal = torch.linalg.vector_norm(residual, dim=1), BEYOND * f.tolerance
    going = f.active & (norm <= _CONTRACTION * before) & (norm > goal)
    length = None
    for _ in range(_STEPS):
        if not bool(going.any()):
            break
        at_work = going.unsqueeze(1)
        step = torch.where(at_work, blocks.solve(torch.where(at_work, residual, 0)), 0)
        length = _length(blocks, z - start) if length is None else length
        last, length = length, _length(blocks, step)
        going = going & (length < last)
        if not bool(going.any()):
            break
        trial = z - torch.where(going.unsqueeze(1), step, 0)
        here = f.exchange({})
        trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
        better = going & (trial_norm <= _CONTRACTION * norm)
        taken = better | (going & (trial_norm < norm))
        if not bool(taken.any()):
            f.exchange(here)
            break
        z = trial if bool((taken | ~going).all()) else torch.where(taken.unsqueeze(1), trial, z)
        norm = torch.where(taken, trial_norm, norm)
        going = better & (norm > goal)
        if bool(going.any()):
            residual = f(z)
    open_ = f.active & (norm > f.tolerance) & (norm <= _CONTRACTION * before)
    if bool(open_.any()):
        f.at_rounding = open_ & is_noise(blocks, z, norm, f.residual(z))
    return z
