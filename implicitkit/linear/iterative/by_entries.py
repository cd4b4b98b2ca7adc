r"""Products by the entries of a sparse matrix, from the moment that pays.

A product with a Jacobian runs through the graph of the function, which takes several times as long as
``sum_j a_ij v_j`` over the entries ``a_ij``.  These are shown by as many products as the pattern has colours
(:mod:`implicitkit.sparsity.compression`): a Krylov method that needs more than that writes the matrix down first, although
its factors may be out of reach.

Then it knows the diagonal, and where that is uneven (a network in which a few nodes have most of the links; a medium whose
conductivity varies) ``A x = b`` is solved as

    (S A S) y = S b,    x = S y,    S = |diag A|^{-1/2}

which is as symmetric as ``A``, and within a factor of the entries in a row the best conditioned of all ``D A D``.

Source: Curtis, Powell & Reid (1974), IMA J. Appl. Math. 13 (entries from products); van der Sluis (1969), Numer. Math. 14,
14-23 (the scaling); when it pays is this library's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import MatVec, Operator

_LOOKS = (8, 16, 32, 64, 128)  # products after which it is asked whether the matrix is to be written down
_NUMBERS = (torch.float32, torch.float64)
_PAYS = 2.0  # products to come, for each that shows entries
_CHEAPER = 2.0  # times: a step of a Krylov method, of which the product is a part
_UNEVEN = 10.0  # times the smallest entry of a diagonal, its largest, from which it is scaled


class ByEntries:
    """The matrix ``A``, and when it is written down: never without a pattern, or on another device.

    Attributes:
        written: are the entries known?
        looks: numbers of products after which it is to be told how many it may :meth:`expect`.
        scale: the diagonal of ``S``, ``(batch, n)``; ``None`` while the matrix is not written down, or is even.
    """

    def __init__(self, A: Operator) -> None:
        self.A = A
        self.written = False
        self.scale: Tensor | None = None
        price = A.price() if A.like.device.type == "cpu" and A.like.dtype in _NUMBERS else None
        self._products = 0 if price is None else price.products
        self.looks = _LOOKS if self._products else ()
        self._mv, self._rmv = A.mv, A.rmv
        self.expect(math.inf if A.formed is not None else 0)

    @property
    def plain(self) -> Operator:
        """``A``, whose products go by entries as soon as these are known."""  # made anew: nothing holds itself alive
        if not self.looks:
            return self.A
        found = self.A.derived(lambda v: self._mv(v), lambda w: self._rmv(w), self.A.dense, symmetric=self.A.symmetric)
        found.selects = self._select
        return found

    @property
    def operator(self) -> Operator:
        """The operator to solve with: :attr:`plain`, or ``S A S`` once there is a scale."""
        return self.plain if self.scale is None else _scaled(self.plain, self.scale)

    def expect(self, products: float) -> None:
        """Told that so many products are to come: write the matrix down if that pays and can be done."""
        if not products > _PAYS * self._products > 0:
            return
        self._products, self._blocks = 0, self.A.sparse()
        if self._blocks is not None:
            self.written = True
            self._mv, self._rmv = self._blocks.products(self.A.like.dtype)
            self.scale = _scale(self._blocks.diagonal.to(self.A.like))

    def affords(self, products: float) -> float:
        """How many products, once they go by entries, cost as much as so many by the graph."""
        if self.written:
            return _CHEAPER * products
        return max(products, _CHEAPER * (products - self._products)) if self._products else products

    def _select(self, samples: Tensor) -> Operator | None:
        return _some(self.A, self._blocks, samples) if self.written else self.A.select(samples)


def _some(A: Operator, blocks: Any, samples: Tensor) -> Operator:
    """The matrices of some samples, by their entries."""
    products: tuple[MatVec, MatVec] = blocks.some(samples).products(A.like.dtype)
    found = A.derived(*products, lambda: A.dense()[samples], symmetric=A.symmetric, batch=len(samples))
    found.selects = lambda index: _some(A, blocks, samples.index_select(0, index))
    return found


def _scale(diagonal: Tensor) -> Tensor | None:
    """``|a_ii|^{-1/2}``, times what leaves the largest entry of each sample as it is; ``None`` where all are even, or one is
    zero, or no number."""
    size = diagonal.abs()
    least, largest = size.aminmax(dim=1, keepdim=True)
    usable = (least > 0) & (largest < torch.inf)
    if not bool(usable.all()) or not bool((largest > _UNEVEN * least).any()):
        return None
    return (largest / size).sqrt()


def _scaled(A: Operator, S: Tensor) -> Operator:
    """``S A S``."""
    found = A.derived(
        lambda v: S * A.mv(S * v),
        lambda w: S * A.rmv(S * w),
        lambda: S.unsqueeze(2) * A.dense() * S.unsqueeze(1),
        symmetric=A.symmetric,
    )
    return found.selected_by(lambda samples, small: _scaled(small, S.index_select(0, samples)), A)
