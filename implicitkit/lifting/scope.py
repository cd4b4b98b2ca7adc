"""What the variables of a function's enclosing scope were at some time."""

from __future__ import annotations

import types
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn


class Scope:
    """What the variables of a function's enclosing scope, and named tensors, were at some time: to say what has changed.

    Tensors are known by identity and version, not held.
    """

    __slots__ = ("_cells", "_tensors")

    def __init__(self, function: Any, tensors: Sequence[tuple[Tensor, str]]) -> None:
        self._tensors = [(weakref.ref(t), version(t), name) for t, name in tensors]
        if not isinstance(function, nn.Module):  # has neither, and takes long to say so
            function = getattr(function, "__func__", function)
        cells = () if isinstance(function, nn.Module) else getattr(function, "__closure__", None) or ()
        names = function.__code__.co_freevars if cells else ()
        self._cells = [(name, cell, _state(cell)) for name, cell in zip(names, cells, strict=True)]

    def changes(self) -> list[str]:
        """In words: which variable was rebound, which tensor was written to, or is tracked now."""
        said = []
        for name, cell, before in self._cells:
            after = _state(cell)
            if after[0] != before[0]:
                values = f" ({before[2]} then, {after[2]} now)" if before[2] and after[2] else ""
                said.append(f"the variable {name!r} was bound to another value{values}")
            elif after[1] != before[1]:
                said.append(f"the tensor {name!r} was written to")
            elif after[3] and not before[3]:
                said.append(f"the tensor {name!r} requires grad now")
        for ref, before_version, name in self._tensors:
            t = ref()
            if t is not None and version(t) != before_version:
                said.append(f"the buffer {name!r} was written to")
        return said


def _state(cell: types.CellType) -> tuple[Any, int, str, bool]:
    """What identifies the contents of a cell: a plain value or an object's id, a tensor's version, how to show it, and
    whether it is a tensor that requires grad."""
    try:
        x = cell.cell_contents
    except ValueError:  # not filled
        return None, 0, "unbound", False
    if x is None or isinstance(x, (bool, int, float, complex, str)):
        shown = repr(x)
        return x, 0, shown if len(shown) < 40 else "", False
    return (id(x), version(x), "", x.requires_grad) if isinstance(x, Tensor) else (id(x), 0, "", False)


def version(t: Tensor) -> int:
    """How often a tensor has been written to."""
    return 0 if t.is_inference() else t._version
