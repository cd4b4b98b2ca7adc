"""Anderson acceleration of a fixed-point iteration."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.registry import register_solver
from implicitkit.solvers.base import Method
from implicitkit.solvers.function import Function
from implicitkit.solvers.guard import check_guard, maybe_any, return_to_best, watch

__all__ = ["Anderson"]


@register_solver("anderson", solves="fixed_point")
@dataclass(frozen=True)
class Anderson(Method):
    r"""Type-II Anderson acceleration, coefficients per sample.

    With residuals ``r_k = f(z_k) - z_k``, the mixed points ``w_k = z_k + damping r_k`` and the last ``m`` differences
    ``dR``, ``dW`` of both as columns,

        gamma = argmin |r_k - dR gamma|^2 + ridge |D gamma|^2,    z_{k+1} = w_k - dW gamma,

    ``D = diag |dR_j|`` (Anderson 1965; Walker & Ni 2011, eq. 2.2 and problem 2.3).  The normal equations are kept as an
    ``m x m`` Gram matrix that gains one row a step; the ridge is relative to its diagonal, since an absolute one would turn
    the method into averaging once residuals are small.

    A sample that does badly forgets its memory and takes a plain (mixed) step from its best point
    (:func:`~implicitkit.solvers.guard.watch`), so that where that step contracts the method cannot do worse than Picard
    for long.

    Memory: one array ``(batch, memory + 1, 2 n)``, allocated once.  One evaluation a step.

    Args:
        memory: ``m``, at least 1. damping: mixing in (0, 2).
        ridge: relative regularisation; ``None``: ``10 m eps`` of the dtype.
        restart: forget the memory every so many steps; ``None``: never.
        safeguard: growth of the residual at which a sample restarts, greater than 1; ``inf`` switches it off.
        patience: steps without a new best residual after which a sample restarts.

    Raises:
        ValueError: an option out of range.
    """

    memory: int = 5
    damping: float = 1.0
    ridge: float | None = None
    restart: int | None = None
    safeguard: float = 4.0
    patience: int = 50
    default_max_steps: ClassVar[int] = 1000

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1, got {self.memory}")
        if not 0 < self.damping < 2:
            raise ValueError(f"damping must be in (0, 2), got {self.damping}")
        if self.ridge is not None and not self.ridge >= 0:
            raise ValueError(f"ridge cannot be negative, got {self.ridge}")
        if self.restart is not None and self.restart < 2:
            raise ValueError(f"restart must be at least 2 (or None for never), got {self.restart}")
        check_guard(self.safeguard, self.patience)

    def init(self, f: Function, z: Tensor) -> dict[str, Any]:
        batch, n = z.shape
        m = self.memory
        small = torch.float32 if z.dtype in (torch.float16, torch.bfloat16) else z.dtype  # no LAPACK in half precision
        return {
            # side by side the differences of residuals and of mixed points, and after them r and w themselves
            "history": z.new_zeros(batch, m + 1, 2 * n),
            "gram": torch.zeros(batch, m, m, dtype=small, device=z.device),
            "since": 0,  # steps since the memory of all was last empty
            "guard": {},
        }

    def step(self, f: Function, z: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        history, gram, k, m, n = state["history"], state["gram"], state["since"], self.memory, z.shape[1]
        r = f.residual(z)
        mixed = f(z) if self.damping == 1.0 else z.add(r, alpha=self.damping)
        newest = torch.cat((r, mixed), 1)
        if self.restart is not None and k >= self.restart:
            k = 0
        # the newest difference goes to row ``slot``, where before all rows are in use the last residual lay
        slot, held = (k - 1) % m, min(k, m)
        if k > 0:
            torch.sub(newest, history[:, min(k - 1, m)], out=history[:, slot])
        history[:, held] = newest
        forget, guard = watch(f, state["guard"], self.safeguard, self.patience)
        state = state | {"since": k + 1, "guard": guard}
        if forget is not None:
            history[:, :held].masked_fill_(forget.view(-1, 1, 1), 0)
            gram.masked_fill_(forget.view(-1, 1, 1), 0)
        if k == 0:
            return return_to_best(f, mixed, guard), state
        used = history.narrow(1, 0, held)
        dR, dW = used.narrow(2, 0, n), used.narrow(2, n, n)
        # products of the newest difference and of r with the history, in one pass over it
        pair = history[:, slot : held + 1 : held - slot].narrow(2, 0, n)
        products = torch.bmm(pair, dR.mT)
        if products.dtype != gram.dtype:
            products = products.to(gram.dtype)
        if held < m:
            gram = gram[:, :held, :held]
        row, rhs = products.unbind(1)
        gram[:, slot] = gram[:, :, slot] = row
        factor, info = torch.linalg.cholesky_ex(_raised(gram, m, self.ridge))
        gamma = torch.cholesky_solve(rhs.unsqueeze(2), factor)
        if maybe_any(info):
            gamma = gamma.masked_fill(info.ne(0).view(-1, 1, 1), 0)  # not positive definite: the plain step
        if gamma.dtype != z.dtype:
            gamma = gamma.to(z.dtype)
        z_next = torch.baddbmm(mixed.unsqueeze(1), gamma.mT, dW, alpha=-1).squeeze(1)
        return return_to_best(f, z_next, guard), state


def _raised(gram: Tensor, memory: int, ridge: float | None) -> Tensor:
    """A Gram matrix with the ridge on its diagonal; an empty column keeps a pivot."""
    floor, factor = _ridge(gram.shape[1], memory, ridge, gram.dtype, gram.device)
    return torch.addcmul(floor, gram, factor)


@functools.lru_cache(maxsize=128)
def _ridge(size: int, memory: int, ridge: float | None, dtype: torch.dtype, device: torch.device) -> Any:
    """What is added to the Gram matrix, and what it is multiplied by, entry by entry."""
    relative = 10 * memory * torch.finfo(dtype).eps if ridge is None else ridge
    eye = torch.eye(size, dtype=dtype, device=device)
    return torch.finfo(dtype).tiny * eye, 1 + relative * eye
