"""Functions that read variables and attributes as these were, whatever they are bound to later.

Python looks a variable of an enclosing scope up when a function runs, not when it is made.  Of the functions in ::

    for _ in range(steps):
        before = u
        u = ik.root(lambda v: v - before - dt * rhs(v), before).value

every one reads the ``before`` of the last step by the time of the backward, where torch's own graph has kept that of each.
So a solve notes what the variables are bound to, and a derivative evaluates a copy of the function that reads these, if one
has been bound to something else since.  Followed are free and global variables, functions, objects and classes that these
refer to, their attributes, those of modules, and entries of containers (``us[-1]`` of a list that grows): ``holders.py``.
What changes during the solve the function changes itself: that is nobody's constant, and stays the user's.  Not followed are
tensors and arrays that are written to.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from implicitkit.foundation.unversioned_writes import version
from implicitkit.lifting.holders import Bound, Functions, Modules, Tensors, holders, kind_of, put, values
from implicitkit.lifting.overlay import Constants

_MOST = 256  # holders that are followed, the nearest first


class Bindings:
    """What the names that a callable reads are bound to, and the attributes of modules.

    Args:
        function: the callable. modules: those within its reach. buffers: of modules, that are no arguments.

    ``in_modules``: what attributes of modules have to be, once :meth:`restored` was asked, for the time of an evaluation.
    """

    __slots__ = ("_buffers", "_function", "_noted", "_restored_as", "_tensors", "in_modules")

    def __init__(self, function: Any, modules: Iterable[nn.Module] = (), buffers: Constants | tuple[()] = ()) -> None:
        self._function = function
        self._buffers = {places[0][2]: t for places, t in buffers}
        self._tensors = [(t, version(t), t.requires_grad) for _, t in buffers]
        self._restored_as: tuple[set[int], Any] = set(), None  # what had to be copied at last, and the copy
        self._noted: dict[int, _Noted] = {}
        self.in_modules: list[tuple[nn.Module, str, Any]] = []
        self.follow([*holders((function,)), *modules])

    def follow(self, todo: list[Any]) -> None:
        """Note what these objects hold, and what is held by whatever that leads to."""
        for x in todo:  # which grows meanwhile
            if len(self._noted) >= _MOST:
                break
            if id(x) not in self._noted:
                self._noted[id(x)] = noted = _Noted(x)
                todo += holders(values(noted.bound))
                if noted.kind.by_class and id(type(x)) not in self._noted:
                    todo += holders((type(x),))
                if type(noted.bound) is dict:
                    tensors = [t for t in noted.bound.values() if kind_of(type(t)) is Tensors]
                    self._tensors += [(t, version(t), t.requires_grad) for t in tensors]

    def changes(self) -> list[str]:
        """Sentences that say which tensor was written to, or is tracked now."""
        said = []
        for t, before, tracked in self._tensors:
            if version(t) != before:
                said.append(f"{self._name(t)} was written to")
            elif t.requires_grad and not tracked:
                said.append(f"{self._name(t)} requires grad now")
        return list(dict.fromkeys(said))

    def _name(self, t: Tensor) -> str:
        for what, named in (("buffer", self._buffers), *[("tensor", noted.bound) for noted in self._noted.values()]):
            if type(named) is dict:
                for name, value in named.items():
                    if value is t:
                        return f"the {what} {name!r}"
        return "a tensor"

    def forget_changed(self) -> None:
        """Note no more what is bound to something else already: evaluations have bound it."""
        for key, noted in list(self._noted.items()):
            if noted.moved() and not noted.forget_changed():
                del self._noted[key]

    def restored(self) -> Any:
        """The callable, with its names bound as they were noted; ``None`` if none of them is bound to something else."""
        found = moved = {key for key, noted in self._noted.items() if noted.moved()}
        if not moved:
            return None
        while found:  # and what refers to one of these
            found = {key for key, noted in self._noted.items() if key not in moved and noted.leads_to(moved)}
            moved = moved | found
        if moved != self._restored_as[0]:
            self._restored_as = moved, self._copy([self._noted[key] for key in moved])
        return self._restored_as[1]

    def _copy(self, notes: list[_Noted]) -> Any:
        """A copy of the callable, made of copies that refer to each other."""
        notes = sorted(
            notes, key=lambda noted: not isinstance(noted.x, type)
        )  # classes, whose objects are copied, first
        made: dict[int, Any] = {id(noted.x): None for noted in notes if noted.kind is not Modules}
        for noted in notes:
            if noted.kind is not Modules:
                made[id(noted.x)] = noted.kind.blank(noted.x, noted.bound, made)
        self.in_modules = []
        for noted in notes:
            if noted.kind is Modules:
                of_class = self._noted.get(id(type(noted.x)))
                self.in_modules += Modules.instead(noted.x, noted.bound, of_class.bound if of_class else {}, made)
            else:
                noted.fill(made)
        return put(self._function, made)


class _Noted:
    """What the names of ``x`` are bound to, but for those that are its ``own``: evaluations bind them."""

    __slots__ = ("bound", "kind", "own", "x")

    def __init__(self, x: Any) -> None:
        self.x = x
        self.kind = kind_of(type(x)) or Modules
        self.bound: Bound = self.kind.bound(x)
        self.own = self.kind.own

    def leads_to(self, some: set[int]) -> bool:
        """Does ``x`` refer to one of ``some``, or is its class one of them?"""
        return id(type(self.x)) in some or any(id(x) in some for x in holders(values(self.bound)))

    def moved(self) -> bool:
        """Is one of the names bound to something else by now?"""
        bound, now = self.bound, self.kind.now(self.x)
        if type(bound) is list:
            return len(now) != len(bound) or any(map(operator.is_not, now, bound))
        if any(map(operator.is_not, map(now.get, bound), bound.values())):
            return True
        if len(now) == len(bound) + len(self.own):
            return False
        return any(name not in bound and name not in self.own and self.kind.told_by(self.x, name) for name in now)

    def forget_changed(self) -> bool:
        """Note no more what has been bound anew: these names are the object's own.  False: it has no names, and nothing is
        left to note."""
        bound, now = self.bound, self.kind.bound(self.x)
        if type(bound) is list:
            return False
        self.bound = {name: value for name, value in bound.items() if now.get(name) is value}
        self.own |= (bound.keys() | now.keys()) - self.bound.keys()
        return True

    def fill(self, made: dict[int, Any]) -> None:
        """Bind in the copy of ``x`` what was noted; names that are its own stay as they are."""
        if type(self.bound) is list:
            self.kind.fill(made[id(self.x)], self.x, [put(value, made) for value in self.bound])
            return
        bound = {name: put(value, made) for name, value in self.bound.items()}
        if self.own and self.kind is not Functions:  # their copies share the variables
            bound.update({name: value for name, value in self.kind.bound(self.x).items() if name in self.own})
        self.kind.fill(made[id(self.x)], self.x, bound)
