"""Operators from the entries of their matrices, where these are known: no products, no colouring."""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation.operators import Operator

__all__ = ["of_entries"]


def of_entries(rows: Tensor, columns: Tensor, values: Tensor, like: Tensor) -> Operator:
    """The operator of sparse matrices, one a sample, all of one pattern.

    Args:
        rows, columns: where the entries stand, ``(k,)``; those that share a place are added.
        values: ``(batch, k)``. like: vectors, ``(batch, n)``.
    """
    from implicitkit.linear.sparse_blocks import blocks_of

    batch, size = like.shape
    blocks = blocks_of(rows, columns, values, size)
    return Operator(
        blocks.product,
        blocks.T.product,
        lambda: blocks.product(torch.eye(size, dtype=like.dtype, device=like.device).expand(batch, -1, -1)),
        batch=batch,
        size=size,
        like=like,
        sparse=lambda _: blocks,
    )
