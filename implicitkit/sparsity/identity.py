"""What tells a user's function from others, for what is asked of each but once."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor, nn

from implicitkit.foundation import compat

_NUMBERS = (int, float, str, bytes, bool, type(None))
_NAMES = 32  # attributes of one object, and items of one list, that are looked at
_CHOICES = 8  # whole numbers that may stand for flags
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
        defaults = tuple(identity_of(d, depth - 1) for d in _defaults(function))
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


def size_of(x: Any) -> Hashable:
    """A flag or a word, or one of the first whole numbers, which choose; of other numbers the sign and how large each is, to
    a power of two."""
    if isinstance(x, (bool, str)):
        return x
    if isinstance(x, int):
        if abs(x) < _CHOICES:
            return x
        return (x > 0) - (x < 0), x.bit_length()
    sign = 0 if isinstance(x, complex) else (x > 0) - (x < 0)
    return sign, math.frexp(math.hypot(x.real, x.imag))[1]


def settings_of(function: Any, of_number: Callable[[Any], Hashable] = bool, depth: int = 3) -> tuple[Hashable, ...]:
    """How the objects behind a function are set: their flags and names, and ``of_number`` of their numbers, by default which
    of them are zero (:func:`size_of` tells more).

    ``self.coupling = 0.3`` may make another function of one that was looked at with ``self.coupling = 0``.  Numbers that
    change in training, and go on being none, change nothing here.
    """
    if depth == 0:
        return ()
    if isinstance(function, types.MethodType):
        function = [function.__func__, function.__self__]
        return tuple(part for x in function for part in settings_of(x, of_number, depth))
    if isinstance(function, types.FunctionType):
        named = (function.__globals__.get(name) for name in function.__code__.co_names)
        held = [*map(_held, function.__closure__ or ()), *_defaults(function)]
        held += [x for x in named if isinstance(x, (*_NUMBERS, Tensor))]
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
            found.append(of_number(x))
        elif isinstance(x, Tensor):
            if x.numel() == 1 and x.device.type == "cpu" and not (x.requires_grad or compat.is_wrapped(x)):
                with compat.unseen():
                    found.append(of_number(x.detach().item()))
        elif depth > 1:
            found += settings_of(x, of_number, depth - 1)
    return tuple(found)


def _defaults(function: types.FunctionType) -> tuple[Any, ...]:
    return (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


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
