"""The state before the first step: shapes, dtypes, and where its values come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik

__all__ = ["Last", "Learned", "alike", "check_shapes", "zeros"]


def is_shape(x: Any) -> bool:
    """Is this the shape of one tensor, rather than a pytree of shapes?"""
    return isinstance(x, (tuple, list)) and all(isinstance(n, int) and not isinstance(n, bool) for n in x)


def over_shapes(function: Callable[[tuple[int, ...]], Any], shapes: Any) -> Any:
    """``function`` of every shape in a pytree of shapes."""
    return ik.trees.tree_map(function, shapes, is_leaf=is_shape)


def check_shapes(shapes: Any) -> None:
    """Raise unless ``shapes`` is a pytree of shapes of one sample.

    Raises:
        TypeError: a leaf is no shape. ValueError: a size less than 1, or no leaf.
    """

    def check(shape: Any) -> None:
        if not is_shape(shape):
            hint = f"; write ({shape},)" if isinstance(shape, int) and not isinstance(shape, bool) else ""
            raise TypeError(
                f"state must be the shape of one sample, as in state=(64,), or a tuple, list or dict of shapes; found "
                f"{shape!r}{hint}"
            )
        if math.prod(shape) < 1:
            raise ValueError(f"state has an empty shape {tuple(shape)}: every size must be at least 1")

    if isinstance(shapes, dict) and not shapes:
        raise ValueError("state has no leaf: there is nothing to solve for")
    over_shapes(check, shapes)


def zeros(shapes: Any, batch: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Zeros: every leaf ``(batch, *shape)``."""
    return over_shapes(lambda shape: torch.zeros(batch, *shape, dtype=dtype, device=device), shapes)


class Learned(nn.Module):
    """One start for all samples, a parameter per leaf.

    The equilibrium does not depend on where the solve starts, so its derivative with respect to these parameters is zero:
    they learn by :meth:`DEQ.start_loss`, or while the layer is unrolled.
    """

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        leaves, _ = ik.trees.tree_flatten(over_shapes(lambda shape: nn.Parameter(torch.zeros(*shape)), shapes))
        self.values = nn.ParameterList(leaves)

    def forward(self, template: Any) -> Any:
        """A state like ``template``."""
        leaves, spec = ik.trees.tree_flatten(template)
        mine = [p.to(t.dtype).expand_as(t) for p, t in zip(self.values, leaves, strict=True)]
        return ik.trees.tree_unflatten(mine, spec)


class Last:
    """The last equilibrium, sample by sample: for frames of a video, iterations of an outer loop, epochs over a full batch.

    Where there is none of the right shape (the first call, another batch size), or where a sample of it is not finite,
    the start is zero.  Equilibria found under ``torch.vmap`` are not kept: they end with it.
    """

    def __init__(self) -> None:
        self.state: Any = None

    def keep(self, state: Any) -> None:
        """Start from this state the next time."""
        try:
            for leaf in ik.trees.tree_flatten(state)[0]:
                leaf.flatten()[:1].tolist()
        except RuntimeError:  # vmap shows no values
            return
        self.state = state

    def __call__(self, template: Any) -> Any:
        """A state like ``template``."""
        if self.state is None or not alike(self.state, template):
            return template

        def usable(kept: Tensor, zero: Tensor) -> Tensor:
            finite = torch.isfinite(kept).flatten(1).all(1) if kept.ndim > 1 else torch.isfinite(kept)
            return torch.where(finite.view(-1, *[1] * (kept.ndim - 1)), kept, zero)

        return ik.trees.tree_map(usable, self.state, template)


def alike(a: Any, b: Any) -> bool:
    """Are two states of the same structure, shapes, dtypes and device?"""
    (mine, spec), (theirs, other) = ik.trees.tree_flatten(a), ik.trees.tree_flatten(b)
    return spec == other and all(
        s.shape == t.shape and s.dtype == t.dtype and s.device == t.device for s, t in zip(mine, theirs, strict=True)
    )
