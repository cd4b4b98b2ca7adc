"""What a projection is, and helpers of several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.autocast import uncast_call
from implicitkit.foundation.constants import look
from implicitkit.foundation.options import Configured, check_options, optional, tensor


class Projection(Configured):
    """``P(v) = argmin_{x in C} |x - v|^2``; a subclass defines :meth:`project` on one tensor.

    ``separable``: acts on each number alone.  ``by_program``: ``P(v)`` comes from a program or from iterations, which leave
    ``eps max |v|`` in each of its numbers.  Shapes: ``x`` has the shape of ``v``; sets of vectors take the last dimension,
    sets of matrices the last two (``dims``: 1, 2), all others are a batch.  Units: ``x``, ``v``,
    bounds and radii have the same units.

    Source: Parikh & Boyd (2014), "Proximal algorithms", chapter 6, for sets that name no other.
    """

    separable: ClassVar[bool] = False
    by_program: ClassVar[bool] = False
    dims: ClassVar[int] = 1

    def __call__(self, v: Any) -> Any:
        """The projection of a tensor, or of each leaf of a pytree.

        Raises:
            TypeError: a leaf is not a real floating-point tensor. ValueError: it is a number where the set has vectors, or
                it is empty.
        """
        return trees.tree_map(self._leaf, v)

    def _leaf(self, v: Any) -> Tensor:
        found: Tensor = uncast_call(self.project, self, check_point(v, self, f"{type(self).__name__} projects"))
        return found

    def project(self, v: Tensor) -> Tensor:
        """The projection of ``v``."""
        raise NotImplementedError(f"{type(self).__name__} has no project method")


def check_point(v: Any, of: Any, does: str) -> Tensor:
    """``v`` itself, a real tensor of at least ``of.dims`` dimensions with something in them.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(v, Tensor) or not v.is_floating_point():
        raise TypeError(
            f"{does} real floating-point tensors, got {v.dtype if isinstance(v, Tensor) else type(v).__name__}"
        )
    if v.is_nested:
        trees.check_numbers(v, "the point")
    dims = 0 if of.separable else of.dims
    if v.ndim < dims or 0 in v.shape[v.ndim - dims :]:
        what = "vectors (the last dimension)" if dims == 1 else "matrices (the last two dimensions)"
        raise ValueError(f"{does} {what} with something in them, got shape {tuple(v.shape)}")
    return v


def check_tensors(owner: Any, *names: str, absent: bool = False) -> None:
    """Raise ``TypeError`` unless attributes of ``owner`` are real tensors (``absent``: or ``None``)."""
    check_options(owner, **dict.fromkeys(names, optional(tensor()) if absent else tensor()))


def check_values(check: Callable[..., None], *parameters: Tensor) -> None:
    """``check(*parameters)``, which may raise, on plain tensors, whatever transforms surround the call."""
    look(check, *parameters)


def against(parameter: Any, v: Tensor) -> Tensor:
    """A parameter of the batch's shape (or a number), to broadcast against ``v``, which has one dimension more."""
    t = torch.as_tensor(parameter, dtype=v.dtype, device=v.device)
    return t.unsqueeze(-1) if t.ndim else t


def unit(v: Tensor) -> Tensor:
    """The largest modulus in the last dimension, kept, a constant; one where it is zero or infinite: by it a square neither
    overflows nor vanishes (in half precision that of 300 and that of 1e-4 do)."""
    largest = v.detach().abs().amax(-1, keepdim=True) if v.shape[-1] else v.detach().sum(-1, keepdim=True)
    return torch.where((largest > 0) & (largest < torch.inf), largest, 1)


def length(v: Tensor) -> Tensor:
    """``|v|_2`` over the last dimension, kept; its derivative at zero is zero, not NaN."""
    size = unit(v)
    square = (v / size).square().sum(-1, keepdim=True)
    zero = square == 0
    return size * torch.where(zero, 0, torch.sqrt(torch.where(zero, 1, square)))
