"""What is kept from one call for the next, of all functions together no more than so many numbers: the oldest goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, ClassVar

_MOST = 1 << 24  # numbers: 128 MB


class Kept:
    """A place for one thing.

    Attributes:
        value: what was put there last; ``None`` where it is gone, or was too large.
    """

    _all: ClassVar[OrderedDict[Kept, int]] = OrderedDict()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.value: Any = None

    def put(self, value: Any, numbers: int) -> None:
        """Keep ``value``, which has so many numbers, in the place of what was there; nothing if it is ``None``."""
        with self._lock:
            self._all.pop(self, None)
            self.value = None
            if value is None or numbers > _MOST:
                return
            self.value, self._all[self] = value, numbers
            while sum(self._all.values()) > _MOST:
                self._all.popitem(last=False)[0].value = None
