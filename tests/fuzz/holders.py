"""Ways in which the function of a solve comes by a tensor.

A holder takes a function ``f(z, *args, **named)`` and gives one of the same form that supplies the tensor ``name``
itself; so holders nest, and the outermost one is what the user hands to the solve.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import implicitkit as ik

__all__ = ["HOLDERS", "IN_ARGS", "hold"]

Held = Callable[..., Any]
_CONTEXT: ContextVar[Any] = ContextVar("held")


def _closure(f: Held, name: str, t: Tensor) -> Held:
    return lambda z, *args, **named: f(z, *args, **{name: t}, **named)


def _late(f: Held, name: str, t: Tensor) -> Held:
    """A function that looks the tensor up when it is called."""

    def find() -> Tensor:
        return t

    return lambda z, *args, **named: f(z, *args, **{name: find()}, **named)


def _list(f: Held, name: str, t: Tensor) -> Held:
    box = [0, [t]]
    return lambda z, *args, **named: f(z, *args, **{name: box[1][0]}, **named)  # type: ignore[index]


def _dict(f: Held, name: str, t: Tensor) -> Held:
    box = {"a": {"b": t}}
    return lambda z, *args, **named: f(z, *args, **{name: box["a"]["b"]}, **named)


def _derived(f: Held, name: str, t: Tensor) -> Held:
    """Captured is not the tensor itself but something made of it."""
    root, sign = (t.sqrt(), 1) if t.is_complex() else (t.abs().sqrt(), t.detach().sign())
    return lambda z, *args, **named: f(z, *args, **{name: sign * root * root}, **named)


def _view(f: Held, name: str, t: Tensor) -> Held:
    stacked = torch.stack([t, 2 * t])
    return lambda z, *args, **named: f(z, *args, **{name: stacked[1] / 2}, **named)


def _default(f: Held, name: str, t: Tensor) -> Held:
    def function(z: Any, *args: Any, held: Any = t, **named: Any) -> Any:
        return f(z, *args, **{name: held}, **named)

    return function


def _partial_keyword(f: Held, name: str, t: Tensor) -> Held:
    return functools.partial(f, **{name: t})


def _partial_positional(f: Held, name: str, t: Tensor) -> Held:
    def function(held: Any, z: Any, *args: Any, **named: Any) -> Any:
        return f(z, *args, **{name: held}, **named)

    return functools.partial(function, t)


def _with_globals(function: Any, **names: Any) -> Any:
    """The function, in a module of its own where ``names`` are global."""
    made = types.FunctionType(function.__code__, {**globals(), **names}, function.__name__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _read_global(z: Any, *args: Any, **named: Any) -> Any:
    return INNER(z, *args, **{NAME: TENSOR}, **named)  # type: ignore[name-defined]  # noqa: F821


def _global(f: Held, name: str, t: Tensor) -> Held:
    return _with_globals(_read_global, INNER=f, NAME=name, TENSOR=t)


class _Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


@dataclass
class _Data:
    held: Any


class _Named(NamedTuple):
    first: int
    held: Any


class _Lazy:
    """A property that computes."""

    def __init__(self, held: Any) -> None:
        self._twice = 2 * held

    @property
    def held(self) -> Any:
        return 0.5 * self._twice


def _attribute(make: Callable[[Any], Any]) -> Callable[[Held, str, Tensor], Held]:
    def holder(f: Held, name: str, t: Tensor) -> Held:
        box = make(t)
        return lambda z, *args, **named: f(z, *args, **{name: box.held}, **named)

    return holder


class _Callable:
    def __init__(self, f: Held, name: str, t: Tensor) -> None:
        self.f, self.name, self.held = f, name, t

    def __call__(self, z: Any, *args: Any, **named: Any) -> Any:
        return self.f(z, *args, **{self.name: self.held}, **named)

    def method(self, z: Any, *args: Any, **named: Any) -> Any:
        return self(z, *args, **named)


def _bound(f: Held, name: str, t: Tensor) -> Held:
    return _Callable(f, name, t).method


def _context(f: Held, name: str, t: Tensor) -> Held:
    key = object()

    def function(z: Any, *args: Any, **named: Any) -> Any:
        return f(z, *args, **{name: _CONTEXT.get()[key]}, **named)

    _CONTEXT.set({**_CONTEXT.get({}), key: t})
    return function


def _weak(f: Held, name: str, t: Tensor) -> Held:
    table: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
    key = _Data.__new__(_Callable)
    table[key] = t
    return lambda z, *args, **named: f(z, *args, **{name: table[key]}, **named)


def _iterator(f: Held, name: str, t: Tensor) -> Held:
    def forever() -> Iterator[Tensor]:
        while True:
            yield t

    stream = forever()
    return lambda z, *args, **named: f(z, *args, **{name: next(stream)}, **named)


# ------------------------------------------------------------------------------------------------------------- modules
class _Module(nn.Module):
    """A module that holds the tensor: as a parameter where it is one, as a buffer else."""

    def __init__(self, t: Tensor, f: Held | None = None, name: str = "") -> None:
        super().__init__()
        self.f, self.name = f, name
        if isinstance(t, nn.Parameter):
            self.held = t
        else:
            self.register_buffer("held", t)

    def forward(self, z: Any, *args: Any, **named: Any) -> Any:
        if self.f is None:
            return self.held
        return self.f(z, *args, **{self.name: self.held}, **named)


class _Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"first": nn.ModuleList([inner])})

    def forward(self, z: Any, *args: Any, **named: Any) -> Any:
        return self.layers["first"][0](z, *args, **named)  # type: ignore[index]


def _module(f: Held, name: str, t: Tensor) -> Held:
    return _Module(t, f, name)


def _nested_module(f: Held, name: str, t: Tensor) -> Held:
    return _Outer(_Module(t, f, name))


def _module_closure(f: Held, name: str, t: Tensor) -> Held:
    module = _Module(t)
    return lambda z, *args, **named: f(z, *args, **{name: module(z)}, **named)


def _module_attribute(f: Held, name: str, t: Tensor) -> Held:
    """The weight is read without calling the module."""
    module = _Module(t)
    return lambda z, *args, **named: f(z, *args, **{name: module.held}, **named)


def _module_slots(f: Held, name: str, t: Tensor) -> Held:
    box = _Slots(_Module(t))
    return lambda z, *args, **named: f(z, *args, **{name: box.held(z)}, **named)


def _module_object(f: Held, name: str, t: Tensor) -> Held:
    box = _Data({"net": [_Module(t)]})
    return lambda z, *args, **named: f(z, *args, **{name: box.held["net"][0](z)}, **named)


def _call_first(module: Any, z: Any, f: Any, name: str, args: Any, named: Any) -> Any:
    return f(z, *args, **{name: module(z)}, **named)


def _module_partial(f: Held, name: str, t: Tensor) -> Held:
    def function(z: Any, *args: Any, net: Any, **named: Any) -> Any:
        return _call_first(net, z, f, name, args, named)

    return functools.partial(function, net=_Module(t))


def _module_default(f: Held, name: str, t: Tensor) -> Held:
    module = _Module(t)

    def function(z: Any, *args: Any, net: Any = module, **named: Any) -> Any:
        return _call_first(net, z, f, name, args, named)

    return function


def _read_module(z: Any, *args: Any, **named: Any) -> Any:
    return INNER(z, *args, **{NAME: MODULE(z)}, **named)  # type: ignore[name-defined]  # noqa: F821


def _module_global(f: Held, name: str, t: Tensor) -> Held:
    return _with_globals(_read_module, INNER=f, NAME=name, MODULE=_Module(t))


def _functional_call(f: Held, name: str, t: Tensor) -> Held:
    module = _Module(nn.Parameter(torch.zeros(t.shape, dtype=t.dtype)))
    return lambda z, *args, **named: f(z, *args, **{name: functional_call(module, {"held": t}, (z,))}, **named)


_LINEAR = [nn.Linear(1, n, bias=False) for n in range(1, 17)]  # made here: vmap forbids random weights


def _functional_linear(f: Held, name: str, t: Tensor) -> Held:
    """The tensor is the weight of a Linear, given by functional_call."""
    lin = _LINEAR[t.numel() - 1]

    def function(z: Any, *args: Any, **named: Any) -> Any:
        one = torch.ones(1, dtype=t.dtype)
        held = functional_call(lin, {"weight": t.reshape(-1, 1)}, (one,)).reshape(t.shape)
        return f(z, *args, **{name: held}, **named)

    return function


# ------------------------------------------------------------------------------------------------------------- solves
def _nested_solve(f: Held, name: str, t: Tensor) -> Held:
    """Captured by the function of a solve inside the function: ``2 u = 2 t``."""

    def function(z: Any, *args: Any, **named: Any) -> Any:
        inner = ik.root(lambda u: 2 * u - 2 * t, torch.zeros(t.shape, dtype=t.dtype)).value
        return f(z, *args, **{name: inner}, **named)

    return function


def _nested_argument(f: Held, name: str, t: Tensor) -> Held:
    """An argument of a solve inside the function."""

    def function(z: Any, *args: Any, **named: Any) -> Any:
        inner = ik.fixed_point(lambda u, v: 0.5 * u + 0.5 * v, torch.zeros(t.shape, dtype=t.dtype), (t,)).value
        return f(z, *args, **{name: inner}, **named)

    return function


def _solution_captured(f: Held, name: str, t: Tensor) -> Held:
    """Captured is the solution of another solve."""
    made = ik.root(lambda u, v: 2 * u - 2 * v, torch.zeros(t.shape, dtype=t.dtype), (t,)).value
    return lambda z, *args, **named: f(z, *args, **{name: made}, **named)


HOLDERS: dict[str, Callable[[Held, str, Tensor], Held]] = {
    "closure": _closure,
    "late": _late,
    "list": _list,
    "dict": _dict,
    "derived": _derived,
    "view": _view,
    "default": _default,
    "partial_keyword": _partial_keyword,
    "partial_positional": _partial_positional,
    "global": _global,
    "slots": _attribute(_Slots),
    "dataclass": _attribute(_Data),
    "namedtuple": _attribute(lambda t: _Named(0, t)),
    "property": _attribute(_Lazy),
    "callable": _Callable,
    "bound_method": _bound,
    "context": _context,
    "weak": _weak,
    "iterator": _iterator,
    "module": _module,
    "nested_module": _nested_module,
    "module_closure": _module_closure,
    "module_attribute": _module_attribute,
    "module_slots": _module_slots,
    "module_object": _module_object,
    "module_partial": _module_partial,
    "module_default": _module_default,
    "module_global": _module_global,
    "functional_call": _functional_call,
    "functional_linear": _functional_linear,
    "nested_solve": _nested_solve,
    "nested_argument": _nested_argument,
    "solution": _solution_captured,
}
# name: how the tensor stands in args
IN_ARGS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "args": (lambda t: t, lambda a: a),
    "args_dict": (lambda t: {"k": t, "n": 3}, lambda a: a["k"]),
    "args_nested": (lambda t: [None, ({"u": t}, 2.0)], lambda a: a[1][0]["u"]),
    "args_last": (lambda t: _batch_last(t), lambda a: _batch_first(a)),
}


def _batch_last(t: Tensor) -> Tensor:
    """The batch, if there is one, in the last dimension."""
    return t.movedim(0, -1) if t.ndim == 2 else t


def _batch_first(t: Tensor) -> Tensor:
    return t.movedim(-1, 0) if t.ndim == 2 else t


def hold(kernel: Held, tensors: dict[str, Tensor], ways: dict[str, str], first: Sequence[str]) -> tuple[Held, tuple]:
    """``(function, args)`` such that ``function(z, *args)`` is ``kernel(z, **tensors)``, each tensor held in its way.

    ``first``: names of which the outermost holders are, in order.
    """
    explicit = [name for name in tensors if ways[name] in IN_ARGS]
    unpack = {name: IN_ARGS[ways[name]][1] for name in explicit}

    def function(z: Any, *args: Any, **named: Any) -> Any:
        given = {name: unpack[name](a) for name, a in zip(explicit, args, strict=True)}
        return kernel(z, **given, **named)

    held: Held = function
    for name in reversed(first):
        if name not in unpack:
            held = HOLDERS[ways[name]](held, name, tensors[name])
    return held, tuple(IN_ARGS[ways[name]][0](tensors[name]) for name in explicit)
