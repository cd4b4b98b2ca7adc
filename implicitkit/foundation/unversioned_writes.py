"""Was a tensor written into where torch does not count it: through ``z.data``, or NumPy's view of its memory?

Such a write changes what others remember of the tensor, and no version counter tells.  Only a look at the values does, so
that a few evaluations are looked at, not all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.trees import tree_flatten
from implicitkit.foundation.wording import called

_LOOKS = 8  # calls at most that are looked at, of states that are zero, on which a product writes nothing

IN_PLACE = (
    "the function changes {what} in place; an implicit equation needs a function without side effects: use out-of-place "
    "operations, or clone first"
)


def version(t: Tensor) -> int:
    """How often a tensor has been written to, as far as torch counts that."""
    return 0 if t.is_inference() else t._version


class Values:
    """The values of some tensors at a time, of those that are not zero (a product writes nothing there) and belong to no
    transform (nobody may look at them); a NaN among them nobody can compare."""

    __slots__ = ("_kept",)

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._kept: list[tuple[Tensor, Tensor]] = []
        for t in tensors:
            if isinstance(t, Tensor) and t.layout == torch.strided and not compat.is_wrapped(t):
                with compat.unseen():
                    plain = t.detach()
                    if plain.count_nonzero().item():
                        self._kept.append((t, plain.clone()))

    def __bool__(self) -> bool:
        """Are there any?"""
        return bool(self._kept)

    def changed(self) -> bool:
        """Has any of them other values now?"""
        with compat.unseen():
            return not all([_same(t.detach(), before) for t, before in self._kept])


class FirstCalls:
    """Calls of ``function(z, *args)``, of which the first are looked at: up to one with a state that is not zero.

    Around each, what ``parametrize.cached()`` keeps is set aside (``compat.own_parametrizations``).

    Raises (when called):
        RuntimeError: ``z`` was written into.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _LOOKS

    def __call__(self, function: Callable[..., Any], z: Any, args: Sequence[Any]) -> Any:
        call = self._looked_at if self._left else called
        if not compat.keeps_parametrizations():
            return call(function, z, args)
        with compat.own_parametrizations():
            return call(function, z, args)

    def _looked_at(self, function: Callable[..., Any], z: Any, args: Sequence[Any]) -> Any:
        values = Values(tree_flatten(z)[0])
        self._left = 0 if values else self._left - 1
        out = called(function, z, args)
        if values and values.changed():
            raise RuntimeError(
                IN_PLACE.format(what="its state z")
                + " (if it writes its result into the same tensor at every call, by out= or into a buffer, return a new one)"
            )
        return out


def _same(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return torch.equal(now, before) or bool(((now == before) | (before != before)).all())
