"""When is a function asked again what it was asked before, at whose answer something random had a part?

At the first derivative of each function, and of each that its code may be: one that closes over other objects, numbers or
flags, whose objects are set otherwise, or that is given flags or words or numbers of another size.  Of those of one code, 16
are asked for what they close over and 64 for how they are set, and later one derivative in eight; where all is as it was, at
the 4th, 8th, 16th, 32nd and every 64th derivative.  Whoever is answered looks elsewhere each time.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from types import CodeType

_KEPT = 1000  # functions that are remembered
_CLOSED_OVER, _SET = 16, 64  # functions of one code that are asked
_ONE_IN, _AT_LEAST = 8, 64  # derivatives
_FIRST = 4  # derivative of one function at which it is asked again


@dataclass
class _Times:
    """How many derivatives were asked for, and how often of these the function was asked."""

    derivatives: int = 0
    asked: int = 0


@dataclass
class Memory:
    """The functions that were asked, by hashes: nothing is kept alive."""

    _made: dict[int, tuple[int, int]] = field(default_factory=dict)  # as each is: how it is set, and its code
    _set: dict[int, _Times] = field(default_factory=dict)
    _codes: dict[int, _Times] = field(default_factory=dict)
    _said: set[int] = field(default_factory=set)

    def clear(self) -> None:
        """Forget all."""
        for kept in (self._made, self._set, self._codes, self._said):
            kept.clear()

    def number(self, identity: tuple[Hashable, ...], settings: Hashable) -> int | None:
        """How often the code of a function was asked before, if it is to be asked at this derivative; else ``None``.

        Args:
            identity: what tells it from others (:attr:`System.identity`). settings: how it is set, and what it is given.
        """
        whole = hash((identity, settings))
        known = self._made.get(whole)
        new = known is None
        here, code = self._remember(whole, identity, settings) if known is None else known
        if here in self._said:
            return None
        unset = here not in self._set
        one, all_ = self._set.setdefault(here, _Times()), self._codes.setdefault(code, _Times())
        one.derivatives += 1
        all_.derivatives += 1
        few = max(_SET if unset else _CLOSED_OVER, all_.derivatives // _ONE_IN)
        if not (all_.asked < few if new or unset else _is_due(one.derivatives)):
            return None
        all_.asked += 1
        return all_.asked - 1

    def said(self, identity: tuple[Hashable, ...], settings: Hashable) -> None:
        """What was to be said of a function has been: it is not asked again."""
        known = self._made.get(hash((identity, settings)))
        if known is not None:  # a solve inside of it, or another thread, may have made room
            self._said.add(known[0])

    def _remember(self, whole: int, identity: Hashable, settings: Hashable) -> tuple[int, int]:
        if len(self._made) >= _KEPT:
            self.clear()
        code = hash(_code(identity))
        found = self._made[whole] = hash((code, settings)), code
        return found


def _is_due(derivatives: int) -> bool:
    return derivatives >= _FIRST and (derivatives % _AT_LEAST == 0 or derivatives.bit_count() == 1)


def _code(identity: Hashable) -> tuple[Hashable, ...]:
    """The code of an identity, and the types of the objects (types with the number of one each)."""
    found: list[Hashable] = []
    open_ = [identity]
    while open_:
        part = open_.pop()
        if type(part) is CodeType:
            found.append(part)
        elif type(part) is not tuple:
            continue
        elif len(part) == 2 and isinstance(part[0], type) and isinstance(part[1], int):
            found.append(weakref.ref(part[0]))
        else:
            open_ += part
    return tuple(found)
