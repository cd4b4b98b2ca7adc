"""Operations that a lower floor offers and an upper floor carries out.

``first >> second`` is written on :class:`~implicitkit.FixedPoint`, which knows nothing of compositions; what it does is
said by the room that knows.  ``implicitkit/__init__.py`` says where each operation is defined, and nothing is imported
before it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_places: dict[str, str] = {}


def provide(name: str, place: str) -> None:
    """Say where the operation ``name`` is defined: ``"package.module:function"``."""
    _places[name] = place


def operation(name: str) -> Callable[..., Any]:
    """The function that carries out the operation.

    Raises:
        KeyError: nobody has said where it is.
    """
    module, _, function = _places[name].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found
