"""How an operator becomes sparse.  SciPy is imported when that happens, not before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import MatVec, Operator
from implicitkit.linear.price import Price, price_of
from implicitkit.sparsity.known import SMALLEST, Sparsity

__all__ = ["SMALLEST", "sparse_blocks"]


def sparse_blocks(sparsity: Callable[[], Sparsity], function: Callable[[Tensor], Tensor], z: Tensor) -> _Form:
    """How the operator of ``function`` at ``z`` becomes sparse: by the known pattern, confirmed by a product.

    A pattern that does not hold at ``z`` is looked for again there; if it does not hold then, there are no blocks.
    """

    return _Form(sparsity, function, z)


class _Form:
    """Makes the blocks of an operator; ``price``: what they and their factors cost, ``None`` where there is no pattern."""

    def __init__(self, sparsity: Callable[[], Sparsity], function: Callable[[Tensor], Tensor], z: Tensor) -> None:
        self.sparsity, self.function, self.z = sparsity, function, z

    def __call__(self, A: Operator) -> Any:
        from implicitkit.linear.sparse_blocks import SparseBlocks

        found = confirmed(self.sparsity(), self.function, self.z, A.mv, A.rmv)
        return None if found is None else SparseBlocks(*found)

    def price(self) -> Price | None:
        ready = self.sparsity().find(self.function, self.z)
        if ready is None:
            return None
        from implicitkit.linear.sparse_factors import analyse

        known = ready.analysed(analyse)
        return price_of(
            len(self.z),
            self.z.shape[1],
            products=ready.products,
            entries=ready.pattern.nnz,
            band=None if known.band is None else sum(known.band) + 1,
            fill=known.ordering.fill,
            reach=known.reach,
        )


def confirmed(
    sparsity: Sparsity, function: Callable[[Tensor], Tensor], z: Tensor, mv: MatVec, rmv: MatVec
) -> tuple[Any, Any] | None:
    """The pattern of ``function`` at ``z`` and the entries of every sample's Jacobian, ``(batch, nnz)``, from products with
    it and with its transposed, which confirm the pattern; ``None`` where there is none."""
    tolerance = torch.finfo(z.dtype).eps ** 0.25
    for _ in range(4):
        ready = sparsity.find(function, z)
        if ready is None:
            return None
        values, error = ready.values(mv, rmv, len(z), z)
        worst = max((e for e in error.tolist() if not math.isnan(e)), default=0.0)  # NaN: the matrix is not finite
        if worst <= tolerance:
            return ready, values
        sparsity.refute(ready, worst)
    return None
