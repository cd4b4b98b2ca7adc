"""Anderson acceleration of a fixed-point iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.registry import register_solver
from implicitkit.solvers.base import Method
from implicitkit.solvers.function import Function

__all__ = ["Anderson"]


@register_solver("anderson", solves="fixed_point")
@dataclass(frozen=True)
class Anderson(Method):
    r"""Type-II Anderson acceleration, coefficients per sample.

    With residuals ``r_k = f(z_k) - z_k`` and the last ``m`` differences ``dZ``, ``dR`` as columns,

        gamma = argmin |r_k - dR gamma|_2
        z_{k+1} = z_k + damping r_k - (dZ + damping dR) gamma

    (Anderson 1965; Walker & Ni 2011, eq. 2.2 and problem 2.3).  The normal equations are kept as an ``m x m`` Gram
    matrix that gains one row a step, its diagonal raised by a relative ridge (Cholesky does not mind the scale of single
    columns; an absolute ridge would turn the method into averaging once residuals are small).  A sample whose residual
    has grown beyond ``safeguard`` times the best since it last did so forgets its memory and takes a damped Picard step,
    so that on a contraction the method cannot do worse than Picard for long.

    Memory: two arrays ``(batch, memory, n)``, allocated once.  One evaluation a step; no host-device synchronisation.

    Args:
        memory: ``m``, at least 1. damping: mixing in (0, 2).
        ridge: relative to the diagonal; ``None``: ``10 m eps`` of the dtype.
        safeguard: growth factor beyond which a sample restarts, greater than 1.

    Raises:
        ValueError: an option out of range.
    """

    memory: int = 5
    damping: float = 1.0
    ridge: float | None = None
    safeguard: float = 4.0
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1, got {self.memory}")
        if not 0 < self.damping < 2:
            raise ValueError(f"damping must be in (0, 2), got {self.damping}")
        if self.ridge is not None and self.ridge < 0:
            raise ValueError(f"ridge cannot be negative, got {self.ridge}")
        if self.safeguard <= 1:
            raise ValueError(f"safeguard must be greater than 1, got {self.safeguard}")

    def init(self, f: Function, z: Tensor) -> dict[str, Any]:
        batch, n = z.shape
        m = self.memory
        small = torch.float32 if z.dtype in (torch.float16, torch.bfloat16) else z.dtype  # no LAPACK in half precision
        return {
            "dR": z.new_zeros(batch, m, n),
            "dS": z.new_zeros(batch, m, n),  # dZ + damping dR
            "pair": z.new_empty(batch, 2, n),  # the newest difference and r, side by side
            "gram": torch.zeros(batch, m, m, dtype=small, device=z.device),
            "best": torch.full((batch,), torch.inf, dtype=small, device=z.device),
            "last_z": z,
            "last_r": None,
            "step": 0,
        }

    def step(self, f: Function, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        r, k = f.residual(z), state["step"]
        gram, small = state["gram"], state["gram"].dtype
        norm = f.norm.to(small)
        plain = z.add(r, alpha=self.damping)
        if k == 0:
            return plain, {**state, "best": norm, "last_r": r, "step": 1}
        slot, held = (k - 1) % self.memory, min(k, self.memory)
        dR, dS, pair, best = state["dR"], state["dS"], state["pair"], state["best"]
        d = torch.sub(r, state["last_r"], out=pair[:, 0])
        pair[:, 1] = r
        dR[:, slot] = d
        torch.sub(z, state["last_z"], out=dS[:, slot]).add_(d, alpha=self.damping)
        grown = norm > self.safeguard * best
        best = torch.minimum(norm, best)
        if grown.device.type != "cpu" or bool(grown.any()):  # elsewhere, asking would cost a synchronisation
            best = torch.where(grown, norm, best)
            dR.masked_fill_(grown.view(-1, 1, 1), 0)
            gram.masked_fill_(grown.view(-1, 1, 1), 0).diagonal(dim1=1, dim2=2).add_(grown.unsqueeze(1))
        # products of the history with the new difference and with r, in one pass over the history
        products = torch.bmm(pair, dR[:, :held].mT).to(small)
        gram[:, slot, :held] = gram[:, :held, slot] = products[:, 0]
        gram[:, slot, slot].mul_(1 + self._ridge(small)).add_(torch.finfo(small).tiny)
        factor, info = torch.linalg.cholesky_ex(gram[:, :held, :held])
        gamma = torch.cholesky_solve(products[:, 1].unsqueeze(2), factor)
        gamma.masked_fill_(info.ne(0).view(-1, 1, 1), 0)  # not positive definite, or NaN: the plain step
        z_next = torch.baddbmm(plain.unsqueeze(1), gamma.to(z.dtype).mT, dS[:, :held], alpha=-1).squeeze(1)
        return z_next, {**state, "best": best, "last_z": z, "last_r": r, "step": k + 1}

    def _ridge(self, dtype: torch.dtype) -> float:
        return self.ridge if self.ridge is not None else 10 * self.memory * torch.finfo(dtype).eps
