"""Limited-memory BFGS, every sample with its own curvature pairs and step length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.registry import register_solver
from implicitkit.solvers.base import Method
from implicitkit.solvers.function import Function

__all__ = ["LBFGS"]


@register_solver("lbfgs", solves="minimise")
@dataclass(frozen=True)
class LBFGS(Method):
    r"""``z <- z - t H g`` with ``H`` from the last ``memory`` pairs ``s = dz``, ``y = dg``.

    Two-loop recursion of Nocedal & Wright (2006, algorithm 7.4), initial scaling ``s'y / y'y`` (eq. 7.20); a pair with
    ``s'y`` not clearly positive is skipped.  Weak Wolfe conditions by bracketing and bisection (Lewis & Overton 2013,
    algorithm 4.6), ``c1 = 1e-4``, ``c2 = 0.9``; where the objective no longer resolves the decrease, Hager & Zhang's
    approximate Wolfe test on slopes (2005, eq. 4.1) takes over, so that the gradient reaches its tolerance and not only
    the square root of it.

    Memory: two arrays ``(batch, memory, n)``.

    Args:
        memory: pairs kept, at least 1. trials: evaluations of one line search at most.

    Raises:
        ValueError: an option below 1.
    """

    memory: int = 10
    trials: int = 30
    default_max_steps: ClassVar[int] = 2000

    def __post_init__(self) -> None:
        if self.memory < 1 or self.trials < 1:
            raise ValueError(f"memory and trials must be at least 1, got {self.memory} and {self.trials}")

    def init(self, f: Function, z: Tensor) -> dict[str, Any]:
        batch, n = z.shape
        return {
            "S": z.new_zeros(batch, self.memory, n),
            "Y": z.new_zeros(batch, self.memory, n),
            "rho": z.new_zeros(batch, self.memory),  # 1 / s'y; zero: no pair
            "scale": z.new_zeros(batch),
            "step": 0,
        }

    def step(self, f: Function, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        g, value, k = f(z), f.value(z), state["step"]
        S, Y, rho = state["S"], state["Y"], state["rho"]
        order = [(k - 1 - i) % self.memory for i in range(min(k, self.memory))]  # newest first
        d = -self._apply(g, S, Y, rho, state["scale"], order)
        slope = (d * g).sum(1)
        downhill = (slope < 0) & torch.isfinite(slope)
        d = torch.where(downhill.unsqueeze(1), d, -g)
        slope = torch.where(downhill, slope, -g.square().sum(1))
        fresh = ~downhill | (state["scale"] == 0)
        norm = torch.linalg.vector_norm(g, dim=1)
        t = torch.where(fresh & (norm > 0), (1 / norm).clamp(max=1.0), 1.0)
        trial, t = self._search(f, z, d, value, slope, t)
        s, y = trial - z, f(trial) - g
        sy, yy = (s * y).sum(1), y.square().sum(1)
        good = sy > torch.finfo(z.dtype).eps * yy.sqrt() * torch.linalg.vector_norm(s, dim=1)
        slot = k % self.memory
        S[:, slot], Y[:, slot] = s, y
        rho[:, slot] = torch.where(good, 1 / sy, 0)
        scale = torch.where(good, sy / yy, state["scale"])
        return trial, {"S": S, "Y": Y, "rho": rho, "scale": scale, "step": k + 1}

    @staticmethod
    def _apply(g: Tensor, S: Tensor, Y: Tensor, rho: Tensor, scale: Tensor, order: list[int]) -> Tensor:
        """``H g``; a pair with ``rho = 0`` changes nothing."""
        q, weights = g, []
        for i in order:
            a = rho[:, i] * (S[:, i] * q).sum(1)
            weights.append(a)
            q = torch.addcmul(q, a.unsqueeze(1), Y[:, i], value=-1)
        q = q * torch.where(scale > 0, scale, 1.0).unsqueeze(1)
        for i, a in zip(reversed(order), reversed(weights), strict=True):
            b = rho[:, i] * (Y[:, i] * q).sum(1)
            q = torch.addcmul(q, (a - b).unsqueeze(1), S[:, i])
        return q

    def _search(
        self, f: Function, z: Tensor, d: Tensor, value: Tensor, slope: Tensor, t: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A step length for each sample; the point returned is the one evaluated last."""
        low, high = torch.zeros_like(t), torch.full_like(t, torch.inf)
        noise = 10 * torch.finfo(z.dtype).eps * value.abs()
        for trial_number in range(self.trials):
            trial = torch.addcmul(z, t.unsqueeze(1), d)
            new, new_slope = f.value(trial), (f(trial) * d).sum(1)
            armijo = new <= value + 1e-4 * t * slope
            armijo = armijo | ((new <= value + noise) & (new_slope <= (2e-4 - 1) * slope))
            curved = new_slope >= 0.9 * slope
            searching = f.active & ~(armijo & curved)
            if trial_number == self.trials - 1 or not bool(searching.any()):
                break
            high = torch.where(searching & ~armijo, t, high)
            low = torch.where(searching & armijo, t, low)
            t = torch.where(searching, torch.where(torch.isinf(high), 2 * t, 0.5 * (low + high)), t)
        return trial, t
