"""What the pattern of a sparse matrix alone says about how to factor it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import reverse_cuthill_mckee

from implicitkit.linear.factors.block_triangular import Parts, parts_of
from implicitkit.linear.factors.complex_pairs import Pairs, pairs_of
from implicitkit.linear.factors.fill import likely_fill
from implicitkit.linear.factors.ordering import Ordering
from implicitkit.linear.price import has_layers

_WIDEST_BAND = 48  # of lower and upper together, above which SuperLU is faster


@dataclass(frozen=True)
class Analysis:
    """What the pattern alone says about how to factor.

    Attributes:
        pattern: ``(n, n)`` in compressed rows. order: the renumbering (``None``: as it stands).
        rows, columns: of every entry, renumbered. band: ``(lower, upper)``, or ``None`` for SuperLU.
        symmetric: the pattern is. reach: how far from the diagonal it has entries (those of its parts), renumbered for a
            band.
        ordering: that of SuperLU, once it has been found. parts: that can be solved for one after the other.
    """

    pattern: sp.csr_matrix
    order: np.ndarray | None
    rows: np.ndarray
    columns: np.ndarray
    band: tuple[int, int] | None
    symmetric: bool
    reach: int = 0
    ordering: Ordering = field(default_factory=Ordering, compare=False)
    parts: Parts | None = None

    @functools.cached_property
    def diagonal(self) -> np.ndarray | None:
        """Where entries of the diagonal stand in :attr:`by_columns`; ``None`` where some are not in the pattern."""
        A, _ = self.by_columns
        columns = np.repeat(np.arange(A.shape[1]), np.diff(A.indptr))
        places = np.flatnonzero(A.indices == columns)
        return places if len(places) == A.shape[0] else None

    @functools.cached_property
    def likely_fill(self) -> int:
        """Entries of the factors, about; 0 where the pattern has layers, whose price is known by :attr:`reach`."""
        if self.band is not None or has_layers(self.reach, self.pattern.shape[0]):
            return 0
        return likely_fill(self.pattern if self.parts is None else self.parts.inside(self.pattern))

    @functools.cached_property
    def of_parts(self) -> list[Analysis]:
        """That of each part; parts of one pattern share it."""
        assert self.parts is not None
        order, bounds = self.parts
        moved = sp.csr_matrix(self.pattern[order][:, order])
        known: dict[Hashable, Analysis] = {}
        found = []
        for a, b in itertools.pairwise(bounds):
            part = sp.csr_matrix(moved[a:b, a:b])
            part.sort_indices()
            key = (b - a, part.indptr.tobytes(), part.indices.tobytes())
            if key not in known:
                known[key] = Analysis(part, None, part.indices, part.indices, None, _is_symmetric(part))
            found.append(known[key])
        return found

    @functools.cached_property
    def pairs(self) -> Pairs | None:
        """Unknowns two by two, where blocks may be complex numbers."""
        return pairs_of(self.pattern)

    @functools.cached_property
    def halved(self) -> Analysis:
        """That of the complex matrix."""
        assert self.pairs is not None
        half = self.pairs.pattern
        symmetric = _is_symmetric(half)
        return Analysis(
            half, None, half.indices, half.indices, None, symmetric, parts=None if symmetric else parts_of(half)
        )

    @functools.cached_property
    def by_columns(self) -> tuple[sp.csc_matrix, np.ndarray]:
        """The pattern in compressed columns, and where its entries stand in rows."""
        places = np.arange(self.pattern.nnz, dtype=np.int64)
        A = sp.csr_matrix((places, self.pattern.indices, self.pattern.indptr), shape=self.pattern.shape).tocsc()
        return A, A.data


def analyse(pattern: sp.csr_matrix) -> Analysis:
    """Band, renumbered band, or neither."""
    n = pattern.shape[0]
    rows, columns = np.repeat(np.arange(n), np.diff(pattern.indptr)), pattern.indices.astype(np.int64)
    lower, upper = _band(rows, columns)
    symmetric = _is_symmetric(pattern)
    if lower + upper <= min(_WIDEST_BAND, n):
        return Analysis(pattern, None, rows, columns, (lower, upper), symmetric)
    order, place = _renumbered(pattern, symmetric)
    lower, upper = _band(place[rows], place[columns])
    if lower + upper <= _WIDEST_BAND:
        return Analysis(pattern, order, place[rows], place[columns], (lower, upper), symmetric)
    reach, parts = max(lower, upper), None if symmetric else parts_of(pattern)
    if parts is not None:
        inside = parts.inside(pattern)
        place = _renumbered(inside, False)[1]
        reach = max(_band(place[np.repeat(np.arange(n), np.diff(inside.indptr))], place[inside.indices]))
    return Analysis(pattern, None, rows, columns, None, symmetric, reach if order is not None else 0, parts=parts)


def _renumbered(pattern: sp.csr_matrix, symmetric: bool) -> tuple[np.ndarray | None, np.ndarray]:
    """The order of Cuthill & McKee, reversed, and the place of each unknown in it; ``None``, and places as they stand,
    where there are too many entries for a band."""
    n = pattern.shape[0]
    both = pattern if symmetric else sp.csr_matrix(pattern + pattern.T)
    place = np.arange(n)
    if both.nnz > _WIDEST_BAND * n:
        return None, place
    order = reverse_cuthill_mckee(both, symmetric_mode=True).astype(np.int64)
    place[order] = np.arange(n)
    return order, place


def _is_symmetric(pattern: sp.csr_matrix) -> bool:
    transposed = sp.csr_matrix(pattern.T)
    transposed.sort_indices()
    return np.array_equal(pattern.indptr, transposed.indptr) and np.array_equal(pattern.indices, transposed.indices)


def _band(rows: np.ndarray, columns: np.ndarray) -> tuple[int, int]:
    gap = rows - columns
    return int(gap.max(initial=0)), int(-gap.min(initial=0))
