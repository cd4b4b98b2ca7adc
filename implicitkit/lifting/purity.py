"""An evaluation under watch: is the function pure, one and the same map at every call?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from implicitkit.foundation import compat, pytrees, tracers
from implicitkit.foundation.errors import ImpureFunctionWarning, warn
from implicitkit.foundation.unversioned_writes import IN_PLACE, FirstCalls, version
from implicitkit.lifting.module_entries import present
from implicitkit.lifting.overlay import Constants
from implicitkit.lifting.reach import named_tensors
from implicitkit.lifting.substitution import swapped


class Impurities(Protocol):
    """What :func:`watched` notes: buffers that every evaluation updates, and whether random numbers are drawn."""

    frozen: Constants
    random: bool
    compiled: bool
    call: FirstCalls

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function."""


def watched(
    evaluate: Callable[[], Any],
    into: Impurities,
    given: Sequence[Tensor],
    states: int,
    constants: Constants,
    beside: Callable[[], Any],
) -> Any:
    """``evaluate()``, watched: in-place changes of what was ``given`` raise; random numbers, updated buffers and a state of
    the function's own warn.  ``beside()`` evaluates it at another point.

    The evaluation runs on copies of the modules' buffers; if it changed them, every later evaluation gets fresh copies
    too (the function is then one and the same map throughout, and the modules keep their statistics).
    """
    versions = [version(t) for t in given]
    device = given[0].device
    held = [] if isinstance(into.function, nn.Module) else [(n, t, version(t)) for n, t in named_tensors(into.function)]
    random = _random_state(device)

    def run() -> Any:
        if not constants:
            return evaluate(), None
        copies = [t.clone() for _, t in constants]
        made = [version(c) for c in copies]  # of inference tensors torch counts the copying, too
        with swapped([slots for slots, _ in constants], copies, 0, into.compiled):
            return evaluate(), (copies, made, [present(slots[0]) for slots, _ in constants])

    out, buffers = run()
    _refuse_written(given, versions, states)
    if buffers is not None:
        _note_buffers(into, constants, *buffers)
    if random is not None and not _same(random, device) and _draws(lambda: run()[0], out, device):
        into.random = True
        warn(
            "the function draws random numbers (dropout in training, noise): every evaluation is a different map, so "
            "there is no solution to converge to, and the derivative belongs to another draw. Call .eval() on the module, "
            "or draw the mask once outside and pass it as an argument",
            ImpureFunctionWarning,
        )
    elif written := dict.fromkeys(name for name, t, before in held if version(t) != before):
        call, into.call = into.call, FirstCalls()  # of a solve, which this one is not, the first are looked at
        with suppress(Exception):  # what it leaves of another point may only show at this one
            beside()
        into.call = call
        _note_state(written, out, evaluate())
    return out


def moved(t: Any) -> Any:
    """Another point, near enough for most functions."""
    return t + 0.01 * (1 + t.abs()) if isinstance(t, Tensor) and t.is_floating_point() else t


class _Draws(tracers.TorchDispatchMode):
    """Whether operations of this thread draw from the generator of the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.any = device, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.any or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        before = _random_state(self.device)
        out = func(*args, **(kwargs or {}))
        self.any = before is not None and not _same(before, self.device)  # attention without dropout draws nothing
        return out


def _draws(again: Callable[[], Any], out: Any, device: torch.device) -> bool:
    """Has the function drawn the random numbers that were drawn meanwhile, or another thread?  One more evaluation tells,
    by its operations (dropout of zeros changes no number) or, where they are compiled, by its numbers."""
    if threading.active_count() == 1:
        return True
    with _Draws(device) as draws:
        other = again()
    return draws.any or _differ(out, other)


def _differ(*trees: Any) -> bool:
    plain = ([compat.physical(t) for t in pytrees.tensors_in(tree)] for tree in trees)  # no vmap may be asked
    return any(not torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num()) for a, b in zip(*plain, strict=False))


def _note_state(written: Iterable[str], out: Any, again: Any) -> None:
    """Warn where a function that has written into tensors of its scope returns something else at the same point then: it
    has a state that nobody solves for (a counter, or a list of what it was given, is none)."""
    if _differ(out, again):
        warn(
            f"the function writes into {', '.join(map(repr, written))}, which it captures, and depends on what it has "
            "written: at the same point it returns something else the next time. That is a state besides z, which the solve "
            "follows blindly and of which the derivative knows nothing: make it part of z, or pass it in args and leave it",
            ImpureFunctionWarning,
        )


def _refuse_written(given: Sequence[Tensor], versions: Sequence[int], states: int) -> None:
    """Raise if the state, or an argument, was written to."""
    now = [version(t) for t in given]
    if now != versions:
        i = next(i for i, n in enumerate(now) if n != versions[i])
        what = "its state z" if i < states else f"argument tensor number {i - states}"
        raise RuntimeError(IN_PLACE.format(what=what))


def _note_buffers(
    into: Impurities, constants: Constants, copies: Sequence[Tensor], made: Sequence[int], after: Sequence[Any]
) -> None:
    """Note the buffers that the evaluation on ``copies`` updated, and warn; ``made``: how often each had been written to."""
    changed = [
        (slots, t.detach().clone())
        for (slots, t), copy, version_made, now in zip(constants, copies, made, after, strict=True)
        if _changed(t, copy, version_made) or _rebound(t, copy, now)
    ]
    if changed:
        into.frozen = changed
        warn(
            f"the function updates {len(changed)} buffer(s) of its modules at every evaluation: {_owners(changed)} "
            "(BatchNorm in training, spectral normalisation, ...). During this solve they are held at their present values "
            "and not updated; call .eval() on those modules, use a normalisation without running statistics (GroupNorm, "
            "LayerNorm), or update them once outside the solve",
            ImpureFunctionWarning,
        )


def _rebound(t: Tensor, copy: Tensor, now: Any) -> bool:
    """Was another tensor put in the copy's place, with other values?  (Of another shape it is a cache, made once.)"""
    if now is copy or not isinstance(now, Tensor) or now.layout != torch.strided or compat.tracked(now):
        return False
    return now.shape == t.shape and now.dtype == t.dtype and not torch.equal(now, t)


def _owners(changed: Constants) -> str:
    """The modules' classes and the names of their buffers, three modules at most."""
    names: dict[int, tuple[str, list[str]]] = {}
    for slots, _ in changed:
        module, _, key = slots[0]
        names.setdefault(id(module), (type(module).__name__, []))[1].append(key)
    told = [f"{', '.join(keys)} of {owner}" for owner, keys in names.values()]
    return "; ".join([*told[:3], *(["..."] if len(told) > 3 else [])])


def _changed(t: Tensor, copy: Tensor, made: int) -> bool:
    """Was the copy written to?  (Fused normalisation kernels do not raise the version counter.)"""
    if t.layout != torch.strided:  # sparse tensors cannot be compared, and no normalisation writes to them
        return version(copy) > made
    return version(copy) > made or not torch.equal(t, copy)


def _same(state: Tensor, device: torch.device) -> bool:
    now = _random_state(device)
    return now is not None and torch.equal(state, now)


def _random_state(device: torch.device) -> Tensor | None:
    if device.type == "cpu":
        return torch.default_generator.get_state().view(torch.int64)  # fewer numbers to compare
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return None
