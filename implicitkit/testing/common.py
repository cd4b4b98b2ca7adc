"""Checks of every noun: what a part does to the process around it, to what it is given, and to itself.

A subject has an ``example()``, the tensor that one use of the part depends on, and ``act(example)``, the plain tensor that
comes of it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import inspect
import io
import os
import pickle
import random
import tempfile
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from implicitkit.foundation.pytrees import tree_flatten
from implicitkit.foundation.wording import place_of
from implicitkit.testing.check import Suite

_ROUNDING = 1e-11  # of the size of an answer: sums follow the memory's alignment
_DEEP = 12  # containers in containers that are looked into
_MAKERS = (
    torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.arange, torch.linspace, torch.rand, torch.randn,
    torch.randint, torch.randperm, torch.tensor, torch.as_tensor,
)  # fmt: skip
_MOVES = (Tensor.to, Tensor.type_as, torch.tensor, torch.as_tensor)
_ACROSS = (*_MOVES, Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__)  # which torch does from device to device
_CONTAINERS = (list, dict, set, collections.deque, Tensor, np.ndarray)


def add_common_checks(suite: Suite, among: Callable[[Any], bool] = lambda part: True) -> None:
    """Give a suite the checks that hold for every noun, but those that it has of its own; ``among``: of which parts."""
    for mend, run, applies in _COMMON:
        if run.__name__ not in suite.checks:
            suite.check(mend, lambda part, applies=applies: among(part) and applies(part))(run)  # type: ignore[misc]


def _always(part: Any) -> bool:
    return True


def is_deterministic(subject: Any) -> None:
    """A second use has the same answer but for rounding, and what it was given is as it was."""
    given = subject.example()
    kept, version = given.clone(), given._version
    first = subject.act(given)
    wanted = first.clone()
    subject.act(0.9 * given.detach())
    assert torch.equal(first, wanted), "a later use changed an earlier answer"
    second = subject.act(given)
    assert torch.equal(given, kept) and given._version == version, "what it was given was written to"
    wrong = float((second - wanted).abs().max())
    assert wrong <= _ROUNDING * (1 + float(wanted.abs().max())), f"the same use once more differs by {wrong:.3g}"


def copies_and_pickles(subject: Any) -> None:
    """``copy.deepcopy`` and ``pickle`` keep the configured part, and what comes of it."""
    given = subject.example()
    wanted = subject.act(given)
    clones: list[Callable[[Any], Any]] = [copy.deepcopy]
    if "<locals>" not in getattr(subject.part, "find", type(subject.part)).__qualname__:
        clones.append(lambda part: pickle.loads(pickle.dumps(part)))
    for clone in clones:
        try:
            part = clone(subject.part)
        except Exception as error:
            raise AssertionError(f"a copy raises {type(error).__name__}: {error}") from error
        wrong = float((replace(subject, part=part).act(given) - wanted).abs().max())
        assert wrong <= _ROUNDING * (1 + float(wanted.abs().max())), f"a copy's answer differs by {wrong:.3g}"


def leaves_the_process_alone(subject: Any) -> None:
    """A part moves no global random generator, changes no setting of torch, NumPy or Python's warnings, and prints
    nothing."""
    given = subject.example()
    kept = torch.get_default_dtype(), torch.get_rng_state(), random.getstate(), np.random.get_state()
    subject.act(given)  # what is imported at the first use may set what it likes
    rounds: tuple[tuple[torch.dtype, int, Any], ...] = ((torch.float32, 1, "warn"), (torch.float64, 2, "ignore"))
    try:
        for dtype, seed, errors in rounds:  # whatever it would set itself
            torch.set_default_dtype(dtype)
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)
            with np.errstate(all=errors), warnings.catch_warnings(record=True):
                warnings.resetwarnings()
                before = _process()
                with _printed() as text:
                    subject.act(given)
                after = _process()
            changed = [name for name, value in after.items() if value != before[name]]
            assert not changed, f"a use of it has changed {' and '.join(changed)}"
            assert not text, f"it prints: {text[0].strip()[:60]!r}"
    finally:
        torch.set_default_dtype(kept[0])
        torch.set_rng_state(kept[1])
        random.setstate(kept[2])
        np.random.set_state(kept[3])


def _process() -> dict[str, Any]:
    """What a process has but one of."""
    states = {"Python": random.getstate(), "NumPy": np.random.get_state()}
    generators = {"torch": torch.get_rng_state().numpy().tobytes()} | {k: pickle.dumps(s) for k, s in states.items()}
    return {f"the global generator of {name}": state for name, state in generators.items()} | {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's choice of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "NumPy's handling of floating-point errors": np.geterr(),
        "the filters of warnings": list(warnings.filters),
        "the working directory": os.getcwd(),
        "the environment": dict(os.environ),
    }


@contextlib.contextmanager
def _printed() -> Iterator[list[str]]:
    """What is written to standard output and standard error inside, by Python and by the process (a library, a program that
    is run)."""
    text: list[str] = []
    with contextlib.ExitStack() as inside:
        python = io.StringIO()
        inside.enter_context(contextlib.redirect_stdout(python))
        inside.enter_context(contextlib.redirect_stderr(python))
        files = [inside.enter_context(_into_a_file(number)) for number in (1, 2)]
        yield text
        for file in files:
            file.seek(0)
        text += [t for t in (python.getvalue(), *(f.read().decode(errors="replace") for f in files)) if t]


@contextlib.contextmanager
def _into_a_file(number: int) -> Iterator[Any]:
    """Inside, what the process writes to this descriptor goes into a file."""
    with tempfile.TemporaryFile() as file:
        try:
            usual = os.dup(number)
        except OSError:  # there is none
            yield file
            return
        os.dup2(file.fileno(), number)
        try:
            yield file
        finally:
            os.dup2(usual, number)
            os.close(usual)


class _Elsewhere(TorchFunctionMode):
    """What is made without a device is on another than everything else is, as on a machine with an accelerator: it meets
    nothing but single numbers, until it is moved there (``.to(z)``); it may say which rows are meant."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        apart = [getattr(x, "elsewhere", False) for x in tensors]
        if len({a for a, x in zip(apart, tensors, strict=True) if x.ndim}) > 1 and func not in _ACROSS:
            raise RuntimeError(f"{getattr(func, '__name__', func)} of tensors on two devices")
        made = func(*args, **kwargs)
        if func in _MOVES and any(isinstance(x, (str, torch.device, Tensor)) for x in (*args[1:], *kwargs.values())):
            return made.clone() if any(apart) else made
        alone = func in _MAKERS and kwargs.get("device") is None and not (args and isinstance(args[0], Tensor))
        if alone or (tensors and all(apart)):
            for x in tree_flatten(made)[0]:
                if isinstance(x, Tensor):
                    x.elsewhere = True  # type: ignore[attr-defined]
        return made


def names_a_device(subject: Any) -> None:
    """Where tensors that are made without a device are on another than ``z`` is, the answer is what it was."""
    given = subject.example()
    wanted = subject.act(given).clone()
    try:
        with _Elsewhere():
            got = subject.act(given)
        wrong = float((got - wanted).abs().max())
    except Exception as error:
        where = place_of(error)
        raise AssertionError(f"a tensor made without a device meets one that has its own: {error} ({where})") from error
    assert wrong <= _ROUNDING * (1 + float(wanted.abs().max())), f"with tensors elsewhere it differs by {wrong:.3g}"


def keeps_nothing_alive(subject: Any) -> None:
    """What it was given is freed once its answer is."""
    given = subject.example()
    gone = weakref.ref(given)
    subject.act(given)
    del given
    if gone() is not None:  # a cycle is no fault
        gc.collect()
    assert gone() is None, "after a use of it, and without its answer, something holds what it was given"


def grows_no_state(subject: Any) -> None:
    """What the part, its class and its module hold is no more after many uses than after a few."""
    given = subject.example()
    sizes = []
    for _ in range(4):
        subject.act(given)
        sizes.append(_held_by(subject.part))
    growing = [name for name in sizes[-1] if sizes[1].get(name, 0) < sizes[2].get(name, 0) < sizes[3][name]]
    assert not growing, f"{' and '.join(growing)} grows with every use of it"


def _held_by(part: Any) -> dict[str, int]:
    """How much lies in what a part keeps, by where: entries of containers, numbers of tensors, results of caches."""
    own = getattr(part, "__dict__", {})
    places = {f"self.{name}": value for name, value in own.items()}
    modules: dict[str, dict[str, Any]] = {}
    functions = [value for value in own.values() if isinstance(value, types.FunctionType)]
    for cls in type(part).__mro__[:-1]:
        places |= {f"{cls.__name__}.{name}": value for name, value in vars(cls).items() if name[:2] != "__"}
        functions += [value for value in vars(cls).values() if isinstance(value, types.FunctionType)]
    for function in functions:
        modules[function.__module__] = function.__globals__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        places |= {f"{name}, captured by {function.__name__}": cell.cell_contents for name, cell in cells}
        places[f"a default of {function.__name__}"] = function.__defaults__, function.__kwdefaults__
        places |= {f"{function.__name__}.{name}": value for name, value in vars(function).items()}
    for module, names in modules.items():
        kept = {k: v for k, v in names.items() if isinstance(v, _CONTAINERS) or hasattr(v, "cache_info")}
        places |= {f"{module}.{name}": value for name, value in kept.items() if name[:2] != "__"}
    return {name: _size(value, set(), _DEEP) for name, value in places.items()}


def _size(value: Any, seen: set[int], deep: int) -> int:
    if id(value) in seen or deep == 0:
        return 0
    seen.add(id(value))
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    if hasattr(value, "cache_info"):
        return int(value.cache_info().currsize)
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return 0
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = list(value.values())
    elif hasattr(value, "__len__") and hasattr(value, "__iter__"):
        inside = list(value)
    elif hasattr(value, "__dict__"):
        inside = list(vars(value).values())
    return len(inside) + sum(_size(v, seen, deep - 1) for v in inside)


def _is_no_black_box(part: Any) -> bool:
    """Whether its tensors meet those of a solve: a black box may use any device, its point is fetched."""
    return not hasattr(part, "find") or not hasattr(part, "batch")


def _takes_any_option(part: Any) -> bool:
    parameters = inspect.signature(getattr(part, "find", type(part))).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def refuses_unknown_options(subject: Any) -> None:
    """An option that does not exist is refused, when it is given or at the first use."""
    part = subject.part
    try:
        if hasattr(part, "find") and isinstance(getattr(part, "options", None), tuple):  # a black box
            other = replace(part, options=(*part.options, ("no_such_option", 1)))
        else:
            other = type(part)(no_such_option=1)
        replace(subject, part=other).act(subject.example())
    except (TypeError, ValueError):
        return
    raise AssertionError("the option no_such_option=1 is accepted")


_COMMON: tuple[tuple[str, Callable[[Any], None], Callable[[Any], bool]], ...] = (
    (
        "Keep no state between uses, draw no random numbers without a fixed generator, and write into nothing that is given "
        "or that was returned before: make new tensors.",
        is_deterministic,
        _always,
    ),
    ("Make it a (frozen) dataclass at module level, with plain values as options.", copies_and_pickles, _always),
    (
        "Leave the process as it was: draw from a torch.Generator of your own with a fixed seed, never from the global one, "
        "set no default dtype, print nothing (disp=False; messages go into what is returned), and anything else (threads, "
        "warnings, np.errstate) for a while only, by its context manager.",
        leaves_the_process_alone,
        _always,
    ),
    (
        "Say where a tensor is made, z.new_zeros(...), torch.zeros_like(z) or device=z.device: on a machine with an "
        "accelerator it is elsewhere.",
        names_a_device,
        _is_no_black_box,
    ),
    (
        "Keep what comes in no longer than the use of it: not on self, not in a global list, not in a cache.",
        keeps_nothing_alive,
        _always,
    ),
    (
        "Keep histories, caches and counters in what is returned, or bound them (functools.lru_cache(maxsize=...)): a "
        "training uses it a million times.",
        grows_no_state,
        _always,
    ),
    (
        "Name the options: **options, where nobody looks at them, takes every misspelt one for its own.",
        refuses_unknown_options,
        _takes_any_option,
    ),
)
