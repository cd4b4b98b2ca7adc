"""From a user's function to a pure function of explicit tensors.

The primitive that carries derivatives (``primitive.py``) takes explicit tensors only: whatever a function captures
would be a constant to it, silently.  :func:`lift` finds what the function uses besides its arguments and makes it an
argument:

1. parameters and buffers of every ``nn.Module`` within reach (the function itself, closure cells, ``partial``, bound
   objects, referenced globals, containers): swapped into the module during each evaluation, as
   ``torch.func.functional_call`` does, so that a later evaluation sees the tensors of *this* call;
2. any other tensor, found by running the function once under a ``TorchFunctionMode`` and substituted by identity at
   every torch operation from then on.

Then one evaluation on detached stand-ins must come out untracked at every autograd and ``torch.func`` level.  If it
does not, something differentiable is used in a way that nothing here can see, and :class:`CapturedTensorError` is
raised rather than a derivative lost.  In the common case that one evaluation is all lifting costs, and it is not lost
either: it is the solver's first.  A function that branches on values may use other tensors at the solution than at the
start: :func:`check_leaves` finds them when a derivative is taken, :func:`check_solution` where none would be.

What nobody can see: a tensor turned into a number before (``float(w)``, ``w.numpy()``), or detached.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from implicitkit import compat
from implicitkit.errors import CapturedTensorError
from implicitkit.lifting.reach import modules_in_use, reachable_modules
from implicitkit.lifting.watch import (
    Discover,
    Looks,
    Slot,
    Substitute,
    graph_leaves,
    leaks,
    purity,
    resolve,
    substitutions,
    swapped,
)
from implicitkit.trees import tree_flatten, tree_unflatten

__all__ = ["Lifted", "check_leaves", "check_solution", "lift", "lift_closed"]


@dataclass
class Lifted:
    """A function whose tensors are all explicit: ``lifted(z, theta)`` equals ``function(z, *args)``.

    Attributes:
        theta: the tensors: first those of ``args``, then those of modules, then other captured ones.
        from_args: how many of them come from ``args``.
        guarded: modules are within reach, and no other thread may swap their tensors during an evaluation.
        live: the captured tensors are plain ones, so that an evaluation on the spot may use the function as it is.
        branches: the function looked at values, and may use other tensors elsewhere, which no linearisation would show.
        inside: lifted inside the evaluation of another: what it captures may have been that one's constant.
        probe: the output of the first evaluation at the very ``z0`` and ``args``, if it was made on plain tensors and
            the function is pure; else ``None``.
    """

    function: Callable[..., Any]
    theta: tuple[Tensor, ...]
    from_args: int
    rebuild: Callable[[Sequence[Tensor]], tuple[Any, ...]]
    slots: list[list[Slot]] = field(default_factory=list)
    captured: list[Tensor] = field(default_factory=list)
    frozen: list[tuple[list[Slot], Tensor]] = field(default_factory=list)
    live: bool = True
    guarded: bool = False
    branches: bool = False
    inside: bool = False
    probe: Any = None

    def __call__(self, z: Any, theta: Sequence[Tensor]) -> Any:
        if not self.guarded:
            return self._evaluate(z, theta)
        with modules_in_use:
            return self._evaluate(z, theta)

    def _evaluate(self, z: Any, theta: Sequence[Tensor]) -> Any:
        k, m = self.from_args, self.from_args + len(self.slots)
        args = self.rebuild(theta[:k])
        if not (self.slots or self.captured or self.frozen):
            return self.function(z, *args)
        with contextlib.ExitStack() as stack:
            if self.slots or self.frozen:  # buffers that the function updates: each evaluation starts from a fresh copy
                slots = [*self.slots, *(places for places, _ in self.frozen)]
                stack.enter_context(swapped(slots, [*theta[k:m], *(t.clone() for _, t in self.frozen)]))
            if self.captured:
                mapping = dict(zip(map(id, self.captured), theta[m:], strict=True))
                stack.enter_context(Substitute(mapping))
            return self.function(z, *args)

    def on_the_spot(self, z: Any, theta: Sequence[Tensor]) -> Any:
        """The same value during the call that lifted, where the modules still hold their tensors."""
        if not self.live:
            return self(z, theta)
        args = self.rebuild(theta[: self.from_args])
        if not self.guarded:
            return self.function(z, *args)
        with modules_in_use:
            return self.function(z, *args)


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
    if all(isinstance(arg, Tensor) for arg in args):
        leaves, where, rebuild = list(args), list(range(len(args))), tuple
    else:
        leaves, spec = tree_flatten(args)
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def rebuild(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
            full = list(leaves)
            for i, t in zip(where, tensors, strict=True):
                full[i] = t
            return tree_unflatten(full, spec)

    theta = [resolve(leaves[i]) for i in where]
    transforms, needed = compat.transforms_active(), torch.is_grad_enabled()
    levels = transforms or compat.has_forward_level()
    lifted = Lifted(function, tuple(theta), len(theta), rebuild, inside=bool(substitutions()))
    modules = reachable_modules(function)
    lifted.guarded = bool(modules)
    with modules_in_use if modules else contextlib.nullcontext():
        _lift(lifted, modules, z0, check, needed, levels)
    return lifted


def lift_closed(function: Callable[..., Any], args: tuple[Tensor, ...]) -> Lifted:
    """:func:`lift` for a function of tensors that is known to use nothing but its arguments: nothing is evaluated."""
    return Lifted(function, tuple(map(resolve, args)), len(args), tuple)


def _lift(
    lifted: Lifted, modules: list[nn.Module], z0: Any, check: Callable[[Any], None], needed: bool, levels: bool
) -> None:
    """Find what the function uses, by looking at modules and by evaluating once (or three times)."""
    constants = _lift_modules(lifted, modules, explicit=needed or levels)

    def stand_in(t: Tensor) -> Tensor:
        return compat.plain_sample(t) if levels else t.detach()

    z_leaves, z_spec = tree_flatten(z0)
    z_plain = [stand_in(resolve(t)) for t in z_leaves]
    plain = [stand_in(t) for t in lifted.theta]
    looks = Looks() if levels or (needed and not any(_explicit(t) for t in lifted.theta)) else None
    with torch.enable_grad() if needed or levels else contextlib.nullcontext():
        watch = purity(lifted.frozen, [*z_plain, *plain[: lifted.from_args]], len(z_plain), constants)
        with watch, looks or contextlib.nullcontext():
            out = lifted(tree_unflatten(z_plain, z_spec), plain)
        if (needed or levels) and leaks(out):
            _lift_captured(lifted, modules, tree_unflatten(z_plain, z_spec), plain)
            plain = [stand_in(t) for t in lifted.theta]
            out = lifted(tree_unflatten(z_plain, z_spec), plain)
            if leaks(out) and (levels or not _tracks_state_only(lifted, z_plain, z_spec, plain)):
                raise CapturedTensorError(
                    "the function uses a tensor that requires grad, or belongs to a torch.func transform, in a way that "
                    "implicitkit cannot see (through a custom autograd.Function, say, or a traced module): its "
                    "derivative would be lost. Pass that tensor as an argument: ik.solve(problem, z0, (..., tensor))"
                )
    check(out)
    lifted.branches = looks is not None and looks.seen and (levels or not lifted.captured)
    if not levels and not lifted.frozen:
        lifted.probe = out
    lifted.live = not lifted.frozen and not any(
        compat.is_wrapped(t) or compat.has_tangent(t) for t in lifted.theta[lifted.from_args :]
    )


def check_leaves(lifted: Lifted, out: Tensor, theta: Sequence[Tensor], z: Tensor) -> None:
    """Raise :class:`CapturedTensorError` if a linearisation's value at ``z`` depends on more than ``z`` and ``theta``."""
    if lifted.inside:
        return
    storage = z.untyped_storage().data_ptr()
    known = {id(t) for t in theta}
    if any(id(t) not in known and t.untyped_storage().data_ptr() != storage for t in graph_leaves(out)):
        raise CapturedTensorError(_ELSEWHERE)


def check_solution(lifted: Lifted, z: Any) -> None:
    """Raise :class:`CapturedTensorError` if the function, at ``z``, uses something differentiable that is not in theta."""
    leaves, spec = tree_flatten(z)
    points, plain = ([compat.plain_sample(t) for t in tensors] for tensors in (leaves, lifted.theta))
    with torch.enable_grad():
        out = lifted(tree_unflatten(points, spec), plain)
        levels = compat.transforms_active() or compat.has_forward_level()
        if leaks(out) and (levels or not _tracks_state_only(lifted, points, spec, plain)):
            raise CapturedTensorError(_ELSEWHERE)


_ELSEWHERE = (
    "at the solution the function uses a tensor that requires grad, or belongs to a torch.func transform, which it did not "
    "use at z0 (it branches on values): its derivative would be lost. Pass that tensor as an argument: "
    "ik.solve(problem, z0, (..., tensor))"
)


def _explicit(t: Tensor) -> bool:
    """Must this captured tensor become an argument for its derivative, or its batch, to be seen?"""
    if compat.is_wrapped(t):
        return True
    return (t.is_floating_point() or t.is_complex()) and (t.requires_grad or compat.has_tangent(t))


def _lift_modules(lifted: Lifted, modules: Sequence[nn.Module], explicit: bool) -> list[tuple[list[Slot], Tensor]]:
    """Parameters and buffers of ``modules`` to ``lifted``; returns copies of the other buffers (they may be updated)."""
    places: dict[int, tuple[Tensor, list[Slot]]] = {}
    constants: dict[int, tuple[list[Slot], Tensor]] = {}
    seen: set[int] = set()
    for module in modules:
        for m in module.modules():
            if id(m) in seen:
                continue
            seen.add(id(m))
            for owner, is_buffer in ((m._parameters, False), (m._buffers, True)):
                for key, t in owner.items():
                    if t is None:
                        continue
                    if explicit and _explicit(resolve(t)):
                        places.setdefault(id(t), (t, []))[1].append((owner, key))
                    elif is_buffer:
                        constants.setdefault(id(t), ([], t))[0].append((owner, key))
    lifted.theta = (*lifted.theta, *(resolve(t) for t, _ in places.values()))
    lifted.slots = [slots for _, slots in places.values()]
    return list(constants.values())


def _lift_captured(lifted: Lifted, modules: list[nn.Module], z: Any, plain: Sequence[Tensor]) -> None:
    """Find captured tensors by one evaluation under observation, and modules that only their call reveals."""
    called: dict[int, nn.Module] = {}

    def note(module: nn.Module, _: Any) -> None:
        called.setdefault(id(module), module)

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        with torch.no_grad(), Discover([*tree_flatten(z)[0], *plain]) as seen:
            lifted(z, plain)
    finally:
        handle.remove()
    inside = {id(m) for module in modules for m in module.modules()}
    hidden = [m for key, m in called.items() if key not in inside]
    if hidden:
        lifted.guarded = True
        known = {id(t) for t in lifted.theta}
        extra = Lifted(lifted.function, (), 0, lifted.rebuild)
        _lift_modules(extra, hidden, explicit=True)
        fresh = [(t, s) for t, s in zip(extra.theta, extra.slots, strict=True) if id(t) not in known]
        lifted.theta = (*lifted.theta, *(t for t, _ in fresh))
        lifted.slots = [*lifted.slots, *(s for _, s in fresh)]
    # a tensor that is an argument as well, or a module's own (handed back to it by functional_call), is substituted where
    # it is captured, all the same
    lifted.captured = [t for t in seen.found.values() if _explicit(resolve(t))]
    lifted.theta = (*lifted.theta, *(resolve(t) for t in lifted.captured))


def _tracks_state_only(lifted: Lifted, z_leaves: Sequence[Tensor], z_spec: Any, plain: Sequence[Tensor]) -> bool:
    """Does a tracked state explain why the output is tracked?

    A function that differentiates (the gradient of an energy, by ``torch.autograd.grad``) makes a leaf of a state that is
    not tracked, and its output then depends on that leaf: nothing is lost if it takes a tracked state as it is.
    """
    leaves = [t.detach().requires_grad_() for t in z_leaves]
    out = lifted(tree_unflatten(leaves, z_spec), plain)
    return {id(t) for t in graph_leaves(out)} <= {id(t) for t in leaves}
