"""Limited-memory BFGS, every sample with its own curvature pairs and step length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.minimise.quasi_newton import QuasiNewton

__all__ = ["LBFGS"]


@register_solver("lbfgs", solves="minimise")
@dataclass(frozen=True)
class LBFGS(QuasiNewton):
    r"""``z <- z - t H g`` with ``H`` from the last ``memory`` pairs ``s = dz``, ``y = dg``.

    Two-loop recursion of Nocedal & Wright (2006, algorithm 7.4), initial scaling ``s'y / y'y`` (eq. 7.20); a pair with
    ``s'y`` not clearly positive is skipped.  Weak Wolfe conditions, approximate ones near the minimum (see
    :func:`~implicitkit.solver.steps.line_search.wolfe`).

    Memory: two arrays ``(batch, memory, n)``.

    Args:
        memory: pairs kept, at least 1. trials: evaluations of one line search at most.

    Raises:
        ValueError: an option below 1.
    """

    memory: int = 10
    trials: int = 30
    default_max_steps: ClassVar[int] = 15000

    def __post_init__(self) -> None:
        check_options(self, memory=at_least(1), trials=at_least(1))

    def blank(self, z: Tensor) -> dict[str, Any]:
        batch, n = z.shape
        return {
            "S": z.new_zeros(batch, self.memory, n),
            "Y": z.new_zeros(batch, self.memory, n),
            "rho": z.new_zeros(batch, self.memory),  # 1 / s'y; zero: no pair
            "scale": z.new_zeros(batch),
            "step": 0,
        }

    def direction(self, g: Tensor, memory: dict[str, Any]) -> Tensor:
        """``-H g``; a pair with ``rho = 0`` changes nothing."""
        S, Y, rho, scale, k = (memory[name] for name in ("S", "Y", "rho", "scale", "step"))
        order = [(k - 1 - i) % self.memory for i in range(min(k, self.memory))]  # newest first
        q, weights = g, []
        for i in order:
            a = rho[:, i] * (S[:, i] * q).sum(1)
            weights.append(a)
            q = torch.addcmul(q, a.unsqueeze(1), Y[:, i], value=-1)
        q = q * torch.where(scale > 0, scale, 1.0).unsqueeze(1)
        for i, a in zip(reversed(order), reversed(weights), strict=True):
            b = rho[:, i] * (Y[:, i] * q).sum(1)
            q = torch.addcmul(q, (a - b).unsqueeze(1), S[:, i])
        return -q

    def learn(self, memory: dict[str, Any], s: Tensor, y: Tensor, sy: Tensor, good: Tensor) -> dict[str, Any]:
        slot = memory["step"] % self.memory
        memory["S"][:, slot] = torch.where(good.unsqueeze(1), s, 0)
        memory["Y"][:, slot] = torch.where(good.unsqueeze(1), y, 0)
        memory["rho"][:, slot] = torch.where(good, 1 / sy, 0)
        scale = torch.where(good, sy / y.square().sum(1), memory["scale"])
        return {**memory, "scale": scale, "step": memory["step"] + 1}

    def forget(self, memory: dict[str, Any], which: Tensor) -> dict[str, Any]:
        rho = torch.where(which.unsqueeze(1), 0, memory["rho"])
        return {**memory, "rho": rho, "scale": torch.where(which, 0, memory["scale"])}
