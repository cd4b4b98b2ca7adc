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

WIDEST_BAND = 48  # of lower and upper together, above which SuperLU is faster


@dataclass(frozen=True)
class Analysis:
    """What the pattern alone says about how to factor.

    Attributes:
        pattern: ``(n, n)`` in compressed rows. order: the renumbering (``None``: as it stands).
        rows, columns: of every entry, renumbered. band: ``(lower, upper)``, or ``None`` for SuperLU.
        symmetric: the pattern is. reach: how far from the diagonal it has entries (those of its parts), renumbered for a
            band; long rows and columns, which come last, are left out.
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
    def on_diagonal(self) -> bool:
        """Are pivots looked for on the diagonal first?  Where the pattern is symmetric; and where a row of ``k`` entries is
        ``k^2`` entries of ``A' A``, whose factors bound what pivots from anywhere fill (George & Ng 1985, SIAM J. Sci. Stat.
        Comput. 6(2)), and these are more than ``A`` has: a sum of all unknowns, as a balance or a norm is, is only ``2 k``
        of ``A + A'``."""
        longest = int(np.diff(self.pattern.indptr).max(initial=0))
        return self.symmetric or (self.parts is None and longest**2 > self.pattern.nnz)

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
        """The analysis of each part; parts of one pattern share it."""
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
                known[key] = _of_part(part)
            found.append(known[key])
        return found

    @functools.cached_property
    def pairs(self) -> Pairs | None:
        """Unknowns two by two, where blocks may be complex numbers."""
        return pairs_of(self.pattern)

    @functools.cached_property
    def halved(self) -> Analysis:
        """The analysis of the complex matrix, which is half as large."""
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


@dataclass(frozen=True)
class _Repeated(Analysis):
    """A pattern of parts that are alike but for the last, which may be smaller.

    Attributes:
        part: the first.
    """

    part: Analysis | None = None

    @functools.cached_property
    def likely_fill(self) -> int:
        """The likely fill of one part, times how many there are."""
        assert self.parts is not None and self.part is not None
        layered = has_layers(self.reach, self.pattern.shape[0])
        return 0 if layered else (len(self.parts.bounds) - 1) * self.part.likely_fill

    @functools.cached_property
    def of_parts(self) -> list[Analysis]:
        assert self.parts is not None and self.part is not None
        found, size = [self.part] * (len(self.parts.bounds) - 1), int(np.diff(self.parts.bounds)[-1])
        if size < self.part.pattern.shape[0]:
            found[-1] = _of_part(sp.csr_matrix(self.pattern[-size:, -size:]))
        return found


def of_repeated_parts(pattern: sp.csr_matrix, bounds: np.ndarray, is_complex: bool) -> Analysis:
    """What :func:`analyse` finds of a wide pattern whose parts, as they stand between ``bounds``, are alike, from the first;
    ``is_complex``: pairs of unknowns may be complex numbers."""
    first = sp.csr_matrix(pattern[: bounds[1], : bounds[1]])
    rows, columns = np.repeat(np.arange(len(pattern.indptr) - 1), np.diff(pattern.indptr)), pattern.indices
    order, place = _renumbered(first, False)
    inside = place[np.repeat(np.arange(bounds[1]), np.diff(first.indptr))], place[first.indices]
    reach = max(_band(*inside)) if order is not None else 0
    parts = Parts(np.arange(pattern.shape[0]), bounds)
    part = _of_part(first)
    found = _Repeated(pattern, None, rows, columns.astype(np.int64), None, False, reach, parts=parts, part=part)
    if not is_complex:
        object.__setattr__(found, "pairs", None)
    return found


def _of_part(part: sp.csr_matrix) -> Analysis:
    part.sort_indices()
    return Analysis(part, None, part.indices, part.indices, None, _is_symmetric(part))


def analyse(pattern: sp.csr_matrix) -> Analysis:
    """Band, renumbered band, or neither."""
    n = pattern.shape[0]
    rows, columns = _rows_of(pattern), pattern.indices
    lower, upper = _band(rows, columns)
    symmetric = _is_symmetric(pattern)
    if lower + upper <= min(WIDEST_BAND, n):
        return Analysis(pattern, None, rows, columns, (lower, upper), symmetric)
    long = _long(pattern)
    inner = pattern if long is None else _without(pattern, long)
    order, place = _renumbered(inner, symmetric)
    lower, upper = _band_of(inner, place)
    if lower + upper <= WIDEST_BAND and long is None:
        return Analysis(pattern, order, place[rows], place[columns], (lower, upper), symmetric)
    reach, parts = max(lower, upper), None if symmetric else parts_of(pattern)
    if parts is not None:
        inside = parts.inside(pattern)
        reach = max(_band_of(inside, _renumbered(inside, False)[1]))
    ordering, reach = Ordering(last=long), reach if order is not None else 0
    return Analysis(pattern, None, rows, columns, None, symmetric, reach, ordering=ordering, parts=parts)


def _long(pattern: sp.csr_matrix) -> np.ndarray | None:
    """Unknowns whose row, or column, is so long that no order could leave layers; ``None`` where there are none, or so many
    that as a border, which they are when they come last, they would cost more than what is inside."""
    n = pattern.shape[0]
    longest = np.maximum(np.diff(pattern.indptr), np.bincount(pattern.indices, minlength=n))
    lengths = [k for k in np.unique(longest) if k > 1 and not has_layers(int(k) // 2, n)]
    found = np.flatnonzero(np.isin(longest, lengths))
    return found if 0 < len(found) <= WIDEST_BAND else None


def _without(pattern: sp.csr_matrix, long: np.ndarray) -> sp.csr_matrix:
    """The pattern without the rows and columns of these unknowns."""
    n, out = pattern.shape[0], np.zeros(pattern.shape[0], dtype=bool)
    out[long] = True
    rows, columns = np.repeat(np.arange(n), np.diff(pattern.indptr)), pattern.indices
    kept = ~(out[rows] | out[columns])
    inner = sp.csr_matrix((np.ones(int(kept.sum()), dtype=bool), (rows[kept], columns[kept])), shape=pattern.shape)
    inner.sort_indices()
    return inner


def _renumbered(pattern: sp.csr_matrix, symmetric: bool) -> tuple[np.ndarray | None, np.ndarray]:
    """The order of Cuthill & McKee, reversed, and the place of each unknown in it; ``None``, and places as they stand,
    where there are too many entries for a band."""
    n = pattern.shape[0]
    both = pattern if symmetric else sp.csr_matrix(pattern + pattern.T)
    place = np.arange(n, dtype=pattern.indices.dtype)
    if both.nnz > WIDEST_BAND * n:
        return None, place
    order = reverse_cuthill_mckee(both, symmetric_mode=True).astype(np.int64)
    place[order] = np.arange(n, dtype=place.dtype)
    return order, place


def _is_symmetric(pattern: sp.csr_matrix) -> bool:
    transposed = sp.csr_matrix(pattern.T)
    transposed.sort_indices()
    return np.array_equal(pattern.indptr, transposed.indptr) and np.array_equal(pattern.indices, transposed.indices)


def _rows_of(pattern: sp.csr_matrix) -> np.ndarray:
    """The row of every entry, in the type of its column."""
    return np.repeat(np.arange(pattern.shape[0], dtype=pattern.indices.dtype), np.diff(pattern.indptr))


def _band_of(pattern: sp.csr_matrix, place: np.ndarray) -> tuple[int, int]:
    return _band(place[_rows_of(pattern)], place[pattern.indices])


def _band(rows: np.ndarray, columns: np.ndarray) -> tuple[int, int]:
    gap = rows - columns
    return int(gap.max(initial=0)), int(-gap.min(initial=0))
