r"""Factors of a Hessian that was positive definite where a minimiser's last step began, and whether it still is at its end.

Near a minimum a Newton step ends where the Hessian is what it was, ``H = N + E`` with a small ``E``.  One product shows
that: for a random ``q``, ``|E q|_{N^{-1}} <= \delta |q|_N`` with ``\delta = 0.001``.  Were ``H`` singular or indefinite, an
eigenvalue of ``N^{-1} E`` would be -1 or less, and ``q`` would have no more than a thousandth of itself along it, though
directions in which ``N`` is weak have the larger shares; and beside an inflection a Newton step changes ``N`` by half of
itself.  As a difference of gradients the product sees a jump of them in ``z``, too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from implicitkit.foundation import seeded

SAME = 1e-3  # how much of itself a Hessian may have changed by


class HessianFactors:
    """``N`` of every sample, positive definite.

    Args:
        diagonal: of ``N``, ``(batch, n)``. inverse: ``b -> N^{-1} b``, ``(batch, n)`` both.
    """

    positive = True

    def __init__(self, diagonal: Tensor, inverse: Callable[[Tensor], Tensor]) -> None:
        self.units, self._inverse = diagonal.sqrt(), inverse
        self._held: tuple[Tensor, Tensor] | None = None

    @classmethod
    def dense(cls, N: Tensor, L: Tensor) -> HessianFactors:
        """The factors of dense ``N = L L'``, ``(batch, n, n)``."""
        solve = lambda b: torch.cholesky_solve(b.to(L).unsqueeze(2), L).squeeze(2)  # noqa: E731
        return cls(N.diagonal(dim1=1, dim2=2), solve)

    def hold(self, product: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        """Where the Hessian at ``z`` is the same, ``(batch,)``; ``product``: that with unit vectors, ``(batch, n)``.  Of the
        last point it is remembered, by identity."""
        if self._held is None or self._held[0] is not z:
            self._held = z, self._hold(product, z)
        return self._held[1]

    def _hold(self, product: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        w = seeded.normal(z.shape[1], seed=0).to(z) * self.units.to(z)
        q = self.solve(w)
        length = torch.linalg.vector_norm(q, dim=1, keepdim=True)
        change = length * product(q / length) - w
        square = (change * self.solve(change)).sum(1)
        return square <= SAME**2 * (q * w).sum(1)  # false for NaN

    def solve(self, b: Tensor) -> Tensor:
        """``N^{-1} b``, ``(batch, n)``."""
        return self._inverse(b).to(b)
