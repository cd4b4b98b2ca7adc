r"""What is asked of every entry of a large matrix, part by part: each part stays in a cache from one operation to the next.

``|A| |x|``, or the largest entry of each row, takes a matrix of sizes on the way.  Of a large one that goes through memory
several times, which the system must hand out anew (its pages are written with zeros first): of a thousand unknowns this
takes as long as the arithmetic of a tenth of an LU.
"""

from __future__ import annotations

import torch
from torch import Tensor

_NUMBERS = 1 << 17  # of a part: a megabyte of float64


def rows(A: Tensor) -> tuple[Tensor, ...]:
    """``A`` ``(batch, m, n)`` in parts ``(batch, k, n)``, one after another; a small one, or one on what has no such caches,
    in one."""
    if A.numel() <= 2 * _NUMBERS or A.device.type != "cpu":
        return (A,)
    return A.split(max(1, _NUMBERS * A.shape[1] // A.numel()), 1)


def absolute_product(A: Tensor, x: Tensor) -> Tensor:
    """``|A| |x|``, block by block: ``(batch, m, n), (batch, n, k) -> (batch, m, k)``."""
    size = x.abs()
    if A.stride(1) >= A.stride(2):
        products = [torch.bmm(part.abs(), size) for part in rows(A)]
        return products[0] if len(products) == 1 else torch.cat(products, 1)
    parts = rows(A.mT)  # the transposed of what lies in rows
    pieces = size.split(parts[0].shape[1], 1)
    total = torch.bmm(parts[0].abs().mT, pieces[0])
    for part, piece in zip(parts[1:], pieces[1:], strict=True):
        total += torch.bmm(part.abs().mT, piece)
    return total


def largest(A: Tensor, dim: int = -1, keepdim: bool = False) -> Tensor:
    """``max |A_ij|`` along a dimension, by its greatest and its least entry: nothing of the size of ``A`` is written (the
    maximum norm takes ten times as long along rows, the sizes of all entries three times)."""
    return torch.maximum(A.amax(dim, keepdim), -A.amin(dim, keepdim))


def sizes(A: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of each row, ``(batch, m, 1)``, and then, of rows divided by that, of each column, ``(batch, 1,
    n)``; 1 for zero."""
    largest_of_rows = largest(A, 2, True)
    largest_of_rows = torch.where(largest_of_rows > 0, largest_of_rows, 1)
    columns, before = A.new_zeros(A.shape[0], 1, A.shape[2]), 0
    for part in rows(A):
        some = largest_of_rows[:, before : (before := before + part.shape[1])]
        columns = torch.maximum(columns, largest(part / some, 1, True))
    return largest_of_rows, torch.where(columns > 0, columns, 1)
