"""Was a tensor written into where torch does not count it: through ``z.data``, or NumPy's view of its memory?

Such a write changes what others remember of the tensor, and no version counter tells.  Only a look at the values does, so
that a few evaluations are looked at, not all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.pytrees import tensors_in
from implicitkit.foundation.trees import tree_flatten, tree_map
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
    """Calls of ``function(z, *args)``, of which the first are looked at: up to one with a state that is not zero, and two at
    least.

    Around each, what ``parametrize.cached()`` keeps is set aside (``compat.own_parametrizations``).  ``ordinary``: inside of
    which context a function is called that has met a tensor made in inference mode, which autograd may not save.

    Raises (when called):
        RuntimeError: ``z`` was written into, or what the call before has returned, and is kept (:meth:`kept`).
    """

    __slots__ = ("_before", "_keeps", "_left", "_met", "_one", "_ordinary")

    def __init__(self, ordinary: Callable[[], Any] | None = None) -> None:
        self._left: int = _LOOKS
        self._before: list[Tensor] | None = []  # None: it has been looked at
        self._ordinary, self._met = ordinary, False
        self._keeps = self._one = False

    def kept(self) -> None:
        """What is returned is kept from now on, beside what later calls return: it may not have one memory.

        Raises:
            RuntimeError: it has.
        """
        self._keeps = True
        if self._one:
            raise RuntimeError(IN_PLACE.format(what="what it has returned before") + _SAME_TENSOR)

    def __call__(self, function: Callable[..., Any], z: Any, args: Sequence[Any]) -> Any:
        call = self._looked_at if self._left or self._before is not None else called
        if self._met or compat.keeps_parametrizations():
            return self._within(call, function, z, args)
        try:
            return call(function, z, args)
        except RuntimeError as error:
            if self._ordinary is None or IN_INFERENCE not in str(error):
                raise
        self._met = True
        return self._within(call, function, z, args)

    def _within(self, call: Callable[..., Any], function: Callable[..., Any], z: Any, args: Sequence[Any]) -> Any:
        own = compat.own_parametrizations() if compat.keeps_parametrizations() else contextlib.nullcontext()
        with own, self._ordinary() if self._met and self._ordinary else contextlib.nullcontext():
            return call(function, z, args)

    def _looked_at(self, function: Callable[..., Any], z: Any, args: Sequence[Any]) -> Any:
        values = Values(tree_flatten(z)[0]) if self._left else None
        out = called(function, z, args)
        if values is not None:
            if values and values.changed():
                raise RuntimeError(IN_PLACE.format(what="its state z") + _SAME_TENSOR)
            self._left = 0 if values else self._left - 1
        if self._before is not None:
            now = [out] if isinstance(out, Tensor) else tensors_in(out)
            if self._before and _share(self._before, now):
                self._one = _writes_into(now, function, z, args)
                if self._keeps:
                    self.kept()
            self._before = None if self._before else now
        return out


IN_INFERENCE = "Inference tensors cannot be saved"  # torch's, of one that autograd was to save
_SAME_TENSOR = (
    " (if it writes its result into the same tensor at every call, by out= or into a buffer, return a new one)"
)


def _writes_into(now: Sequence[Tensor], function: Callable[..., Any], z: Any, args: Sequence[Any]) -> bool:
    """Does a function that has returned the same memory twice write into it at another point?"""
    values = Values(now)
    called(function, tree_map(lambda t: t + 0.01 * (1 + t.abs()), z), args)
    return values.changed()


def _share(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Has one of the first memory of one of the second?  Not of tensors without memory of their own."""
    try:
        places = set()
        for t in first:
            places.add(t.untyped_storage().data_ptr())
        for t in second:
            if t.untyped_storage().data_ptr() in places and t.numel():
                return True
    except RuntimeError:  # sparse ones, and those of a transform
        pass
    return False


def _same(now: Tensor, before: Tensor) -> bool:
    if now.shape != before.shape or now.dtype != before.dtype:
        return False
    return torch.equal(now, before) or bool(((now == before) | (before != before)).all())
