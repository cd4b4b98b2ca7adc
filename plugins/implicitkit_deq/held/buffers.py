"""Buffers that a cell writes to in passing: moving averages, codebooks, ranges of a quantiser, counters.

Every evaluation reads what they were when the call began, on copies, so that the map is one and the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.compat import is_plain, unseen, version

Where = tuple[nn.Module, str, Tensor]


class Buffers:
    """The buffers below some modules; which of them move, the first evaluation tells (:meth:`watched`).

    Attributes:
        moving: those of modules that have written to one of theirs in an evaluation, with what they held before (others may
            have been written to without a trace: fused normalisations do not count it, and of zeros the mean is zero).
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.all: list[Where] = [
            (m, name, t) for m in modules for name, t in m._buffers.items() if t is not None and is_plain(t)
        ]
        self.moving: list[Where] = []
        self._compiled = bool(self.all) and ik.extend.holds_compiled(modules)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, all are copies, and what is written to them is noted and forgotten."""
        if not self.all:
            yield
            return
        copies = self._copies(self.all)
        with ik.extend.replaced(copies, self._compiled):
            yield
            now = [m._buffers[name] for m, name, _ in self.all]
        seen = zip(self.all, now, (copy for *_, copy in copies), strict=True)
        writing = {id(m) for (m, _, t), *after in seen if _moved(t, *after)}
        self.moving = [(m, name, t.clone()) for m, name, t in self.all if id(m) in writing]

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Inside, those that move are copies of what they held before."""
        return (
            ik.extend.replaced(self._copies(self.moving), self._compiled) if self.moving else contextlib.nullcontext()
        )

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Copies inside, but what comes to hold a tensor with a derivative has it afterwards: it is there to be read."""
        with self.held():
            yield
            now = [(m, name, m._buffers[name]) for m, name, _ in self.moving]
        for m, name, t in now:
            if t is not None and t.requires_grad:
                m._buffers[name] = t

    @staticmethod
    def _copies(of: Sequence[Where]) -> list[tuple[nn.Module, str, str, Any]]:
        made: dict[int, Tensor] = {}  # a buffer that two modules share is one
        return [(m, "_buffers", name, made.setdefault(id(t), t.clone())) for m, name, t in of]


def _moved(before: Tensor, after: Any, copy: Tensor) -> bool:
    """Was its ``copy`` written to, or another one of its shape put in the place?  (One of another shape is a cache.)

    Asked by values too: fused normalisations do not count what they write, nor does torch what is written in inference mode.
    """
    if not isinstance(after, Tensor) or after.shape != before.shape or after.dtype != before.dtype:
        return False
    written = after is not copy or (not copy.is_inference() and version(copy) > 0)
    with unseen():  # it is no work of the cell's, as which it may be counted
        return written or not torch.equal(before, after)
