"""Sets of unknowns, one for each entry of a tensor, as a boolean sparse matrix: row = entry, column = unknown.

Everything here is whole-array work on compressed rows, so that a grid of 100,000 points costs milliseconds.  The number of
members that a set of results would have is known before it is formed; above a limit (:func:`limited`) there is nothing
sparse left to find, and :class:`TooDense` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

import numpy as np
import scipy.sparse as sp

IndexSets: TypeAlias = sp.csr_matrix
_MOST = 40_000_000
_budget: ContextVar[tuple[int, int]] = ContextVar("budget", default=(_MOST, 0))


class TooDense(Exception):
    """The sets hold so many members that the matrix is not worth calling sparse."""


@contextmanager
def limited(members: int | None, each: int = 0) -> Iterator[None]:
    """At most so many members in one collection of sets (``None``: 40 million), or ``each`` in one set on average."""
    token = _budget.set(_budget.get() if members is None else (min(members, _budget.get()[0]), each))
    try:
        yield
    finally:
        _budget.reset(token)


def identity(rows: int, unknowns: int, others: int = 0) -> IndexSets:
    """Entry ``i`` is unknown ``i mod unknowns`` (the batch lies in front); ``others``: of what else sets may have."""
    members = np.arange(rows, dtype=np.int32) % np.int32(unknowns)
    return _made(members, np.arange(rows + 1, dtype=np.int32), (rows, unknowns + others))


def named(sets: IndexSets, rows: np.ndarray, members: np.ndarray) -> IndexSets:
    """``sets``, of which the ``rows``, ascending, are replaced by one member each."""
    counts = np.diff(sets.indptr)
    owner = np.repeat(np.arange(len(counts)), counts)
    left = np.ones(len(counts), dtype=bool)
    left[rows] = False
    kept = left[owner]
    owners, indices = np.append(owner[kept], rows), np.append(sets.indices[kept], members)
    order = np.argsort(owners, kind="stable")
    counts = np.where(left, counts, 1)
    pointer = np.append(0, np.cumsum(counts)).astype(np.int32)
    return _made(indices[order].astype(np.int32), pointer, sets.shape)


def empty(rows: int, unknowns: int) -> IndexSets:
    """Entries that depend on nothing."""
    return _made(np.zeros(0, dtype=np.int32), np.zeros(rows + 1, dtype=np.int32), (rows, unknowns))


def take(sets: IndexSets, rows: np.ndarray) -> IndexSets:
    """The sets of these rows, in this order; row ``-1`` is the empty set."""
    count = sets.shape[0]
    missing = rows < 0
    if missing.any():
        padded = np.append(sets.indptr, sets.indptr[-1])
        sets = sp.csr_matrix((sets.data, sets.indices, padded), shape=(count + 1, sets.shape[1]), copy=False)
        rows = np.where(missing, count, rows)
    if sets.nnz > sets.shape[0] or len(rows) > count:
        afford(int(np.diff(sets.indptr)[rows].sum(dtype=np.int64)), len(rows))
    picked = sets[rows]
    picked.has_canonical_format = True
    return picked


def union(collections: Sequence[IndexSets]) -> IndexSets:
    """Row by row the union; of rows of numbers the sum."""
    result = collections[0]
    for other in collections[1:]:
        counts = result.dtype != bool or other.dtype != bool
        if (other is result and not counts) or not other.nnz:
            continue
        if not result.nnz:
            result = other
            continue
        if (
            not counts
            and result.nnz == other.nnz
            and np.array_equal(result.indices, other.indices)
            and np.array_equal(result.indptr, other.indptr)
        ):
            continue
        afford(result.nnz + other.nnz, result.shape[0])
        result = result + other
        result.has_canonical_format = True
    return result


def merge(sets: IndexSets, groups: np.ndarray, count: int) -> IndexSets:
    """Row ``g`` is the union of the rows ``i`` with ``groups[i] = g < count``; those of group ``-1`` are left out."""
    rows = np.arange(len(groups), dtype=np.int32)
    if (groups < 0).any():
        rows = rows[groups >= 0]
        groups = groups[rows]
    return through(groups, rows, count, sets)


def through(targets: np.ndarray, sources: np.ndarray, count: int, sets: IndexSets) -> IndexSets:
    """Row ``t`` is the union of the rows ``s`` over all pairs ``(t, s)`` of ``targets`` and ``sources``; of rows of numbers
    the sum."""
    afford(int(np.diff(sets.indptr)[sources].sum(dtype=np.int64)), max(count, len(sources)))
    links = sp.csr_matrix((np.ones(len(targets), dtype=bool), (targets, sources)), shape=(count, sets.shape[0]))
    result = (links @ sets).astype(sets.dtype, copy=False)
    result.sort_indices()
    result.has_canonical_format = True
    return result


def everything(collections: Sequence[IndexSets], rows: int) -> IndexSets:
    """Every one of ``rows`` entries depends on all that any entry of the collections depends on."""
    unknowns = collections[0].shape[1]
    seen = np.zeros(unknowns, dtype=bool)
    for sets in collections:
        seen[sets.indices] = True
    members = np.flatnonzero(seen).astype(np.int32)
    afford(rows * len(members), rows)
    pointer = np.arange(rows + 1, dtype=np.int64) * len(members)
    return _made(np.tile(members, rows), pointer.astype(np.int32), (rows, unknowns))


def overwrite(old: IndexSets, where: np.ndarray, new: IndexSets) -> IndexSets:
    """``old`` with the rows ``where`` replaced by those of ``new``."""
    rows = np.arange(old.shape[0])
    rows[where] = old.shape[0] + np.arange(new.shape[0])
    return take(sp.vstack([old, new], format="csr"), rows)


def _made(indices: np.ndarray, pointer: np.ndarray, shape: tuple[int, int]) -> IndexSets:
    made = sp.csr_matrix((np.ones(len(indices), dtype=bool), indices, pointer), shape=shape, copy=False)
    made.has_canonical_format = True
    return made


def afford(members: int, rows: int) -> None:
    """Raise :class:`TooDense` where so many members in sets for so many entries are more than are worth it."""
    total, each = _budget.get()
    if members > max(total, min(rows * each, _MOST)):
        raise TooDense(f"{members} dependencies")
