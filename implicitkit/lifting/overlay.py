"""Entries of modules replaced for one thread: what every other thread reads is as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import Any

from torch import Tensor, nn

_get, _has = dict.__getitem__, dict.__contains__  # quicker than super(), at every look at a parameter

_ABSENT = object()
Slot = tuple[nn.Module, str, str]  # a module, "_parameters" or "_buffers" (or an attribute of its own), and a key
Constants = list[tuple[list[Slot], Tensor]]  # tensors of modules that are no arguments, and where they are
# a module; "_parameters", "_buffers", "_modules", or "" of attributes; a key; what it is to hold
Entry = tuple[nn.Module, str, str, Any]


class replaced:
    """Inside, on this thread, the modules hold these; other threads that run them or read them see what was there.

    Not so where a module keeps its entries in a dict of a kind of its own (traced modules) or as plain attributes (sharding
    by FSDP with ``use_orig_params`` takes parameters out of ``_parameters`` and sets what it has gathered so): these change
    for all threads.

    Args:
        everywhere: all of them for all threads, in the modules' own dicts: for modules that ``torch.compile`` has compiled,
            which looks into the dicts and would compile another time, or not at all.
    """

    __slots__ = ("_overlays", "_plain")

    def __init__(self, entries: Iterable[Entry], everywhere: bool = False) -> None:
        shown: dict[tuple[int, str], tuple[dict[str, Any], str, dict[str, Any]]] = {}
        self._plain: list[tuple[Any, str, Any, Any]] = []
        for module, kind, key, value in entries:
            attributes = module.__dict__
            if not everywhere and type(attributes.get(kind)) in (dict, Overlay) and key not in attributes:
                found = shown.get((id(module), kind))
                if found is None:
                    shown[id(module), kind] = attributes, kind, {key: value}
                else:
                    found[2][key] = value
            else:
                where = attributes if not kind or key in attributes else getattr(module, kind)
                before = where[key] if key in where else _ABSENT  # noqa: SIM401 (the dicts of a traced module have no get)
                self._plain.append((where, key, before, value))
        self._overlays = [(of, kind, Overlay(of[kind], new)) for of, kind, new in shown.values()]

    def __enter__(self) -> None:
        try:
            for attributes, kind, overlay in self._overlays:
                attributes[kind] = overlay
            for where, key, _, value in self._plain:
                where[key] = value
        except BaseException:  # an interrupt between two of them
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        for attributes, kind, overlay in self._overlays:
            attributes[kind] = overlay.end()
        for where, key, before, _ in self._plain:
            if before is _ABSENT:
                where.pop(key, None)
            else:
                where[key] = before


class Overlay(dict[str, Any]):
    """The dict of a module's parameters, buffers or children with some entries replaced, for the thread that made it.

    Every other thread reads ``under``, the dict that was there before, and writes to it; so it is also for all once
    :meth:`end` was called (a copy of the module made meanwhile may hold this dict for ever).  The owner's writes to entries
    that are not replaced reach ``under`` too.  To code in C, which passes by these methods, the dict is the owner's.
    """

    __slots__ = ("_owner", "_replaced", "_under")

    def __init__(self, under: dict[str, Any], replaced: dict[str, Any]) -> None:
        super().__init__(under if type(under) is dict else under.items())
        dict.update(self, replaced)
        self._under, self._replaced = under, frozenset(replaced)
        self._owner: int | None = get_ident()

    def end(self) -> dict[str, Any]:
        """From now on this is ``under`` to everybody; returns it."""
        self._owner = None
        dict.clear(self)
        under = self._under
        dict.update(self, under if type(under) is dict else under.items())
        return under

    def _mine(self) -> bool:
        return self._owner == get_ident()

    def _view(self) -> dict[str, Any]:
        return dict(super().items()) if self._mine() else self._under

    # ---- reading
    def __getitem__(self, key: str) -> Any:
        return _get(self, key) if self._owner == get_ident() else self._under[key]

    def __contains__(self, key: object) -> bool:
        return _has(self, key) if self._owner == get_ident() else key in self._under

    def __len__(self) -> int:
        return super().__len__() if self._mine() else len(self._under)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__() if self._mine() else iter(self._under)

    def __reversed__(self) -> Iterator[str]:
        return super().__reversed__() if self._mine() else reversed(self._under)

    def __eq__(self, other: object) -> bool:
        return self._view() == other

    __hash__ = None

    def __repr__(self) -> str:
        return repr(self._view())

    def __or__(self, other: Any) -> Any:
        return self._view() | other

    def __ror__(self, other: Any) -> Any:
        return other | self._view()

    def __reduce__(self) -> Any:  # copies and pickles are plain dicts
        return dict, (self._view(),)

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default) if self._mine() else self._under.get(key, default)

    def keys(self) -> Any:
        return super().keys() if self._mine() else self._under.keys()

    def values(self) -> Any:
        return super().values() if self._mine() else self._under.values()

    def items(self) -> Any:
        return super().items() if self._mine() else self._under.items()

    def copy(self) -> dict[str, Any]:
        return dict(self._view())

    # ---- writing
    def __setitem__(self, key: str, value: Any) -> None:
        if not self._mine():
            self._under[key] = value
            return
        super().__setitem__(key, value)
        if key not in self._replaced:
            self._under[key] = value

    def __delitem__(self, key: str) -> None:
        if not self._mine():
            del self._under[key]
            return
        super().__delitem__(key)
        if key not in self._replaced:
            del self._under[key]

    def pop(self, key: str, *default: Any) -> Any:
        if key not in self and default:
            return default[0]
        value = self[key]
        del self[key]
        return value

    def popitem(self) -> tuple[str, Any]:
        key = next(reversed(self))
        return key, self.pop(key)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *others: Any, **more: Any) -> None:
        for key, value in dict(*others, **more).items():
            self[key] = value

    def clear(self) -> None:
        for key in list(self):
            del self[key]
