"""Numbers found by a loop on plain tensors, below every transform.

A projection that is the root of an equation is found here by iteration, as a constant, and given its derivatives
afterwards by a few steps of the chord method with a frozen Jacobian ``J``: ``u <- u - J^{-1} F(u, v)``.  Each step makes
one more derivative of ``u(v)`` exact (the error ``e_k`` obeys ``e_{k+1} = O(|v - v_0| e_k)``), so that :data:`ORDER` steps
give every derivative up to that order, in every mode, out of elementary operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["ORDER", "numeric"]

ORDER = 3
"""Derivatives of projections that are exact."""


class _Numeric(torch.autograd.Function):
    @staticmethod
    def forward(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        raise RuntimeError("a numeric constant has no derivative")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], function: Callable[..., Tensor], *inputs: Tensor) -> Any:
        moved = [
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(inputs, in_dims[1:], strict=True)
        ]
        return _Numeric.apply(function, *moved), 0


def numeric(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``function(*inputs)`` without derivative, on plain tensors whatever transforms surround the call.

    ``function`` must treat all dimensions but the trailing ones it knows of as batch.
    """
    return _Numeric.apply(function, *(t.detach() for t in inputs))
