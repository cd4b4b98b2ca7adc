"""A batch of quadratic programs as plain tensors, and their optimality conditions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.linear.factors.dense import mv


class QPData(NamedTuple):
    """Data of a batch of programs, nothing absent: ``P (B, n, n)``, ``q (B, n)``, ``A (B, p, n)``, ``b (B, p)``,
    ``G (B, m, n)``, ``h (B, m)`` with ``p`` or ``m`` possibly zero; ``h`` may hold ``inf``."""

    P: Tensor
    q: Tensor
    A: Tensor
    b: Tensor
    G: Tensor
    h: Tensor

    def rows(self, keep: Tensor) -> QPData:
        """Some of the programs."""
        return QPData(*(t.index_select(0, keep) for t in self))


def natural_residual(z: Tensor, y: Tensor, lam: Tensor, data: QPData) -> tuple[Tensor, Tensor, Tensor]:
    r"""The optimality conditions as equations in natural-map form (Robinson 1992; Facchinei & Pang 2003, section 1.5):

        Pz + q + A'y + G'lam = 0,    Az - b = 0,    lam - max(lam + Gz - h, 0) = 0

    Args:
        z: ``(B, n)``. y: ``(B, p)``. lam: ``(B, m)``. data: the programs.

    Returns:
        The three left-hand sides, of the shapes of ``z``, ``y`` and ``lam``.
    """
    stationarity = mv(data.P, z) + data.q + mv(data.A.mT, y) + mv(data.G.mT, lam)
    return stationarity, mv(data.A, z) - data.b, lam - (lam + mv(data.G, z) - data.h).clamp_min(0)


def natural_jacobian(P: Tensor, A: Tensor, G: Tensor, D: Tensor) -> Tensor:
    """The Jacobian of :func:`natural_residual`, ``[[P, A', G'], [A, 0, 0], [-D G, 0, I - D]]``, ``(B, k, k)`` with
    ``k = n + p + m``; ``D``: the derivative of the maximum, 1 on active rows and 0 on others, ``(B, m)``."""
    batch, p, m = P.shape[0], A.shape[1], G.shape[1]
    stationarity = torch.cat([P, A.mT, G.mT], 2)
    equalities = torch.cat([A, P.new_zeros(batch, p, p + m)], 2)
    inequalities = torch.cat([-D.unsqueeze(2) * G, P.new_zeros(batch, m, p), torch.diag_embed(1 - D)], 2)
    return torch.cat([stationarity, equalities, inequalities], 1)
