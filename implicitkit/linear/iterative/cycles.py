r"""What the iterative linear solvers share: working precision, the tolerance, and restarts on the true residual.

Every Krylov method here is a *cycle*: given a residual ``r`` it returns a correction ``dx`` with ``A dx ~ r``,
judged by its own cheap recurrence.  :func:`restarted` runs cycles one after another::

    r = b - A x,    dx = cycle(r),    x <- x + dx

and judges each sample by ``r``, the true residual, so a recurrence that has drifted costs one more cycle and is never
believed.  A cycle that does not improve a sample is thrown away for that sample, and ends it.

Source: Kelley, *Iterative Methods for Linear and Nonlinear Equations* (SIAM 1995), section 3.4 (restarts);
Higham, *Accuracy and Stability of Numerical Algorithms* (2nd ed., SIAM 2002), chapter 12 (iterative refinement).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator, preconditioned, single
from implicitkit.linear.base import LinearSolution

SolveMethod = TypeVar("SolveMethod", bound=Callable[..., LinearSolution])
LOW_PRECISION = (torch.float16, torch.bfloat16)
_PROGRESS = 0.95  # a cycle that leaves more than this share of a residual has stalled


def norms(x: Tensor) -> Tensor:
    """The 2-norm of each row: ``(batch, n) -> (batch,)``."""
    lengths: Tensor = torch.linalg.vector_norm(x, dim=1)
    return lengths


def column(mask: Tensor) -> Tensor:
    """``(batch,) -> (batch, 1)``, to be broadcast against ``(batch, n)``."""
    return mask.unsqueeze(1)


def tolerance(b: Tensor, rtol: float | Tensor, atol: float) -> Tensor:
    """``atol + rtol |b|`` per sample, shape ``(batch,)``; NaN, which nothing meets, where ``b`` is not finite."""
    return _asked(norms(b), rtol, atol)


def _asked(scale: Tensor, rtol: float | Tensor, atol: float) -> Tensor:
    """:func:`tolerance` where ``|b|`` is known."""
    return torch.where(scale < torch.inf, atol + rtol * scale, torch.nan)


def default_steps(size: int) -> int:
    """Products allowed when the caller names no number: ``10 n``, at least 100 and at most 1000."""
    return min(max(10 * size, 100), 1000)


def in_working_precision(solve: SolveMethod) -> SolveMethod:
    """Decorates a ``solve`` method: float16 and bfloat16 systems are iterated in float32.

    The products themselves stay in the precision of the operator; ``x`` is cast back at the end, so ``residual_norm``
    is that of the float32 iterate.
    """

    @functools.wraps(solve)
    def wrapper(
        self: object, A: Operator, b: Tensor, *, rtol: float | Tensor, atol: float, max_steps: int | None
    ) -> LinearSolution:
        if b.dtype not in LOW_PRECISION:
            return solve(self, A, b, rtol=rtol, atol=atol, max_steps=max_steps)
        solution = solve(self, single(A), b.float(), rtol=rtol, atol=atol, max_steps=max_steps)
        return solution._replace(x=solution.x.to(b.dtype))

    return wrapper  # type: ignore[return-value]


def right_preconditioned(solve: SolveMethod) -> SolveMethod:
    """Decorates a ``solve`` method: where the operator (or the solver, by name) has a preconditioner, ``A M^{-1} y = b`` is
    solved, ``x = M^{-1} y``.

    The residual is that of ``x``, whatever the preconditioner.
    """

    @functools.wraps(solve)
    def wrapper(
        self: Any, A: Operator, b: Tensor, *, rtol: float | Tensor, atol: float, max_steps: int | None
    ) -> LinearSolution:
        M = self.preconditioner_of(A)
        if M is None:
            return solve(self, A, b, rtol=rtol, atol=atol, max_steps=max_steps)
        answer = solve(self, preconditioned(A, M.solve), b, rtol=rtol, atol=atol, max_steps=max_steps)
        return answer._replace(x=M.solve(answer.x))

    return wrapper  # type: ignore[return-value]


class Task(NamedTuple):
    """What a cycle is to solve: the residual ``r`` ``(batch, n)``, zero where a sample is not ``live``; its norms, the norms
    to reach, and the products left, each ``(batch,)``."""

    r: Tensor
    norm: Tensor
    target: Tensor
    live: Tensor
    budget: Tensor

    def left(self, r: Tensor, used: Tensor) -> Task:
        """What is left to do of it where ``r`` is left, after so many products."""
        norm, budget = norms(r), self.budget - used
        live = self.live & (norm > self.target) & (budget > 0)
        return Task(torch.where(column(live), r, 0), norm, self.target, live, budget)


class Correction(NamedTuple):
    """What one cycle returns: ``dx`` ``(batch, n)``, products used ``(batch,)``, and which samples cannot go on."""

    dx: Tensor
    steps: Tensor
    failed: Tensor | None = None


def _too_slow(norm: Tensor, target: Tensor, steps: Tensor, limit: int, before: Tensor, begun: Tensor) -> Tensor:
    """Residuals that were not halved since ``before``, after ``begun`` products, and at that rate miss their target."""
    fell = torch.log(before / norm)
    needed = torch.log(norm / target) * (steps - begun) / fell
    return (norm > 0.5 * before) & ~(needed <= limit - steps)


Cycle = Callable[[Task], Correction]


def restarted(
    cycle: Cycle,
    A: Operator,
    b: Tensor,
    *,
    rtol: float | Tensor,
    atol: float,
    max_steps: int | None,
    stalled: str,
    failed: str = "",
    patience: int = 0,
) -> LinearSolution:
    """Run ``cycle`` until every sample's true residual meets its tolerance, stops improving, or runs out of products.

    Args:
        cycle: returns a correction for the residual it is given.
        A, b, rtol, atol, max_steps: as in :meth:`LinearSolver.solve`.
        stalled: the clause to report when a cycle shrinks a residual to more than ``_PROGRESS`` times what it was.
        failed: the clause to report for the samples that the cycle marks as failed.
        patience: cycles in which a residual must be halved if, falling on as it did in them, it would need more products
            than are left; 0: never asked.

    The products that form the true residuals are not counted.
    """
    limit = default_steps(A.size) if max_steps is None else max_steps
    norm = norms(b)
    target, residual = _asked(norm, rtol, atol), b
    x: Tensor | None = None  # zero
    steps = torch.zeros(b.shape[0], dtype=torch.int64, device=b.device)
    live = norm > target  # false where b is not finite
    has_stalled = has_failed = torch.zeros_like(live)
    past, left = [(norm, steps)], int(torch.count_nonzero(live))
    while limit > 0 and left:
        safe = residual if left == len(live) else residual.where(column(live), residual.new_zeros(()))
        correction = cycle(Task(safe, norm, target, live, limit - steps))
        trial = correction.dx if x is None else x + correction.dx
        trial_residual = b - A.mv(trial)
        trial_norm = norms(trial_residual)
        better = trial_norm < norm if left == len(live) else live & (trial_norm < norm)
        if bool((better & (trial_norm <= target)).all()):  # the everyday case: nothing is left to choose
            return LinearSolution(trial, trial_norm, steps + correction.steps, better, "")
        x, before = torch.where(column(better), trial, 0 if x is None else x), norm
        norm = torch.where(better, trial_norm, norm)
        steps = torch.where(live, steps + correction.steps, steps)
        open_ = live & (norm > target)
        if not bool(open_.any()):
            break
        residual = torch.where(column(better), trial_residual, residual)
        stuck = live & ~(trial_norm <= _PROGRESS * before)
        past.append((norm, steps))
        if len(past) > patience > 0:
            stuck = stuck | _too_slow(norm, target, steps, limit, *past.pop(0))
        if correction.failed is not None:
            has_failed = has_failed | (open_ & correction.failed)
        has_stalled = has_stalled | (open_ & stuck)
        live = open_ & ~has_stalled & ~has_failed & (steps < limit)
        left = int(torch.count_nonzero(live))
    converged = norm <= target
    reason = ""
    if not bool(converged.all()):
        missed = ~converged
        if bool((missed & has_failed).any()):
            reason = failed
        elif bool((missed & ~norm.isfinite()).any()):
            reason = "the right-hand side is not finite"
        elif bool((missed & has_stalled).any()):
            reason = stalled
        else:
            reason = f"not converged after {limit} products with the matrix"
    return LinearSolution(torch.zeros_like(b) if x is None else x, norm, steps, converged, reason)
