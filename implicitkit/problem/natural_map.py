"""The natural map of a set or a term, where it has one in a form without cancellation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FORMS = ("natural", "gap")  # what says ``z - prox(z - slope, 1)`` ...
_MAPS = ("__call__", "apply", "project")  # ... and what says ``prox``


def natural_of(prox: Any) -> Callable[[Any, Any], Any] | None:
    """``(z, slope) -> z - prox(z - slope, 1)`` as ``prox`` has it; ``None`` where it has none, or where a subclass has a map
    of its own and has left that of its base as it was."""
    for cls in type(prox).__mro__:
        if any(name in vars(cls) for name in _FORMS):
            return prox.natural
        if any(name in vars(cls) for name in _MAPS):
            return None
    return None
