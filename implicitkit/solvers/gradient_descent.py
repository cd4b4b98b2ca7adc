"""Gradient descent with a step length of its own for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.registry import register_solver
from implicitkit.solvers.base import Method
from implicitkit.solvers.function import Function

__all__ = ["GradientDescent"]


@register_solver("gradient_descent", solves="minimise")
@dataclass(frozen=True)
class GradientDescent(Method):
    r"""``z <- z - t g``, ``g = df/dz``.

    With ``step_size`` given, ``t`` is that number.  Otherwise ``t`` starts from the Barzilai-Borwein length
    ``s's / s'y`` (1988, eq. 5; ``s``, ``y`` the last changes of ``z`` and ``g``) and is halved, per sample, while the
    objective is not below ``max(last values) - 1e-4 t |g|^2`` (nonmonotone Armijo, Raydan 1997) — or, where values no
    longer resolve the decrease, while the gradient does not shrink.

    Args:
        step_size: fixed step length. memory: values that the nonmonotone test looks back on.

    Raises:
        ValueError: ``step_size`` not positive.
    """

    step_size: float | None = None
    memory: int = 10
    default_max_steps: ClassVar[int] = 20000

    def __post_init__(self) -> None:
        if self.step_size is not None and not self.step_size > 0:
            raise ValueError(f"step_size must be positive, got {self.step_size}")
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1, got {self.memory}")

    @property
    def differentiable(self) -> bool:
        """With a fixed step the iteration can be unrolled."""
        return self.step_size is not None

    def init(self, f: Function, z: Tensor) -> dict[str, Any]:
        if self.step_size is not None:
            return {}
        g = f(z)
        value = f.value(z)
        norm = torch.linalg.vector_norm(g, dim=1)
        start = torch.where(norm > 0, (1 / norm).clamp(max=1.0), 1.0)
        return {"t": start, "values": value.unsqueeze(1).expand(-1, self.memory).clone(), "step": 0}

    def step(self, f: Function, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        g = f(z)
        if self.step_size is not None:
            return z.add(g, alpha=-self.step_size), state
        t, values, k = state["t"], state["values"], state["step"]
        square = g.square().sum(1)
        reference = values.amax(1)
        noise = 10 * torch.finfo(z.dtype).eps * reference.abs()
        for _ in range(60):
            trial = torch.addcmul(z, t.unsqueeze(1), g, value=-1)
            value = f.value(trial)
            enough = value <= reference - 1e-4 * t * square
            if not bool((enough | ~f.active).all()):
                level = (value <= reference + noise) & (f(trial).square().sum(1) <= square)
                enough = enough | level | ~f.active
            if bool(enough.all()):
                break
            t = torch.where(enough, t, 0.5 * t)
        values = values.clone()
        values[:, k % self.memory] = value
        s, y = trial - z, f(trial) - g
        curvature = (s * y).sum(1)
        length = s.square().sum(1) / curvature
        t = torch.where((curvature > 0) & torch.isfinite(length), length, 2 * t).clamp(1e-12, 1e12)
        return trial, {"t": t, "values": values, "step": k + 1}
