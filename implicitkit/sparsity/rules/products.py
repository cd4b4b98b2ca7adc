r"""Matrix products: ``C_bik = sum_j A_bij B_bjk`` depends on ``B_bjk`` where the constant ``A_bij`` is not zero.

Where both factors depend on unknowns, or a constant one is full, whole rows and columns count.  Zeros of a constant
factor are structure (a Laplacian written as a dense matrix); every use of a pattern is checked, so that another constant
at another time cannot make it wrong without notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit.sparsity import index_sets
from implicitkit.sparsity.index_sets import IndexSets
from implicitkit.sparsity.rules.pointwise import broadcast
from implicitkit.sparsity.tracing import Rule, Trace


def _nonzeros(trace: Trace, A: Tensor) -> tuple[np.ndarray, ...] | None:
    """``(b, i, j)`` of the entries of a constant ``(batch, m, k)`` that are not zero; ``None`` where all may be other
    numbers: it is no constant, or values of unknowns have chosen it, or none is zero."""
    if trace.chosen(A):
        return None
    if A.layout is not torch.strided:
        index = A.detach().coalesce().indices().cpu().numpy()
        return index[0], index[1], index[2]
    there = A.detach() != 0
    if int(torch.count_nonzero(there)) == A.numel():
        return None
    return np.nonzero(there.cpu().numpy())


def _product(trace: Trace, A: Tensor, B: Tensor) -> list[IndexSets]:
    """The sets of ``A @ B``, ``(batch, m, k) @ (batch, k, q)``, from each factor that depends on unknowns."""
    batch, m, k = A.shape
    q = B.shape[2]
    found = []
    if trace.tracked(B):
        found.append(from_right(trace.read(B), _nonzeros(trace, A), (batch, m, k, q)))
    if trace.tracked(A):  # (A B)^T = B^T A^T
        sets = index_sets.take(trace.read(A), _turned(batch, m, k))
        constant = _nonzeros(trace, B.mT if B.layout is torch.strided else B.transpose(1, 2))
        right = from_right(sets, constant, (batch, q, k, m))
        found.append(index_sets.take(right, _turned(batch, q, m)))
    return found


def _turned(batch: int, rows: int, columns: int) -> np.ndarray:
    """Where the entries of the transposed matrices stand."""
    return np.arange(batch * rows * columns).reshape(batch, rows, columns).transpose(0, 2, 1).reshape(-1)


def from_right(sets: IndexSets, constant: tuple[np.ndarray, ...] | None, sizes: tuple[int, int, int, int]) -> IndexSets:
    """Rows ``(b, i, k)`` of ``A B`` from those of ``B``; ``constant``: where ``A`` is not zero (``None``: anywhere)."""
    batch, m, k, q = sizes
    if constant is None or len(constant[0]) == batch * m * k:  # all of a column of B
        groups = np.arange(batch)[:, None, None] * q + np.arange(q) + np.zeros((1, k, 1), dtype=int)
        columns = index_sets.merge(sets, groups.reshape(-1), batch * q)
        where = np.arange(batch)[:, None, None] * q + np.zeros((1, m, 1), dtype=int) + np.arange(q)
        return index_sets.take(columns, where.reshape(-1))
    b, i, j = constant
    targets = ((b * m + i)[:, None] * q + np.arange(q)).reshape(-1)
    sources = ((b * k + j)[:, None] * q + np.arange(q)).reshape(-1)
    return index_sets.through(targets, sources, batch * m * q, sets)


def _rule(with_bias: bool) -> Rule:
    def rule(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        A, B = args[1:3] if with_bias else args[:2]
        factors = [t if t.layout is torch.strided else t.to_sparse_coo() for t in (A, B)]
        factors[1] = factors[1] if B.dim() > 1 else factors[1].unsqueeze(1)
        blocks = [t if t.dim() == 3 else t.unsqueeze(0) for t in factors]
        found = _product(trace, *blocks)
        if with_bias and trace.tracked(args[0]):
            found.append(broadcast(trace, args[0], out.shape))
        trace.write(out, index_sets.union(found))

    return rule


RULES: dict[str, Rule] = {
    **dict.fromkeys(("mm", "bmm", "mv"), _rule(False)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_sparse_addmm"), _rule(True)),
}
