"""Factors of the last matrix of a pattern, which serve the next one if that is the same to the last bit.

The design of a linear fit is the same in every call while its data change: its factors, the dearest part of such a call,
need not be made again.  Entries are compared one by one, so that nothing is ever solved with the factors of another matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from implicitkit.foundation.kept import Kept
from implicitkit.sparsity.same_pattern import stand_at


class LastMatrix:
    """The last matrix of a pattern, with whatever was made of it."""

    def __init__(self) -> None:
        self._kept = Kept()

    def factors(self, A: sp.csc_matrix, make: Callable[[], Any], numbers: Callable[[Any], int]) -> Any:
        """``make()``, or what it returned for the matrix before if ``A`` is the same; of NaN none is.

        Args:
            A: not to be written to any more. numbers: in what was made; that ``None`` was made is not remembered.
        """
        last = self._kept.value
        if last is not None:
            same = np.array_equal(last[0].data, A.data) and stand_at(A, last[0].indices, last[0].indptr)
            self._kept.served(same)  # two at a time may be too many
            if same:
                return last[1]
        last = None
        found = make()
        if found is not None and self._kept.is_wanted():
            self._kept.put((A, found), numbers(found) + A.nnz)
        return found

    def forget(self) -> None:
        """Give the memory back."""
        self._kept.put(None, 0)


def numbers_in(factors: Any) -> int:
    """How many numbers there are in SuperLU's factors, or LAPACK's."""
    return int(factors.nnz if hasattr(factors, "nnz") else factors.factors.size)
