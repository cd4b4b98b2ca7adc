"""Operators from the entries of their matrices, where these are known: no products, no colouring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator


def of_entries(rows: Tensor, columns: Tensor, values: Tensor, like: Tensor) -> Operator:
    """The operator of sparse matrices, one a sample, all of one pattern.

    Args:
        rows, columns: where the entries stand, ``(k,)``; those that share a place are added.
        values: ``(batch, k)``. like: vectors, ``(batch, n)``.
    """
    batch, size = like.shape
    made: list[Any] = []

    def blocks() -> Any:
        if not made:
            from implicitkit.linear.factors.sparse_blocks import blocks_of

            made.append(blocks_of(rows, columns, values, size))
        return made[0]

    def times(x: Tensor, out: Tensor, into: Tensor) -> Tensor:
        """Where factors are known from elsewhere a few products are all that is asked for: the order of the entries, which
        takes as long as thirty of them, is not looked for."""
        if made:
            found: Tensor = (blocks() if into is rows else blocks().T).product(x)
            return found
        terms = values * x.index_select(1, out)
        return torch.zeros_like(x).index_add(1, into, terms.to(x.dtype))

    return Operator(
        lambda x: times(x, columns, rows),
        lambda x: times(x, rows, columns),
        lambda: blocks().product(torch.eye(size, dtype=like.dtype, device=like.device).expand(batch, -1, -1)),
        batch=batch,
        size=size,
        like=like,
        sparse=lambda _: blocks(),
    )
