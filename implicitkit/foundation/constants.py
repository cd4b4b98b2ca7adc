"""What a closed form depends on in steps only: an order, a support, a partition, found on plain tensors.

A projection onto a polyhedron is a smooth formula once one knows which face the point falls on.  The face is found here,
below every transform, where loops and comparisons are free; the formula around it is differentiated by PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from implicitkit.foundation import compat, recording, tracers


def constants(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """``function(*inputs)`` on plain tensors, whatever transforms surround the call; the result has derivative zero.

    Args:
        function: returns a tensor or a tuple of tensors, and treats all dimensions but the last ones that it knows of as
            batch. inputs: tensors of one rank, which broadcast.
    """
    return _Constants.apply(function, *(t.detach() for t in inputs))


def look(check: Callable[..., Any], *inputs: Tensor) -> None:
    """``check(*inputs)``, which may raise, on plain tensors, whatever transforms surround the call (of one rank, then)."""
    if torch.compiler.is_compiling() or any(t.is_meta or tracers.is_fake(t) for t in inputs):
        return
    with recording.unrecorded():
        if any(map(compat.is_wrapped, inputs)):
            constants(lambda *plain: (check(*plain), torch.zeros_like(plain[0]))[1], *inputs)
        else:
            check(*(t.detach() for t in inputs))


class _Constants(Function):
    @staticmethod
    @tracers.opaque_to_compile
    def forward(function: Callable[..., Any], *inputs: Tensor) -> Any:
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.mark_non_differentiable(*(output if isinstance(output, tuple) else (output,)))

    @staticmethod
    @tracers.opaque_to_compile
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Callable[..., Any], *inputs: Tensor) -> Any:
        moved = [
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(inputs, in_dims[1:], strict=True)
        ]
        out = _Constants.apply(function, *moved)
        return out, (0,) * len(out) if isinstance(out, tuple) else 0
