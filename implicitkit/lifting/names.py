"""Names that code reads, and that a class has for all its objects."""

from __future__ import annotations

import abc
import builtins
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from implicitkit.foundation.by_class import by_class

_OTHERS = ("torch", "numpy", "scipy")  # whose objects hold nothing of the user's
HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by the statement of that name
_MAKES = ("__init__", "__new__", "__post_init__", "__repr__", "__str__")  # no evaluation is there
_OF_USERS = ("__main__", "collections", "types", "argparse")  # of the standard library, with what users put there
_ABSENT = object()


def slots(kind: Any) -> dict[str, Any]:
    """Attributes for which a class keeps places, and how these are reached."""
    return {name: vars(kind.__mro__[i])[name] for name, i in _slots(kind)}


@by_class
def _slots(kind: Any) -> Sequence[tuple[str, int]]:
    """The names of these attributes, and which of the classes that ``kind`` is derived from has each."""
    members = {
        name: (i, member) for i, c in reversed(list(enumerate(kind.__mro__))) for name, member in vars(c).items()
    }
    return [
        (name, i)
        for name, (i, member) in members.items()
        if isinstance(member, types.MemberDescriptorType) and member.__objclass__.__flags__ & HEAP
    ]


def attributes(x: Any) -> dict[str, Any]:
    """The attributes of an object, past whatever its class does where one is read."""
    found = dict(getattr(x, "__dict__", ()))
    members = slots(type(x))
    if not members:
        return found
    for name, slot in members.items():
        with contextlib.suppress(AttributeError):  # not yet set
            found[name] = slot.__get__(x)
    return found


def set_attributes(x: Any, attributes: dict[str, Any]) -> None:
    """Set attributes past whatever the class does where one is set."""
    members = slots(type(x))
    for name, value in attributes.items():
        if name in members:
            members[name].__set__(x, value)
        else:
            x.__dict__[name] = value


def shared(kind: Any) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """What a class has for all its objects and may be bound anew, and functions that read what may be: a name, and the names
    of the class that has it."""
    found = spaces(kind)
    if not found:
        return ()
    names, noted = tuple(map(tuple, found)), _noted(kind)
    if noted[:1] != [names]:
        noted[:] = names, _names(found)
    return [(name, found[i]) for name, i in noted[1]]


def spaces(kind: Any) -> Sequence[Mapping[str, Any]]:
    """The names of a class of the user's and of those of his that it is derived from, the nearest last."""
    return [vars(kind.__mro__[i]) for i in _places(kind)]


@by_class
def _places(kind: Any) -> Sequence[int]:
    """Where in the ``__mro__`` of a class the user's own classes are, the nearest last."""
    if type(kind) not in (type, abc.ABCMeta):
        return ()
    places = [i for i, c in enumerate(kind.__mro__) if not _is_known(c)]
    return () if any("__init_subclass__" in vars(kind.__mro__[i]) for i in places) else places[::-1]


@by_class
def _noted(kind: Any) -> list[Any]:
    """Room for what :func:`shared` has found of a class: the names that there were, and which of them may be bound anew."""
    return []


def _is_known(kind: Any) -> bool:
    """Is this a class of a library that nobody changes?"""
    return in_library(kind.__module__) or kind.__module__.startswith("implicitkit") or not kind.__flags__ & HEAP


def in_library(module: str) -> bool:
    """Is this a module whose objects hold nothing of the user's?"""
    name = module.partition(".")[0]
    return name in _OTHERS or (name in sys.stdlib_module_names and name not in _OF_USERS)


def _names(found: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, int]]:
    """The names that may be bound anew among those of some classes, each with the number of its class."""
    names: dict[str, int] = {}
    for i, space in enumerate(found):
        for name, value in space.items():
            names.pop(name, None)
            inner = _function(value)
            if isinstance(inner, types.FunctionType):
                if name not in _MAKES and _reads(inner):
                    names[name] = i
            elif not (name[:2] == "__" == name[-2:] or hasattr(type(value), "__get__")):
                names[name] = i
    return list(names.items())


def _function(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def _reads(function: types.FunctionType) -> bool:
    """Does a function read a name of its scope that is no library's?"""
    code, space = used(function.__code__), function.__globals__
    if code.reads_free:
        return True
    for name in code.reads_globals:
        value = space.get(name, _ABSENT)
        if value is _ABSENT:
            if not hasattr(builtins, name):
                return True
        elif isinstance(value, type):
            if spaces(value):
                return True
        elif isinstance(value, types.FunctionType):
            if not in_library(value.__module__ or ""):
                return True
        elif not isinstance(value, (types.ModuleType, types.BuiltinFunctionType)):
            return True
    return False


class _Used:
    """What a code object, and those nested in it, do to names: the free ones that they read only, by number; global ones
    that they read (none, if they bind a global: then the function keeps its globals)."""

    __slots__ = ("reads_free", "reads_globals")

    def __init__(self, code: types.CodeType) -> None:
        did: dict[str, set[str]] = {}
        todo = [code]
        while todo:
            inner = todo.pop()
            todo += [constant for constant in inner.co_consts if isinstance(constant, types.CodeType)]
            for instruction in dis.get_instructions(inner):
                did.setdefault(instruction.opname, set()).add(instruction.argval)
        of = lambda *kinds: frozenset().union(*[did.get(kind, ()) for kind in kinds])  # noqa: E731
        free = set(code.co_freevars)
        self.reads_globals = () if of("STORE_GLOBAL", "DELETE_GLOBAL") else tuple(of("LOAD_GLOBAL") - free)
        bound = of("STORE_DEREF", "DELETE_DEREF") | {"__class__"}  # of super()
        self.reads_free = [(i, name) for i, name in enumerate(code.co_freevars) if name not in bound]


@functools.lru_cache(maxsize=4096)
def used(code: types.CodeType) -> _Used:
    """What a function of this code, and those inside it, read by name; found once."""
    return _Used(code)
