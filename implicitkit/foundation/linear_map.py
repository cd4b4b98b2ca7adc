r"""Products with a matrix, ``v -> A v``, for those who differentiate them.

What an operator multiplies with is the graph of an evaluation that has ended, and its products have none.  Where a vector
is differentiated, by autograd or at a level of the transforms of ``torch.func``, :class:`_Product` gives what the map is,
itself again:

    tangent:    \dot y = A \dot v
    cotangent:  \bar v = A^T \bar y

in every order and mode.  ``A`` itself is constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from implicitkit.foundation import compat, graph

Map: TypeAlias = Callable[[Tensor], Tensor]


def product(forth: Map, back: Map, v: Tensor, plain: bool = False) -> Tensor:
    """``forth(v)``, differentiable with respect to ``v`` if that is differentiated.

    Args:
        forth, back: products with ``A`` and ``A^T`` of plain vectors, or under ``torch.vmap``; ``plain``: of no others than
            plain ones. v: ``(batch, n)``.
    """
    if not compat.tracked(v, batched=plain):
        return forth(v)
    found: Tensor = _Product.apply(forth, back, v)
    return found


class _Product(compat.Function):
    @staticmethod
    def forward(forth: Map, back: Map, v: Tensor) -> Tensor:
        return forth(v.detach())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.forth, ctx.back, _ = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _Product.apply(ctx.back, ctx.forth, g)

    @staticmethod
    def jvp(ctx: Any, _forth: Any, _back: Any, t: Tensor) -> Tensor:
        with compat.forward_ad_enabled(()):  # tangents of an outer level that ``t`` has
            found: Tensor = _Product.apply(ctx.forth, ctx.back, t)
        return found

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], forth: Map, back: Map, v: Tensor) -> tuple[Tensor, int]:
        return _Product.apply(_of_each(forth), _of_each(back), v.movedim(in_dims[2], 0)), 0


def _of_each(one: Map) -> Map:
    return lambda vectors: graph.each(one, vectors)
