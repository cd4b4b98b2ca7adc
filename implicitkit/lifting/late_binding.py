"""Functions that read variables and attributes as these were, whatever they are bound to later.

Python looks a variable of an enclosing scope up when a function runs, not when it is made.  Of the functions in ::

    for _ in range(steps):
        before = u
        u = ik.root(lambda v: v - before - dt * rhs(v), before).value

every one reads the ``before`` of the last step by the time of the backward, where torch's own graph has kept that of each.
So a solve notes what the variables are bound to, and a derivative evaluates a copy of the function that reads these, if one
has been bound to something else since.  Followed are free and global variables, functions and objects that these refer to,
and attributes of such objects.  Entries of lists and dicts (``us[-1]`` of a list that grows) and attributes of modules
(``entries.py``) are too where the function as it is would be refused: into many the function itself writes, which is not to
be lost.  Not followed are tensors that are written to.
"""

from __future__ import annotations

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

    __slots__ = ("_function", "_noted", "_restores")

    def __init__(self, function: Any) -> None:
        self._function, self._restores = function, 0  # 1: the last callable given reads names as noted; 2: entries too
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

    def restored(self, entries: bool) -> Any:
        """The callable, with its names (and the ``entries`` of containers) bound as they were noted; ``None`` if none of
        them has been bound to something else since, or the callable given last is this one."""
        if self._restores > entries:
            return None
        copied = {
            key
            for key, (x, bound) in self._noted.items()
            if (entries or type(x) not in _CONTAINERS) and _moved(x, bound)
        }
        if not copied:
            return None
        self._restores = 1 + entries
        found = copied
        while found:  # and what refers to one of these
            found = {
                key
                for key, (_, bound) in self._noted.items()
                if key not in copied and any(id(x) in copied for value in _values(bound) for x, _ in _holders(value))
            }
            copied = copied | found
        return self._restored(self._function, copied, {})

    def _restored(self, x: Any, copied: set[int], made: dict[int, Any]) -> Any:
        if isinstance(x, functools.partial):
            return functools.partial(self._restored(x.func, copied, made), *x.args, **x.keywords)
        if isinstance(x, types.MethodType):
            return types.MethodType(self._restored(x.__func__, copied, made), self._restored(x.__self__, copied, made))
        if type(x) is tuple:
            return tuple([self._restored(value, copied, made) for value in x])
        if id(x) not in copied:
            return x
        if id(x) not in made:
            bound = self._noted[id(x)][1]
            made[id(x)] = copy = _copy(x, bound)  # before what it refers to, which may be itself
            if type(x) is list:
                copy.extend([self._restored(value, copied, made) for value in bound])
                return copy
            rebound = {name: self._restored(value, copied, made) for name, value in bound.items()}
            if isinstance(x, types.FunctionType):
                _bind(copy, rebound)
            else:
                (copy if type(x) is dict else copy.__dict__).update(rebound)
        return made[id(x)]


_HOLD_NOTHING = (Tensor, nn.Module, type, types.ModuleType, int, float, str, types.NoneType)
_CONTAINERS = (list, dict)


def _holders(x: Any) -> Iterator[tuple[Any, frozenset[str]]]:
    """The functions, objects and containers that a value leads to, and which of their names they set when called."""
    if isinstance(x, types.FunctionType):
        if not tracers.is_compiled(x):
            yield x, _NOTHING
    elif isinstance(x, functools.partial):
        yield from _holders(x.func)
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


@functools.lru_cache(maxsize=4096)
def _has_attributes(kind: Any) -> bool:
    """Is this a class in the language, of the user's or of ours, whose objects have attributes?"""
    if issubclass(kind, (Tensor, nn.Module, type)) or kind.__module__.startswith(_OTHERS) or not kind.__dictoffset__:
        return False
    return all(c is object or c.__flags__ & _HEAP for c in kind.__mro__)


def _bound(x: Any) -> Any:
    """What the names that a function reads and does not bind itself are bound to, or those of an object; what a container
    holds."""
    if type(x) in _CONTAINERS:
        return x.copy()
    if not isinstance(x, types.FunctionType):
        return dict(vars(x))
    code, found = _used(x.__code__), {}
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


def _copy(x: Any, names: Any) -> Any:
    """A function with cells of its own for these names, and globals of its own; a shallow copy of an object; an empty
    container."""
    if type(x) in _CONTAINERS:
        return type(x)()
    if not isinstance(x, types.FunctionType):
        copy = object.__new__(type(x))
        copy.__dict__.update(x.__dict__)
        return copy
    closure = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
    cells = tuple([types.CellType() if name in names else cell for name, cell in closure])
    space, read = x.__globals__, _used(x.__code__).reads_globals
    if read:
        space = {name: space[name] for name in ("__builtins__", "__name__", *read) if name in space}
    copy = types.FunctionType(x.__code__, space, x.__name__, x.__defaults__, cells)
    copy.__kwdefaults__ = x.__kwdefaults__
    copy.__dict__.update(x.__dict__)
    return copy


def _bind(copy: types.FunctionType, names: dict[str, Any]) -> None:
    cells = dict(zip(copy.__code__.co_freevars, copy.__closure__ or (), strict=True))
    for name, value in names.items():
        if name in cells:
            cells[name].cell_contents = value
        else:
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
