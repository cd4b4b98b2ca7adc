"""What a user's own solver says beside the point that it returns, brought up through the levels of ``torch.vmap``.

A solver runs on plain tensors below all transforms, once for each user-level call.  One such call under no ``vmap`` is
passed on as it is.  Of several, every number, array or tensor becomes one tensor that the levels can batch: a function of
the solve's figures, which they have batched already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from implicitkit.foundation.trees import tree_flatten, tree_unflatten


def said_beside(said: Sequence[Any], batched: bool, figures: Tensor | None) -> Any:
    """``info`` for the caller, with derivative zero.

    Args:
        said: one entry a call. batched: are there levels of ``vmap`` between the calls and the caller? figures: of the
            solve, at the caller's level.
    """
    if not batched or figures is None:
        return said[0]
    trees = [tree_flatten(entry) for entry in said]
    spec = trees[0][1]
    if any(other != spec for _, other in trees):
        return list(said)
    token = 0 * figures.sum()
    columns = list(zip(*(leaves for leaves, _ in trees), strict=True))
    return tree_unflatten([_together(list(column), token) for column in columns], spec)


def _together(column: list[Any], token: Tensor) -> Any:
    if not all(isinstance(x, (Tensor, bool, int, float, complex, np.ndarray, np.generic)) for x in column):
        return column
    tensors = [torch.as_tensor(x, device=token.device).detach() for x in column]
    if any(t.shape != tensors[0].shape or t.dtype != tensors[0].dtype for t in tensors):
        return column
    return _Raised.apply(torch.stack(tensors), token)


class _Raised(Function):
    """Plain rows ``(calls, ...)`` at the levels at which ``token``, one number a call, is batched."""

    @staticmethod
    def forward(rows: Tensor, token: Tensor) -> Tensor:
        return rows.reshape(token.shape + rows.shape[1:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], rows: Tensor, token: Tensor) -> Any:
        return _Raised.apply(rows, token.movedim(in_dims[1], 0)), 0
