"""Which numbers a projection or proximal map treats together."""

from __future__ import annotations

import math
from typing import Any


class ByRow:
    """A map that treats each vector along the last dimension alone."""

    def blocks(self, shape: tuple[int, ...]) -> list[int]:
        """Sizes of consecutive blocks of a tensor of that shape, which the map couples with nothing else."""
        return [shape[-1]] * math.prod(shape[:-1])


def blocks(mapping: Any, shape: tuple[int, ...]) -> list[int] | None:
    """Sizes of consecutive blocks of one sample's tensor that ``mapping`` treats one by one; ``None``: it couples all, or
    does not say.

    Args:
        mapping: a projection or proximal map with a method ``blocks(shape)``, or an attribute ``separable``; anything
            without either (bounds, no map at all) is taken to act on single numbers. shape: without batch dimensions.
    """
    own = getattr(mapping, "blocks", None)
    if own is not None and shape:
        return list(own(shape))
    return [1] * math.prod(shape) if getattr(mapping, "separable", True) else None
