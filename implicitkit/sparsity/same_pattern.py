"""Matrices whose entries stand at the same places as those of another.

A constructor of SciPy's looks at every index before it believes them, which takes as long as the product of a matrix of
some thousand entries; what stands where another matrix's entries stand need not be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import scipy.sparse as sp

from implicitkit.sparsity.index_sets import IndexSets

M = TypeVar("M", sp.csr_matrix, sp.csc_matrix)


def with_entries(like: M, values: np.ndarray) -> M:
    """The matrix with the indices of ``like``, which both have from now on, and the entries ``values`` ``(nnz,)``."""
    found: M = object.__new__(type(like))
    found.__dict__.update(like.__dict__)
    found.data = values
    return found


def stand_at(A: M, indices: np.ndarray, indptr: np.ndarray) -> bool:
    """Do the entries of a matrix stand at these places?"""
    if A.indices is indices and A.indptr is indptr:
        return True
    return np.array_equal(A.indptr, indptr) and np.array_equal(A.indices, indices)


@dataclass(frozen=True)
class Pattern:
    """Where the entries of a matrix ``(m, n)`` stand, and what has been found of that: each once.

    Attributes:
        pattern: in compressed rows.
    """

    pattern: IndexSets
    _found: dict[Any, Any] = field(repr=False, default_factory=dict, compare=False, kw_only=True)

    def analysed(self, analyse: Callable[..., Any], *arguments: Any) -> Any:
        """``analyse(pattern, *arguments)``, computed once."""
        return self.remembered((analyse, *arguments), lambda: analyse(self.pattern, *arguments))

    def remembered(self, name: Hashable, find: Callable[[], Any]) -> Any:
        """What ``find()`` has found the first time that something of this ``name`` was asked for."""
        if name not in self._found:
            self._found[name] = find()
        return self._found[name]

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)``."""
        shape: tuple[int, int] = self.pattern.shape
        return shape

    def matrix(self, values: np.ndarray) -> sp.csr_matrix:
        """One sample's matrix from its entries."""
        return with_entries(self.pattern, values)
