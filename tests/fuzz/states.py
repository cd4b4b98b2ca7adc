"""Structures in which an unknown vector may stand: what a user's state looks like.

A structure is a pair ``(split, join)`` with ``join(split(z)) == z``; ``z`` has its entries in the last dimension, all
before it are a batch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["STATES", "in_structure"]

Function = Callable[..., Any]


class Pair(NamedTuple):
    rest: Any
    first: Any


def _rows(z: Tensor) -> dict[str, Tensor]:
    """One leaf with two dimensions of its own, one without any number."""
    return {"rows": z.unsqueeze(-2), "none": z[..., :0]}


STATES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "": (lambda z: z, lambda s: s),
    "tuple": (lambda z: (z[..., :1], z[..., 1:]), lambda s: torch.cat(s, -1)),
    "dict": (lambda z: {"b": z[..., 1:], "a": z[..., :1]}, lambda s: torch.cat([s["a"], s["b"]], -1)),
    "ordered": (
        lambda z: OrderedDict([("b", z[..., 1:]), ("a", z[..., :1])]),
        lambda s: torch.cat([s["a"], s["b"]], -1),
    ),
    "named": (
        lambda z: Pair([z[..., 1:]], {"v": z[..., 0]}),
        lambda s: torch.cat([s.first["v"][..., None], s.rest[0]], -1),
    ),
    "numbers": (lambda z: list(z.unbind(-1)), lambda s: torch.stack(s, -1)),
    "rows": (_rows, lambda s: torch.cat([s["rows"].squeeze(-2), s["none"]], -1)),
}


def in_structure(function: Function, name: str, returns_state: bool) -> Function:
    """The function of a vector, as one of the structure ``name``; of the structure ``""`` it is itself."""
    if not name:
        return function
    split, join = STATES[name]
    if returns_state:
        return lambda state, *args: split(function(join(state), *args))
    return lambda state, *args: function(join(state), *args)
