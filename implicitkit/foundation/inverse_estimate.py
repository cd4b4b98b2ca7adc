"""An estimate of an inverse Jacobian, as a quasi-Newton method leaves it behind."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class InverseEstimate:
    r"""``B = scale I + U^T V``, block by block: an estimate of ``(dF/dz)^{-1}`` at the solution.

    What makes the forward solve's own estimate serve as an approximate backward (SHINE: Ramzi et al. 2022, ICLR, arXiv
    2106.00553): ``B^T g`` in place of the solution ``u`` of ``(dF/dz)^T u = g``.  It may be good to three digits or point
    uphill, depending on the steps the solver happened to take: measure ``|(dF/dz)^T u - g|`` before trusting it.

    Units: those of ``z`` by those of the residual.  Raises: nothing.

    Attributes:
        scale: ``(batch, 1)``. U, V: ``(batch, memory, n)``, unused rows zero.
    """

    scale: Tensor
    U: Tensor
    V: Tensor

    def mv(self, x: Tensor) -> Tensor:
        """``B x``, both ``(batch, n)``."""
        return torch.addcmul(through(x, self.V, self.U), self.scale, x)

    def rmv(self, x: Tensor) -> Tensor:
        """``B^T x``, both ``(batch, n)``."""
        return torch.addcmul(through(x, self.U, self.V), self.scale, x)


def through(x: Tensor, P: Tensor, Q: Tensor) -> Tensor:
    """``Q^T P x`` per sample, ``P`` and ``Q`` ``(batch, rank, n)``; vectors are rows, which bmm does faster."""
    return torch.bmm(torch.bmm(x.unsqueeze(1), P.mT), Q).squeeze(1)
