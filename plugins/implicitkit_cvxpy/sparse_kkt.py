r"""The Jacobian of a sparse cone program's optimality conditions, entry by entry.

    J = [[ P, A' ], [ -D A, I - D ]]

``D`` is diagonal on the linear rows.  On a cone of ``s`` rows it is a block, ``(D A)_{ij} = sum over rows k of the cone of
D_ik A_kj``: every entry of ``A`` there makes ``s`` entries of the product, which are added where they share a place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit import extend
from implicitkit_cvxpy.held import Entries

__all__ = ["sparse_operator"]


def sparse_operator(
    P: Tensor, A: Tensor, at: tuple[Entries, Entries], diagonal: Tensor, blocks: list[Any], near: float = 0.0
) -> extend.Operator:
    """``J + near I`` of a batch of programs.

    Args:
        P, A: entries, ``(batch, nnz)``. at: how they are held. diagonal: of ``D`` on the linear rows, ``(batch, linear)``.
        blocks: of ``D`` on the groups of other cones, each ``(batch, number, size, size)``.
    """
    P_at, A_at = at[0].on(P), at[1].on(A)
    m, n = A_at.extent
    batch, linear = diagonal.shape
    row, column = A_at.at_row, A_at.at_column
    every = torch.arange(n, n + m, device=A.device)
    plain = row < linear
    D = diagonal.index_select(1, row[plain])
    pieces: list[tuple[Tensor, Tensor, Tensor]] = [
        (P_at.at_row, P_at.at_column, P),
        (column, n + row, A),
        (n + row[plain], column[plain], -D * A[:, plain]),
        (every[:linear], every[:linear], 1 - diagonal),
        (every[linear:], every[linear:], torch.ones_like(A[:, :1]).expand(batch, m - linear)),
    ]
    for group, block in blocks:
        size = group.size
        first, last = group.start, group.start + group.number * size
        inside = (row >= first) & (row < last)
        cone, place = (row[inside] - first) // size, (row[inside] - first) % size
        local = torch.arange(size, device=A.device)
        # D A: row `place` of the block, which is symmetric, times the entry; and D itself
        times = block[:, cone, place] * A[:, inside].unsqueeze(2)
        rows = n + first + cone.unsqueeze(1) * size + local
        pieces.append((rows.flatten(), column[inside].repeat_interleave(size), -times.flatten(1)))
        start = n + first + size * torch.arange(group.number, device=A.device).view(-1, 1, 1)
        shape = (group.number, size, size)
        own = (start + local.view(1, -1, 1)).expand(shape), (start + local.view(1, 1, -1)).expand(shape)
        pieces.append((own[0].flatten(), own[1].flatten(), -block.flatten(1)))
    if near:
        everywhere = torch.arange(n + m, device=A.device)
        pieces.append((everywhere, everywhere, near * torch.ones_like(A[:, :1]).expand(batch, n + m)))
    rows, columns, values = (torch.cat(parts, -1) for parts in zip(*pieces, strict=True))
    return extend.of_entries(rows, columns, values, torch.cat([A.new_zeros(batch, n), A.new_zeros(batch, m)], 1))
