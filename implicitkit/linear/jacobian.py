"""The Jacobian of a function of samples as a matrix of NumPy's or SciPy's, for libraries that know no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff, compat, graph
from implicitkit.foundation.numbers import numbers
from implicitkit.foundation.operators import MatVec
from implicitkit.linear.factors.sparse_form import confirmed
from implicitkit.sparsity.identity import identity_of
from implicitkit.sparsity.patterns import SMALLEST, Sparsity, detected

Function = Callable[[Tensor], Tensor]


class JacobianMatrix:
    """Jacobians of functions ``(batch, n) -> (batch, n)`` of one make, row by row.

    Args:
        make: what tells them from others (a user's function); patterns are remembered by it. smallest: unknowns from which
            a pattern is looked for. known: the pattern ``(n, n)``, if it has been found, a SciPy matrix.
    """

    def __init__(self, make: Any, smallest: int = SMALLEST, known: Any = None) -> None:
        self.make, self.smallest = make, smallest
        self._known = None if known is None else Sparsity((type(self), identity_of(make)), known)

    def _sparsity(self, z: Tensor) -> Sparsity:
        if self._known is not None:
            return self._known
        return Sparsity((type(self), identity_of(self.make), tuple(z.shape)), smallest=self.smallest)

    def pattern(self, function: Function, z: Tensor) -> Any:
        """The pattern of one sample's ``(n, n)``, in compressed rows, looked for anew; ``None`` where it has none worth
        having."""
        found = detected(function, z) if z.shape[1] >= self.smallest else None
        return None if found is None else found.pattern

    def at(self, function: Function, z: Tensor) -> Any:
        """``(batch n, batch n)``, the samples' blocks along its diagonal: an array for one sample without a pattern, else
        sparse.  Whatever transforms surround it; under ``torch.vmap`` the batches that it maps over come first, without a
        pattern."""
        import scipy.sparse as sp

        mv, rmv = self._products(function, z)
        try:
            mapped = compat.batches_in_front(z)[1]
            found = None if mapped else confirmed(self._sparsity(z), function, z, mv, rmv)
        except NotImplementedError:  # inside torch.func.grad and jvp all is wrapped, and shows no memory
            found = None
        if found is not None:
            return found[0].stacked(found[1])
        rows = torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
        products, _ = compat.batches_in_front(graph.each(lambda w: rmv(torch.zeros_like(z) + w), rows))
        blocks = numbers(products.transpose(-3, -2).flatten(0, -3))
        return blocks[0] if len(blocks) == 1 else sp.block_diag(list(blocks), format="csc")

    @staticmethod
    def _products(function: Function, z: Tensor) -> tuple[MatVec, MatVec]:
        """``v -> J v`` and ``w -> J^T w``, from one evaluation where no transform is in the way."""
        if not compat.transforms_active():
            A = autodiff.linearise(function, z)[1]
            return A.mv, A.rmv
        return (lambda v: torch.func.jvp(function, (z,), (v,))[1], lambda w: torch.func.vjp(function, z)[1](w)[0])
