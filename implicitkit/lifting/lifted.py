"""From a user's function to a pure function of explicit tensors.

The primitive that carries derivatives (``primitive.py``) takes explicit tensors only: whatever a function captures
would be a constant to it, silently.  :func:`lift` finds what the function uses besides its arguments and makes it an
argument:

1. parameters and buffers of every ``nn.Module`` within reach (the function itself, closure cells, ``partial``, bound
   objects, referenced globals, containers): swapped into the module during each evaluation, so that a later evaluation
   sees the tensors of *this* call; other threads do not see them (``overlay.py``), unless the module is compiled;
2. any other tensor, found by running the function once under a ``TorchFunctionMode`` and substituted by identity at
   every torch operation from then on.

Then one evaluation on detached stand-ins must come out untracked at every autograd and ``torch.func`` level.  If it
does not, something differentiable is used in a way that nothing here can see, and :class:`CapturedTensorError` is
raised rather than a derivative lost.  In the common case that one evaluation is all lifting costs, and it is not lost
either: it is the solver's first.  A function that branches on values may use other tensors at the solution than at the
start: :func:`check_leaves` finds them when a derivative is taken, :func:`check_solution` where none would be.

What nobody can see: a tensor turned into a number before (``float(w)``, ``w.numpy()``), or detached.  One that the function
itself turns into a number is found, and the derivative says so (``rule/hidden_dependence.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.foundation import compat
from implicitkit.foundation.errors import CapturedTensorError
from implicitkit.foundation.trees import tree_flatten, tree_map, tree_unflatten
from implicitkit.foundation.unversioned_writes import FirstCalls
from implicitkit.foundation.wording import DRAWN, ELSEWHERE, KEPT, UNSEEN
from implicitkit.lifting.inference import Ordinary
from implicitkit.lifting.late_binding import Bindings
from implicitkit.lifting.module_entries import Entries, Rest, differentiated, explicit, has_lazy, to_lift
from implicitkit.lifting.overlay import Constants, Slot
from implicitkit.lifting.purity import moved, watched
from implicitkit.lifting.reach import below, can_keep, holds_compiled, modules_in_use, reachable_modules
from implicitkit.lifting.recomputing import Recomputing, surroundings
from implicitkit.lifting.refill import refilled
from implicitkit.lifting.stand_ins import is_marked, plainly, stand_ins
from implicitkit.lifting.substitution import Substitute, SubstituteWithin, resolve, substitutions, swapped, used
from implicitkit.lifting.watch import Called, Discover, Looks, graph_leaves, leaks, memory
from implicitkit.lifting.work import Work


@dataclass
class Lifted:
    """A function whose tensors are all explicit: ``lifted(z, theta)`` equals ``function(z, *args)``.

    Attributes:
        theta: the tensors: first those of ``args``, then those of modules, then other captured ones.
        from_args: how many of them come from ``args``.
        guarded: modules are within reach, and no solve on another thread may swap their tensors during an evaluation.
        compiled: one of them is compiled: its modules' tensors are swapped for all threads.
        as_torch: whatever the values are, it does nothing that :mod:`~implicitkit.foundation.faithful` would do otherwise.
        recomputed: parts of it are computed once more in a backward (activation checkpoints); ``None``: nobody knows.
        constants: what takes the place of captured tensors that are not tracked, by their identity. live: the captured
            tensors are plain ones, so that an evaluation on the spot may use the function as it is.
        branches: the function looked at values, and may use other tensors elsewhere, which no linearisation would show.
        numbers: which of theta are tracked, if the function makes numbers of tensors; else none. inside: lifted inside the
            evaluation of another that has put stand-ins in the place of what it captures.
        probe: the output of the first evaluation at ``z0`` and ``args``, if pure and made on plain tensors; else ``None``.
        random: it draws random numbers. within: it gives what it captures to transforms that it begins.
        failed: why matrices of samples have no factors. cut: an evaluation since its reset
            gave nothing tracked. sparse, kinked: it meets torch's sparse matrices, operations with kinks. rest: what else
            modules hold. bindings: what variables were. call, work: of it.
    """

    function: Callable[..., Any]
    theta: tuple[Tensor, ...]
    from_args: int
    rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]]
    slots: list[list[Slot]] = field(default_factory=list)
    captured: list[Tensor] = field(default_factory=list)
    frozen: list[tuple[list[Slot], Tensor]] = field(default_factory=list)
    rest: Rest = field(default_factory=Rest)
    constants: dict[int, Tensor] = field(default_factory=dict)
    live: bool = True
    guarded: bool = False
    compiled: bool = False
    as_torch: bool = False
    recomputed: bool | None = False
    branches: bool = False
    numbers: Sequence[int] = ()
    inside: bool = False
    probe: Any = None
    random: bool = False
    failed: str = ""
    within: bool = False
    cut: bool = False
    sparse: bool = False
    kinked: bool = False
    spectral: bool = False
    bindings: Bindings | None = None
    work: Work = field(default_factory=Work)
    call: FirstCalls = field(default_factory=functools.partial(FirstCalls, Ordinary))

    def found(self) -> None:
        """The solution was found: what has been bound anew by now the function binds itself."""
        if self.bindings is not None:
            self.bindings.forget_changed()

    def as_found(self) -> None:
        """From now on the function reads variables, attributes and entries of containers as they were at the solve."""
        if self.bindings is not None:
            self.function = self.bindings.restored() or self.function
            self.rest.as_before = self.bindings.in_modules

    def __call__(self, z: Any, theta: Sequence[Tensor]) -> Any:
        if not self.guarded:
            return self._evaluate(z, theta)
        with modules_in_use.lock:
            return self._evaluate(z, theta)

    def _evaluate(self, z: Any, theta: Sequence[Tensor]) -> Any:
        k, m = self.from_args, self.from_args + len(self.slots)
        args = self.rebuild(theta[:k])
        fresh = self.rest.moved()
        if self.frozen:  # buffers that the function updates: each evaluation starts from a fresh copy
            fresh += [(places, t.clone()) for places, t in self.frozen]
        by_name = {**dict(zip(map(id, self.captured), theta[m:], strict=True)), **self.constants}
        if not (self.slots or by_name or fresh or self._recomputes()):
            return self.call(self.function, z, args)
        slots, tensors = self.slots, theta[k:m]
        if fresh:
            slots, tensors = [*slots, *[places for places, _ in fresh]], [*tensors, *[t for _, t in fresh]]
        if self._recomputes():
            inside = lambda: surroundings(self, slots, tensors, theta[m:])  # noqa: E731
            with inside(), Recomputing(inside):
                return self.call(self.function, z, args)
        in_modules = swapped(slots, tensors, len(self.slots), self.compiled) if slots else contextlib.nullcontext()
        if not by_name:
            with in_modules:
                return self.call(self.function, z, args)
        with in_modules, self.substitute(by_name):
            return _each(resolve, self.call(self.function, z, args))  # what is returned as it is no operation has shown

    def substitute(self, by_name: dict[int, Tensor]) -> Substitute:
        """A context in which operations get these in the place of what the function captures."""
        return SubstituteWithin(by_name) if self.within else Substitute(by_name)

    def _recomputes(self) -> bool:
        """May parts of the function be computed once more in a backward, and be others then?"""
        return self.recomputed or (self.recomputed is None and not self.as_torch and torch.is_grad_enabled())

    def on_the_spot(self, z: Any, theta: Sequence[Tensor]) -> Any:
        """The value of :meth:`__call__` during the call that lifted, where the modules still hold their tensors."""
        if not self.live or self._recomputes():
            return self(z, theta)
        args = self.rebuild(theta[: self.from_args])
        if not self.guarded:
            return self.call(self.function, z, args)
        with modules_in_use.lock:
            return self.call(self.function, z, args)


def lift(function: Callable[..., Any], z0: Any, args: tuple[Any, ...], check: Callable[[Any], None]) -> Lifted:
    """Make every tensor that ``function(z, *args)`` uses explicit.

    Args:
        function: the user's function or module. z0: a state. args: the arguments after it, pytrees of anything.
        check: raises unless the function's output has the right form.

    Raises:
        CapturedTensorError: a derivative would be lost.
        RuntimeError: the function changes ``z`` or an argument in place.
    """
    rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]]
    if all([isinstance(arg, Tensor) for arg in args]):
        theta, rebuild = args, tuple
        if True in map(Tensor.is_inference, args):
            theta = tuple(map(compat.ordinary, args))
    else:
        theta = tuple([compat.ordinary(leaf) for leaf in tree_flatten(args)[0] if isinstance(leaf, Tensor)])
        rebuild = refilled(args)
    inside = any(substitutions())
    if inside:
        theta = tuple(map(used, theta))
    transforms, needed = compat.transforms_active(), torch.is_grad_enabled()
    levels = transforms or compat.has_forward_level()
    lifted = Lifted(function, theta, len(theta), rebuild, inside=inside)
    modules, lifted.compiled = reachable_modules(function)
    lifted.guarded = bool(modules)
    if not modules:
        _lift(lifted, modules, z0, check, needed, levels)
        return lifted
    with modules_in_use.lock:
        try:
            _lift(lifted, modules, z0, check, needed, levels)
        except ValueError:  # torch's, of a lazy module, which has no parameters before it is called
            if transforms or not any(map(has_lazy, modules)):  # inside a transform it would get ones that end with it
                raise
            with torch.no_grad():
                function(z0, *args)
            return lift(function, z0, args, check)
    return lifted


def lift_closed(function: Callable[..., Any], args: tuple[Tensor, ...]) -> Lifted:
    """:func:`lift` for a function of tensors that is known to use nothing but its arguments: nothing is evaluated."""
    return Lifted(function, tuple(map(used, args)), len(args), tuple)


def _lift(
    lifted: Lifted, modules: list[nn.Module], z0: Any, check: Callable[[Any], None], needed: bool, levels: bool
) -> None:
    """Find what the function uses, by looking at modules and by evaluating once, twice or three times."""
    constants = _lift_modules(lifted, modules, needed or levels)
    if needed or levels:
        lifted.bindings = Bindings(lifted.function, lifted.rest.modules(), constants)
    z_leaves, z_spec = tree_flatten(z0)
    z = tree_unflatten([plainly(resolve(t), levels) for t in z_leaves], z_spec)
    branch = levels or (needed and (lifted.inside or not any(map(explicit, lifted.theta))))
    looks = Looks() if branch or not lifted.compiled else None
    with compat.own_graphs():  # how often a function is looked at depends on what is known of it
        if levels or (needed and lifted.inside):
            with torch.enable_grad():
                out = _lift_observed(lifted, modules, z, constants, looks, levels)
        else:
            out = _lift_plainly(lifted, modules, z, constants, looks, needed)
    check(out)
    lifted.rest.note(lifted.frozen)
    if looks is not None:
        lifted.branches = branch and looks.seen and (levels or lifted.inside or not lifted.captured)
        lifted.work, lifted.as_torch = looks.tally.work(), not (looks.seen or looks.rewritten)
        tally = looks.tally
        lifted.sparse, lifted.kinked, lifted.spectral = tally.sparse, tally.kinked, tally.spectral
        lifted.recomputed = looks.recomputed if needed or levels else None  # without gradients there are no checkpoints
        lifted.numbers = [i for i, t in enumerate(lifted.theta) if differentiated(t)] if looks.numbers else []
    if not levels and not lifted.frozen:
        lifted.probe = _each(Tensor.detach, out)
    # inside another's substitution nothing holds on the spot: torch suspends it in operations that call back
    lifted.live = (
        not lifted.frozen
        and not lifted.inside
        and not any(map(compat.is_wrapped, lifted.theta[lifted.from_args :]))
        and not (levels and any(map(compat.has_tangent, lifted.theta[lifted.from_args :])))
    )


def _lift_plainly(
    lifted: Lifted, modules: list[nn.Module], z: Any, constants: Constants, looks: Looks | None, needed: bool
) -> Any:
    """One evaluation on stand-ins: only if its graph leads anywhere else, the function is observed."""
    marks = explicit if needed and can_keep(lifted.function, modules) else None
    plain = stand_ins(lifted.theta, levels=False, marked=marks)
    out = _first_evaluation(lifted, z, plain, constants, looks)
    known = set(map(id, plain))
    if needed and ((looks and looks.outside) or not known.issuperset(map(id, graph_leaves(out)))):
        seen, called = Discover([*tree_flatten(z)[0], *plain]), Called()
        with torch.no_grad(), called, seen:
            _each(Tensor.detach, lifted(z, plain))
        _adopt(lifted, modules, seen, called)
        plain = stand_ins(lifted.theta, levels=False)
        out = lifted(z, plain)
        _refuse_leaks(lifted, z, plain, out, levels=False)
    return out


def _lift_observed(
    lifted: Lifted, modules: list[nn.Module], z: Any, constants: Constants, looks: Looks | None, levels: bool
) -> Any:
    """Two evaluations under observation: inside transforms no output shows, at an inner level, what outer ones track."""
    given, called = tree_flatten(z)[0], Called()
    for which in (explicit, differentiated):
        plain = stand_ins(lifted.theta, levels, marked=which)
        first = Discover([*given, *plain])
        try:
            with called, first:
                _each(Tensor.detach, _first_evaluation(lifted, z, plain, constants, looks))
            break
        except RuntimeError as error:  # torch's, of statistics that are batched only, and must not be tracked
            if which is not explicit or _NO_DERIVATIVE not in str(error):
                raise
    _adopt(lifted, modules, first, called)
    plain = stand_ins(lifted.theta, levels)
    again = Discover([*given, *plain])
    with again:
        out = lifted(z, plain)
    kept = [t for key, t in again.found.items() if key in first.made]
    if leaks(kept) or any(is_marked(t) for t in graph_leaves(list(map(compat.physical, kept)))):
        raise CapturedTensorError(KEPT)
    _refuse_leaks(lifted, z, plain, out, levels)
    return out


def _first_evaluation(
    lifted: Lifted, z: Any, plain: Sequence[Tensor], constants: Constants, looks: Looks | None
) -> Any:
    leaves = tree_flatten(z)[0]
    given = [*leaves, *plain[: lifted.from_args]]

    def evaluate() -> Any:  # whose lock is held
        with contextlib.nullcontext() if looks is None else looks:
            return lifted._evaluate(z, plain)

    beside = lambda: lifted._evaluate(tree_map(moved, z), plain)  # noqa: E731
    return watched(evaluate, lifted, given, len(leaves), constants, beside)


def _refuse_leaks(lifted: Lifted, z: Any, plain: Sequence[Tensor], out: Any, levels: bool, why: str = "") -> None:
    """Raise if the output on stand-ins of everything explicit is tracked."""
    if not leaks(out) or not (levels or not _tracks_state_only(lifted, z, plain)):
        return
    kept = any(is_marked(t) for t in graph_leaves(out))
    raise CapturedTensorError(KEPT if kept else why or (DRAWN if lifted.random and levels else UNSEEN))


def check_leaves(out: Tensor, known: Sequence[Tensor], z: Tensor, nodes: Sequence[Any] | None = None) -> None:
    """Raise :class:`CapturedTensorError` if a linearisation at ``z`` depends on more than ``z`` and what is known.
    ``nodes``: of its graph, where they are known."""
    point, ids = memory(z), set(map(id, known))
    foreign = [t for t in graph_leaves(out, nodes) if id(t) not in ids and memory(t) != point]
    if foreign:
        raise CapturedTensorError(KEPT if any(is_marked(t) for t in foreign) else ELSEWHERE)


def check_solution(lifted: Lifted, z: Any) -> None:
    """Raise :class:`CapturedTensorError` if the function, at ``z``, uses something differentiable that is not in theta."""
    levels = compat.transforms_active() or compat.has_forward_level()
    leaves, spec = tree_flatten(z)
    point = tree_unflatten([compat.plain_sample(t) for t in leaves], spec)
    plain = [compat.plain_sample(t) for t in lifted.theta]
    with torch.enable_grad():
        if not levels:
            _refuse_leaks(lifted, point, plain, lifted(point, plain), levels, ELSEWHERE)
            return
        with Discover([*tree_flatten(point)[0], *plain]) as seen:
            out = lifted(point, plain)
        if any(_tells(resolve(t)) for t in seen.found.values()):
            raise CapturedTensorError(ELSEWHERE)
        _refuse_leaks(lifted, point, plain, out, levels, ELSEWHERE)


def _tells(t: Tensor) -> bool:
    """Has a tensor a derivative or a batch to lose?  Inside ``torch.func.grad`` numbers that the function has from elsewhere
    (``torch.from_numpy``) are wrapped like all else, and have neither."""
    return differentiated(t) or bool(compat.batches_in_front(t)[1])


_NO_DERIVATIVE = "is not differentiable with respect to argument"


def _each(change: Callable[[Tensor], Tensor], out: Any) -> Any:
    """``change`` of each tensor of what a function returned."""
    if isinstance(out, Tensor):
        return change(out)
    return tree_map(lambda x: change(x) if isinstance(x, Tensor) else x, out)


def _lift_modules(lifted: Lifted, modules: Sequence[nn.Module], arguments: bool) -> Constants:
    """Parameters and buffers of ``modules`` to ``lifted``; returns the other buffers (they may be updated)."""
    found = Entries.of(modules, arguments, lifted.inside)
    lifted.theta = (*lifted.theta, *[resolve(t) if lifted.inside else t for _, t in found.arguments])
    lifted.slots = [slots for slots, _ in found.arguments]
    lifted.rest = Rest(found.rest)
    return found.constants


def _adopt(lifted: Lifted, modules: list[nn.Module], seen: Discover, called: Called) -> None:
    """Make explicit what an evaluation under observation used, and modules that only their call reveals."""
    inside = {id(m) for module in modules for m in below(module)}
    hidden = [m for key, m in called.modules.items() if key not in inside]
    if hidden:
        lifted.guarded, lifted.compiled = True, lifted.compiled or holds_compiled(hidden)
        known = {id(t) for t in lifted.theta}
        extra = Lifted(lifted.function, (), 0, lifted.rebuild, inside=lifted.inside)
        _lift_modules(extra, hidden, True)
        lifted.rest.slots += extra.rest.slots
        if lifted.bindings is not None:
            lifted.bindings.follow(extra.rest.modules())
        fresh = [(t, s) for t, s in zip(extra.theta, extra.slots, strict=True) if id(t) not in known]
        lifted.theta = (*lifted.theta, *(t for t, _ in fresh))
        lifted.slots = [*lifted.slots, *(s for _, s in fresh)]
    # one that is an argument as well, or a module's own (by functional_call), is substituted where it is captured, too
    lifted.captured, lifted.within = [t for t in seen.found.values() if to_lift(t, lifted.inside)], seen.within
    lifted.theta = (*lifted.theta, *(resolve(t) for t in lifted.captured))


def _tracks_state_only(lifted: Lifted, z: Any, plain: Sequence[Tensor]) -> bool:
    """Does a tracked state explain why the output is tracked?

    A function that differentiates (the gradient of an energy, by ``torch.autograd.grad``) makes a leaf of a state that is
    not tracked, and its output then depends on that leaf: nothing is lost if it takes a tracked state as it is.
    """
    z_leaves, spec = tree_flatten(z)
    leaves = [t.detach().requires_grad_() for t in z_leaves]
    out = lifted(tree_unflatten(leaves, spec), plain)
    return {id(t) for t in graph_leaves(out)} <= {id(t) for t in leaves}
