"""What modules hold when a function is lifted: what of it becomes an argument, and what has to be as it was."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from implicitkit.foundation import compat
from implicitkit.lifting.overlay import Constants, Slot
from implicitkit.lifting.reach import below
from implicitkit.lifting.substitution import is_substituted


def explicit(t: Tensor) -> bool:
    """Must this captured tensor become an argument for its derivative, or its batch, to be seen?"""
    return t.requires_grad or compat.is_wrapped(t) or compat.has_tangent(t)


def differentiated(t: Tensor) -> bool:
    """Is this captured tensor tracked at some level?  (Of the :func:`explicit` ones, what is batched only is not.)"""
    while compat.is_wrapped(t):
        if t.requires_grad or compat.has_tangent(t):
            return True
        t = compat.unwrap(t)
    return t.requires_grad or compat.has_tangent(t)


def to_lift(t: Tensor, inside: bool) -> bool:
    """Must the captured ``t`` become an argument?  Inside another lifted function also what that one has put in its place:
    the derivative of this solve may be taken after that substitution has ended."""
    return (inside and is_substituted(t)) or explicit(t)


def present(slot: Slot) -> Any:
    """What the slot holds now."""
    module, kind, key = slot
    where = module.__dict__ if not kind or key in module.__dict__ else getattr(module, kind)
    return where[key] if key in where else None  # noqa: SIM401 (the dicts of a traced module have no get)


def has_lazy(module: nn.Module) -> bool:
    """Does the module, or one below it, get its parameters at its first call?"""
    held = (t for m in below(module) for t in (*m._parameters.values(), *m._buffers.values()))
    return any(t is not None and is_lazy(t) for t in held)


@dataclass
class Entries:
    """The parameters and buffers of modules, each tensor with all its places.

    ``arguments``: those that become arguments. ``constants``: the other buffers, which the function may update.
    ``rest``: the places of all that are no arguments, and of the modules' modes.
    """

    arguments: Constants
    constants: Constants
    rest: list[Slot]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], arguments: bool, inside: bool) -> Entries:
        """The entries of ``modules`` and of all below them; without ``arguments`` none of them becomes an argument."""
        to, constants, rest, seen = {}, {}, [], set()  # type: ignore[var-annotated]
        for module in modules:
            for m in below(module):
                if id(m) in seen:
                    continue
                seen.add(id(m))
                if "training" in m.__dict__:  # a traced module has it elsewhere
                    rest.append((m, "", "training"))
                for kind in ("_parameters", "_buffers"):
                    for key, t in list(getattr(m, kind).items()):  # at once: others may add to it
                        if t is None:
                            continue
                        if arguments and to_lift(t, inside):
                            to.setdefault(id(t), ([], t))[0].append((m, kind, key))
                            continue
                        rest.append((m, kind, key))
                        if kind == "_buffers":
                            constants.setdefault(id(t), ([], t))[0].append((m, kind, key))
        return cls(list(to.values()), list(constants.values()), rest)


@dataclass
class Rest:
    """The parameters and buffers of modules that are no arguments, and the modules' modes, as a solve met them.

    ``torch.func.functional_call`` puts tensors into modules for the time of a call.  The derivative of a solve inside it is
    formed when the call has ended and the modules hold their own tensors again, with other values, or tracked ones.  And
    ``train()``, ``eval()`` or ``requires_grad_()`` may have been called since: what was no argument is a constant still.
    ``as_before``: attributes of modules that have been bound anew, as they were (``late_binding.py``).
    """

    slots: list[Slot] = field(default_factory=list)
    was: list[Any] = field(default_factory=list)
    constant: list[bool] = field(default_factory=list)  # is this a tensor that was not tracked?
    as_before: Sequence[tuple[nn.Module, str, Any]] = ()

    def note(self, but: Constants) -> None:
        """Note what the slots hold now, to which they will be held, ``but`` for those that somebody else looks after."""
        others: Collection[tuple[int, str, str]] = {(id(m), kind, key) for places, _ in but for m, kind, key in places}
        self.slots = [s for s in self.slots if (id(s[0]), *s[1:]) not in others]
        self.was = [present(s) for s in self.slots]
        self.constant = [isinstance(t, Tensor) and not t.requires_grad for t in self.was]

    def modules(self) -> list[nn.Module]:
        """The modules whose attributes the user may bind anew: those of his own classes, or of none."""
        own = [m for m, kind, _ in self.slots if not kind]
        return [m for m in own if type(m) is nn.Module or not type(m).__module__.startswith("torch.")]

    def moved(self) -> list[tuple[list[Slot], Any]]:
        """The slots that hold something else now, or something tracked since, and what they held."""
        moved: list[tuple[list[Slot], Any]] = []
        for slot, t, constant in zip(self.slots, self.was, self.constant, strict=False):
            if present(slot) is not t:
                if _is_there(t):
                    moved.append(([slot], t.detach() if constant and t.requires_grad else t))
            elif constant and t.requires_grad:
                moved.append(([slot], t.detach()))
        for m, name, x in self.as_before:
            if vars(m).get(name, self) is not x and (x is None or _is_there(x)):
                moved.append(([(m, "", name)], x))
        return moved


def _is_there(t: Any) -> bool:
    """Has a tensor got its numbers?  (What sharding by FSDP has gathered is emptied after a call.)"""
    if not isinstance(t, Tensor) or compat.is_wrapped(t):
        return t is not None
    return t.layout != torch.strided or t.numel() == 0 or t.untyped_storage().size() > 0
