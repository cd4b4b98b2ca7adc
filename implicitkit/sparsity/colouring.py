r"""Groups of columns (or rows) of a sparse matrix that can be found from one product each.

Columns that share no row are structurally orthogonal: their sum shows every entry of each (Curtis, Powell & Reid 1974; as
a colouring of the column intersection graph: Coleman & Moré 1983, SIAM J. Numer. Anal. 20(1)).  Two ways:

- strides: where rows only couple columns at few distances (stencils on a grid), column ``j`` gets colour ``j mod p`` with
  the smallest ``p`` that divides no distance.  On a line or a grid this is the fewest possible, or close to it.
- greedy: columns choose the smallest colour no neighbour has, those of most neighbours first; all whose turn has come at
  once, which gives the same colours (Jones & Plassmann 1993, SIAM J. Sci. Comput. 14(3)).

Rows with many entries (hubs of a graph) would force as many colours; they are set apart, and found by products with the
transposed matrix, coloured in their turn (Coleman & Verma 1998, SIAM J. Sci. Comput. 19(4): bicolouring).  Of a symmetric
matrix these products show the columns of the hubs as well, so that the others need only be told apart in what is left
(Coleman & Moré 1984, Math. Prog. 28: symmetry saves products).  So do the rows of multipliers in conditions of optimality,
which have nothing on the diagonal: theirs show the Jacobian of the constraints twice, and leave the Hessian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from implicitkit.sparsity.index_sets import IndexSets

_DISTANCES = 4096  # distances that strides are tried for
_WORTH = 0.7  # rows are set apart where that leaves no more than this share of the products
_TABLE = 8  # numbers of a table for each to be put there, up to which that is faster than to sort them
_PAIRS = 40_000_000  # pairs of columns that may share a row, at most


@dataclass(frozen=True)
class Colouring:
    """How a matrix is found from products.

    Attributes:
        by_rows: groups are of rows (products with the transposed matrix); else of columns.
        groups: the colour of each column (row), ``(n,)``, -1 for those that need none. count: colours.
        apart: rows (columns) found from products of the other kind; their entries are not in the others' colours.
        apart_groups, apart_count: their colours.
    """

    by_rows: bool
    groups: np.ndarray
    count: int
    apart: np.ndarray
    apart_groups: np.ndarray
    apart_count: int

    @property
    def products(self) -> int:
        """Products needed in all."""
        return self.count + self.apart_count


def colour(
    pattern: IndexSets, *, row_cost: float = 1.0, column_cost: float = 1.5, symmetric: bool = False
) -> Colouring | None:
    """The cheaper of row and column groups; ``None`` if both would need about as many products as a dense matrix.

    Args:
        pattern: ``(m, n)``. row_cost, column_cost: of a product with the transposed matrix, and with the matrix.
        symmetric: the matrix is, and so its pattern.
    """
    if symmetric:
        return _of_symmetric(pattern)
    sides = []
    for by_rows, own, other in ((True, row_cost, column_cost), (False, column_cost, row_cost)):
        matrix = sp.csr_matrix(pattern.T) if by_rows else pattern
        apart, least = _hubs(matrix, other / own)
        sides.append((own * least, by_rows, own, other, matrix, apart))
    sides.sort(key=lambda side: side[0])  # the other one's graph may be many times as large
    candidates = []
    for _, by_rows, own, other, matrix, apart in sides:
        found = groups_of_columns(_without(matrix, apart))
        alone = groups_of_columns(sp.csr_matrix(matrix[apart].T)) if len(apart) else (apart, 0)
        if found is not None and alone is not None:
            plan = Colouring(by_rows, *found, apart, *alone)
            candidates.append((own * plan.count + other * plan.apart_count, plan))
        if candidates and candidates[0][0] <= 1.2 * sides[1][0]:
            break  # the other can hardly do better
        if by_rows and candidates and not len(apart) and row_cost <= column_cost and _is_symmetric(pattern, matrix):
            break  # they have the same colours
    if not candidates:
        return None
    return min(candidates, key=lambda c: c[0])[1]


def of_columns(groups: np.ndarray, count: int, rows: Sequence[int] = ()) -> Colouring:
    """Products with ``count`` groups of columns, and one with each of these rows, where that is known beforehand."""
    apart = np.array(rows, dtype=np.int64)
    return Colouring(False, groups, count, apart, np.arange(len(apart)), len(apart))


def fewest(pattern: IndexSets) -> int:
    """Products that show the entries of a pattern, at least."""
    return min(int(counts.max(initial=0)) for counts in _counts(pattern))


def most(pattern: IndexSets) -> int | None:
    """Products that show the entries of a pattern, at most; ``None`` where there may be no colouring."""
    rows, columns = _counts(pattern)
    if max(int((counts * counts).sum()) for counts in (rows, columns)) > _PAIRS:
        return None
    wide, high = int(rows.max(initial=0)), int(columns.max(initial=0))
    several = max(wide * high + 1, 2 * max(wide, high) + 3)  # one more than there are neighbours, or a stride
    return 2 * several  # where lines are set apart


def is_regular(pattern: IndexSets) -> bool:
    """Are the columns of a row at a few distances from each other, as on a grid, and so few colours found at once?"""
    widest = _widest(pattern)
    distances = _distances(pattern) if widest else None
    stride = None if distances is None else _stride(distances, widest)
    return widest <= 1 or (stride is not None and stride <= 2 * widest + 3)


def groups_of_columns(pattern: IndexSets) -> tuple[np.ndarray, int] | None:
    """The colour of each column, and how many colours; columns of one colour share no row."""
    n = pattern.shape[1]
    widest = _widest(pattern)
    if widest <= 1:
        return np.zeros(n, dtype=np.int64), 1
    counts = np.diff(pattern.indptr).astype(np.int64)
    many = int((counts * counts).sum()) > _PAIRS
    distances = _distances(pattern)
    stride = None if distances is None else _stride(distances, widest)
    if stride is not None and (many or stride <= 2 * widest + 3):
        return np.arange(n) % stride, stride
    if many:
        return None
    groups = _greedy(pattern)
    return groups, int(groups.max()) + 1


def _counts(pattern: IndexSets) -> tuple[np.ndarray, np.ndarray]:
    """Entries of each row, and of each column."""
    return np.diff(pattern.indptr).astype(np.int64), np.bincount(pattern.indices, minlength=pattern.shape[1])


def _widest(pattern: IndexSets) -> int:
    return int(np.diff(pattern.indptr).max(initial=0))


def _is_symmetric(pattern: IndexSets, transposed: IndexSets) -> bool:
    transposed.sort_indices()
    same = np.array_equal(pattern.indptr, transposed.indptr)
    return same and np.array_equal(pattern.indices, transposed.indices)


def _hubs(pattern: IndexSets, cost: float) -> tuple[np.ndarray, float]:
    """The rows to set apart so that the colours of the others and theirs (times ``cost``) are few together, and how many.

    Colours are estimated from below: by the widest of the other rows, and the most rows set apart that share a column.
    """
    counts = np.diff(pattern.indptr)
    order = np.argsort(-counts, kind="stable")
    best, least, size = 0, float(_widest(pattern)), 1
    price = _WORTH * least
    shared, before = np.zeros(pattern.shape[1], dtype=np.int64), 0
    while size < len(order) // 2:
        shared += np.bincount(pattern[order[before:size]].indices, minlength=len(shared))
        value = cost * shared.max(initial=0)
        if value >= price:
            break  # as are those of more rows
        if value + counts[order[size]] < price:
            best, least = size, value + counts[order[size]]
            price = least
        before, size = size, 2 * size
    return np.sort(order[:best]), least


def _of_symmetric(pattern: IndexSets) -> Colouring | None:
    """The colouring of a symmetric matrix: hubs, or multipliers, by products of their own, the others by what is left
    without their rows and columns."""
    multipliers = np.flatnonzero(pattern.diagonal() == 0)
    plans = [_set_apart(pattern, _symmetric_hubs(pattern))]
    if 0 < len(multipliers) < pattern.shape[0]:
        plans.append(_set_apart(pattern, multipliers))
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.products, default=None)


def _set_apart(pattern: IndexSets, apart: np.ndarray) -> Colouring | None:
    """The colouring of a symmetric matrix with these rows, and columns, set apart."""
    n = pattern.shape[0]
    keep = np.setdiff1d(np.arange(n), apart, assume_unique=True)
    rest = pattern[keep][:, keep] if len(apart) else pattern
    found = groups_of_columns(rest)
    alone = groups_of_columns(sp.csr_matrix(pattern[apart].T)) if len(apart) else (apart, 0)
    if found is None or alone is None:
        return None
    groups = np.full(n, -1, dtype=np.int64)
    groups[keep] = found[0]
    return Colouring(True, groups, found[1], apart, *alone)


def _symmetric_hubs(pattern: IndexSets) -> np.ndarray:
    """The rows to set apart with their columns; colours estimated as in :func:`_hubs`."""
    counts = np.diff(pattern.indptr)
    n = len(counts)
    order = np.argsort(-counts, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(n)
    row, column = place[np.repeat(np.arange(n), counts)], place[pattern.indices]
    falls = counts[order[:-1]] / np.maximum(counts[order[1:]], 1)
    sizes = {1 << k for k in range(max(1, n // 2).bit_length())} | ({int(falls.argmax()) + 1} if n > 1 else set())
    best, price = 0, float(_widest(pattern)) * _WORTH
    for size in sorted(size for size in sizes if size <= n // 2):
        left, hubs = (row >= size) & (column >= size), row < size
        value = float(np.bincount(row[left]).max(initial=0) + np.bincount(column[hubs]).max(initial=0))
        if value < price:
            best, price = size, value
    return np.sort(order[:best])


def _without(pattern: IndexSets, rows: np.ndarray) -> IndexSets:
    if len(rows) == 0:
        return pattern
    keep = np.ones(pattern.shape[0], dtype=bool)
    keep[rows] = False
    return pattern[keep]


def _distances(pattern: IndexSets) -> np.ndarray | None:
    """All ``|j - k|`` of columns that share a row; ``None`` if there are many."""
    n, counts = pattern.shape[1], np.diff(pattern.indptr)
    seen = np.zeros(n, dtype=bool)
    longest = int(counts.max())
    if longest > 64:
        return None
    start, indices = pattern.indptr[:-1], pattern.indices
    for gap in range(1, longest):
        rows = np.flatnonzero(counts > gap)
        for first in range(longest - gap):
            rows = rows[counts[rows] > gap + first]
            left = start[rows] + first
            seen[np.abs(indices[left + gap] - indices[left])] = True
    found = np.flatnonzero(seen)
    return found if len(found) <= _DISTANCES else None


def _stride(distances: np.ndarray, least: int) -> int | None:
    """The smallest number from ``least`` on that divides no distance."""
    for p in range(least, 4 * least + 64):
        if (distances % p).all():
            return p
    return None


def _greedy(pattern: IndexSets) -> np.ndarray:
    """Greedy colouring of the column intersection graph, columns of many neighbours first."""
    lines = pattern.astype(bool, copy=False)  # of numbers of eight bits, 256 shared rows would count as none
    graph = sp.csr_matrix(lines.T @ lines)  # with a diagonal, which tells nothing: no column is before itself
    n, degree = graph.shape[0], np.diff(graph.indptr)
    rank = np.empty(n, dtype=np.int32)
    rank[np.lexsort((np.random.default_rng(0).permutation(n), -degree))] = np.arange(n, dtype=np.int32)
    before = rank[graph.indices] < np.repeat(rank, degree)
    waiting = np.bincount(np.repeat(np.arange(n, dtype=np.int32), degree)[before], minlength=n)  # for their turns
    colours = np.full(n, -1, dtype=np.int64)
    ready = np.flatnonzero(waiting == 0)
    while len(ready):
        edges = graph[ready]
        owner, neighbour = np.repeat(np.arange(len(ready)), np.diff(edges.indptr)), edges.indices
        colours[ready] = _free(owner, colours[neighbour], len(ready))
        later, count = np.unique(neighbour[rank[neighbour] > rank[ready][owner]], return_counts=True)
        waiting[later] -= count
        ready = later[waiting[later] == 0]
    return colours


def _free(owner: np.ndarray, taken: np.ndarray, owners: int) -> np.ndarray:
    """For each owner the smallest colour not ``taken`` by its neighbours."""
    seen = taken >= 0
    width = int(taken.max(initial=0)) + 1
    if owners * (width + 1) <= _TABLE * len(taken):
        table = np.zeros((owners, width + 1), dtype=bool)
        table[owner[seen], taken[seen]] = True
        return table.argmin(1)
    pairs = np.unique(owner[seen] * width + taken[seen])
    who, which = pairs // width, pairs % width
    place = np.arange(len(who)) - np.searchsorted(who, np.arange(owners))[who]
    return np.bincount(who[which == place], minlength=owners)  # the first so many are taken
