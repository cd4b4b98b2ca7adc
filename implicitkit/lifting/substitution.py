"""What is put in the place of the tensors that a function uses: in its operations, and in its modules.

A solve may be nested in a lifted function, and this in another: the substitutions of all of them are in force at once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.lifting.overlay import Slot, replaced
from implicitkit.lifting.replacing import Replacing


class _Active(threading.local):
    """Substitutions in force on this thread, for solves nested inside a lifted function."""

    def __init__(self) -> None:
        self.maps: list[dict[int, Tensor]] = []


_active = _Active()


def substitutions() -> list[dict[int, Tensor]]:
    """The substitutions in force on this thread, innermost last."""
    return _active.maps


def resolve(t: Tensor) -> Tensor:
    """The tensor that ``t`` stands for inside the lifted functions now running (usually ``t`` itself)."""
    for mapping in reversed(substitutions()):
        t = mapping.get(id(t), t)
    return t


def used(t: Tensor) -> Tensor:
    """:func:`resolve` of an argument; lifted functions around that capture it see, by an operation, that they use it."""
    if is_substituted(t):
        t.detach()
    return resolve(t)


def is_substituted(t: Tensor) -> bool:
    """Has a lifted function now running put a stand-in where ``t`` was, or is ``t`` itself one in a module?"""
    return any(id(t) in mapping for mapping in substitutions())


class Substitute(Replacing):
    """Replaces tensors, by identity, in the arguments of every torch operation."""

    def __init__(self, mapping: dict[int, Tensor]) -> None:
        super().__init__()
        self.mapping = mapping

    def __enter__(self) -> Substitute:
        substitutions().append(self.mapping)
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        substitutions().pop()
        super().__exit__(*exc)

    def instead(self, t: Tensor) -> Tensor:
        return self.mapping.get(id(t), t)


class SubstituteWithin(Substitute):
    """A :class:`Substitute` that also knows tensors that a transform of ``torch.func`` inside the function shows it wrapped.

    One wrapper takes the place of another in all operations, since a derivative may be taken by it.
    """

    def __init__(self, mapping: dict[int, Tensor]) -> None:
        super().__init__(mapping)
        self.level = compat.level()
        self.wrappers: dict[int, tuple[Tensor, Tensor]] = {}  # what is held keeps its identity

    def instead(self, t: Tensor) -> Tensor:
        if id(t) in self.mapping or not compat.is_wrapped(t):
            return super().instead(t)
        if id(t) in self.wrappers:
            return self.wrappers[id(t)][1]
        with compat.unseen():
            if compat.level(t) <= self.level or t.requires_grad:
                return t
            inner = compat.unwrap(t)
            other = self.instead(inner)
            if other is inner:
                return t
            self.wrappers[id(t)] = t, compat.around(other, t)
        return self.wrappers[id(t)][1]


class swapped(replaced):
    """The tensors, in the modules, while it lasts; solves inside see the first ``explicit`` of them as stand-ins.

    ``everywhere``: for all threads, not for this one only (:class:`~implicitkit.lifting.overlay.replaced`).
    """

    __slots__ = ("_mapping",)

    def __init__(
        self, slots: Sequence[Sequence[Slot]], tensors: Sequence[Tensor], explicit: int, everywhere: bool = False
    ) -> None:
        entries = [
            (module, kind, key, t) for places, t in zip(slots, tensors, strict=True) for module, kind, key in places
        ]
        super().__init__(entries, everywhere)
        self._mapping = {id(t): t for t in tensors[:explicit]}

    def __enter__(self) -> None:
        substitutions().append(self._mapping)
        super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        substitutions().pop()
