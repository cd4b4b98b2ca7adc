"""Losses, which are taken entry by entry and added up, and gated halves; the derivatives of most are pointwise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from implicitkit.foundation import tracers
from implicitkit.foundation.pytrees import tree_flatten
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.rules.mixing import mix
from implicitkit.sparsity.rules.pointwise import pointwise
from implicitkit.sparsity.tracing import Rule, Trace, names

_LOSSES = names("mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy")


def loss(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``loss(x, target, ..., reduction)``: pointwise, or one number made of all."""
    if out.shape == args[0].shape:
        pointwise(trace, func, args, kwargs, out)
        return
    tracked = [t for t in tree_flatten((args, kwargs))[0] if trace.tracked(t)]
    trace.write(out, index_sets.everything([trace.read(t) for t in tracked], out.numel()))


def nll(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``nll_loss(x, target, weight, ...)``, ``x`` ``(n, classes, ...)``: row by row or one number of all, and the sum of the
    weights."""
    x, weight = args[0], args[2]
    if trace.tracked(weight):
        trace.guess(tracers.operation(func)[0], [x, weight], list(out))
    elif out[0].dim():
        mix(trace, [x], [1], [out[0]])
    else:
        trace.write(out[0], index_sets.everything([trace.read(x)], 1))


def nll_backward(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Linear in ``x``: only what it is multiplied with counts."""
    grad, weight = args[0], args[3]
    if trace.tracked(weight):
        trace.guess(tracers.operation(func)[0], [grad, weight], [out])
        return
    rows = np.arange(grad.numel()).reshape(tuple(grad.shape))
    rows = np.expand_dims(rows, 1) if grad.dim() else rows
    trace.write(out, index_sets.take(trace.read(grad), np.broadcast_to(rows, tuple(out.shape)).reshape(-1)))


def gated(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``glu(x, dim)``, ``a sigmoid(b)`` of the halves of ``x``."""
    _halves(trace, args[0], args[1] if len(args) > 1 else kwargs.get("dim", -1), None, out)


def gated_backward(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``glu_backward(grad, x, dim)``: both halves depend on both, and on ``grad``."""
    _halves(trace, args[1], args[2], args[0], out)


def _halves(trace: Trace, x: Tensor, dim: int, grad: Tensor | None, out: Tensor) -> None:
    rows = np.arange(x.numel()).reshape(tuple(x.shape))
    first, second = np.split(rows, 2, axis=dim)
    sets = [index_sets.take(trace.read(x), half.reshape(-1)) for half in (first, second)]
    both = index_sets.union(sets if grad is None else [*sets, trace.read(grad)])
    if grad is None:
        trace.write(out, both)
        return
    half = np.arange(first.size).reshape(first.shape)
    trace.write(out, index_sets.take(both, np.concatenate([half, half], axis=dim).reshape(-1)))


RULES: dict[str, Rule] = {
    **dict.fromkeys(_LOSSES, loss),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), nll),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), nll_backward),
    "glu": gated,
    "glu_backward": gated_backward,
}
