"""What a training step costs: floating-point operations forward and backward, and what is kept between the two."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from implicitkit_deq import ForgivenWarning


@dataclass(frozen=True)
class Cost:
    """Operations of the forward and of the backward pass, of all that is in them (a solve, its linear algebra); bytes that
    autograd saves between them."""

    forward: int
    backward: int
    saved: int

    @property
    def step(self) -> int:
        """Both passes."""
        return self.forward + self.backward


class _NoModules:
    """In place of torch's tracker of modules, whose hooks refuse ``torch.autograd.grad`` with respect to an input of one."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """Within, the returned function tells how many operations there were: those of products and convolutions, two for a
    multiplication with its addition, as ``torch.utils.flop_counter`` counts them."""
    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    with counter:
        yield counter.get_total_flops


def cost(loss: Callable[[], Tensor], own: Iterable[Tensor] = ()) -> Cost:
    """Of ``loss().backward()``, which is done; ``own`` are tensors that are there anyway, and not counted as saved."""
    kept: dict[int, int] = {}
    there = {t.untyped_storage().data_ptr() for t in own}

    def keep(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    with warnings.catch_warnings(), counted() as operations:
        warnings.simplefilter("ignore", ForgivenWarning)  # a step of a model is priced as it is
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            value = loss()
        forward = operations()
        value.backward()
        return Cost(forward, operations() - forward, sum(kept.values()))
