"""Convolutions and pooling: each output sees a window of the input, tap by tap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.tracing import Rule, Trace


def _taps(
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For every tap of the kernel: output places and the input places they see there (flat)."""
    pairs = []
    for tap in itertools.product(*(range(k) for k in kernel)):
        coordinates, valid = [], []
        for o, i, t, s, p, d in zip(outputs, inputs, tap, stride, padding, dilation, strict=True):
            position = np.arange(o) * s - p + t * d
            coordinates.append(position)
            valid.append((position >= 0) & (position < i))
        out_index = np.ix_(*(np.flatnonzero(v) for v in valid))
        in_index = np.ix_(*(c[v] for c, v in zip(coordinates, valid, strict=True)))
        pairs.append(
            (
                np.ravel_multi_index(out_index, tuple(outputs)).reshape(-1),
                np.ravel_multi_index(in_index, tuple(inputs)).reshape(-1),
            )
        )
    return pairs


def _geometry(
    x: Tensor, result: Tensor, weight: Tensor, options: Sequence[Any], transposed: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """:func:`_taps` of a convolution; of a transposed one, those of the convolution it transposes, turned round.
    ``options``: stride, padding, dilation."""
    stride, padding, dilation = (_all_of(option, x.dim() - 2) for option in options)
    small, large = (result.shape[2:], x.shape[2:]) if transposed else (x.shape[2:], result.shape[2:])
    pairs = _taps(small, large, weight.shape[2:], stride, padding, dilation)
    return [(seen, place) for place, seen in pairs] if transposed else pairs


def _all_of(value: Any, count: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


def _links(
    weight: np.ndarray, transposed: bool, groups: int, geometry: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """``(output, input)`` places of one sample that a weight that is not zero connects: channel first."""
    channels_out = weight.shape[1] * groups if transposed else weight.shape[0]
    outs, ins = [], []
    for (places_out, places_in), number in zip(geometry, range(len(geometry)), strict=True):
        first, second = np.nonzero(weight[:, :, number])
        if transposed:  # weight (in, out / groups)
            group = first // (weight.shape[0] // groups)
            channel_in, channel_out = first, second + group * weight.shape[1]
        else:  # weight (out, in / groups)
            group = first // (channels_out // groups)
            channel_out, channel_in = first, second + group * weight.shape[1]
        outs.append(np.stack([np.repeat(channel_out, len(places_out)), np.tile(places_out, len(channel_out))]))
        ins.append(np.stack([np.repeat(channel_in, len(places_in)), np.tile(places_in, len(channel_in))]))
    return np.concatenate(outs, 1), np.concatenate(ins, 1)


def _apply(trace: Trace, x: Tensor, out: Tensor, links: tuple[np.ndarray, np.ndarray]) -> None:
    """Write what ``out`` ``(batch, channels, ...)`` sees of ``x``."""
    outs, ins = links
    space_out, space_in = math.prod(out.shape[2:]), math.prod(x.shape[2:])
    batch = np.arange(x.shape[0])[:, None]
    targets = (batch * out[0].numel() + outs[0] * space_out + outs[1]).reshape(-1)
    sources = (batch * x[0].numel() + ins[0] * space_in + ins[1]).reshape(-1)
    trace.write(out, index_sets.through(targets, sources, out.numel(), trace.read(x)))


def _flat(trace: Trace, weight: Tensor) -> np.ndarray:
    """Where a constant weight is not zero, or may not be: values of unknowns have chosen it."""
    flat: np.ndarray = (weight.detach() != 0).flatten(2).cpu().numpy()
    return flat | trace.chosen(weight)


def _afford(
    trace: Trace, x: Tensor, out: Tensor, weight: np.ndarray, geometry: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Raise :class:`~implicitkit.sparsity.index_sets.TooDense` before links are made that cannot be paid for: each brings a
    member of what it sees, at least."""
    seen = trace.read(x)
    if seen.nnz and int(np.diff(seen.indptr).min()):
        taps = np.count_nonzero(weight, axis=(0, 1))
        links = sum(int(tap) * len(places) for tap, (places, _) in zip(taps, geometry, strict=True))
        index_sets.afford(x.shape[0] * links, out.numel())


def convolution(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)``, weight constant."""
    x, weight, bias = args[:3]
    *options, transposed, _, groups = args[3:9]
    if trace.tracked(weight) or trace.tracked(bias):
        trace.guess("convolution", [t for t in (x, weight, bias) if isinstance(t, Tensor)], [out])
        return
    geometry, flat = _geometry(x, out, weight, options, transposed), _flat(trace, weight)
    _afford(trace, x, out, flat, geometry)
    _apply(trace, x, out, _links(flat, transposed, groups, geometry))


def convolution_backward(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """The gradient with respect to the input is the transposed convolution; that of a constant weight concerns nobody."""
    grad, x, weight, _, *options, transposed, _, groups = args[:10]
    written = [t for t in out if isinstance(t, Tensor)]
    if trace.tracked(weight) or any(t is not out[0] for t in written):
        trace.guess("convolution_backward", [t for t in (grad, x, weight) if isinstance(t, Tensor)], written)
        return
    geometry, flat = _geometry(x, grad, weight, options, transposed), _flat(trace, weight)
    _afford(trace, grad, out[0], flat, geometry)
    outs, ins = _links(flat, transposed, groups, geometry)
    _apply(trace, grad, out[0], (ins, outs))


def pooled(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``avg_pool(x, kernel, stride, padding, ...)`` and ``max_pool(x, kernel, stride, padding, dilation, ...)``, and their
    transposes ``(grad, x, kernel, ...)``."""
    name = tracers.operation(func)[0]
    result = out[0] if isinstance(out, (tuple, list)) else out
    turned = name.endswith("_backward")
    large, small = (result, args[0]) if turned else (args[0], result)
    options = args[2:] if turned else args[1:]
    count = 3 if "3d" in name else 2
    kernel = _all_of(options[0], count)
    stride = _all_of(options[1], count) if len(options) > 1 and options[1] else kernel
    padding = _all_of(options[2], count) if len(options) > 2 else [0] * count
    dilation = _all_of(options[3], count) if "max" in name and len(options) > 3 else [1] * count
    geometry = _taps(large.shape[-count:], small.shape[-count:], kernel, stride, padding, dilation)
    outs, ins = (np.concatenate(parts) for parts in zip(*geometry, strict=True))
    outs, ins = (ins, outs) if turned else (outs, ins)
    planes = np.arange(math.prod(large.shape[:-count]))[:, None]
    targets = (planes * math.prod(result.shape[-count:]) + outs).reshape(-1)
    sources = (planes * math.prod(args[0].shape[-count:]) + ins).reshape(-1)
    trace.write(result, index_sets.through(targets, sources, result.numel(), trace.read(args[0])))


_POOLS = tuple(
    f"{pool}{suffix}"
    for pool in ("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices")
    for suffix in ("", "_backward")
)
RULES: dict[str, Rule] = {
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    **dict.fromkeys(_POOLS, pooled),
}
