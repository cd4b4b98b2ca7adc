r"""The derivative of a maximum is the maximiser: ``d/d\theta max_y <\theta, y> - \Omega(y) = y*(\theta)`` (Danskin 1967)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from implicitkit.foundation import compat


def envelope(value: Tensor, theta: Tensor, slope: Tensor, dims: int) -> Tensor:
    r"""``value``, with ``slope`` for its derivative by ``theta``; further derivatives are those of ``slope``.

    Args:
        value: ``(*batch,)``, taken as a number. theta, slope: ``(*batch, *event)``. dims: dimensions of an event.
    """
    result: Tensor = _Envelope.apply(value, theta, slope, dims)
    return result


class _Envelope(Function):
    @staticmethod
    def forward(value: Tensor, theta: Tensor, slope: Tensor, dims: int) -> Tensor:
        return value.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        ctx.dims = inputs[3]
        ctx.save_for_backward(inputs[2])
        ctx.save_for_forward(inputs[2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return None, g.reshape(g.shape + (1,) * ctx.dims) * slope, None, None

    @staticmethod
    def jvp(ctx: Any, _value: Any, dtheta: Tensor | None, _slope: Any, _dims: Any) -> Tensor:
        with compat.forward_ad_enabled(ctx.saved_tensors) as (slope,):
            moved = 0 * slope if dtheta is None else slope * dtheta
            return moved.sum(tuple(range(-ctx.dims, 0)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], value: Tensor, theta: Tensor, slope: Tensor, dims: int
    ) -> tuple[Tensor, int]:
        value, theta, slope = (
            t.expand(info.batch_size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip((value, theta, slope), in_dims[:3], strict=True)
        )
        return envelope(value, theta, slope, dims), 0
