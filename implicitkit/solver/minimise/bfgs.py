"""BFGS with a dense inverse Hessian for each sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.minimise.quasi_newton import QuasiNewton

__all__ = ["BFGS"]


@register_solver("bfgs", solves="minimise")
@dataclass(frozen=True)
class BFGS(QuasiNewton):
    r"""``z <- z - t H g`` with ``H <- (I - \rho s y') H (I - \rho y s') + \rho s s'``, ``\rho = 1 / s'y``.

    Nocedal & Wright (2006, eq. 6.17); ``H`` is scaled by ``s'y / y'y`` before the first update (eq. 6.20), and a pair with
    ``s'y`` not clearly positive is skipped.  Weak Wolfe conditions, approximate ones near the minimum (see
    :func:`~implicitkit.solver.steps.line_search.wolfe`).

    Memory: one array ``(batch, n, n)``; beyond some thousand unknowns use ``lbfgs``.

    Args:
        trials: evaluations of one line search at most.

    Raises:
        ValueError: ``trials`` below 1.
    """

    trials: int = 30
    default_max_steps: ClassVar[int] = 2000

    def __post_init__(self) -> None:
        check_options(self, trials=at_least(1))

    def blank(self, z: Tensor) -> dict[str, Any]:
        return {"H": _identity(z).expand(z.shape[0], -1, -1), "scale": z.new_zeros(z.shape[0])}

    def direction(self, g: Tensor, memory: dict[str, Any]) -> Tensor:
        return -torch.bmm(memory["H"], g.unsqueeze(2)).squeeze(2)

    def learn(self, memory: dict[str, Any], s: Tensor, y: Tensor, sy: Tensor, good: Tensor) -> dict[str, Any]:
        H, scale = memory["H"], memory["scale"]
        first = good & (scale == 0)
        gamma = torch.where(first, sy / y.square().sum(1), 1)
        H = H * gamma[:, None, None]
        rho = torch.where(good, 1 / sy, 0)
        s, y = torch.where(good.unsqueeze(1), s, 0), torch.where(good.unsqueeze(1), y, 0)
        Hy = torch.bmm(H, y.unsqueeze(2)).squeeze(2)
        # H - rho (s (Hy)' + Hy s') + (rho + rho^2 y'Hy) s s' = H + s w' + w s'
        half = 0.5 * (rho + rho.square() * (y * Hy).sum(1))
        w = half.unsqueeze(1) * s - rho.unsqueeze(1) * Hy
        outer = s.unsqueeze(2) * w.unsqueeze(1)
        return {"H": H + outer + outer.mT, "scale": torch.where(first, gamma, scale)}

    def forget(self, memory: dict[str, Any], which: Tensor) -> dict[str, Any]:
        H = torch.where(which[:, None, None], _identity(memory["H"][:, 0]), memory["H"])
        return {"H": H, "scale": torch.where(which, 0, memory["scale"])}


def _identity(z: Tensor) -> Tensor:
    return torch.eye(z.shape[1], dtype=z.dtype, device=z.device).unsqueeze(0)
