"""Operations that mix some dimensions and leave the others alone: reductions, normalisations, sorting, transforms.

An entry of the result depends on all entries of the arguments that agree with it in the dimensions left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.foundation.pytrees import tree_flatten
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.tracing import Rule, Trace, names

Dims = Callable[[Sequence[Any], dict[str, Any]], Any]


def mix(
    trace: Trace, tensors: Sequence[Tensor], dims: Sequence[int], outputs: Sequence[Tensor], scalar: bool = False
) -> None:
    """Note outputs that mix the dimensions ``dims`` of ``tensors``, which share a shape: outputs keep it outside ``dims``,
    and have any size or no dimension there.

    ``scalar``: an entry depends on those at its own place, and on one number made of all (softmax).
    """
    shape = tuple(tensors[0].shape)
    mixed = {d % max(1, len(shape)) for d in dims}
    kept = tuple(1 if d in mixed else s for d, s in enumerate(shape))
    count = math.prod(kept)
    ids = np.arange(count).reshape(kept)
    groups = np.broadcast_to(ids, shape).reshape(-1)
    own = index_sets.union([trace.read(t) for t in tensors])
    merged = index_sets.merge(own, groups, count)
    for out in outputs:
        if out.numel() == count:
            trace.write(out, merged)
        elif out.dim() == len(shape):
            where = np.broadcast_to(ids, tuple(out.shape)).reshape(-1)
            short = trace.name(merged) if scalar and tuple(out.shape) == shape else merged
            spread = index_sets.take(short, where)
            trace.write(out, spread if short is merged else index_sets.union([own, spread]))
        else:
            trace.guess("mixing", tensors, [out])


def along(dims: Dims, count: int | None = None) -> Rule:
    """The rule of an operation that mixes the dimensions that ``dims(args, kwargs)`` names (``None``, ``()``: all)."""

    def rule(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        first = next(t for t in tree_flatten(args)[0] if isinstance(t, Tensor))
        tensors = [t for t in tree_flatten((args, kwargs))[0] if trace.tracked(t) and not _same(t, out)]
        outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.is_floating_point() | t.is_complex()]
        named = dims(args, kwargs)
        if named is None or (isinstance(named, (list, tuple)) and not named):
            named = range(first.dim())
        if any(t.shape != first.shape for t in tensors):
            trace.guess(tracers.operation(func)[0], tensors, outputs)
            return
        scalar = tracers.operation(func)[0].split("::")[1] in _NORMALISED
        mix(trace, tensors, [named] if isinstance(named, int) else list(named), outputs, scalar)

    return rule


def _same(t: Tensor, out: Any) -> bool:
    return t is out


def _dim(place: int, default: Any = None) -> Dims:
    """The argument ``dim``, by its name or at its place."""
    return lambda args, kwargs: kwargs.get("dim", args[place] if len(args) > place else default)


def _layer(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``layer_norm(x, normalized_shape, ...)``: the last dimensions."""
    return [-1 - i for i in range(len(args[1]))]


def layer_backward(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``native_layer_norm_backward(grad, x, normalized_shape, mean, rstd, weight, ...)``, weights constant."""
    grad, x, shape = args[:3]
    if trace.tracked(args[5]) or any(isinstance(t, Tensor) for t in out[1:]):
        written = [t for t in out if isinstance(t, Tensor)]
        trace.guess("native_layer_norm_backward", [t for t in args if isinstance(t, Tensor)], written)
        return
    mix(trace, [grad, x], range(-len(shape), 0), [out[0]])


def of_channels(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``native_batch_norm(x, weight, bias, mean, var, training, ...)``: entry by entry with statistics that are given; with
    its own, a channel as a whole."""
    x, training = args[0], args[5]
    if any(trace.tracked(t) for t in args[1:5]) or (training and args[3] is not None):
        trace.guess("native_batch_norm", [t for t in args if isinstance(t, Tensor)], out)
    elif training:
        mix(trace, [x], [d for d in range(x.dim()) if d != 1], out)
    else:
        trace.write(out[0], trace.read(x))


def of_channels_backward(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``native_batch_norm_backward(grad, x, weight, mean, var, own mean, own rstd, training, ...)``, weights constant."""
    (grad, x), written = args[:2], [t for t in out if isinstance(t, Tensor)]
    if any(trace.tracked(t) for t in args[2:5]):
        trace.guess("native_batch_norm_backward", [t for t in args if isinstance(t, Tensor)], written)
        return
    mix(trace, [grad, x], [d for d in range(x.dim()) if d != 1], written)
    if not args[7] and out[0] is not None:
        trace.write(out[0], trace.read(grad))


def of_groups(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``native_group_norm(x, weight, bias, N, C, size, groups, eps)`` and ``native_group_norm_backward(grad, x, mean, rstd,
    weight, N, C, size, groups, mask)``, weights constant: a group as a whole."""
    back = tracers.operation(func)[0].endswith("backward")
    samples, channels, size, groups = args[5:9] if back else args[3:7]
    tensors, written = args[: 2 if back else 1], [t for t in out if isinstance(t, Tensor)]
    if any(trace.tracked(t) for t in (args[4:5] if back else args[1:3])) or (back and len(written) > 1):
        trace.guess("native_group_norm", [t for t in args if isinstance(t, Tensor)], written)
        return
    count = samples * groups
    where = np.repeat(np.arange(count), channels // groups * size)
    merged = index_sets.merge(index_sets.union([trace.read(t) for t in tensors]), where, count)
    for o in written:
        trace.write(o, merged if o.numel() == count else index_sets.take(merged, where))


def _none(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return None


def matrices(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Dense linear algebra: the last two dimensions are mixed, those before them are a batch."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if trace.tracked(t)]
    outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.is_floating_point() | t.is_complex()]
    lead = tuple(tensors[0].shape[:-2])
    if not lead or any(tuple(t.shape[: len(lead)]) != lead for t in (*tensors, *outputs)):
        trace.guess(tracers.operation(func)[0], tensors, outputs)
        return
    count = math.prod(lead)
    merged = index_sets.union(
        [
            index_sets.merge(trace.read(t), np.repeat(np.arange(count), max(1, t.numel() // max(1, count))), count)
            for t in tensors
        ]
    )
    for o in outputs:
        trace.write(o, index_sets.take(merged, np.repeat(np.arange(count), o.numel() // max(1, count))))


_SECOND = names(
    "sum mean amax amin prod logsumexp nansum var std var_mean std_mean cumsum cumprod logcumsumexp _softmax "
    "_log_softmax max min mode aminmax cummax cummin _fft_c2c _fft_r2c _fft_c2r argmax _safe_softmax"
)
_NORMALISED = names("_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data")
_THIRD = names("norm linalg_vector_norm _softmax_backward_data _log_softmax_backward_data topk kthvalue")
_MATRICES = names(
    "linalg_inv_ex linalg_cholesky_ex cholesky linalg_qr _linalg_eigh _linalg_svd linalg_lu_factor_ex "
    "_linalg_solve_ex linalg_solve_triangular triangular_solve cholesky_solve linalg_lu_solve _linalg_det "
    "_linalg_slogdet linalg_matrix_exp linalg_lu linalg_ldl_factor_ex cholesky_inverse"
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(_SECOND, along(_dim(1))),
    **{name: along(_dim(2)) for name in _THIRD},
    "sort": along(lambda a, k: k.get("dim", next((x for x in a[1:] if type(x) is int), -1))),
    "topk": along(_dim(2, default=-1)),
    "kthvalue": along(_dim(2, default=-1)),
    "median": along(_dim(1)),
    "nanmedian": along(_dim(1)),
    "renorm": along(lambda a, k: [d for d in range(a[0].dim()) if d != a[2] % a[0].dim()]),
    "linalg_cross": along(lambda a, k: k.get("dim", -1)),
    "native_layer_norm": along(_layer),
    "native_layer_norm_backward": layer_backward,
    "native_batch_norm": of_channels,
    "native_batch_norm_backward": of_channels_backward,
    "native_group_norm": of_groups,
    "native_group_norm_backward": of_groups,
    **dict.fromkeys(("dot", "vdot", "trace", "dist"), along(_none)),
    **dict.fromkeys(_MATRICES, matrices),
}
