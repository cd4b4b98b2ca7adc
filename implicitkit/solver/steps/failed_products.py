"""The matrix for which products have cost more than its factors.

These may have been kept (:mod:`implicitkit.linear.factors.last_matrix`): in the next call products need not be tried again.
It is known by its entries, while these are kept (:mod:`implicitkit.sparsity.last_entries`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np


class FailedProducts:
    """Remembered with a pattern."""

    def __init__(self) -> None:
        self._entries: Callable[[], Any] = lambda: None

    def note(self, entries: Any) -> None:
        """They have failed for the matrix with these entries, as they are kept."""
        if isinstance(entries, np.ndarray):
            self._entries = weakref.ref(entries)

    def are_of(self, entries: Callable[[], Any]) -> bool:
        """Have they for this one?  Its entries are asked for only while those are there."""
        failed = self._entries()
        return failed is not None and entries() is failed
