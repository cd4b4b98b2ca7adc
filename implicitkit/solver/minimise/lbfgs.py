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

    In the compact form of Byrd, Nocedal & Schnabel (1994; Nocedal & Wright 2006, eq. 7.24), of pairs in units in which
    ``s'y = 1``, the columns of ``S`` and ``Y``:

        H = \gamma I + [S, \gamma Y] [[R^{-T} (I + \gamma Y'Y) R^{-1}, -R^{-T}], [-R^{-1}, 0]] [S, \gamma Y]'

    with ``R`` the upper triangle of ``S'Y``, in the order of time, and ``\gamma = 1 / y'y`` of the last pair (eq. 7.20).
    ``R^{-1}`` is kept: a new pair gives it a column, ``-R^{-1} S'y`` above one, and of the pairs that are left, once the
    oldest goes, it is what is left of it.  So a step is a handful of products of matrices, however many the pairs.

    A pair with ``s'y`` not clearly positive is skipped.  Weak Wolfe conditions, approximate ones near the minimum (see
    :func:`~implicitkit.solver.steps.line_search.wolfe`).

    Memory: one array ``(batch, 2 memory, n)``.

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
        (batch, n), m = z.shape, self.memory
        return {
            "pairs": z.new_zeros(batch, 2 * m, n),  # the rows of S', then of Y'
            "inverse": z.new_zeros(batch, m, m),  # of R; zero where a pair is none
            "YY": z.new_zeros(batch, m, m),
            "scale": z.new_zeros(batch),
            "step": 0,
        }

    def direction(self, g: Tensor, memory: dict[str, Any]) -> Tensor:
        r"""``-H g = -\gamma g - S b + \gamma Y a`` with ``a = R^{-1} S'g``, ``b = R^{-T} (a + \gamma (Y'Y a - Y'g))``."""
        if not memory["step"]:
            return -g
        pairs, inverse, scale = memory["pairs"], memory["inverse"], memory["scale"]
        gamma = torch.where(scale > 0, scale, 1)[:, None, None]
        Sg, Yg = torch.bmm(g.unsqueeze(1), pairs.mT).chunk(2, 2)  # all vectors as rows: several times as fast
        a = torch.bmm(Sg, inverse.mT)
        scaled = gamma * a
        b = torch.bmm(a + torch.bmm(scaled, memory["YY"]) - gamma * Yg, inverse)
        return torch.baddbmm(-gamma * g.unsqueeze(1), torch.cat([-b, scaled], 2), pairs).squeeze(1)

    def learn(self, memory: dict[str, Any], s: Tensor, y: Tensor, sy: Tensor, good: Tensor) -> dict[str, Any]:
        m, pairs, inverse, YY = self.memory, memory["pairs"], memory["inverse"], memory["YY"]
        k, scale = memory["step"] % m, memory["scale"]
        unit = sy.rsqrt().unsqueeze(1)
        s, y = unit * s, unit * y
        if not bool(good.all()):
            s, y = torch.where(good.unsqueeze(1), s, 0), torch.where(good.unsqueeze(1), y, 0)
        pairs[:, k], pairs[:, m + k] = s, y
        Sy, Yy = torch.bmm(y.unsqueeze(1), pairs.mT).squeeze(1).chunk(2, 1)
        inverse[:, k], inverse[:, :, k] = 0, 0  # the oldest goes
        inverse[:, :, k] = -torch.bmm(Sy.unsqueeze(1), inverse.mT).squeeze(1)
        inverse[:, k, k] = 1
        YY[:, k] = YY[:, :, k] = Yy
        scale = torch.where(good, 1 / YY[:, k, k], scale)
        return {**memory, "scale": scale, "step": memory["step"] + 1}

    def forget(self, memory: dict[str, Any], which: Tensor) -> dict[str, Any]:
        inverse = torch.where(which[:, None, None], 0, memory["inverse"])
        return {**memory, "inverse": inverse, "scale": torch.where(which, 0, memory["scale"])}
