"""How an operator becomes sparse.  SciPy is imported when that happens, not before."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import MatVec, Operator
from implicitkit.linear.price import Price, price_of, touched_beside
from implicitkit.sparsity.patterns import SMALLEST, Sparsity

__all__ = ["SMALLEST", "sparse_blocks"]

_Graph = Callable[[], tuple[int, int, int] | None]


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
            from implicitkit.linear.factors.sparse_blocks import SparseBlocks

            return SparseBlocks(*found)
        own = A.rmv if A.symmetric else A.mv  # of a symmetric matrix fewer products tell all
        found = confirmed_bordered(self.sparsity(), self.function, self.z, own, A.rmv)
        if found is None:
            return None
        from implicitkit.linear.factors.low_rank_blocks import low_rank_blocks

        return low_rank_blocks(*found, A.symmetric)

    def price(self, alike: float | None = None, graph: _Graph | None = None) -> Price | None:
        """``alike``: samples a matrix, if that is known; else as many as the last time.  ``graph``: finds what a product
        goes through, if that is known (``Operator.graph``); asked once for a pattern and a number of samples."""
        from implicitkit.linear.factors.analysis import analyse

        ready = self.sparsity().find(self.function, self.z)
        if ready is None:
            border = self.sparsity().find_bordered(self.function, self.z)
            if border is None:
                return None
            wide = self._wide(border, graph)
            entries = border.pattern.nnz + 2 * (border.rank + len(border.alone)) * self.z.shape[1]
            reach = border.analysed(analyse).reach
            return price_of(len(self.z), self.z.shape[1], border.products, entries, None, reach=reach, wide=wide)
        known, wide = ready.analysed(analyse), self._wide(ready, graph)
        parts = 1 if known.parts is None else len(known.parts.bounds) - 1  # as so many matrices
        return price_of(
            parts * len(self.z),
            self.z.shape[1] // parts,
            products=ready.products,
            entries=ready.pattern.nnz // parts,
            band=None if known.band is None else sum(known.band) + 1,
            fill=(known.ordering.fill or known.likely_fill) // parts,
            reach=known.reach,
            alike=alike or known.ordering.alike,
            wide=wide,
        )

    def _wide(self, ready: Any, graph: _Graph | None) -> float:
        """What a product touches beside the state."""
        batch, n = self.z.shape
        if graph is None:
            return 0.0
        found: float = ready.remembered(("wide", batch), lambda: touched_beside(batch, n, graph()))
        return found


def confirmed(
    sparsity: Sparsity, function: Callable[[Tensor], Tensor], z: Tensor, mv: MatVec, rmv: MatVec
) -> tuple[Any, Any] | None:
    """The pattern of ``function`` at ``z`` and the entries of every sample's Jacobian, ``(batch, nnz)``, from products with
    it and with its transposed, which confirm the pattern; ``None`` where there is none."""
    for _ in range(4):
        ready = sparsity.find(function, z)
        if ready is None:
            return None
        values, error = ready.entries(function, mv, rmv, z)
        worst, tolerance = _worst(error), _tolerance(z)
        if worst <= tolerance or ready.is_rounding(values, mv, rmv, z, tolerance):
            return ready, values
        sparsity.refute(ready, worst)
    return None


def confirmed_bordered(
    sparsity: Sparsity, function: Callable[[Tensor], Tensor], z: Tensor, mv: MatVec, rmv: MatVec
) -> tuple[Any, Any] | None:
    """Pattern and entries as of :func:`confirmed`, of a matrix that is sparse but for a few numbers that all unknowns share
    (:mod:`implicitkit.sparsity.low_rank`)."""
    ready = sparsity.find_bordered(function, z)
    if ready is None:
        return None
    entries, error = ready.values(mv, rmv, len(z), z)
    if _worst(error) <= _tolerance(z):
        return ready, entries
    sparsity.refute_bordered()
    return None


def _worst(error: Any) -> float:
    """The largest error of all samples; those with NaN, whose matrices are not finite, do not count."""
    return max((e for e in error.tolist() if not math.isnan(e)), default=0.0)


def _tolerance(z: Tensor) -> float:
    """How much a product may differ from that of the entries, relative."""
    return float(torch.finfo(z.dtype).eps) ** 0.25
