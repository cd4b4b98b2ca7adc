"""What a set or a term says of itself beside its map: a natural map without cancellation, bounds that it is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

_MAPS = ("__call__", "apply", "project", "shrink")  # what says ``prox``


def natural_of(prox: Any) -> Callable[[Any, Any], Any] | None:
    """``(z, slope) -> z - prox(z - slope, 1)`` as ``prox`` has it; ``None`` where it has none."""
    return prox.natural if _speaks_of_its_map(prox, "natural", "gap") else None


def compares(prox: Any) -> bool:
    """Does ``z - prox(z - slope, 1)`` depend on how long slopes are beside the unknowns, as that of single numbers, and of a
    curved set by its own form, does not?"""
    return natural_of(prox) is None or bool(getattr(prox, "compares", False))


def ends_of(projection: Any) -> Callable[[Tensor], tuple[Any, Any]] | None:
    """``leaf -> (lower, upper)`` of a set that is nothing but bounds; ``None`` where it is another, or does not say."""
    return projection.ends if _speaks_of_its_map(projection, "ends") else None


def _speaks_of_its_map(prox: Any, *forms: str) -> bool:
    """Has ``prox`` one of these methods, and not from a base whose map a subclass has replaced by one of its own?"""
    for cls in type(prox).__mro__:
        if any(name in vars(cls) for name in forms):
            return True
        if any(name in vars(cls) for name in _MAPS):
            return False
    return False
