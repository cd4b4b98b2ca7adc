r"""What direct solvers share: factors, iterative refinement on the true residual, and what rounding allows.

    x = A^{-1} b,    x <- x + A^{-1} (b - A x)    while that helps

for one or for many right-hand sides.

Source: Higham, *Accuracy and Stability of Numerical Algorithms* (2nd ed., SIAM 2002), chapter 12.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.linear.base import LinearSolution
from implicitkit.linear.dense import RHS_NOT_FINITE

__all__ = ["MANY", "Verdict", "refined"]

MANY = 8  # right-hand sides above which products with a matrix itself pay
_SWEEPS = 4
_LEAST = 0.5  # what a sweep must leave of a residual for another to be worth it


class Verdict(NamedTuple):
    """Which blocks have usable factors, ``(batch,)`` bool, and one clause on why the others have not."""

    ok: Tensor
    reason: str = ""


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
) -> LinearSolution:
    """Solve with factors and refine.

    Args:
        inverse: ``(batch, n, k) -> (batch, n, k)`` with the factors. product: the same with the matrix itself.
        b: ``(batch, n, k)``. target: norms to reach, ``(batch, k)``.
        rounding: ``x -> (batch, k)``, the residual that rounding leaves in any direct solution.
        ok: ``(batch,)``, blocks that could be factored; reason: why the others could not. sweeps: refinements at most.
        digits: sweeps go on to this part of the target, while they help.
        at_rounding: a residual that is nothing but rounding is not refined any further.

    Returns:
        A solution with rows ``(k * batch)``, the blocks running fastest.
    """
    asked, x = (b != 0).any(1), inverse(b)
    if not bool(asked.all()):
        x = torch.where(asked.unsqueeze(1) | ~ok[:, None, None], x, 0)
    residual = b - product(x)
    norm = torch.linalg.vector_norm(residual, dim=1)
    steps = asked.long()
    goal = target if digits is None else digits * target
    if at_rounding and bool((norm > goal).any()):
        goal = torch.maximum(goal, rounding(x))
    for _ in range(sweeps):
        open_ = ok.unsqueeze(1) & (norm > goal)
        if not bool(open_.any()):
            break
        trial = x + inverse(residual)
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
    flat = x.permute(2, 0, 1).flatten(0, 1)
    norm, steps, converged = (t.T.reshape(-1) for t in (norm, steps, converged))
    return LinearSolution(flat, norm, steps, converged, "" if bool(converged.all()) else reason)
