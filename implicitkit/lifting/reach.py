"""What a callable can reach: the modules whose tensors it may use, and the lock under which they are used.

Where a module is run before it is lifted, its buffers are given back what they held.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.foundation import compat, tracers

_DEPTH = 6  # how far reachable objects are followed
_LIBRARIES = ("torch", "numpy", "builtins", "scipy", "implicitkit")  # whose functions hold nothing of the user's


# Evaluations that swap tensors into modules, and those that read modules, exclude each other between threads.
class _Lock:
    """A re-entrant lock that a forked child finds free, whichever thread held it: enter ``lock``."""

    def __init__(self) -> None:
        self.renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        self.lock = threading.RLock()


modules_in_use = _Lock()


@contextlib.contextmanager
def modules_held() -> Iterator[None]:
    """Inside, no solve on another thread swaps tensors into modules: for code that runs modules beside its solves."""
    with modules_in_use.lock:
        yield


def reachable_modules(function: Any) -> tuple[list[nn.Module], bool]:
    """The outermost modules within reach of a callable, each once, in order of discovery; is anything there compiled?"""
    found: list[nn.Module] = []
    seen: dict[int, Any] = {}
    _walk(function, found, seen, 0)
    if not tracers.compiles():
        return found, False
    others = [x for x in seen.values() if not isinstance(x, nn.Module)]
    return found, holds_compiled(found) or any(map(tracers.is_compiled, others))


def holds_compiled(modules: Iterable[nn.Module]) -> bool:
    """Has ``torch.compile`` compiled one of these modules, or a module below one?"""
    return any([any(map(tracers.is_compiled, below(module))) for module in modules])


def below(module: nn.Module) -> Sequence[nn.Module]:
    """``list(module.modules())``, without the names that torch makes of each on the way."""
    if type(module).modules is not nn.Module.modules:
        return list(module.modules())
    found: dict[int, nn.Module] = {}
    left: list[Any] = [module]
    while left:
        m = left.pop()
        if m is None or id(m) in found:
            continue
        if type(m).named_modules is not _NAMED:
            found.update((id(inner), inner) for inner in m.modules() if id(inner) not in found)
            continue
        found[id(m)] = m
        if m._modules:
            left.extend(reversed(list(m._modules.values())))
    return list(found.values())


_NAMED = nn.Module.named_modules
_TORCHS = frozenset(vars(nn.Module()))  # attributes of every module, in which none of the user's own are


def can_keep(function: Any, modules: list[nn.Module]) -> bool:
    """Has the callable a place of its own (a module, a closure, an object) where something could outlive a call?"""
    return bool(modules) or not inspect.isfunction(function) or function.__closure__ is not None


def _walk(x: Any, found: list[nn.Module], seen: dict[int, Any], depth: int) -> None:
    """Gather the modules that ``x`` leads to.  Where a class names the attributes that its objects call (``reaches``), no
    other is followed."""
    if isinstance(x, (Tensor, str, int, float, type, types.ModuleType)) or x is None or id(x) in seen or depth > _DEPTH:
        return
    seen[id(x)] = x
    if isinstance(x, nn.Module):
        found.append(x)
    elif isinstance(x, functools.partial):
        for v in (x.func, *x.args, *x.keywords.values()):
            _walk(v, found, seen, depth + 1)
    elif inspect.ismethod(x):
        _walk(x.__self__, found, seen, depth + 1)
        _walk(x.__func__, found, seen, depth + 1)
    elif inspect.isfunction(x):
        for cell in x.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell not yet filled
                _walk(cell.cell_contents, found, seen, depth + 1)
        for v in x.__defaults__ or ():
            _walk(v, found, seen, depth + 1)
        for name in _global_names(x.__code__):
            v = x.__globals__.get(name)
            if isinstance(v, (nn.Module, types.FunctionType, functools.partial)):
                _walk(v, found, seen, depth + 1)
        if hasattr(x, "__wrapped__"):
            _walk(x.__wrapped__, found, seen, depth + 1)
    elif isinstance(x, dict):
        for v in x.values():
            _walk(v, found, seen, depth + 1)
    elif isinstance(x, (list, tuple, set, frozenset)):
        for v in x:
            _walk(v, found, seen, depth + 1)
    elif not type(x).__module__.startswith(_LIBRARIES[:3]) and hasattr(x, "__dict__"):
        for v in (getattr(x, part) for part in type(x).reaches) if hasattr(type(x), "reaches") else vars(x).values():
            _walk(v, found, seen, depth + 1)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Global names that a code object and those nested in it refer to."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.extend(_global_names(constant))
    return tuple(names)


def captured_rows(function: Any, rows: int) -> list[str]:
    """Names of variables of the enclosing scope, and of attributes, that hold tensors with so many rows."""
    return list({name: None for name, x in named_tensors(function) if x.ndim and len(x) == rows})


def named_tensors(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors that a function, and those that it calls by a name of its scope, refer to by a name."""
    todo, seen = [(function, 0)], set()
    while todo:
        function, depth = todo.pop(0)
        seen.add(id(function))
        for name, x in _uses(function):
            if isinstance(x, Tensor):
                yield name, x
            elif callable(x) and not isinstance(x, type) and id(x) not in seen and depth < _DEPTH:
                todo.append((x, depth + 1))


def _uses(function: Any) -> Iterator[tuple[str, Any]]:
    """What a callable refers to, by name."""
    if isinstance(function, functools.partial):
        yield "", function.func
        yield from (("", x) for x in function.args)
        yield from function.keywords.items()
    elif inspect.ismethod(function):
        own = getattr(function.__self__, "__dict__", {})
        yield from ((name, x) for name, x in own.items() if name not in _TORCHS)
        yield "", function.__func__
    elif inspect.isfunction(function) and not (function.__module__ or "").startswith(_LIBRARIES):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a cell not yet filled
                yield name, cell.cell_contents
        globals_ = function.__globals__
        yield from ((n, globals_[n]) for n in _global_names(function.__code__) if n in globals_)
    elif hasattr(type(function), "reaches"):
        yield from ((part, getattr(function, part)) for part in type(function).reaches)
    elif not (inspect.isfunction(function) or type(function).__module__.startswith(_LIBRARIES[:3])):
        yield from vars(function).items() if hasattr(function, "__dict__") else ()
        yield from getattr(function, "_buffers", {}).items()


@contextlib.contextmanager
def buffers_untouched(function: Any) -> Iterator[None]:
    """Inside, what the modules within reach of ``function`` write into their buffers (running statistics, counters) is
    taken back at the end, as that of a solve's evaluations is."""
    with modules_held():
        modules = {id(m): m for outer in reachable_modules(function)[0] for m in outer.modules()}.values()
        places = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        before = [(m, name, b, b.detach().clone()) for m, name, b in places if not compat.is_wrapped(b)]
        try:
            yield
        finally:
            for m, name, b, copy in before:
                m._buffers[name] = b
                if not torch.equal(b, copy):
                    with torch.no_grad():
                        b.copy_(copy)
