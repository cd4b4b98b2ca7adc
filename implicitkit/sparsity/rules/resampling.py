"""Interpolation, adaptive averages, and samples of a constant image at places that are unknown.

The first two are constant linear maps, one for each dimension of space, or the transposes of such maps.

The map of a dimension of ``n`` entries, ``(P x)_o = sum_i P_oi x_i`` with ``sum_i P_oi = 1``, sees a window of ``w``
entries at most.  So ``m = 2 w + 1`` vectors show it: that of the residue class ``r`` is one where ``i = r`` modulo ``m``,
and which of these an output has seen is told by ``sum_i P_oi i``, which lies in the window.  That of all dimensions is their
Kronecker product.  (With ``antialias=True`` torch makes something else of arrays that are one entry wide: no rule.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.tracing import Rule, Trace

_RESAMPLED = tuple(
    f"{kind}{suffix}"
    for kind in ("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d")
    for suffix in ("", "_backward")
)
_EXACT = tuple(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3))
_NEAREST = tuple(f"{kind}{d}d_backward" for kind in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3))
_AVERAGED = tuple(f"_adaptive_avg_pool{d}d{suffix}" for d in (2, 3) for suffix in ("", "_backward"))


def resampled(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``resample(x, output_size, ...)``, or with ``_backward`` ``(grad, output_size, input_size, ...)``, ``(grad, x)``."""
    x, name = args[0], tracers.operation(func)[0].split("::")[1]
    count = next(d for d in (1, 2, 3) if f"{d}d" in name)
    turned = name.endswith("_backward")
    forward = getattr(torch.ops.aten, name.removesuffix("_backward")).default
    large, small = (out, x) if turned else (x, out)
    options = args[(3 if "upsample" in name else 2) if turned else 2 :]
    dtype = torch.promote_types(x.dtype, torch.float32)  # places are rounded as the kernel of that type rounds them
    lines = [_line(forward, large.shape[i], small.shape[i], i, count, options, dtype) for i in range(-count, 0)]
    plane = sp.coo_matrix(functools.reduce(lambda a, b: sp.kron(a, b, format="csr"), lines))
    seen, places = (plane.row, plane.col) if turned else (plane.col, plane.row)
    planes = np.arange(math.prod(x.shape[:-count]))[:, None]
    targets = planes * math.prod(out.shape[-count:]) + places
    sources = planes * math.prod(x.shape[-count:]) + seen
    trace.write(out, index_sets.through(targets.reshape(-1), sources.reshape(-1), out.numel(), trace.read(x)))


def _line(
    forward: Any, n: int, outputs: int, axis: int, count: int, options: Sequence[Any], dtype: torch.dtype
) -> sp.csr_matrix:
    """The pattern ``(outputs, n)`` of the map along a dimension; the others have one entry."""

    def along(vectors: Tensor) -> Tensor:
        one = lambda size: [size if i == axis else 1 for i in range(-count, 0)]  # noqa: E731
        found: Tensor = forward(vectors.view(len(vectors), 1, *one(n)), one(outputs), *options)
        return found.view(len(vectors), outputs)

    w = 4 + 2 * math.ceil(n / outputs)  # four entries of bicubic interpolation, or all that one average is of
    m = min(2 * w + 1, n)
    numbers = torch.arange(n, device="cpu")
    classes = (numbers % m == numbers[:m].unsqueeze(1)).to(dtype)
    centre = along(numbers.double().unsqueeze(0))[0].round().long()
    residue, place = along(classes).nonzero(as_tuple=True)
    near = centre[place]
    entry = near + (residue - near + m // 2) % m - m // 2
    entry = torch.where(entry < 0, entry + m, torch.where(entry >= n, entry - m, entry))  # all, where m is n
    return sp.csr_matrix((np.ones(len(place), bool), (place.numpy(), entry.numpy())), shape=(outputs, n))


def sampled(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``grid_sampler(x, grid, ...)``, ``grid`` ``(n, *places, dims)``, and ``(grad, x, grid, ...)`` of its transpose: an
    output depends on its own place, while ``x`` is constant."""
    turned = tracers.operation(func)[0].endswith("_backward")
    grad, (x, grid) = (args[0], args[1:3]) if turned else (None, args[:2])
    written = [t for t in (out if turned else (out,)) if isinstance(t, Tensor)]
    if trace.tracked(x) or len(written) > 1:
        trace.guess(tracers.operation(func)[0], [t for t in (grad, x, grid) if isinstance(t, Tensor)], written)
        return
    dims, batch = grid.shape[-1], len(grid)
    count = grid.numel() // dims
    sets = index_sets.merge(trace.read(grid), np.arange(grid.numel()) // dims, count)
    places = np.arange(count).reshape(batch, 1, -1)
    if grad is None:
        spread = np.broadcast_to(places, (batch, out.shape[1], places.shape[2]))
    else:
        of = np.broadcast_to(places, (batch, grad.shape[1], places.shape[2])).reshape(-1)
        sets = index_sets.union([sets, index_sets.merge(trace.read(grad), of, count)])
        spread = np.repeat(places, dims)
    trace.write(written[0], index_sets.take(sets, spread.reshape(-1)))


_SAMPLED = tuple(f"grid_sampler_{d}d{suffix}" for d in (2, 3) for suffix in ("", "_backward"))
RULES: dict[str, Rule] = {
    **dict.fromkeys((*_RESAMPLED, *_EXACT, *_NEAREST, *_AVERAGED), resampled),
    **dict.fromkeys(_SAMPLED, sampled),
}
