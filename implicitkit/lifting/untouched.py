"""Modules that are run before they are lifted keep what they have of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from implicitkit.foundation import compat
from implicitkit.lifting.reach import modules_held, reachable_modules

__all__ = ["buffers_untouched"]


@contextlib.contextmanager
def buffers_untouched(function: Any) -> Iterator[None]:
    """Inside, what the modules within reach of ``function`` write into their buffers (running statistics, counters) is
    taken back at the end, as that of a solve's evaluations is."""
    with modules_held():
        modules = {id(m): m for outer in reachable_modules(function)[0] for m in outer.modules()}.values()
        places = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        before = [(m, name, b, b.detach().clone()) for m, name, b in places if not compat.is_wrapped(b)]
        try:
            yield
        finally:
            for m, name, b, copy in before:
                m._buffers[name] = b
                if not torch.equal(b, copy):
                    with torch.no_grad():
                        b.copy_(copy)
