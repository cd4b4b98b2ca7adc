"""What a projection is, and helpers of several."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees

__all__ = ["Projection", "against", "check_positive", "length"]


class Projection:
    """``P(v) = argmin_{x in C} |x - v|^2``; a subclass defines :meth:`project` on one tensor.

    ``separable``: acts on each number alone.  Shapes: ``x`` has the shape of ``v``; sets of vectors take the last dimension,
    sets of matrices the last two, all others are a batch.  Units: ``x``, ``v``, bounds and radii have the same units.

    Source: Parikh & Boyd (2014), "Proximal algorithms", chapter 6, for sets that name no other.
    """

    separable: ClassVar[bool] = False

    def __call__(self, v: Any) -> Any:
        """The projection of a tensor, or of each leaf of a pytree.

        Raises:
            TypeError: a leaf is not a real floating-point tensor.
        """
        return trees.tree_map(self._leaf, v)

    def _leaf(self, v: Any) -> Tensor:
        if not isinstance(v, Tensor) or not v.is_floating_point():
            got = v.dtype if isinstance(v, Tensor) else type(v).__name__
            raise TypeError(f"{type(self).__name__} projects real floating-point tensors, got {got}")
        return self.project(v)

    def project(self, v: Tensor) -> Tensor:
        """The projection of ``v``."""
        raise NotImplementedError(f"{type(self).__name__} has no project method")


def against(parameter: Any, v: Tensor, dims: int = 1) -> Tensor:
    """A parameter of the batch's shape (or a number), to broadcast against ``v`` with ``dims`` further dimensions."""
    t = torch.as_tensor(parameter, dtype=v.dtype, device=v.device)
    return t.reshape(t.shape + (1,) * dims) if t.ndim else t


def length(v: Tensor) -> Tensor:
    """``|v|_2`` over the last dimension, kept; its derivative at zero is zero, not NaN."""
    square = v.square().sum(-1, keepdim=True)
    zero = square == 0
    return torch.where(zero, 0, torch.sqrt(torch.where(zero, 1, square)))


def check_positive(parameter: Any, name: str, owner: Any, *, strict: bool = True) -> None:
    """Raise unless a number is positive (tensors are taken on trust: looking would cost a synchronisation)."""
    if isinstance(parameter, Tensor):
        return
    if not isinstance(parameter, (int, float)) or not (parameter > 0 if strict else parameter >= 0):
        bound = "positive" if strict else "not negative"
        raise ValueError(f"{type(owner).__name__}: {name} must be {bound}, got {parameter!r}")
