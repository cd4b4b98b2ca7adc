"""Arguments with other tensors in them: the same tree, filled anew at every evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from implicitkit.foundation.pytrees import tree_flatten, tree_unflatten


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

    places = _places(args, iter(range(len(where))))
    plain = len(where) == len(leaves) and not _holds_none(places)
    return functools.partial(_filled, places) if plain else anew


def _places(part: Any, numbers: Iterator[int]) -> Any:
    """A number for a tensor, a tuple of places for a tuple; ``None`` for anything else."""
    if isinstance(part, Tensor):
        return next(numbers)
    return tuple([_places(inner, numbers) for inner in part]) if type(part) is tuple else None


def _filled(places: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([tensors[place] if type(place) is int else place and _filled(place, tensors) for place in places])


def _holds_none(places: Any) -> bool:
    return places is None or (type(places) is tuple and any(map(_holds_none, places)))
