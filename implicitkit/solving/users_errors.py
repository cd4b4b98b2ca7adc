"""Errors of the user's function, raised again with a word on what it was given."""

from __future__ import annotations

import inspect
import re
from typing import Any, NoReturn

from torch import Tensor

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.tracers import NO_NUMBERS, is_fake
from implicitkit.foundation.trees import describe_leaves, tree_flatten
from implicitkit.foundation.wording import OF_SHAPES, kind_of, of_a_part, of_operations
from implicitkit.lifting.reach import reachable_modules

_DEVICES = ("the same device", "expected device", "is on cpu, different from", "is on cuda")
_PRECISIONS = ("the same dtype", "expected scalar type", "expected m1 and m2")


def raise_in_words(
    error: Exception, z: Any, args: tuple[Any, ...], function: Any = None, batch: tuple[int, ...] = ()
) -> NoReturn:
    """Raise the error of the user's ``function``, called with ``z`` and ``args``, again: with a word on what it was given,
    if there is one to add.  ``batch``: the first dimensions of ``z``, which are samples."""
    text = str(error)
    if getattr(z, "_fields", None) == ("z", "multipliers"):  # the state of a program: its function is given the first
        z = z.z
    if any(isinstance(t, Tensor) and is_fake(t) for t in tree_flatten(args)[0]):
        raise CapabilityError(NO_NUMBERS.format(what="fake tensors (FakeTensorMode), as in args,")) from error
    if type(error) in (TypeError, AttributeError, RuntimeError, ValueError, IndexError):
        place = of_a_part(error)
        said = f"It was raised by lines of the solver's own, {place}" if place else ""
        said = said or _of_types(error, text, z, args) or of_operations(text) or _of_leaves(text, z, args, function)
        if said and isinstance(error, IndexError) and batch:
            said += f", all samples at once: with batch_dims={len(batch)} the i-th number of each is z[..., i]"
        if said and said not in text:
            raise type(error)(f"{text.rstrip('.')}. {said}") from error
    raise error


def _of_types(error: Exception, text: str, z: Any, args: tuple[Any, ...]) -> str:
    """What may be wrong where something has another type, or number, than the function takes."""
    if not isinstance(error, (TypeError, AttributeError)):
        return ""
    if len(args) == 1 and isinstance(args[0], (list, dict)):
        kind = type(args[0]).__name__
        return (
            f"The function was called with z and one argument, a {kind}: args is the tuple of what comes after z, "
            f"args=(first, second), and a {kind} alone is one argument"
        )
    if "positional argument" in text and re.search(r"\.(step|init)\(\)", text):
        return "A method defines step(f, z, state), which returns z and the new state; init(f, z) makes the first state"
    if "positional argument" in text and ".run()" in text:
        return "A Solver defines run(f, z0, options), which returns an implicitkit.extend.Outcome"
    if "positional argument" in text and " is called as " not in text:
        count = f"{len(args) or 'no'} argument{'s' * (len(args) != 1)}"
        one = f" (a {type(z).__name__}, one argument; lambda z, *args: f(*z, *args) unpacks it)"
        given = f"z{one if isinstance(z, (list, tuple)) else ''} and {count}"
        return f"The functions of a problem, constraints among them, are called as f(z, *args): here with {given}"
    kind = type(z).__name__
    if isinstance(z, (list, tuple)) and any(
        words in text for words in (f"'{kind}'", "sequence", f"concatenate {kind}")
    ):
        return f"z is a {kind}, as z0 was: for a vector pass z0 as a tensor, torch.tensor(z0)"
    odd = [
        f"args[{i}], {kind_of(a)}"
        for i, a in enumerate(args)
        if not isinstance(a, Tensor) and f"'{type(a).__name__}'" in text
    ]
    return f"The function was called with {' and '.join(odd)}" if odd else ""


def _of_leaves(text: str, z: Any, args: tuple[Any, ...], function: Any) -> str:
    """What the function was given, where devices, shapes or precisions do not fit."""
    if any(clause in text for clause in _DEVICES):
        return f"The function was called with {_beside(z, args, function, 'device', 'on')}: put all of them where z0 is"
    if any(clause in text for clause in _PRECISIONS):
        return (
            f"The function was called with {_beside(z, args, function, 'dtype', 'of')}: start from a z0 of the dtype that "
            "the function computes in (z0.to(dtype)), or convert the rest (module.double())"
        )
    if "returned dtype" in text and (others := _others(z, args, "dtype", "of")):
        return f"It was given {', '.join(others)}"
    if any(clause in text for clause in OF_SHAPES):
        shape = lambda t: f" {tuple(t.shape)}"  # noqa: E731
        given = describe_leaves(z, "z", shape) + describe_leaves(args, "args", shape)
        return f"The function was called with {', '.join(given)}" if given else ""
    return ""


def _beside(z: Any, args: tuple[Any, ...], function: Any, attribute: str, word: str) -> str:
    """``z0`` with an attribute of its tensors, and what has another: ``z0 of torch.float32 beside args[0] of ...``."""
    mine = ", ".join(describe_leaves(z, "z0", lambda t: f" {word} {getattr(t, attribute)}"))
    others = _others(z, args, attribute, word) + _others_held(z, function, attribute, word)
    return f"{mine} beside {', '.join(others)}" if others else mine


def _others(z: Any, args: tuple[Any, ...], attribute: str, word: str) -> list[str]:
    """Which arguments have another dtype, or device, than ``z``."""
    own = {getattr(t, attribute) for t in tree_flatten(z)[0] if isinstance(t, Tensor)}
    said = lambda t: "" if getattr(t, attribute) in own else f" {word} {getattr(t, attribute)}"  # noqa: E731
    return describe_leaves(args, "args", said)


def _others_held(z: Any, function: Any, attribute: str, word: str) -> list[str]:
    """Which tensors the function itself holds, in modules or by name, have another one than ``z``; the first three."""
    own = {getattr(t, attribute) for t in tree_flatten(z)[0] if isinstance(t, Tensor)}
    found = [
        f"parameter {name} of {type(module).__name__} {word} {getattr(t, attribute)}"
        for module in (reachable_modules(function)[0] if function is not None else [])
        for name, t in module.named_parameters()
        if t.is_floating_point() and getattr(t, attribute) not in own
    ]
    try:
        names = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function of Python, or a cell is still empty
        return found[:3]
    for name, t in {**names.globals, **names.nonlocals}.items():
        if isinstance(t, Tensor) and t.is_floating_point() and getattr(t, attribute) not in own:
            found.append(f"{name} {word} {getattr(t, attribute)}")
    return found[:3]
