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

__all__ = ["SMALLEST", "pattern_of_samples", "sparse_blocks"]

_HARDLY = 0.3  # of the entries: more are no pattern


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
        found = confirmed(self.sparsity(), self.function, self.z, A.mv, A.rmv)
        if found is not None:
            from implicitkit.linear.sparse_blocks import SparseBlocks

            return SparseBlocks(*found)
        found = confirmed_bordered(self.sparsity(), self.function, self.z, A.mv, A.rmv)
        if found is None:
            return None
        from implicitkit.linear.low_rank_blocks import low_rank_blocks

        return low_rank_blocks(*found, A.symmetric)

    def price(self) -> Price | None:
        from implicitkit.linear.sparse_factors import analyse

        ready = self.sparsity().find(self.function, self.z)
        if ready is None:
            border = self.sparsity().find_bordered(self.function, self.z)
            if border is None:
                return None
            entries = border.pattern.nnz + 2 * (border.rank + len(border.alone)) * self.z.shape[1]
            reach = border.analysed(analyse).reach
            return price_of(len(self.z), self.z.shape[1], border.products, entries, None, reach=reach)
        known = ready.analysed(analyse)
        return price_of(
            len(self.z),
            self.z.shape[1],
            products=ready.products,
            entries=ready.pattern.nnz,
            band=None if known.band is None else sum(known.band) + 1,
            fill=known.ordering.fill,
            reach=known.reach,
            alike=known.ordering.alike,
        )


def confirmed(
    sparsity: Sparsity, function: Callable[[Tensor], Tensor], z: Tensor, mv: MatVec, rmv: MatVec
) -> tuple[Any, Any] | None:
    """The pattern of ``function`` at ``z`` and the entries of every sample's Jacobian, ``(batch, nnz)``, from products with
    it and with its transposed, which confirm the pattern; ``None`` where there is none."""
    for _ in range(4):
        ready = sparsity.find(function, z)
        if ready is None:
            return None
        values, error = ready.values(mv, rmv, len(z), z)
        worst = _worst(error)
        if worst <= _tolerance(z):
            return ready, values
        sparsity.refute(ready, worst)
    return None


def confirmed_bordered(
    sparsity: Sparsity, function: Callable[[Tensor], Tensor], z: Tensor, mv: MatVec, rmv: MatVec
) -> tuple[Any, Any] | None:
    """The same of a matrix that is sparse but for a few numbers that all unknowns share
    (:mod:`implicitkit.sparsity.low_rank`): its pattern, and its entries."""
    ready = sparsity.find_bordered(function, z)
    if ready is None:
        return None
    entries, error = ready.values(mv, rmv, len(z), z)
    if _worst(error) <= _tolerance(z):
        return ready, entries
    sparsity.refute_bordered()
    return None


def _worst(error: Any) -> float:
    """Of all samples; NaN: the matrix is not finite."""
    return max((e for e in error.tolist() if not math.isnan(e)), default=0.0)


def _tolerance(z: Tensor) -> float:
    """Of what a product may differ by, relative."""
    return float(torch.finfo(z.dtype).eps) ** 0.25


def pattern_of_samples(function: Callable[[Tensor], Tensor], z: Tensor) -> Any:
    """The pattern of the Jacobian of ``function: (batch, n) -> (batch, n)`` with all samples one below the other, a SciPy
    matrix ``(batch n, batch n)``; ``None`` where it is hardly sparse, or cannot be told."""
    import scipy.sparse as sp

    from implicitkit.sparsity.detection import detect

    batch, n = z.shape
    found = detect(function, z, budget=batch * n * n, each=max(1, int(_HARDLY * n))).pattern
    if found is None or found.nnz > _HARDLY * n * n:
        return None
    return sp.csc_matrix(sp.kron(sp.identity(batch), found))
