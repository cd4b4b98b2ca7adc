"""Products of several factors in one operation: bilinear forms, bags of embeddings, attention; and distances of rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.index_sets import IndexSets
from implicitkit.sparsity.rules.products import from_right
from implicitkit.sparsity.tracing import Rule, Trace


def trilinear(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``_trilinear(a, b, c, expand_a, expand_b, expand_c, sums)``: ``a b c``, each with new dimensions, summed."""
    sums = args[6]
    full = list(out.shape)
    for d in sorted(sums):
        full.insert(d, 1)
    found = []
    for t, expand in zip(args[:3], args[3:6], strict=True):
        shape = list(t.shape)
        for d in sorted(expand):
            shape.insert(d, 1)
        kept = [1 if d in sums else size for d, size in enumerate(shape)]
        ids = np.arange(math.prod(kept)).reshape(kept)
        merged = index_sets.merge(trace.read(t), np.broadcast_to(ids, shape).reshape(-1), ids.size)
        found.append(index_sets.take(merged, np.broadcast_to(ids, full).reshape(-1)))
    trace.write(out, index_sets.union(found))


def bags(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``_embedding_bag(weight, indices, offsets, scale, mode, sparse, per_sample, last_offset, padding)``: column by column
    the rows of a bag, each times a number of its own."""
    weight, indices, offsets, per_sample = *args[:3], args[6] if len(args) > 6 else None
    if trace.chosen(indices) or trace.chosen(offsets):
        floating = [t for t in (weight, per_sample) if isinstance(t, Tensor)]
        trace.guess(tracers.operation(func)[0], floating, out[:1])
        return
    rows, (count, width) = indices.cpu().numpy(), out[0].shape
    taken = np.flatnonzero(rows != (args[8] if len(args) > 8 else -1))
    bag = np.searchsorted(offsets.cpu().numpy()[:count], taken, side="right") - 1
    place = lambda row: (row[:, None] * width + np.arange(width)).reshape(-1)  # noqa: E731
    found = [index_sets.through(place(bag), place(rows[taken]), count * width, trace.read(weight))]
    if per_sample is not None and trace.tracked(per_sample):
        found.append(index_sets.through(place(bag), np.repeat(taken, width), count * width, trace.read(per_sample)))
    trace.write(out[0], index_sets.union(found))


def attention(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``softmax(Q K' + mask) V`` and the logarithms of the sums: of a row of ``Q``, the rows of ``K`` that it may see, and
    the entries of ``V`` there."""
    q, k, v = args[:3]
    mask, causal = kwargs.get("attn_mask"), args[4] if len(args) > 4 else False
    shape = (*q.shape[:-1], k.shape[-2])
    batch, m, n = math.prod(shape[:-2]), *shape[-2:]
    sees = None
    if causal or not (mask is None or trace.chosen(mask)):
        allowed = q.new_ones(m, n).tril() != 0 if mask is None else mask != -torch.inf
        sees = np.nonzero(allowed.expand(shape).reshape(batch, m, n).cpu().numpy())
    heads = np.arange(k.shape[:-2].numel()).reshape(-1, k.shape[1]).repeat(q.shape[1] // k.shape[1], 1).reshape(-1, 1)
    rows = (heads * n + np.arange(n)).reshape(-1)  # of K and V, a head of which serves several of Q
    scores = [_rows(trace, q), from_right(index_sets.take(_rows(trace, k), rows), sees, (batch, m, n, 1))]
    if mask is not None and trace.tracked(mask):
        scores.append(_rows(trace, mask.expand(shape)))
    sums = index_sets.union(scores)
    width = v.shape[-1]
    entries = (rows[:, None] * width + np.arange(width)).reshape(-1)
    values = from_right(index_sets.take(trace.read(v), entries), sees, (batch, m, n, width))
    trace.write(out[0], index_sets.union([index_sets.take(sums, np.repeat(np.arange(batch * m), width)), values]))
    trace.write(out[1], sums)


def _rows(trace: Trace, t: Tensor) -> IndexSets:
    """For each row of ``t`` all that its entries depend on."""
    count, width = t.shape[:-1].numel(), t.shape[-1]
    return index_sets.merge(trace.read(t), np.repeat(np.arange(count), width), count)


def pairs(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``_pdist_forward(x, p)``: of each pair of rows the two."""
    rows = _rows(trace, args[0])
    trace.write(out, index_sets.union([index_sets.take(rows, i) for i in np.triu_indices(len(args[0]), 1)]))


def distances(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``_cdist_forward(A, B, p, mode)`` of ``(*batch, m, k)`` and ``(*batch, q, k)``, batches broadcast: a row of each."""
    found = []
    for t, across in ((args[0], -1), (args[1], -2)):
        rows = np.expand_dims(np.arange(t.shape[:-1].numel()).reshape(t.shape[:-1]), across)
        found.append(index_sets.take(_rows(trace, t), np.broadcast_to(rows, out.shape).reshape(-1)))
    trace.write(out, index_sets.union(found))


RULES: dict[str, Rule] = {
    "_trilinear": trilinear,
    "_embedding_bag": bags,
    "_embedding_bag_forward_only": bags,
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_pdist_forward": pairs,
    "_cdist_forward": distances,
    "_euclidean_dist": distances,
}
