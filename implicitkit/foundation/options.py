"""Options of configured objects, declared: what each may be, said once and checked in one place.

    @dataclass(frozen=True)
    class Anderson(Method):
        memory: int = 8
        damping: float = 1.0

        def __post_init__(self) -> None:
            check_options(self, memory=at_least(1), damping=between(0, 2))

A value of the wrong type is a ``TypeError``, one out of range a ``ValueError``; both name the option and what was given.
An option that the class does not have is refused by :class:`Configured`, with the nearest that it has.  Functions say the
same of their arguments by :func:`check_arguments`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from implicitkit.foundation import compat
from implicitkit.foundation.constants import look
from implicitkit.foundation.wording import did_you_mean, option_error, shown

__all__ = [
    "Configured",
    "Requirement",
    "above",
    "adopts",
    "at_least",
    "between",
    "check_arguments",
    "check_call",
    "check_options",
    "each",
    "finite",
    "flag",
    "function",
    "instance",
    "is_integer",
    "not_negative",
    "number",
    "one_of",
    "optional",
    "or_tensor",
    "part",
    "part_of_one",
    "positive",
    "string",
    "tensor",
    "torch_dtype",
    "whole",
]

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Requirement:
    """What an option may be.

    Attributes:
        holds: is a value of the right type allowed? text: "must be positive". kind: ``"integer"``, ``"number"``,
            ``"flag"``, ``"choice"``, or ``"instance"``: of one of ``types``, called ``words``. absent: is ``None`` allowed?
        tensors: will a real tensor do (of any values, unless each is looked at)? each: must each number in it be allowed?
    """

    holds: Callable[[Any], bool]
    text: str
    kind: str = "number"
    absent: bool = False
    tensors: bool = False
    each: bool = False
    types: tuple[Any, ...] = ()
    words: str = ""

    def check(self, name: str, value: Any, owner: str = "") -> None:
        """Raise unless the option ``name`` (of ``owner``) may be ``value``."""
        if value is None and self.absent:
            return
        if self.tensors and isinstance(value, Tensor) and not value.is_complex() and value.dtype != torch.bool:
            if self.each and value.numel() and not torch.compiler.is_compiling():
                look(functools.partial(self._check_ends, f"{owner}{name}", compat.is_wrapped(value)), value)
            return
        plain = self.types or _PLAIN[self.kind]
        if type(value) not in plain and not (isinstance(value, plain) if self.types else _TYPES[self.kind](value)):
            words = [self.words or _WORDS[self.kind]] if self.kind != "tensor" else []
            words += ["a real tensor"] * self.tensors + ["None"] * self.absent
            raise TypeError(f"{owner}{name} must be {' or '.join(words)}, got {shown(value)}{self._hint(value)}")
        if not self.holds(value):
            raise ValueError(f"{owner}{name} {self.text}, got {shown(value)}{self._hint(value)}")

    def _check_ends(self, name: str, mapped: bool, values: Tensor) -> None:
        """Raise unless the smallest and the largest number are allowed (a NaN among ``mapped`` ones spoils its sample)."""
        if mapped:
            values = values[~values.isnan()]
        for end in values.aminmax() if values.numel() else ():
            if not self.holds(float(end)):
                raise ValueError(f"{name} {self.text}, got a tensor that holds {float(end):.6g}")

    def _hint(self, value: Any) -> str:
        if torch.dtype in self.types and isinstance(getattr(torch, str(value), None), torch.dtype):
            return f". Did you mean torch.{value}?"
        hint = did_you_mean(value, self.text.split("'")[1::2]) if self.kind == "choice" else ""
        return hint and f".{hint}"


def check_options(owner: Any, **requirements: Requirement) -> None:
    """Raise unless every option of ``owner`` is what is required; arrays become tensors where tensors are allowed.

    Raises:
        TypeError: a value of the wrong type. ValueError: one that is not allowed.
    """
    of = f"{type(owner).__name__}: "
    for name, requirement in requirements.items():
        value = getattr(owner, name)
        if requirement.tensors and type(value).__module__ == "numpy" and hasattr(value, "ndim") and value.ndim:
            value = torch.as_tensor(value)
            object.__setattr__(owner, name, value)
        requirement.check(name, value, of)


def adopts(part: str, *names: str) -> Callable[[type[T]], type[T]]:
    """Say of a class what is true of the part inside it: attributes of these names are those of the attribute ``part``,
    unless a subclass says otherwise."""

    def decorate(cls: type[T]) -> type[T]:
        for name in names:
            setattr(cls, name, property(operator.attrgetter(f"{part}.{name}")))
        return cls

    return decorate


def check_arguments(owner: str, **given: tuple[Requirement, Any]) -> None:
    """Raise unless every argument of the function ``owner`` is what is required, ``steps=(at_least(1), steps)``.

    Raises:
        TypeError: a value of the wrong type. ValueError: one that is not allowed.
    """
    for name, (requirement, value) in given.items():
        requirement.check(name, value, f"{owner}: ")


def check_call(form: str, function: Any) -> None:
    """Raise unless ``function`` can be called as ``form`` says, ``"prox(z, step)"``.

    Raises:
        TypeError: it is a class, or takes fewer or more arguments.
    """
    name, _, rest = form.partition("(")
    if inspect.isclass(function):
        raise TypeError(f"{name} is called as {form}, but got the class {function.__name__}: create an instance first")
    plain = isinstance(function, nn.Module) and not function._forward_pre_hooks  # which may hand on something else
    try:
        signature = inspect.signature(function.forward if plain else function)
    except (TypeError, ValueError):  # some routines of C, and what cannot be called, do not tell
        return
    try:
        signature.bind(*rest.split(","))
    except TypeError as error:
        raise TypeError(f"{name} is called as {form}, which the function given does not take: {error}") from None


class Configured:
    """Base class of parts that are made with options, ``ik.Anderson(memory=5)``.

    What the body of a subclass assigns to an option is its default there, ``class Short(ik.Anderson): memory = 3``.

    Raises:
        TypeError (when made): an option that the class does not have; names the nearest, and all.
    """

    if not TYPE_CHECKING:  # type checkers read __init__

        def __init_subclass__(cls, **how: Any) -> None:
            super().__init_subclass__(**how)
            _take_defaults(cls)

        def __new__(cls, *args: Any, **options: Any) -> Any:
            if (
                options or args
            ) and not torch.compiler.is_compiling():  # which traces through caches; __init__ refuses too
                _check_names(cls, args, options)
            return super().__new__(cls)

    def __repr__(self) -> str:  # of what is neither a dataclass nor a module
        text = super().__repr__()
        return f"{type(self).__name__}()" if text == object.__repr__(self) else text


def _take_defaults(cls: type) -> None:
    """What the body of a subclass assigns to an option is its default, annotated or not: a dataclass, made anew, looks at
    annotated names only."""
    if not dataclasses.is_dataclass(cls):
        return
    own, body = dict(vars(cls).get("__annotations__", {})), vars(cls)
    said = {
        field.name: field.type
        for field in dataclasses.fields(cls)
        if field.name in body and field.name not in own and not hasattr(type(body[field.name]), "__get__")
    }
    if said:
        cls.__annotations__ = own | said
        made: Any = cls.__dataclass_params__  # type: ignore[attr-defined]
        dataclasses.dataclass(frozen=made.frozen, eq=made.eq, repr=made.repr)(cls)


def _check_names(cls: type, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise unless the constructor takes options of these names."""
    known = _option_names(cls)
    if known is None:
        return
    for option in options:
        if option not in known:
            undecorated = "__dataclass_fields__" not in vars(cls)
            declared = undecorated and any(option in inspect.get_annotations(base) for base in cls.__mro__)
            hint = f" {option} is declared in the class: with @dataclass(frozen=True) above it, it is one."
            raise TypeError(option_error(cls.__name__, option, known) + hint * declared)
    if args and not known and not _takes_any_number(cls):
        raise TypeError(f"{cls.__name__} takes no arguments, got {shown(args[0])}")


@functools.lru_cache(maxsize=1024)
def _option_names(cls: type) -> tuple[str, ...] | None:
    """What may be given by name; ``None``: anything."""
    init: Any = getattr(cls, "__init__")  # noqa: B009
    if init is object.__init__:
        return ()
    parameters = list(inspect.signature(init).parameters.values())[1:]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL))


def _takes_any_number(cls: type) -> bool:
    """Does it take positional arguments without names?"""
    init: Any = getattr(cls, "__init__")  # noqa: B009
    kinds = [] if init is object.__init__ else [p.kind for p in inspect.signature(init).parameters.values()][1:]
    return any(kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for kind in kinds)


def at_least(bound: int) -> Requirement:
    """An integer, ``bound`` or more."""
    text = "cannot be negative" if bound == 0 else f"must be at least {bound}"
    return Requirement(lambda value: value >= bound, text, "integer")


def whole() -> Requirement:
    """Any integer."""
    return Requirement(lambda value: True, "", "integer")


def positive() -> Requirement:
    """A number above zero."""
    return Requirement(lambda value: value > 0, "must be positive")


def not_negative() -> Requirement:
    """A number, zero or more."""
    return Requirement(lambda value: value >= 0, "cannot be negative")


def above(bound: float) -> Requirement:
    """A number larger than ``bound``."""
    return Requirement(lambda value: value > bound, f"must be larger than {bound:g}")


def between(low: float, high: float, *, closed: bool = False) -> Requirement:
    """A number in ``(low, high)``; with ``closed``, in ``(low, high]``."""
    text = f"must be in ({low:g}, {high:g}{']' if closed else ')'}"
    return Requirement(lambda value: low < value <= high if closed else low < value < high, text)


def part_of_one() -> Requirement:
    """A number in ``[0, 1]``."""
    return Requirement(lambda value: 0 <= value <= 1, "must be in [0, 1]")


def finite() -> Requirement:
    """A finite number."""
    return Requirement(lambda value: math.isfinite(value), "must be finite")


def flag() -> Requirement:
    """``True`` or ``False``."""
    return Requirement(lambda value: True, "", "flag")


def one_of(*choices: str) -> Requirement:
    """One of some words."""
    quoted = [repr(choice) for choice in choices]
    text = f"must be {quoted[0]} or {quoted[1]}" if len(quoted) == 2 else f"must be one of {', '.join(quoted)}"
    return Requirement(lambda value: value in choices, text, "choice")


def optional(requirement: Requirement) -> Requirement:
    """What ``requirement`` allows, or ``None``."""
    return replace(requirement, absent=True)


def number() -> Requirement:
    """Any number but NaN."""
    return Requirement(lambda value: value == value, "must not be NaN")


def tensor() -> Requirement:
    """A real tensor."""
    return Requirement(lambda value: True, "", "tensor", tensors=True)


def or_tensor(requirement: Requirement) -> Requirement:
    """What ``requirement`` allows, or a real tensor of any values."""
    return replace(requirement, tensors=True)


def each(requirement: Requirement) -> Requirement:
    """What ``requirement`` allows, or a real tensor of such numbers, which are looked at where the option is given."""
    return replace(requirement, tensors=True, each=True)


def instance(words: str, *types: Any) -> Requirement:
    """An object of one of these types, ``words`` in a message: ``instance("a Solution", Solution)``."""
    return Requirement(lambda value: True, "", "instance", types=types, words=words)


def function(form: str = "") -> Requirement:
    """What can be called, as ``form`` says: a function or a module, but no class (``nn.ReLU`` for ``nn.ReLU()``)."""
    text = "must be an object, not a class: create an instance first"
    words = f"callable as {form}" if form else "callable"
    return Requirement(lambda value: not inspect.isclass(value), text, "instance", types=(Callable,), words=words)


def string() -> Requirement:
    """Any word or sentence."""
    return Requirement(lambda value: True, "", "instance", types=(str,), words="a str")


def torch_dtype() -> Requirement:
    """A floating-point or complex ``torch.dtype``."""
    floating = lambda value: value.is_floating_point or value.is_complex  # noqa: E731
    return Requirement(
        floating, "must be floating point or complex", "instance", types=(torch.dtype,), words="a torch.dtype"
    )


def part(word: str, *bases: type) -> Requirement:
    """A registered name, a configured object, or a class: ``word`` says of what; a name is looked up when it is used."""

    def holds(value: Any) -> bool:
        return isinstance(value, (str, *bases)) or (inspect.isclass(value) and issubclass(value, bases))

    return Requirement(holds, f"must be the name of a {word} or a configured one", "choice")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Is it a whole number, NumPy's too, and no truth value?"""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


_WORDS = {"integer": "an integer", "number": "a number", "flag": "True or False", "choice": "a word"}
_PLAIN: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (float, int),
    "flag": (bool,),
    "choice": (),
    "tensor": (),
}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "integer": is_integer,
    "number": _is_number,
    "flag": lambda value: type(value).__name__ in ("bool", "bool_"),  # NumPy's too
    "choice": lambda value: True,
    "tensor": lambda value: False,
}
