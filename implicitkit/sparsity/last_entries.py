"""Entries that were found last, and what shows that a matrix has them.

That is its product with a random vector, to some units of rounding.  Designs of linear fits, risk models and quadratic terms
are the same from solve to solve: one product in place of all that show the entries.

Source: Freivalds (1979), "Fast probabilistic algorithms": whoever has another matrix has another product, with probability
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.kept import Kept
from implicitkit.foundation.numbers import numbers

_SAME = 4.0  # units of rounding of the moduli, by which a product of the same matrix may differ
_Product = Callable[[Tensor], Tensor]


class Sizes(NamedTuple):
    """The largest entry of each column of every sample's matrix, ``(batch, n)``, and ``|A| v`` of vectors ``(batch, n)``
    that are nowhere negative."""

    columns: np.ndarray
    moved: Callable[[np.ndarray], np.ndarray]


class _Last(NamedTuple):
    """``v`` gives every column of each sample the size one, so that a large one hides no small one."""

    entries: Any
    error: np.ndarray
    v: np.ndarray
    product: np.ndarray
    rounding: np.ndarray
    dtype: torch.dtype


class LastEntries:
    """What is remembered of one pattern."""

    def __init__(self, pattern: object = None) -> None:
        self._kept = Kept()

    @property
    def entries(self) -> Any:
        """What is kept; ``None`` where nothing is."""
        last: _Last | None = self._kept.value
        return None if last is None else last.entries

    def same(self, product: _Product, batch: int, like: Tensor) -> tuple[Any, np.ndarray] | None:
        """The entries and their error, if they are those of the matrices with this product, ``(batch, n) -> (batch, m)``."""
        last: _Last | None = self._kept.value
        if last is None or batch != len(last.v) or like.dtype != last.dtype:
            return None
        now = product_of_one(product, last.v, batch, like)
        with np.errstate(invalid="ignore"):  # of what is infinite
            same = bool((np.abs(now - last.product) <= last.rounding).all())
        self._kept.served(same)
        return (last.entries, last.error) if same else None

    def keep(
        self, entries: Any, error: np.ndarray, product: _Product, like: Tensor, count: int, sizes: Callable[[], Sizes]
    ) -> None:
        """Remember them if the next are to be asked; ``count`` numbers, ``product`` of the matrices that have them.  What is
        not finite is not told from anything."""
        if not self._kept.is_wanted():
            return
        columns, moved = sizes()
        v = seeded.normal(columns.shape[1], seed=0x53).numpy() / np.where(
            (columns > 0) & np.isfinite(columns), columns, 1.0
        )
        rounding = _SAME * torch.finfo(like.dtype).eps * moved(np.abs(v))
        if not np.isfinite(rounding).all():
            return
        last = _Last(entries, error, v, product_of_one(product, v, len(v), like), rounding, like.dtype)
        self._kept.put(last, count + 3 * v.size)


def product_of_one(product: _Product, vectors: np.ndarray, batch: int, like: Tensor) -> np.ndarray:
    """``product`` of ``(batch, n)``, or of ``(n,)`` for each sample: ``(batch, width)``."""
    return numbers(product(torch.from_numpy(vectors).to(like).expand(batch, -1)))
