"""Arguments with other tensors in them: the same tree, filled anew at every evaluation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from implicitkit.foundation.compat import tree_flatten, tree_unflatten

__all__ = ["refilled"]


def refilled(args: tuple[Any, ...]) -> Callable[[Sequence[Tensor]], tuple[Any, ...]]:
    """``tensors -> args``: the same tree with these in the place of its tensors, in their order; containers are made anew.

    Tuples of tensors and of what is no container, as most arguments are, take no walk of the tree.
    """
    leaves, spec = tree_flatten(args)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def anew(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        full = list(leaves)
        for i, t in zip(where, tensors, strict=True):
            full[i] = t
        rebuilt: tuple[Any, ...] = tree_unflatten(full, spec)
        return rebuilt

    places = _places(args, itertools.count())
    return anew if len(where) < len(leaves) or "None" in places else _maker(places)


def _places(part: Any, numbers: Iterator[int]) -> str:
    """``t[k]`` for the ``k``-th tensor, a tuple of these for a tuple, written out; ``None`` for anything else."""
    if isinstance(part, Tensor):
        return f"t[{next(numbers)}]"
    return f"({''.join([_places(inner, numbers) + ',' for inner in part])})" if type(part) is tuple else "None"


@functools.lru_cache(maxsize=256)
def _maker(places: str) -> Callable[[Sequence[Tensor]], tuple[Any, ...]]:
    """The function of ``t`` that is written there: one call, however many tuples it makes."""
    made: Callable[[Sequence[Tensor]], tuple[Any, ...]] = eval(f"lambda t: {places}")
    return made
