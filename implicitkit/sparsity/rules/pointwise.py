"""Entry by entry: what an entry of the result depends on stands at the same place in the arguments, after broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from implicitkit.foundation.pytrees import tree_flatten
from implicitkit.sparsity import index_sets
from implicitkit.sparsity.index_sets import IndexSets
from implicitkit.sparsity.tracing import Rule, Trace, names

#: Operations that torch does not tag as pointwise, and are.
_UNTAGGED = names(
    "_to_copy alias lift lift_fresh detach native_dropout complex polar "
    "masked_fill threshold_backward softplus_backward hardtanh_backward elu_backward rrelu_with_noise _prelu_kernel "
    "_prelu_kernel_backward xlogy hardswish_backward hardsigmoid_backward mish_backward "
    "log_sigmoid_forward log_sigmoid_backward where hardswish leaky_relu_backward rrelu_with_noise_backward "
    "mse_loss_backward huber_loss_backward smooth_l1_loss_backward soft_margin_loss_backward binary_cross_entropy_backward"
)
#: Operations whose result depends on no number in their arguments.
NOTHING = names(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like bernoulli new_zeros new_ones new_empty "
    "new_full new_empty_strided zero normal uniform exponential set_ empty_permuted"
)


def broadcast(trace: Trace, t: Tensor, shape: Sequence[int]) -> IndexSets:
    """The sets of ``t.expand(shape)``."""
    sets = trace.read(t)
    if tuple(t.shape) == tuple(shape):
        return sets
    rows = np.broadcast_to(np.arange(t.numel()).reshape(tuple(t.shape)), tuple(shape)).reshape(-1)
    return index_sets.take(sets, rows)


def pointwise(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """Each entry depends on the entries at its place in all arguments, broadcast."""
    tensors = [t for t in tree_flatten((args, kwargs))[0] if trace.tracked(t)]
    outputs = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
    for o in outputs:
        trace.write(o, index_sets.union([broadcast(trace, t, o.shape) for t in tensors]))


def nothing(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """What was there is overwritten by constants."""
    for o in tree_flatten(out)[0]:
        if trace.tracked(o):
            trace.write(o, index_sets.empty(o.numel(), trace.unknowns))


def in_place_view(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``unsqueeze_`` and its like: the numbers stay where they are, and sets are those of places in memory."""


def copied(trace: Trace, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
    """``copy_(self, src)``, ``fill_(self, value)``: only what is written counts."""
    source = args[1]
    sets = (
        broadcast(trace, source, out.shape) if trace.tracked(source) else index_sets.empty(out.numel(), trace.unknowns)
    )
    trace.write(out, sets)


RULES: dict[str, Rule] = {
    "pointwise": pointwise,
    **dict.fromkeys(_UNTAGGED, pointwise),
    **dict.fromkeys(NOTHING, nothing),
    **dict.fromkeys(("squeeze", "unsqueeze", "transpose", "t"), in_place_view),
    "copy": copied,
    "fill": copied,
}
