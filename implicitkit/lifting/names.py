"""Names that code reads, and that a class has for all its objects."""

from __future__ import annotations

import abc
import builtins
import contextlib
import dis
import functools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

_OTHERS = ("torch", "numpy", "scipy")  # whose objects hold nothing of the user's
HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by the statement of that name
_MAKES = ("__init__", "__new__", "__post_init__", "__repr__", "__str__")  # no evaluation is there
_OF_USERS = ("__main__", "collections", "types", "argparse")  # of the standard library, with what users put there
_ABSENT = object()
F = TypeVar("F", bound=Callable[..., Any])


def remembered(function: F) -> F:
    """What it returns, for the last few thousands of what it is given."""
    return functools.lru_cache(maxsize=4096)(function)  # type: ignore[return-value]


@remembered
def slots(kind: Any) -> dict[str, Any]:
    """Attributes for which a class keeps places, and how these are reached."""
    members = (item for c in reversed(kind.__mro__) for item in vars(c).items())
    return {
        name: member
        for name, member in members
        if isinstance(member, types.MemberDescriptorType) and member.__objclass__.__flags__ & HEAP
    }


def attributes(x: Any) -> dict[str, Any]:
    """Those of an object, past whatever its class does where one is read."""
    found = dict(getattr(x, "__dict__", ()))
    members = slots(type(x))
    if not members:
        return found
    for name, slot in members.items():
        with contextlib.suppress(AttributeError):  # not yet set
            found[name] = slot.__get__(x)
    return found


def set_attributes(x: Any, attributes: dict[str, Any]) -> None:
    """Past whatever the class does where an attribute is set."""
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
    return _names(kind, tuple(map(tuple, found))) if found else ()


@remembered
def spaces(kind: Any) -> Sequence[Mapping[str, Any]]:
    """The names of a class of the user's and of those of his that it is derived from, the nearest last."""
    if type(kind) not in (type, abc.ABCMeta) or any(
        "__init_subclass__" in vars(c) for c in kind.__mro__[:-1] if not _is_known(c)
    ):
        return ()
    return tuple([vars(c) for c in reversed(kind.__mro__) if not _is_known(c)])


def _is_known(kind: Any) -> bool:
    """Is this a class of a library that nobody changes?"""
    return in_library(kind.__module__) or kind.__module__.startswith("implicitkit") or not kind.__flags__ & HEAP


def in_library(module: str) -> bool:
    """Is this a module whose objects hold nothing of the user's?"""
    name = module.partition(".")[0]
    return name in _OTHERS or (name in sys.stdlib_module_names and name not in _OF_USERS)


@remembered
def _names(kind: Any, _: tuple[tuple[str, ...], ...]) -> Sequence[tuple[str, Mapping[str, Any]]]:
    """:func:`shared`, of classes with these names."""
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for space in spaces(kind):
        for name, value in space.items():
            found.pop(name, None)
            inner = _function(value)
            if isinstance(inner, types.FunctionType):
                if name not in _MAKES and _reads(inner):
                    found[name] = name, space
            elif not (name[:2] == "__" == name[-2:] or hasattr(type(value), "__get__")):
                found[name] = name, space
    return tuple(found.values())


def _function(value: Any) -> Any:
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def _reads(function: types.FunctionType) -> bool:
    """Does it read a name of its scope that is no library's?"""
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


@remembered
def used(code: types.CodeType) -> _Used:
    return _Used(code)
