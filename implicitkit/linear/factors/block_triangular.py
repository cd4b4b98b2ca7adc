r"""Matrices whose unknowns can be solved for part after part: only the parts are factored.

The unknowns of a sparse matrix that depend on each other in a circle form a part (a strong component of its graph: Tarjan
1972, SIAM J. Comput. 1(2)); numbered after those that they depend on, the parts make the matrix block lower triangular (Duff
& Reid 1978, ACM TOMS 4(2)),

    x_k = A_kk^{-1} (b_k - sum_{j<k} A_kj x_j),      and from the last part on for the transposed.

So it is with every process in time whose steps are solved for as one system.  Its factors as one matrix fill what is below
the diagonal; those of the parts do not (97 implicit steps of heat on 20 x 20 points: 8.7 million entries for 230).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components

SMALLEST_PART = 256  # unknowns up to which parts that follow each other are factored as one: a call costs as much
_SHARE = 2  # the largest part is one of so many of all unknowns, at most, or they are not worth it


class Parts(NamedTuple):
    """``order``: the unknowns, part after part; ``bounds``: where in it each part begins, and ``n``."""

    order: np.ndarray
    bounds: np.ndarray

    def inside(self, pattern: sp.csr_matrix) -> sp.csr_matrix:
        """The entries within the parts."""
        part = np.empty(len(self.order), dtype=np.int64)
        part[self.order] = np.repeat(np.arange(len(self.bounds) - 1), np.diff(self.bounds))
        found = sp.coo_matrix(pattern)
        kept = part[found.row] == part[found.col]
        return sp.csr_matrix((found.data[kept], (found.row[kept], found.col[kept])), shape=pattern.shape)


def parts_of(pattern: sp.csr_matrix) -> Parts | None:
    """The parts of a square pattern, each of some unknowns; ``None`` where there are none worth having."""
    n = pattern.shape[0]
    number, label = connected_components(pattern, directed=True, connection="strong")
    sizes = np.bincount(label, minlength=number)
    if _SHARE * sizes.max(initial=0) > n:
        return None
    rows = np.repeat(np.arange(n), np.diff(pattern.indptr))
    if not bool((label[rows] >= label[pattern.indices]).all()):  # SciPy numbers them so, and does not say it
        return None
    ends, bounds = np.cumsum(sizes), [0]
    for end in ends:
        if end - bounds[-1] >= SMALLEST_PART:
            bounds.append(int(end))
    if bounds[-1] < n:
        bounds = [*bounds[:-1], n] if len(bounds) > 1 else [0, n]
    if _SHARE * np.diff(bounds).max() > n:
        return None
    return Parts(np.argsort(label, kind="stable"), np.array(bounds))


class BlockTriangular:
    """Factors of the parts of ``A``, with the interface of SuperLU's.

    Args:
        factorise: makes the factors of one part, with ``solve(b, trans)``, from its matrix and its number; ``None`` where
            it is singular.

    Attributes:
        ok: no part is singular. nnz: entries of all factors.
    """

    def __init__(self, A: sp.csc_matrix, parts: Parts, factorise: Callable[[sp.csc_matrix, int], Any]) -> None:
        order, bounds = parts
        self.order = order
        whole = sp.csr_matrix(A)
        if not np.array_equal(order, np.arange(len(order))):
            whole = whole[order][:, order]
        self.spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
        self.below = [whole[span, : span.start] for span in self.spans]
        self._beside: list[sp.csr_matrix] | None = None  # for the transposed, if anybody asks
        self._whole = whole
        self.factors = [factorise(whole[span, span].tocsc(), k) for k, span in enumerate(self.spans)]
        self.ok = all(lu is not None for lu in self.factors)
        self.nnz = sum(int(getattr(lu, "nnz", 0)) for lu in self.factors)

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``A x = b`` or, with ``"T"``, ``A' x = b``; ``(n,)`` or ``(n, k)``."""
        x = np.ascontiguousarray(b[self.order])
        if trans == "N":
            for span, below, lu in zip(self.spans, self.below, self.factors, strict=True):
                x[span] = lu.solve(x[span] - below @ x[: span.start], "N")
        else:
            for span, beside, lu in zip(self.spans[::-1], self.beside[::-1], self.factors[::-1], strict=True):
                x[span] = lu.solve(x[span] - beside @ x[span.stop :], "T")
        out = np.empty_like(x)
        out[self.order] = x
        return out

    @property
    def beside(self) -> list[sp.csr_matrix]:
        """What stands below each part in its columns, transposed."""
        if self._beside is None:
            across = self._whole.T.tocsr()
            self._beside = [across[span, span.stop :] for span in self.spans]
        return self._beside
