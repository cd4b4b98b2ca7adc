"""Operations that write or add entries at places given by an index, and the backward passes of padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.rules.moves import lines, numbers
from implicitkit.sparsity.rules.pointwise import broadcast
from implicitkit.sparsity.tracing import Rule, Trace

aten = torch.ops.aten


def _land(trace: Trace, target: Tensor, spots: Tensor, source: Any, out: Tensor, keep: bool) -> None:
    """Entries of ``source`` (broadcast to the shape of ``spots``) come to the places ``spots`` (numbered from 1) of
    ``target``; what was there counts on, or not (``keep``)."""
    places = spots.reshape(-1).to(torch.int64).cpu().numpy() - 1
    old = trace.read(target)
    if not keep:
        rows = np.arange(target.numel())
        rows[places] = -1
        old = index_sets.take(old, rows)
    if trace.tracked(source):
        new = index_sets.merge(broadcast(trace, source, spots.shape), places, target.numel())
        old = index_sets.union([old, new])
    trace.write(out, old)


def _land_along(trace: Trace, target: Tensor, dim: int, index: Tensor, source: Any, out: Tensor) -> None:
    """Entries of ``source`` come to places of their line along ``dim`` that values of unknowns have chosen: each place of
    the line may have got any of them."""
    old = trace.read(target)
    if trace.tracked(source):
        given, places = (lines(t, dim, index.shape).long().numpy() - 1 for t in (source, target))
        count = places.size // max(1, places.shape[-1])
        groups = np.full(source.numel(), -1)
        groups[given.reshape(-1)] = np.repeat(np.arange(count), given.shape[-1])
        merged = index_sets.merge(trace.read(source), groups, count)
        spread = np.full(target.numel(), -1)
        spread[places.reshape(-1)] = np.repeat(np.arange(count), places.shape[-1])
        old = index_sets.union([old, index_sets.take(merged, spread)])
    trace.write(out, old)


def _indexed(adds: Callable[[Sequence[Any], dict[str, Any]], bool], spots: Callable[..., Tensor]) -> Rule:
    def rule(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        target, source = args[0], args[3] if len(args) > 3 else kwargs.get("src", kwargs.get("value"))
        scatters = tracers.operation(func)[0].startswith("aten::scatter")
        if trace.chosen(args[2]):
            if scatters:
                _land_along(trace, target, args[1], args[2], source, out)
                return
            trace.guess(tracers.operation(func)[0], [t for t in (target, source) if isinstance(t, Tensor)], [out])
            return
        where = spots(numbers(target).to(target.device), args[1], args[2], source)
        if scatters and isinstance(source, Tensor):  # of which the index may take a corner
            source = source[tuple(map(slice, where.shape))]
        _land(trace, target, where, source, out, adds(args, kwargs))

    return rule


def put(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``index_put(self, indices, values, accumulate)``."""
    target, indices, values = args[:3]
    if any(trace.chosen(i) for i in indices if isinstance(i, Tensor)):
        trace.guess(tracers.operation(func)[0], [target, values], [out])
        return
    spots = aten.index.Tensor(numbers(target).to(target.device), indices)
    _land(trace, target, spots, values, out, bool(args[3] if len(args) > 3 else kwargs.get("accumulate", False)))


def _carry(trace: Trace, source: Tensor, spots: Tensor, out: Tensor) -> None:
    """Entry ``i`` of the source is added to entry ``spots_i`` (counted from 1) of the result, which is zero otherwise."""
    trace.write(out, index_sets.merge(trace.read(source), spots.reshape(-1).long().numpy() - 1, out.numel()))


def padded_back(forward: Any) -> Rule:
    """The backward pass of padding: gradients go back to where the padding was copied from."""

    def rule(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        _carry(trace, args[0], forward(numbers(args[1]), args[2]), out)

    return rule


def folded(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``col2im(x, output_size, kernel, dilation, padding, stride)``: the transposed of ``im2col``."""
    _carry(trace, args[0], aten.im2col.default(numbers(out), *args[2:]), out)


def unfolded_back(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``unfold_backward(grad, input_sizes, dim, size, step)``."""
    _carry(trace, args[0], numbers(out).unfold(*args[2:]), out)


def embedded_back(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``embedding_dense_backward(grad, indices, rows, ...)``."""
    _carry(trace, args[0], numbers(out)[args[1]], out)


def _select(target: Tensor, dim: int, index: Tensor, source: Any) -> Tensor:
    return target.index_select(dim, index)


def _gather(target: Tensor, dim: int, index: Tensor, source: Any) -> Tensor:
    return target.gather(dim, index)


def _always(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return True


def _never(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return False


_PADS = {
    f"{kind}_pad{d}d_backward": padded_back(getattr(aten, f"{kind}_pad{d}d").default)
    for kind in ("reflection", "replication")
    for d in (1, 2, 3)
}
RULES: dict[str, Rule] = {
    "index_add": _indexed(_always, _select),
    "index_reduce": _indexed(_always, _select),
    "index_copy": _indexed(_never, _select),
    "index_fill": _indexed(_never, _select),
    "scatter": _indexed(_never, _gather),
    "scatter_add": _indexed(_always, _gather),
    "scatter_reduce": _indexed(_always, _gather),
    "index_put": put,
    "_index_put_impl": put,
    "_unsafe_index_put": put,
    "col2im": folded,
    "unfold_backward": unfolded_back,
    "embedding_dense_backward": embedded_back,
    **_PADS,
}
