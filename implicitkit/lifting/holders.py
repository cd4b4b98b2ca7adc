"""What holds what a function reads: other functions, containers, objects, classes and modules.

Each kind says what its names (or places) are bound to, and makes a copy in which they are bound to something else, past
whatever a class of the user's does where it is made, or where an attribute is set.  A class is copied as one derived from
it, of which the copies of its objects are.  A module is not copied: its attributes are held for the time of an evaluation.
Tuples, partials, methods and the like are never bound anew: they are looked through
(:mod:`~implicitkit.lifting.rebuilding`).
"""

from __future__ import annotations

import abc
import collections
import functools
import operator
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from implicitkit.foundation import tracers
from implicitkit.foundation.by_class import by_class
from implicitkit.lifting.names import (
    HEAP,
    attributes,
    in_library,
    set_attributes,
    shared,
    slots,
    used,
)
from implicitkit.lifting.rebuilding import LONGEST, parts_of, rebuilt

_DEFAULTS = ("__defaults__", "__kwdefaults__", "__dict__")
_ABSENT, _OWN = object(), object()

Bound = Any  # a dict of names, or a list where there are none


def holders(given: Iterable[Any]) -> list[Any]:
    """The functions, objects, classes and containers that are given, or that tuples, methods and the like lead to."""
    found: list[Any] = []
    for x in given:
        kind = kind_of(type(x))
        if kind is None:
            continue
        if kind is Parts:
            found += holders(parts_of(x))
        elif kind.follows(x):
            found.append(x)
    return found


def put(x: Any, made: Mapping[int, Any]) -> Any:
    """``x``, or the copy of it that was made; a tuple, a partial and the like of such copies."""
    if id(x) in made:
        return made[id(x)]
    if kind_of(type(x)) is not Parts:
        return x
    old = parts_of(x)
    new = [put(part, made) for part in old]
    return rebuilt(x, new) if any(map(operator.is_not, old, new)) else x


class Kind:
    """One way in which values are held.  ``by_class``: some of them for all objects of a class. ``own``: names that are
    never bound anew."""

    by_class = False
    own: frozenset[Any] = frozenset()

    @classmethod
    def follows(cls, x: Any) -> bool:
        """Is ``x`` looked into?"""
        return True

    @classmethod
    def bound(cls, x: Any) -> Bound:
        """What the names of ``x`` are bound to, or what it contains."""
        raise NotImplementedError

    @classmethod
    def now(cls, x: Any) -> Bound:
        """What :meth:`bound` returns, or the thing itself where it is only looked at: nothing is copied."""
        return cls.bound(x)

    @classmethod
    def told_by(cls, x: Any, name: Any) -> bool:
        """Would a name that was not bound be noticed in ``x``, as the key of a dict is?"""
        return False

    @classmethod
    def blank(cls, x: Any, names: Any, made: dict[int, Any]) -> Any:
        """A copy of ``x`` that is not yet filled, so that others can refer to it."""
        raise NotImplementedError

    @classmethod
    def fill(cls, copy: Any, x: Any, bound: Any) -> None:
        """Bind these names in the copy of ``x``."""
        raise NotImplementedError


class Parts(Kind):
    """Tuples, partials, methods, properties: what they are made of is never bound anew."""


class Tensors(Kind):
    """Tensors, which hold nothing."""

    @classmethod
    def follows(cls, x: Any) -> bool:
        return False


class Functions(Kind):
    """Functions: what the names that they read and do not bind themselves are bound to, their defaults and attributes."""

    @classmethod
    def follows(cls, x: Any) -> bool:
        return not tracers.is_compiled(x)

    @classmethod
    def bound(cls, x: Any) -> Bound:
        code, found = used(x.__code__), {name: value for name in _DEFAULTS if (value := getattr(x, name))}
        for i, name in code.reads_free:
            try:
                found[name] = x.__closure__[i].cell_contents
            except ValueError:  # not yet bound, or no longer
                continue
        space = x.__globals__
        for name in code.reads_globals:
            value = space.get(name, _ABSENT)
            if value is not _ABSENT and not isinstance(value, types.ModuleType):
                found[name] = value
        return found

    @classmethod
    def blank(cls, x: Any, names: Any, made: dict[int, Any]) -> Any:
        """A function with cells of its own for these names, and with globals of its own if one of them has to be another."""
        closure = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        cells = tuple([types.CellType() if name in names else cell for name, cell in closure])
        space = x.__globals__
        others = [name for name in used(x.__code__).reads_globals if name in names]
        if any(space.get(name) is not names[name] or _leads_to(names[name], made) for name in others):
            space = dict(space)
        copy = types.FunctionType(x.__code__, space, x.__name__, x.__defaults__, cells)
        copy.__kwdefaults__ = x.__kwdefaults__
        copy.__dict__.update(x.__dict__)
        return copy

    @classmethod
    def fill(cls, copy: Any, x: Any, bound: Any) -> None:
        cells = dict(zip(copy.__code__.co_freevars, copy.__closure__ or (), strict=True))
        for name, value in bound.items():
            if name in cells:
                cells[name].cell_contents = value
            elif name in _DEFAULTS:
                setattr(copy, name, value)
            elif copy.__globals__ is not x.__globals__:  # else they stay as they are
                copy.__globals__[name] = value


def _leads_to(value: Any, made: Mapping[int, Any]) -> bool:
    return any(id(x) in made for x in holders((value,)))


class Sequences(Kind):
    """Lists, deques, sets, and what is derived from them: entries, and at last the dict of attributes, if there is one."""

    last: Any = -1  # the place of that

    @classmethod
    def follows(cls, x: Any) -> bool:
        return (len(x) if type(x) in _BASES else _base(type(x)).__len__(x)) <= LONGEST

    @classmethod
    def bound(cls, x: Any) -> Bound:
        if type(x) in _BASES:
            return list(x)
        return [*_base(type(x)).__iter__(x), getattr(x, "__dict__", None)]

    @classmethod
    def now(cls, x: Any) -> Bound:
        return x if type(x) in (list, dict) else cls.bound(x)

    @classmethod
    def blank(cls, x: Any, names: Any, made: dict[int, Any]) -> Any:
        copy = _base(type(x)).__new__(type(x))
        if isinstance(x, collections.deque):
            collections.deque.__init__(copy, (), x.maxlen)
        set_attributes(copy, attributes(x))
        return copy

    @classmethod
    def fill(cls, copy: Any, x: Any, bound: Any) -> None:
        base: Any = _base(type(x))
        if base is not type(x) and (own := bound.pop(cls.last)) is not None:
            copy.__dict__ = own
        if type(bound) is list:
            (base.update if base is set else base.extend)(copy, bound)
            return
        for key, value in bound.items():
            base.__setitem__(copy, key, value)


class Mappings(Sequences):
    """Dicts, and what is derived from them, in the same way."""

    last = _OWN

    @classmethod
    def bound(cls, x: Any) -> Bound:
        return dict.copy(x) if type(x) in _BASES else {**dict.copy(x), _OWN: getattr(x, "__dict__", None)}

    @classmethod
    def told_by(cls, x: Any, name: Any) -> bool:
        return True

    @classmethod
    def blank(cls, x: Any, names: Any, made: dict[int, Any]) -> Any:
        copy = super().blank(x, names, made)
        if isinstance(x, collections.defaultdict):
            copy.default_factory = x.default_factory
        return copy


class Objects(Kind):
    """Objects of a class in the language: their attributes."""

    by_class = True

    @classmethod
    def bound(cls, x: Any) -> Bound:
        return attributes(x)

    @classmethod
    def now(cls, x: Any) -> Bound:
        return attributes(x) if slots(type(x)) else x.__dict__

    @classmethod
    def told_by(cls, x: Any, name: Any) -> bool:
        return hasattr(type(x), name)  # it hides what all objects of the class have

    @classmethod
    def blank(cls, x: Any, names: Any, made: dict[int, Any]) -> Any:
        return _base(type(x)).__new__(put(type(x), made))

    @classmethod
    def fill(cls, copy: Any, x: Any, bound: Any) -> None:
        set_attributes(copy, bound)


class Named(Objects):
    """Objects whose class says which of their attributes they call (``reaches``): no other is followed."""

    @classmethod
    def bound(cls, x: Any) -> Bound:
        found = attributes(x)
        return {name: found[name] for name in type(x).reaches if name in found}

    @classmethod
    def now(cls, x: Any) -> Bound:
        return cls.bound(x)

    @classmethod
    def blank(cls, x: Any, names: Any, made: dict[int, Any]) -> Any:
        copy = super().blank(x, names, made)
        set_attributes(copy, attributes(x))
        return copy


class Classes(Kind):
    """Classes: attributes that are no functions, and functions that read names of their scope."""

    @classmethod
    def follows(cls, x: Any) -> bool:
        return bool(shared(x))

    @classmethod
    def bound(cls, x: Any) -> Bound:
        return {name: of[name] for name, of in shared(x)}

    @classmethod
    def blank(cls, x: Any, names: Any, made: dict[int, Any]) -> Any:
        return _Derived(x.__name__, (x,), {"__slots__": (), "__module__": x.__module__, "__qualname__": x.__qualname__})

    @classmethod
    def fill(cls, copy: Any, x: Any, bound: Any) -> None:
        now = cls.bound(x)
        for name, value in bound.items():
            if now.get(name, _ABSENT) is not value:
                type.__setattr__(copy, name, value)


class _Derived(abc.ABCMeta):
    """A copy of a class, which takes the objects of that class for its own."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.__base__)  # type: ignore[arg-type]


class Modules(Objects):
    """Modules of torch: their attributes, but for those that every module has."""

    own = frozenset(vars(nn.Module()))

    @classmethod
    def bound(cls, x: Any) -> Bound:
        return {name: value for name, value in vars(x).items() if name not in cls.own}

    @classmethod
    def now(cls, x: Any) -> Bound:
        return vars(x)

    @staticmethod
    def instead(x: nn.Module, bound: Any, of_class: Any, made: Mapping[int, Any]) -> list[tuple[nn.Module, str, Any]]:
        """What the attributes of a module have to be; functions of its class that have to be others become attributes."""
        found = [(x, name, put(value, made)) for name, value in bound.items()]
        for name, value in of_class.items():
            if name not in bound:
                copy = put(value, made)
                if not hasattr(type(value), "__get__"):
                    found.append((x, name, copy))
                elif copy is not value and not isinstance(copy, property):
                    found.append((x, name, copy.__get__(x, type(x))))
        return found


_BASES: dict[Any, type[Kind]] = {
    list: Sequences,
    set: Sequences,
    collections.deque: Sequences,
    collections.OrderedDict: Mappings,
    collections.defaultdict: Mappings,
    dict: Mappings,
    types.SimpleNamespace: Objects,
    object: Objects,
}


@by_class
def kind_of(kind: Any) -> type[Kind] | None:
    """How objects of a class hold values; ``None``: nobody looks into them.  Objects with attributes must be of a class in
    the language, of the user's or of ours, and be safe to copy (where one ends, files may be closed)."""
    if kind is types.FunctionType:
        return Functions
    if kind in (type, abc.ABCMeta):
        return Classes
    if kind in (tuple, functools.partial, types.MethodType, property, classmethod, staticmethod):
        return Parts
    if kind in _BASES and kind is not object:
        return _BASES[kind]
    if issubclass(kind, Tensor):
        return Tensors
    if issubclass(kind, (nn.Module, type)) or in_library(kind.__module__) or hasattr(kind, "__del__"):
        return None
    base = _base(kind)
    if base is tuple or base not in _BASES:
        return Parts if base is tuple else None
    if base is object and not (kind.__dictoffset__ or slots(kind)):
        return None
    try:
        base.__new__(kind)
    except TypeError:  # it is written in C
        return None
    return Named if hasattr(kind, "reaches") else _BASES[base]


@by_class
def _base(kind: Any) -> Any:
    """The first class that ``kind`` is derived from and that is not made by a ``class`` statement."""
    return next(c for c in kind.__mro__ if c in _BASES or not c.__flags__ & HEAP)


def values(bound: Bound) -> Iterable[Any]:
    """The values among what is bound, names or not."""
    return bound if type(bound) is list else bound.values()
