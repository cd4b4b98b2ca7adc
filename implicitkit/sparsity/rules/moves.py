"""Operations that only move entries: they are run once more on numbered entries, and the result says where each came from.

Numbers start at 1; 0 stands for constants and padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.foundation.pytrees import tree_flatten, tree_map
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.tracing import Rule, Trace, names

_MOVES = names(
    "cat stack index index_select gather take roll flip constant_pad_nd repeat unfold unfold_copy slice_copy view_copy "
    "select_copy expand_copy permute_copy transpose_copy diagonal_copy as_strided_copy unsqueeze_copy squeeze_copy t_copy "
    "split_copy unbind_copy diag_embed masked_select slice_scatter select_scatter diagonal_scatter reflection_pad1d "
    "reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle "
    "pixel_unshuffle channel_shuffle native_channel_shuffle im2col embedding rot90 repeat_interleave slice_backward "
    "select_backward diagonal_backward upsample_nearest1d upsample_nearest2d upsample_nearest3d _unsafe_index "
    "split_with_sizes_copy narrow_copy "
    "tril triu masked_scatter "
    "masked_scatter_backward block_diag"
)


def numbers(t: Tensor, first: int = 1) -> Tensor:
    """Entries numbered from ``first``, in the shape of ``t``; doubles, which every operation takes."""
    return torch.arange(first, first + t.numel(), dtype=torch.float64, device="cpu").view(t.shape)


def moved(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Run ``func`` on numbers."""
    leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
    if any(trace.chosen(t) for t in leaves if not (t.is_floating_point() or t.is_complex())):
        if tracers.operation(func)[0] in ("aten::gather", "aten::index_select"):
            _chosen_along(trace, args[0], args[1], args[2], out)
            return
        trace.guess(tracers.operation(func)[0], leaves, outputs)  # where they go depends on values
        return
    first, collections, swap = 1, [], {}
    for t in leaves:
        if id(t) in swap:
            continue
        if trace.tracked(t):
            swap[id(t)] = numbers(t, first).to(t.device)
            first += t.numel()
            collections.append(trace.read(t))
        elif t.is_floating_point() or t.is_complex():
            swap[id(t)] = torch.zeros(t.shape, dtype=torch.float64, device=t.device)

    def replaced(x: Any) -> Any:
        return swap.get(id(x), x) if isinstance(x, Tensor) else x

    if tracers.operation(func)[0] == "aten::constant_pad_nd":
        args, kwargs = args[:2], {}  # what it pads with is no number of an entry
    again = func(*tree_map(replaced, tuple(args)), **tree_map(replaced, kwargs))
    sets = collections[0] if len(collections) == 1 else sp.vstack(collections, format="csr")
    for o, m in zip(outputs, [t for t in tree_flatten(again)[0] if isinstance(t, Tensor)], strict=True):
        trace.write(o, index_sets.take(sets, _whole(m)))


def _chosen_along(trace: Trace, source: Tensor, dim: int, index: Tensor, out: Tensor) -> None:
    """Entries of one line along ``dim``, whichever values of unknowns have chosen: each depends on all of its line."""
    spots = lines(source, dim, index.shape if index.dim() == source.dim() else source.shape)
    count, length = spots.shape[:-1].numel(), spots.shape[-1]
    groups = np.full(source.numel(), -1)  # what the corner leaves over is in no line
    groups[_whole(spots)] = np.repeat(np.arange(count), length)
    merged = index_sets.merge(trace.read(source), groups, count)
    where = np.repeat(np.arange(count), out.numel() // max(1, count)).reshape(*spots.shape[:-1], -1)
    trace.write(out, index_sets.take(merged, np.moveaxis(where, -1, dim % max(1, out.dim())).reshape(-1)))


def lines(t: Tensor, dim: int, corner: Sequence[int]) -> Tensor:
    """The entries of ``t``, numbered from 1, with ``dim`` last; of the other dimensions those in a ``corner``."""
    if not t.dim():
        return numbers(t).reshape(1)
    dim %= t.dim()
    kept = tuple(slice(None) if d == dim else slice(0, size) for d, size in enumerate(corner))
    return numbers(t)[kept].movedim(dim, -1)


def _whole(m: Tensor) -> np.ndarray:
    rows: np.ndarray = m.reshape(-1).to(torch.int64).cpu().numpy() - 1
    return rows


RULES: dict[str, Rule] = dict.fromkeys(_MOVES, moved)
