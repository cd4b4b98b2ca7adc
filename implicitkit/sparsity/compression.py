"""A sparse Jacobian from a few products, and the check that its pattern holds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation import graph, seeded
from implicitkit.foundation.numbers import numbers
from implicitkit.sparsity.accumulation import accumulated
from implicitkit.sparsity.colouring import Colouring, colour, fewest, is_regular, most, of_columns
from implicitkit.sparsity.index_sets import IndexSets
from implicitkit.sparsity.last_entries import LastEntries, Sizes, product_of_one
from implicitkit.sparsity.same_pattern import Pattern, with_entries

_CHUNK = 1 << 18  # numbers in one batch of products: fewer cost more calls, more take memory and save no time
_CHUNK_ELSEWHERE = 1 << 25
# samples, and numbers in all products, from which a test for a common matrix pays
_SAMPLES, _LEAST = 4, 1 << 16
_LIKELY, _ALIKE = 1e-6, 64.0  # of themselves products with one may differ by, and in the end units of rounding
_TIMES = (1.37, 0.61, 2.23)  # no powers of two, whose products have the same rounding errors
_AS_MUCH = 1e-2  # of what it should be, how far a multiple may be from that
_SURE = 1e-8  # of the product itself, by which it may be wrong: then it need not be asked what cancels in it
_ROUNDED, _ROUGH = (
    64.0,
    1e-4,
)  # roundings that a product may be away from one with entries that were followed, at most that
_FOLLOWED = 16  # products that take as long as an evaluation that is followed, about
_FOLLOWED_FROM = 2048  # rows from which it is: of fewer numbers the calls take most of the time
_LOST = "lost"  # what is remembered of a pattern whose entries could not be followed
_Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Coloured(Pattern):
    """A pattern ``(m, n)``, and how products show its entries, which is found when that is first asked.

    Attributes:
        origin: who said so: ``"detected"`` or ``"given"``. symmetric: the matrix is.
        known: its entries are, and need not be found from products.
        told: the colours, where they follow from those of a smaller matrix and need not be looked for.
        followed: all operations are known that lead from the unknowns to what is differentiated, and their derivatives
            (:mod:`~implicitkit.sparsity.accumulation`).
    """

    origin: str = "detected"
    symmetric: bool = False
    known: bool = False
    told: Colouring | None = field(default=None, repr=False, compare=False)
    followed: bool = field(default=False, compare=False)

    @functools.cached_property
    def colouring(self) -> Colouring:
        """Which products show the entries."""
        if self.told is not None:
            return self.told
        plan = None if self.known else colour(self.pattern, symmetric=self.symmetric)
        return of_columns(np.zeros(0, dtype=np.int64), 0) if plan is None else plan

    @functools.cached_property
    def places(self) -> np.ndarray:
        """For every entry, in the order of the rows, where it stands among the flattened products."""
        return np.zeros(0, dtype=np.int64) if self.known else _places(self.pattern, self.colouring, self.symmetric)

    @property
    def accumulates(self) -> bool:
        """Do the entries take less time by one evaluation that is followed than by products, and than to find colours?"""
        if not self.followed or _LOST in self._found:
            return False
        many = self.pattern.shape[0] >= _FOLLOWED_FROM and 2 * self.analysed(fewest) >= _FOLLOWED
        return many and not self.analysed(is_regular)

    @property
    def products(self) -> int:
        """How many show the entries, or take as long; at least, while their colours are not known."""
        if self.accumulates:
            return _FOLLOWED
        found = self.told is not None or "colouring" in self.__dict__
        return self.colouring.products if found else self.analysed(fewest)

    @functools.cached_property
    def _as_shown(self) -> IndexSets:
        """The pattern, transposed if products are by rows."""
        return self.pattern.T if self.colouring.by_rows else self.pattern

    @functools.cached_property
    def _random(self) -> np.ndarray:
        """The vector of the product that confirms the pattern; positive."""
        v: np.ndarray = seeded.uniform(self.shape[0 if self.colouring.by_rows else 1], seed=0x5EED).numpy() + 0.5
        return v

    def values(self, mv: _Product, rmv: _Product, batch: int, like: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The entries of every sample's matrix, and how far it is from the products.

        Args:
            mv: ``(batch, n) -> (batch, m)``. rmv: its transposed. like: a tensor with their dtype and device.

        Returns:
            ``(batch, nnz)`` in the order of :attr:`pattern` (those of one matrix, expanded, where all samples have the same,
            :meth:`_of_one`), and ``(batch,)``: for a random vector ``v``, the
            relative error ``max_i |(A v - mv(v))_i| / (|A| |v|)_i``; rounding if the pattern holds, else far from it.
        """
        c, (m, n) = self.colouring, self.shape
        own, other = (rmv, mv) if c.by_rows else (mv, rmv)
        size_in, size_out = (m, n) if c.by_rows else (n, m)
        random = self._random
        members = np.flatnonzero(c.groups >= 0)
        first, alone = _Seeds(c.groups[members], members, c.count), _Seeds(c.apart_groups, c.apart, c.apart_count)
        if own == other:  # of a symmetric matrix: one pass, not two
            first, alone = first.and_then(alone), _Seeds(members[:0], members[:0], 0)
        check = None
        if batch >= _SAMPLES and not alone.number and batch * first.number * size_out >= _LEAST:
            check = product_of_one(own, random, batch, like)
            if bool((np.abs(check - check[0]) <= _LIKELY * np.abs(check[0])).all()):
                one = self._of_one(own, first, batch, size_in, like)
                if one is not None:
                    return np.broadcast_to(one, (batch, len(one))), self._error(one[None], random, check)
        values = np.empty((batch, len(self.places)))
        shown = self._read(values, own, first, random if check is None else None, 0, size_out, like)
        if alone.number:
            self._read(values, other, alone, None, c.count * size_out, size_in, like)
        return values, self._error(values, random, shown if check is None else check)

    def entries(
        self, function: Callable[[Tensor], Tensor], mv: _Product, rmv: _Product, z: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        """:meth:`values` of the Jacobian of ``function`` at ``z`` ``(batch, n)``: the last ones if these hold
        (:mod:`~implicitkit.sparsity.last_entries`), or by following an evaluation where that takes less time than products
        (:attr:`accumulates`)."""
        last: LastEntries = self.analysed(LastEntries)
        found = last.same(rmv, len(z), z)
        if found is None:
            found = self._entries_anew(function, mv, rmv, z)
            values = found[0]
            last.keep(*found, rmv, z, values.size, lambda: self._sizes(values))
        return found

    def _sizes(self, values: np.ndarray) -> Sizes:
        """The largest entries of the rows, and how the transposed of ``|A|`` multiplies."""
        A, (m, n) = abs(self.stacked(values)), self.shape
        largest = A.max(1).toarray().reshape(-1, m)
        lengths = np.diff(A.indptr)
        moved = lambda v: np.bincount(A.indices, A.data * np.repeat(v.reshape(-1), lengths), A.shape[1])  # noqa: E731
        return Sizes(largest, lambda v: moved(v).reshape(-1, n))

    def _entries_anew(
        self, function: Callable[[Tensor], Tensor], mv: _Product, rmv: _Product, z: Tensor
    ) -> tuple[np.ndarray, np.ndarray]:
        if self.accumulates and len(z) < _SAMPLES:
            values = accumulated(function, z, self.pattern)
            if values is not None:
                v = seeded.uniform(self.shape[0], seed=0x5EED).numpy() + 0.5
                shown, size, A = product_of_one(rmv, v, len(z), z), np.tile(v, len(z)), self.stacked(values)
                wrong = np.abs((A.T @ size).reshape(shown.shape) - shown)
                error = _relative(wrong, (abs(A).T @ size).reshape(shown.shape))
                sure = max(_SURE, min(_ROUNDED * torch.finfo(z.dtype).eps, _ROUGH))
                if np.isfinite(shown).all() and bool((error <= sure).all()):
                    return values, error
            self._found[_LOST] = True
        return self.values(mv, rmv, len(z), z)

    def _of_one(self, product: _Product, seeds: _Seeds, batch: int, n: int, like: Tensor) -> np.ndarray | None:
        """The entries ``(nnz,)`` of the matrix of all samples, each of which shows other colours: a few products, not one
        for each colour.  ``None`` where they have others: a random vector then has other products with some, beyond what
        rounding leaves of ``|A| |v|``; it gives each column the size one, so that a large one hides no small one."""
        block = np.zeros((-(-seeds.number // batch) * batch, n))
        block[seeds.groups, seeds.members] = 1
        line = np.concatenate([product_of_one(product, some, batch, like) for some in block.reshape(-1, batch, n)])
        values: np.ndarray = np.take(line, self.places)
        sizes = np.zeros(n)
        rows, columns = _coordinates(self.pattern)
        np.maximum.at(sizes, rows if self.colouring.by_rows else columns, np.abs(values))
        v = self._random / np.where(sizes > 0, sizes, 1)
        wrong = np.abs(product_of_one(product, v, batch, like) - self._product(values[None], v))
        rounding = _ALIKE * torch.finfo(like.dtype).eps * self._product(np.abs(values[None]), v)
        return values if bool((wrong <= rounding).all()) else None

    def _read(
        self,
        values: np.ndarray,
        product: _Product,
        seeds: _Seeds,
        vector: np.ndarray | None,
        begin: int,
        width: int,
        like: Tensor,
    ) -> np.ndarray:
        """Put the entries that products show into ``values`` ``(batch, nnz)``: products in one line, ``(k, width)``, of
        which the first number is the place ``begin``.  What the last one is, that of ``vector``: ``(batch, width)``."""
        n, batch, last = self.shape[0] + self.shape[1] - width, len(values), np.empty(0)
        beyond = begin + seeds.number * width
        kept = self.remembered(("seeds", begin, seeds.number), dict)
        for block in _shown(product, seeds, vector, n, batch, width, like, kept):
            line = block.transpose(1, 0, 2).reshape(batch, -1)
            end, last = begin + line.shape[1], block[-1]
            if begin == 0:  # what is beyond is put there later
                np.take(line, self.places, axis=1, out=values, mode="clip")  # which writes into it at once
            else:
                here = (self.places >= begin) & (self.places < min(end, beyond))
                values[:, here] = line[:, self.places[here] - begin]
            begin = end
        return last

    def _error(self, values: np.ndarray, v: np.ndarray, product: np.ndarray) -> np.ndarray:
        """The relative error of each sample, or of the one matrix of all, ``values`` ``(1, nnz)``, in its product with
        ``v``."""
        v, shown = np.tile(v, len(values)), np.abs(product)
        with np.errstate(invalid="ignore"):  # of what is infinite
            wrong = np.abs(self._product(values, v).reshape(len(values), -1) - product)
        error = _relative(wrong, shown)
        if bool((error <= _SURE).all()):  # an upper bound
            return error
        size = self._product(np.abs(values), v).reshape(len(values), -1)  # v is positive
        return _relative(wrong, np.maximum(size, shown))

    def is_rounding(self, values: np.ndarray, mv: _Product, rmv: _Product, like: Tensor, tolerance: float) -> bool:
        """Whether all that products differ by beyond ``tolerance`` is rounding, of terms that cancel in the entries
        (``sech^2 = 1 - tanh^2`` far out): what an entry that the pattern does not have adds grows with the vector.

        Args:
            values: the entries, ``(batch, nnz)``. mv, rmv, like: as for :meth:`values`.
        """
        own, batch = rmv if self.colouring.by_rows else mv, len(values)
        every = np.tile(self._random, batch)
        inside, size = (self._product(part, every).reshape(batch, -1) for part in (values, np.abs(values)))
        shown = product_of_one(own, self._random, batch, like)
        more = (np.abs(shown - inside) > tolerance * size) & (shown != 0)  # what cancels may leave nothing
        for times in _TIMES:
            grown = np.abs(product_of_one(own, times * self._random, batch, like) - times * shown)
            more &= grown <= _AS_MUCH * times * np.abs(shown - inside)
        return not bool(more.any())

    def _product(self, values: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Every sample's matrix times ``v``; of products by rows the transposed."""
        return np.asarray(below_each_other(self._as_shown, values) @ v)

    def with_rows(self, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """The entries ``(batch, nnz)`` of matrices whose rows are so many times as long, ``(batch, m)``."""
        return values * np.repeat(weights, np.diff(self.pattern.indptr), axis=1)

    def stacked(self, values: np.ndarray) -> sp.csr_matrix:
        """All samples' matrices from their entries ``(batch, nnz)``, one below the other along the diagonal: one call of
        SciPy's, which costs as much as 300 entries, for all of them."""
        return below_each_other(self.pattern, values)


def _relative(wrong: np.ndarray, size: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        error: np.ndarray = np.where(wrong > 0, wrong / size, 0.0).max(1, initial=0.0)
    return error


def coloured(
    pattern: IndexSets, origin: str = "detected", symmetric: bool = False, followed: bool = False
) -> Coloured | None:
    """A pattern made ready for use; ``None`` if no colouring halves the products that a dense matrix takes.

    ``symmetric``: the matrix is. ``followed``: its entries need no colours.
    """
    pattern = sp.csr_matrix(pattern).astype(bool)
    if symmetric:
        pattern = sp.csr_matrix(pattern + pattern.T)
    pattern.sum_duplicates()
    pattern.sort_indices()
    ready = Coloured(pattern, origin, symmetric, followed=followed)
    if ready.accumulates:
        return ready
    few = most(pattern)  # a bound costs nothing, colours of a large graph more than a solve that never asks for them
    if few is not None and 2 * few <= min(pattern.shape):
        return ready
    return ready if 0 < 2 * ready.colouring.products <= min(pattern.shape) else None


def _places(pattern: IndexSets, plan: Colouring, symmetric: bool) -> np.ndarray:
    rows, columns = _coordinates(pattern)
    group_of, inside = (rows, columns) if plan.by_rows else (columns, rows)
    width = pattern.shape[1] if plan.by_rows else pattern.shape[0]
    most = plan.count * width + plan.apart_count * max(pattern.shape)
    kind = np.int32 if most < 2**31 else np.int64
    places = plan.groups.astype(kind)[group_of] * kind(width) + inside
    if len(plan.apart):
        number = np.full(width, -1, dtype=np.int64)
        number[plan.apart] = plan.apart_groups
        alone, first = number[inside] >= 0, plan.count * width
        other_width = pattern.shape[0] if plan.by_rows else pattern.shape[1]
        places = np.where(alone, first + number[inside] * other_width + group_of, places)
        if symmetric:  # an entry is found where the one across the diagonal is
            across = ~alone & (number[group_of] >= 0)
            places = np.where(across, first + number[group_of] * other_width + inside, places)
    return places.astype(kind, copy=False)


def below_each_other(pattern: IndexSets, values: np.ndarray) -> sp.csr_matrix:
    """Matrices of one pattern, compressed alike, along the diagonal of one; ``values``: ``(batch, nnz)``."""
    batch, nnz, (m, n) = len(values), pattern.nnz, pattern.shape
    if batch == 1:
        return with_entries(pattern, values[0])
    inner, outer = (n, m) if pattern.format == "csr" else (m, n)
    kind = np.dtype(np.int32 if max(batch * nnz, batch * max(inner, outer)) < 2**31 else np.int64)
    each = np.arange(batch, dtype=kind)[:, None]
    indices = (pattern.indices.astype(kind) + each * inner).reshape(-1)
    pointer = np.append((pattern.indptr[:-1].astype(kind) + each * nnz).reshape(-1), kind.type(batch * nnz))
    return type(pattern)((values.reshape(-1), indices, pointer), shape=(batch * m, batch * n))


def known_entries(pattern: IndexSets) -> Coloured:
    """A pattern whose entries are known, and need not be found from products."""
    return Coloured(pattern, known=True)


def _coordinates(pattern: IndexSets) -> tuple[np.ndarray, np.ndarray]:
    rows = np.arange(pattern.shape[0], dtype=pattern.indices.dtype)
    return np.repeat(rows, np.diff(pattern.indptr)), pattern.indices


class _Seeds(NamedTuple):
    """Indicators of ``number`` groups of numbers: number ``members[i]`` is in ``groups[i]``."""

    groups: np.ndarray
    members: np.ndarray
    number: int

    def and_then(self, other: _Seeds) -> _Seeds:
        """These groups, and then the others."""
        groups = np.concatenate([self.groups, self.number + other.groups])
        return _Seeds(groups, np.concatenate([self.members, other.members]), self.number + other.number)


def _shown(
    product: _Product,
    seeds: _Seeds,
    vector: np.ndarray | None,
    n: int,
    batch: int,
    width: int,
    like: Tensor,
    kept: dict[Any, Tensor],
) -> Iterator[np.ndarray]:
    """``product`` ``(batch, n) -> (batch, width)`` of every seed and of one vector more, the same for each sample: a few
    at a time, ``(some, batch, width)``, double precision, on the host.  ``kept``: the vectors, if they are few numbers."""
    k = seeds.number + (vector is not None)
    limit = _CHUNK if like.device.type == "cpu" else _CHUNK_ELSEWHERE
    some = max(1, limit // max(1, batch * max(n, width)))
    some = min(some, max(1, math.ceil(k / math.ceil(k / some))))
    for first in range(0, k, some):
        count = min(some, k - first)
        vectors = kept.get((first, count, like.dtype, like.device))
        if vectors is None:
            block = np.zeros((count, n))
            here = slice(None) if count == k else (seeds.groups >= first) & (seeds.groups < first + count)
            block[seeds.groups[here] - first, seeds.members[here]] = 1
            if vector is not None and first + count == k:
                block[-1] = vector
            vectors = torch.from_numpy(block).to(like)
            if count == k and block.size <= _CHUNK:
                kept[first, count, like.dtype, like.device] = vectors
        vectors = vectors.unsqueeze(1).expand(-1, batch, -1)
        yield numbers(graph.each(product, vectors))


def as_pattern(given: object, rows: int, columns: int, diagonal: bool = False) -> IndexSets:
    """A user's word for a pattern ``(rows, columns)``: a sparse or dense matrix, or bandwidths ``(lower, upper)``;
    with the diagonal added if asked for.

    Raises:
        ValueError: another shape. TypeError: none of these.
    """
    if isinstance(given, (tuple, list)):
        lower, upper = (min(k, size - 1) for k, size in zip(given, (rows, columns), strict=True))
        diagonals = range(-lower, upper + 1)
        return sp.diags([1.0] * len(diagonals), list(diagonals), shape=(rows, columns), format="csr").astype(bool)
    if isinstance(given, Tensor):
        if given.layout is torch.strided:
            given = given.detach().cpu().numpy()
        else:
            coo = given.detach().cpu().to_sparse_coo().coalesce()
            i, j = coo.indices().numpy()
            given = sp.csr_matrix((np.ones(len(i), dtype=bool), (i, j)), shape=tuple(coo.shape))
    if not (sp.issparse(given) or isinstance(given, np.ndarray)):
        raise TypeError(
            "jac_sparsity must be a SciPy or torch sparse matrix, an array, bandwidths (lower, upper), 'auto' or None; "
            f"got {type(given).__name__}"
        )
    pattern = sp.csr_matrix(given)
    if pattern.shape != (rows, columns):
        raise ValueError(
            f"jac_sparsity has shape {pattern.shape}, but the Jacobian of one sample is {rows} x {columns} (unknowns in "
            "the order of the leaves of z, each flattened)"
        )
    pattern = sp.csr_matrix((np.ones(pattern.nnz, dtype=bool), pattern.indices, pattern.indptr), shape=pattern.shape)
    return pattern + sp.identity(rows, dtype=bool, format="csr") if diagonal else pattern
