"""Functions that read variables and attributes as these were, whatever they are bound to later.

Python looks a variable of an enclosing scope up when a function runs, not when it is made.  Of the functions in ::

    for _ in range(steps):
        before = u
        u = ik.root(lambda v: v - before - dt * rhs(v), before).value

every one reads the ``before`` of the last step by the time of the backward, where torch's own graph has kept that of each.
So a solve notes what the variables are bound to, and a derivative evaluates a copy of the function that reads these, if one
has been bound to something else since.  Followed are free and global variables, functions and objects that these refer to,
attributes of such objects, and entries of lists and dicts (``us[-1]`` of a list that grows); attributes of modules are in
``entries.py``.  What changes during the solve the function changes itself: that is nobody's constant, and stays the user's.
Not followed are tensors that are written to.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import operator
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from implicitkit.foundation import tracers

_MOST = 64  # functions, objects and containers that are followed
_LONGEST = 4096  # entries of a container that is followed
_OTHERS = ("torch", "numpy", "scipy", "builtins")  # whose objects hold nothing of the user's
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by the statement of that name
_NOTHING: frozenset[str] = frozenset()


class Bindings:
    """What the names that a callable reads are bound to."""

    __slots__ = ("_function", "_noted", "_restored_as")

    def __init__(self, function: Any) -> None:
        self._function = function
        self._restored_as: tuple[set[int], Any] = set(), None  # what had to be copied at last, and the copy
        self._noted: dict[int, tuple[Any, Any]] = {}
        todo = list(_holders(function))
        while todo and len(self._noted) < _MOST:
            x, set_by_itself = todo.pop()
            if id(x) not in self._noted:
                bound = _bound(x)
                if set_by_itself:
                    bound = {name: value for name, value in bound.items() if name not in set_by_itself}
                self._noted[id(x)] = x, bound
                for value in _values(bound):
                    if len(todo) >= _MOST:
                        break
                    if not isinstance(value, _HOLD_NOTHING):
                        todo += _holders(value)

    def forget_changed(self) -> None:
        """What is bound to something else already, evaluations have bound: it is not noted any more."""
        for key, (x, bound) in list(self._noted.items()):
            if _moved(x, bound):
                now = _bound(x)
                if type(x) in _CONTAINERS:
                    self._noted.pop(key, None)
                else:
                    self._noted[key] = x, {name: value for name, value in bound.items() if now.get(name) is value}

    def restored(self) -> Any:
        """The callable, with its names bound as they were noted; ``None`` if none of them is bound to something else."""
        copied = {key for key, (x, bound) in self._noted.items() if _moved(x, bound)}
        if not copied:
            return None
        found = copied
        while found:  # and what refers to one of these
            found = {
                key
                for key, (_, bound) in self._noted.items()
                if key not in copied and any(_leads_to(value, copied) for value in _values(bound))
            }
            copied = copied | found
        if copied != self._restored_as[0]:
            self._restored_as = copied, self._restored(self._function, copied, {})
        return self._restored_as[1]

    def _restored(self, x: Any, copied: set[int], made: dict[int, Any]) -> Any:
        if isinstance(x, functools.partial):
            given = {name: self._restored(value, copied, made) for name, value in x.keywords.items()}
            return functools.partial(*self._restored((x.func, *x.args), copied, made), **given)
        if isinstance(x, types.MethodType):
            return types.MethodType(self._restored(x.__func__, copied, made), self._restored(x.__self__, copied, made))
        if type(x) is tuple:
            return tuple([self._restored(value, copied, made) for value in x])
        if id(x) not in copied:
            return x
        if id(x) not in made:
            bound = self._noted[id(x)][1]
            made[id(x)] = copy = _copy(x, bound, copied)  # before what it refers to, which may be itself
            if type(x) is list:
                copy.extend([self._restored(value, copied, made) for value in bound])
                return copy
            rebound = {name: self._restored(value, copied, made) for name, value in bound.items()}
            if isinstance(x, types.FunctionType):
                _bind(copy, rebound, x.__globals__)
            elif type(x) is dict:
                copy.update(rebound)
            else:
                _set(copy, rebound)
        return made[id(x)]


_HOLD_NOTHING = (Tensor, nn.Module, type, types.ModuleType, int, float, str, types.NoneType)
_CONTAINERS = (list, dict)


def _holders(x: Any) -> Iterator[tuple[Any, frozenset[str]]]:
    """The functions, objects and containers that a value leads to, and which of their names they set when called."""
    if isinstance(x, types.FunctionType):
        if not tracers.is_compiled(x):
            yield x, _NOTHING
    elif isinstance(x, functools.partial):
        yield from _holders((x.func, *x.args, *x.keywords.values()))
    elif type(x) is tuple:
        for value in x[:_LONGEST]:
            yield from _holders(value)
    elif isinstance(x, types.MethodType):
        yield from _holders(x.__func__)
        yield from [(of, _attributes_set(x.__func__)) for of, _ in _holders(x.__self__)]
    elif type(x) in _CONTAINERS:
        if len(x) <= _LONGEST:
            yield x, _NOTHING
    else:
        kind: Any = type(x)
        if _has_attributes(kind):
            yield x, _attributes_set(vars(kind).get("__call__"))


def _leads_to(value: Any, copied: set[int]) -> bool:
    return any(id(x) in copied for x, _ in _holders(value))


@functools.lru_cache(maxsize=4096)
def _has_attributes(kind: Any) -> bool:
    """Is this a class in the language, of the user's or of ours, whose objects have attributes, and may be copied (where
    one ends, files may be closed)?"""
    if issubclass(kind, (Tensor, nn.Module, type)) or kind.__module__.startswith(_OTHERS) or hasattr(kind, "__del__"):
        return False
    if not all(c is object or c.__flags__ & _HEAP for c in kind.__mro__) or not (kind.__dictoffset__ or _slots(kind)):
        return False
    try:
        object.__new__(kind)
    except TypeError:  # it is written in C
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _slots(kind: Any) -> dict[str, Any]:
    members = (item for c in reversed(kind.__mro__) for item in vars(c).items())
    return {name: member for name, member in members if isinstance(member, types.MemberDescriptorType)}


def _attributes(x: Any) -> dict[str, Any]:
    kind: Any = type(x)
    found = dict(getattr(x, "__dict__", ()))
    for name, slot in _slots(kind).items():
        with contextlib.suppress(AttributeError):  # not yet set
            found[name] = slot.__get__(x)
    return found


def _set(x: Any, attributes: dict[str, Any]) -> None:
    """Past whatever the class does where an attribute is set."""
    kind: Any = type(x)
    slots = _slots(kind)
    for name, value in attributes.items():
        if name in slots:
            slots[name].__set__(x, value)
        else:
            x.__dict__[name] = value


def _bound(x: Any) -> Any:
    """What the names that a function reads and does not bind itself are bound to, or those of an object; what a container
    holds."""
    if type(x) in _CONTAINERS:
        return x.copy()
    if not isinstance(x, types.FunctionType):
        found = _attributes(x)
        return {name: found[name] for name in x.reaches if name in found} if hasattr(type(x), "reaches") else found
    code, found = _used(x.__code__), {name: value for name in _DEFAULTS if (value := getattr(x, name))}
    for i, name in code.reads_free:
        try:
            found[name] = x.__closure__[i].cell_contents  # type: ignore[index]
        except ValueError:  # not yet bound, or no longer
            continue
    space = x.__globals__
    for name in code.reads_globals:
        value = space.get(name)
        if not isinstance(value, _NEVER_REBOUND):
            found[name] = value
    return found


_DEFAULTS = ("__defaults__", "__kwdefaults__")
_NEVER_REBOUND = (types.ModuleType, type, types.NoneType)


def _values(bound: Any) -> Iterable[Any]:
    return bound if type(bound) is list else bound.values()


def _moved(x: Any, bound: Any) -> bool:
    now = _bound(x)
    if type(x) in _CONTAINERS and len(now) != len(bound):
        return True
    if type(x) is list:
        return any(map(operator.is_not, now, bound))
    return any([now.get(name) is not value for name, value in bound.items()])


def _copy(x: Any, names: Any, copied: set[int]) -> Any:
    """A function with cells of its own for these names, and with globals of its own if one of them has to be another; a
    shallow copy of an object; an empty container."""
    if type(x) in _CONTAINERS:
        return type(x)()
    if not isinstance(x, types.FunctionType):
        copy = object.__new__(type(x))
        _set(copy, _attributes(x))
        return copy
    closure = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
    cells = tuple([types.CellType() if name in names else cell for name, cell in closure])
    space = x.__globals__
    of_others = [
        name for name in _used(x.__code__).reads_globals if name in names and name not in x.__code__.co_freevars
    ]
    if any(space.get(name) is not names[name] or _leads_to(names[name], copied) for name in of_others):
        space = dict(space)
    copy = types.FunctionType(x.__code__, space, x.__name__, x.__defaults__, cells)
    copy.__kwdefaults__ = x.__kwdefaults__
    copy.__dict__.update(x.__dict__)
    return copy


def _bind(copy: types.FunctionType, names: dict[str, Any], shared: dict[str, Any]) -> None:
    """``shared``: globals that stay as they are."""
    cells = dict(zip(copy.__code__.co_freevars, copy.__closure__ or (), strict=True))
    for name, value in names.items():
        if name in cells:
            cells[name].cell_contents = value
        elif name in _DEFAULTS:
            setattr(copy, name, value)
        elif copy.__globals__ is not shared:
            copy.__globals__[name] = value


class _Used:
    """What a code object, and those nested in it, do to names: the free ones that they read only, by number; global ones
    that they read (none, if they bind a global: then the function keeps its globals); attributes that they set."""

    __slots__ = ("reads_free", "reads_globals", "sets_attributes")

    def __init__(self, code: types.CodeType) -> None:
        did: dict[str, set[str]] = {}
        todo = [code]
        while todo:
            inner = todo.pop()
            todo += [constant for constant in inner.co_consts if isinstance(constant, types.CodeType)]
            for instruction in dis.get_instructions(inner):
                did.setdefault(instruction.opname, set()).add(instruction.argval)
        of = lambda *kinds: frozenset().union(*[did.get(kind, ()) for kind in kinds])  # noqa: E731
        self.reads_globals = () if of("STORE_GLOBAL", "DELETE_GLOBAL") else tuple(of("LOAD_GLOBAL"))
        bound = of("STORE_DEREF", "DELETE_DEREF")
        self.reads_free = [(i, name) for i, name in enumerate(code.co_freevars) if name not in bound]
        self.sets_attributes: frozenset[str] = of("STORE_ATTR", "DELETE_ATTR")


@functools.lru_cache(maxsize=4096)
def _used(code: types.CodeType) -> _Used:
    return _Used(code)


def _attributes_set(function: Any) -> frozenset[str]:
    return _used(function.__code__).sets_attributes if isinstance(function, types.FunctionType) else _NOTHING
