r"""What direct solvers share: factors, iterative refinement on the true residual, and what rounding allows.

    x = A^{-1} b,    x <- x + A^{-1} (b - A x)    while that helps

for one or for many right-hand sides.  Of very many (:data:`_CROWD`) the residuals ``r_j``, with limits ``t_j``, are judged
first by eight random combinations ``y = \sum_j w_j r_j / t_j``, ``E |y|^2 = \sum_j |r_j|^2 / t_j^2`` for independent
standard normal ``w``, which cost eight products and not one a right-hand side.  Where the root of the mean of ``|y|^2`` is a
fifth or less all are taken to be below their limits; by chance that happens, where one is at its limit, once in 1e5.

Source: Higham, *Accuracy and Stability of Numerical Algorithms* (2nd ed., SIAM 2002), chapter 12; Hutchinson,
*Communications in Statistics* 19 (1990), 433, for ``E |y|^2``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.operators import Operator
from implicitkit.linear.base import LinearSolution, LinearSolver
from implicitkit.linear.factors.dense import RHS_NOT_FINITE, mm
from implicitkit.linear.iterative.cycles import in_working_precision

MANY = 8  # right-hand sides above which products with a matrix itself pay
_CROWD, _COMBINATIONS, _BELOW = 64, 8, 0.2  # right-hand sides that are judged by so many combinations, and how strictly
_SWEEPS = 4
_LITTLE = 1e-8  # of a solution: a correction that is no more than this need not be judged
_LEAST = 0.5  # what a sweep must leave of a residual for another to be worth it


class Verdict(NamedTuple):
    """Which blocks have usable factors, ``(batch,)`` bool, and one clause on why the others have not."""

    ok: Tensor
    reason: str = ""


@dataclass(frozen=True)
class DirectSolver(LinearSolver):
    """Base class of linear solvers whose factors serve many right-hand sides; a subclass defines :meth:`solve_many`."""

    factors: ClassVar[bool] = True

    @in_working_precision
    def solve(self, A: Operator, b: Tensor, *, rtol: float, atol: float, max_steps: int | None) -> LinearSolution:
        return self.solve_many(A, b.unsqueeze(0), rtol=rtol, atol=atol, max_steps=max_steps)


def refined(
    inverse: Callable[[Tensor], Tensor],
    product: Callable[[Tensor], Tensor],
    b: Tensor,
    target: Tensor,
    rounding: Callable[[Tensor], Tensor],
    ok: Tensor,
    reason: str,
    sweeps: int = _SWEEPS,
    digits: float | None = None,
    at_rounding: bool = False,
    by_combinations: bool = False,
) -> LinearSolution:
    """Solve with factors and refine.

    Args:
        inverse: ``(batch, n, k) -> (batch, n, k)`` with the factors. product: the same with the matrix itself.
        b: ``(batch, n, k)``. target: norms to reach, ``(batch, k)``.
        rounding: ``x -> (batch, k)``, the residual that rounding leaves in any direct solution.
        ok: ``(batch,)``, blocks that could be factored; reason: why the others could not. sweeps: refinements at most.
        digits: sweeps go on to this part of the target, while they help; what meets the target, and is corrected by little,
            is not measured again and has the norm that it had before.
        at_rounding: a residual that is nothing but rounding is not refined any further.
        by_combinations: a product is dear beside ``rounding``: a crowd is judged by combinations first.

    Returns:
        A solution with rows ``(k * batch)``, the blocks running fastest.
    """
    asked, x = _asked(b), inverse(b)
    if not bool(asked.all()):
        x = torch.where(asked.unsqueeze(1) | ~ok[:, None, None], x, 0)
    steps = asked.long()
    goal = target if digits is None else digits * target
    if by_combinations and b.shape[2] >= _CROWD:
        limit = torch.maximum(goal, rounding(x))
        share = _largest_share(product, b, x, torch.where(asked, limit, torch.inf))
        if bool(((share <= _BELOW) & ok).all()):
            return _solution(x, share.unsqueeze(1) * limit, steps, torch.ones_like(asked), "")
    residual = b - product(x)
    norm = torch.linalg.vector_norm(residual, dim=1)
    if at_rounding and bool((norm > goal).any()):
        goal = torch.maximum(goal, rounding(x))
    converged = ok.unsqueeze(1) & (norm <= goal)
    if digits is None and not at_rounding and bool(converged.all()):  # as nearly always
        return _solution(x, norm, steps, converged, "")
    for _ in range(sweeps):
        open_ = ok.unsqueeze(1) & (norm > goal)
        if not bool(open_.any()):
            break
        correction = inverse(residual)
        trial = x + correction
        if digits is not None and bool((~open_ | ((norm <= target) & _is_little(correction, x))).all()):
            x, steps = torch.where(open_.unsqueeze(1), trial, x), steps + open_.long()
            break
        trial_residual = b - product(trial)
        trial_norm = torch.linalg.vector_norm(trial_residual, dim=1)
        better = open_ & (trial_norm < norm)
        steps = steps + open_.long()
        helped = bool((better & (trial_norm < _LEAST * norm)).any())
        x = torch.where(better.unsqueeze(1), trial, x)
        residual = torch.where(better.unsqueeze(1), trial_residual, residual)
        norm = torch.where(better, trial_norm, norm)
        if not helped:
            break
    converged = ok.unsqueeze(1) & (norm <= target)
    if not bool(converged.all()):
        converged = converged | (ok.unsqueeze(1) & (norm <= rounding(x)))
    if not bool(converged.all()) and not reason:
        finite = bool(norm.isfinite().all())
        reason = "the matrix is too ill-conditioned for the tolerance" if finite else RHS_NOT_FINITE
    return _solution(x, norm, steps, converged, "" if bool(converged.all()) else reason)


def _is_little(correction: Tensor, x: Tensor) -> Tensor:
    """Which corrections are but a few digits of ``x``, ``(batch, k)``: those after them are less, by whatever factors."""
    little: Tensor = torch.linalg.vector_norm(correction, dim=1) <= _LITTLE * torch.linalg.vector_norm(x, dim=1)
    return little  # not of NaN


def _asked(b: Tensor) -> Tensor:
    """Which columns are not zero, ``(batch, k)``: by their norms, unless one underflows."""
    found = torch.linalg.vector_norm(b, dim=1) > 0
    return found if bool(found.all()) else (b != 0).any(1)


def _largest_share(product: Callable[[Tensor], Tensor], b: Tensor, x: Tensor, limit: Tensor) -> Tensor:
    """At most so much of its ``limit`` is each residual of a block, as random combinations tell it, ``(batch,)``."""
    w = seeded.normal(b.shape[2], _COMBINATIONS, seed=0x3D).to(b) / limit.unsqueeze(2)
    return torch.linalg.vector_norm(mm(b, w) - product(mm(x, w)), dim=(1, 2)) / _COMBINATIONS**0.5


def _solution(x: Tensor, norm: Tensor, steps: Tensor, converged: Tensor, reason: str) -> LinearSolution:
    """``(batch, n, k)`` and ``(batch, k)`` as rows, the blocks running fastest."""
    flat = x.permute(2, 0, 1).flatten(0, 1)
    norm, steps, converged = (t.T.reshape(-1) for t in (norm, steps, converged))
    return LinearSolution(flat, norm, steps, converged, reason)
