r"""Integration of slopes that are known: what is left of collocation where the right-hand side does not look at the state.

The equations of step ``k``, ``Y_ki - y_k - h_k \sum_j a_ij f(t_kj, Y_kj) = 0`` with ``y_k = Y_{k-1,s}``, have the Jacobian
``A - h (a \otimes df/dy)``, where

    (A x)_ki = x_ki - x_{k-1,s},        A^{-1} b = b_ki + \sum_{j<k} b_js,

    A^{-T} b = b_ki                     for ``i < s``,        b_ks + \sum_{j>k} \sum_i b_ji       else:

running sums over the steps.  Preconditioned by them the Jacobian is ``I - K`` with an integral operator ``K`` of Volterra's
kind, whose powers fall as ``(L T)^m / m!`` for a right-hand side of Lipschitz constant ``L`` over the time ``T``: GMRES
takes few products unless the equation is stiff, all steps at once, and no matrix is formed.

Source: Kelley (1995), *Iterative Methods for Linear and Nonlinear Equations*, section 3.5 (GMRES for integral equations);
Linz (1985), *Analytical and Numerical Methods for Volterra Equations*, section 3.1, for the powers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class RunningSums:
    """``A^{-1}``, or its transposed, of vectors ``(..., steps * stages * n)``; the time of an event, behind them, stays.

    ``solve`` and ``T`` are what Krylov methods ask of a preconditioner; ``exact``: of an inverse.
    """

    exact: ClassVar[bool] = False

    steps: int
    stages: int
    n: int
    transposed: bool = False

    @property
    def T(self) -> RunningSums:
        """The transposed."""
        return RunningSums(self.steps, self.stages, self.n, not self.transposed)

    def solve(self, b: Tensor) -> Tensor:
        """``A^{-1} b``, of ``(batch, N)`` or ``(batch, N, k)``."""
        return self._sums(b.mT).mT if b.ndim == 3 else self._sums(b)

    def _sums(self, b: Tensor) -> Tensor:
        size = self.steps * self.stages * self.n
        Y = b[..., :size].unflatten(-1, (self.steps, self.stages, self.n))
        zero = torch.zeros_like(Y[..., :1, 0, :])
        if self.transposed:
            later = Y[..., 1:, :, :].sum(-2).flip(-2).cumsum(-2).flip(-2)
            X = torch.cat((Y[..., :-1, :], (Y[..., -1, :] + torch.cat((later, zero), -2)).unsqueeze(-2)), -2)
        else:
            X = Y + torch.cat((zero, Y[..., :-1, -1, :].cumsum(-2)), -2).unsqueeze(-2)
        return torch.cat((X.flatten(-3), b[..., size:]), -1)
