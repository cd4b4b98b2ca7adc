"""What tells a user's function from others, for what is asked of each but once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
import weakref
from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from implicitkit.foundation import compat

_NUMBERS = (int, float, str, bytes, bool, type(None))
_NAMES = 32  # attributes of one object, and items of one list, that are looked at
_numbered: dict[int, tuple[weakref.ref[Any], int]] = {}  # by address
_next = itertools.count()


def identity_of(function: Any, depth: int = 4) -> Hashable:
    """What tells a function from others although it is made anew at every call: its code, and what it closes over; an object
    by a number that no other gets, when it is gone, as its address may.

    Two functions with one identity may have different patterns all the same; every use of a pattern is checked.
    """
    if depth == 0:
        return type(function).__qualname__
    if isinstance(function, types.MethodType):
        return (identity_of(function.__func__, depth - 1), identity_of(function.__self__, depth - 1))
    if isinstance(function, types.FunctionType):
        cells = tuple(identity_of(_held(cell), depth - 1) for cell in function.__closure__ or ())
        defaults = tuple(identity_of(d, depth - 1) for d in function.__defaults__ or ())
        return (function.__code__, cells, defaults)
    if isinstance(function, Tensor):
        return (tuple(function.shape), function.dtype)
    if isinstance(function, _NUMBERS):
        return function
    parts = getattr(type(function), "identified_by", None)  # a function of ours around the user's
    if parts is not None:
        return (type(function), *(identity_of(getattr(function, part), depth) for part in parts))
    if isinstance(function, (tuple, list)):
        if all(isinstance(item, _NUMBERS) for item in function):
            return (type(function), tuple(function))
        return (type(function), tuple(identity_of(item, depth) for item in function))
    if dataclasses.is_dataclass(function) and not isinstance(function, type):  # a problem, a constraint, bounds
        fields = (f.name for f in dataclasses.fields(function) if f.compare)
        return (type(function), tuple(identity_of(getattr(function, name), depth) for name in fields))
    if isinstance(function, functools.partial):  # not what only has attributes of these names, as the class itself has
        named = tuple((name, identity_of(a, depth - 1)) for name, a in function.keywords.items())
        return (identity_of(function.func, depth - 1), *(identity_of(a, depth - 1) for a in function.args), named)
    return (type(function), _number(function))


def settings_of(function: Any, depth: int = 3) -> tuple[Hashable, ...]:
    """How the objects behind a function are set: their flags and names, and which of their numbers are zero.

    ``self.coupling = 0.3`` may make another function of one that was looked at with ``self.coupling = 0``.  Numbers that
    change in training, and go on being none, change nothing here.
    """
    if depth == 0:
        return ()
    if isinstance(function, types.MethodType):
        return (*settings_of(function.__func__, depth - 1), *settings_of(function.__self__, depth - 1))
    if isinstance(function, types.FunctionType):
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        held = [*map(_held, function.__closure__ or ()), *(function.__defaults__ or ())]
        held += [x for x in named if isinstance(x, _NUMBERS)]
    elif isinstance(function, (tuple, list)):
        held = list(function[:_NAMES])
    elif isinstance(function, dict):
        held = list(itertools.islice(function.values(), _NAMES))
    elif (parts := getattr(type(function), "identified_by", None)) is not None:
        held = [getattr(function, part) for part in parts]
    elif isinstance(function, functools.partial):
        held = [function.func, *function.args, *function.keywords.values()]
    else:
        attributes = getattr(function, "__dict__", {})
        children = list(attributes.get("_modules", {}).values()) if isinstance(function, nn.Module) else []
        held = [x for name, x in itertools.islice(attributes.items(), _NAMES) if not name.startswith("_")] + children
    found: list[Hashable] = []
    for x in held:
        if x is None or isinstance(x, (str, bool)):
            found.append(x)
        elif isinstance(x, (int, float)):
            found.append(x != 0)
        elif isinstance(x, Tensor):
            if x.numel() == 1 and x.device.type == "cpu" and not (x.requires_grad or compat.is_wrapped(x)):
                with compat.unseen():
                    found.append(bool(x.detach() != 0))
        elif depth > 1:
            found += settings_of(x, depth - 1)
    return tuple(found)


def _held(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _number(x: Any) -> int:
    """One number for one object, as long as the program runs (its address, where nobody can tell when it ends)."""
    key = id(x)
    known = _numbered.get(key)
    if known is not None and known[0]() is x:
        return known[1]
    try:
        ref = weakref.ref(x, lambda gone: _forget(key, gone))
    except TypeError:
        return key
    _numbered[key] = ref, next(_next)
    return _numbered[key][1]


def _forget(key: int, gone: Any) -> None:
    if key in _numbered and _numbered[key][0] is gone:
        del _numbered[key]
