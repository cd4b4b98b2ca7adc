"""Activation checkpoints inside a function: what they compute once more sees what the evaluation saw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation import graph
from implicitkit.foundation.faithful import faithful
from implicitkit.lifting.reach import modules_in_use
from implicitkit.lifting.substitution import swapped


@contextlib.contextmanager
def surroundings(lifted: Any, slots: Any, tensors: Sequence[Tensor], captured: Sequence[Tensor]) -> Iterator[None]:
    """The surroundings of an evaluation, or of a part of it that is computed once more: modules hold ``tensors``, operations
    get ``captured`` in the place of what the function captures, and operations of torch that have wrong derivatives are
    replaced."""
    with (
        modules_in_use.lock if lifted.guarded else contextlib.nullcontext(),
        contextlib.nullcontext() if lifted.compiled else faithful(as_torch=lifted.as_torch),
        swapped(slots, tensors, len(lifted.slots), lifted.compiled),
        lifted.substitute(dict(zip(map(id, lifted.captured), captured, strict=True))),
    ):
        yield


class Recomputing(TorchFunctionMode):
    """While it lasts, each region of ``torch.utils.checkpoint`` in which there is an operation is to be computed once more
    inside ``context()``.

    A region is computed again in the backward, when the evaluation has ended: modules hold their own parameters again, some
    of which are tracked where their stand-ins were not.  Then other tensors are saved than the first time, and torch, which
    knows them by their number, takes one for another: an error, or a wrong derivative without a word.  Of
    regions in one another, one without an operation of its own saves nothing that could be taken for another.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = graph.checkpoint_of()
        if frame is not None and not isinstance(frame.recompute_fn, _Again):
            frame.recompute_fn = _Again(frame.recompute_fn, self.context)
        return func(*args, **(kwargs or {}))


class _Again:
    """A region, computed in the context of the evaluation it belongs to."""

    def __init__(self, region: Callable[..., Any], context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.region, self.context = region, context

    def __call__(self, *args: Any) -> Any:
        with self.context():
            return self.region(*args)
