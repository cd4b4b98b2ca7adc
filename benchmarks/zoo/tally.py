"""How often a model's cell is applied, and how often it is differentiated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.base import Model

__all__ = ["Tally", "tallied"]


@dataclass
class Tally:
    """``calls`` of ``update``; ``products``: vectors that went back through it."""

    calls: int = 0
    products: int = 0


class _Through(torch.autograd.Function):
    """The identity, which counts what comes back (or goes forth, in forward mode)."""

    @staticmethod
    def forward(tally: Tally, *z: Tensor) -> tuple[Tensor, ...]:
        return tuple(leaf.view_as(leaf) for leaf in z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.tally = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.tally.products += 1
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor) -> tuple[Tensor, ...]:
        ctx.tally.products += 1
        return tuple(tangent.view_as(tangent) for tangent in tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], tally: Tally, *z: Tensor) -> tuple[Any, Any]:
        return _Through.apply(tally, *z), in_dims[1:]


@contextlib.contextmanager
def tallied(model: Model) -> Iterator[Tally]:
    """Count while the context lasts."""
    tally, update = Tally(), model.update

    def counted(z: Any, *injected: Any) -> Any:
        tally.calls += 1
        out = update(z, *injected)
        return _Through.apply(tally, *out) if isinstance(out, tuple) else _Through.apply(tally, out)[0]

    model.update = counted  # type: ignore[method-assign]
    try:
        yield tally
    finally:
        del model.update
