"""Newton's method with dense Jacobians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.linear.dense import lstsq_batched, solve_batched
from implicitkit.registry import register_solver
from implicitkit.solvers.base import Method
from implicitkit.solvers.function import Function

__all__ = ["Newton"]


@register_solver("newton", solves="root")
@dataclass(frozen=True)
class Newton(Method):
    r"""``z <- z + t d``, ``(dF/dz) d = -F`` (Nocedal & Wright 2006, algorithm 11.1), one dense block a sample.

    The full step (``t = 1``) is taken if it lowers ``|F|``; else ``t`` is halved, per sample, until it does (Deuflhard
    2011, section 3.1).  If no ``t`` down to ``2^-halvings`` lowers ``|F|``, the best of those tried is taken: descent
    on ``|F|`` alone would stick at stationary points that are no roots.  A singular block gives the least-squares step
    of minimum norm.

    One evaluation and ``n`` vector-Jacobian products a step (in batched calls), ``O(batch n^3)`` work, ``O(batch n^2)``
    memory.

    Args:
        line_search: halve steps that do not lower ``|F|``. halvings: how often at most.

    Raises:
        ValueError: negative ``halvings``.
    """

    line_search: bool = True
    halvings: int = 12
    default_max_steps: ClassVar[int] = 100

    def __post_init__(self) -> None:
        if self.halvings < 0:
            raise ValueError(f"halvings cannot be negative, got {self.halvings}")

    def step(self, f: Function, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        residual = f(z)
        J = f.jacobian(z)
        d, regular, _ = solve_batched(J, -residual)
        if not bool(regular.all()):
            bad = ~regular & torch.isfinite(J).flatten(1).all(1) & torch.isfinite(residual).all(1)
            if bool(bad.any()):
                d = d.clone()
                d[bad] = _minimum_norm(J[bad], -residual[bad])
            d = torch.where(torch.isfinite(d), d, 0)
        if not self.line_search:
            return z + d, state
        norm = torch.linalg.vector_norm(residual, dim=1)
        t = torch.ones_like(norm)
        best_t, best_norm = t, torch.full_like(norm, torch.inf)
        trial = z + d
        for _ in range(self.halvings + 1):
            trial_norm = torch.linalg.vector_norm(f(trial), dim=1)
            better = trial_norm < best_norm
            best_t, best_norm = torch.where(better, t, best_t), torch.where(better, trial_norm, best_norm)
            searching = f.active & ~(best_norm < norm)
            if not bool(searching.any()):
                break
            t = torch.where(searching, 0.5 * t, best_t)
            trial = torch.addcmul(z, t.unsqueeze(1), d)
        if not bool((t == best_t).all()):
            trial = torch.addcmul(z, best_t.unsqueeze(1), d)
        return trial, state


def _minimum_norm(J: Tensor, rhs: Tensor) -> Tensor:
    answer = lstsq_batched(J, rhs)
    return answer[0] if isinstance(answer, tuple) else answer
