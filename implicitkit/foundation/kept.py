"""What is kept from one call for the next, of all functions together no more than so many numbers: the oldest goes first.

It goes with whoever has the place for it, too.

What was kept in vain is kept again after two other occasions, then four, eight, ...: what changes each time hardly ever is.
"""

from __future__ import annotations

import threading
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

_MOST = 1 << 24  # numbers: 128 MB, and half as much for the indices of what is sparse


class Kept:
    """A place for one thing.

    Attributes:
        value: what was put there last; ``None`` where it is gone, or was too large.
    """

    _all: ClassVar[WeakKeyDictionary[Kept, int]] = WeakKeyDictionary()  # in the order in which they were put
    _lock: ClassVar[threading.RLock] = threading.RLock()  # what is let go may let go of others

    def __init__(self) -> None:
        self.value: Any = None
        self._in_vain, self._ahead = 0, 0

    def served(self, well: bool) -> None:
        """Was it what was needed?  If not it is gone."""
        self._in_vain = 0 if well else self._in_vain + 1
        if not well:
            self._ahead = 2**self._in_vain
            self.put(None, 0)

    def is_wanted(self) -> bool:
        """Is something to be kept on this occasion?"""
        self._ahead -= 1
        return self._ahead <= 0

    def put(self, value: Any, numbers: int) -> None:
        """Keep ``value``, which has so many numbers, in the place of what was there; nothing if it is ``None``."""
        with self._lock:
            self._all.pop(self, None)
            self.value = None
            if value is None or numbers > _MOST:
                return
            self.value, self._all[self] = value, numbers
            while sum(self._all.values()) > _MOST:
                oldest = next(iter(self._all))
                oldest.value = None
                del self._all[oldest]
