r"""Matrices that are sparse but for a few numbers which all unknowns share: a mean, a norm, a normalisation.

    J = A + U V,      A  (m, n) sparse,   U  (m, k),   V  (k, n),   k  a few

``F(z) = f(z, s(z))`` with ``k`` numbers ``s`` has such a Jacobian, ``A = df/dz``, ``U = df/ds``, ``V = ds/dz``, full though
it is.  The pattern of ``A`` is known (:func:`~implicitkit.sparsity.detection.detect` gives such numbers names); the entries
come from products with ``J`` alone:

1. ``w'J = w'A + (w'U) V``, where ``w`` is not zero in few rows only, is a combination of the rows of ``V`` wherever ``A``
   has no entry in these rows.  ``3 k`` such combinations, of rows that meet three separate sets of columns, have rank ``k``,
   and each column of ``V`` is found from those that show it; its rows are made orthonormal.
   Rows of few numbers that hardly another row uses (a residual that is a mean) are rows of ``V`` themselves, ``e_i'J``.
2. For columns ``c`` of one colour, with signs, ``J s_c = A s_c + U (V s_c)`` shows ``A_ij s_j + U_i (V s_c)``, and a few
   random vectors ``x`` more, ``J x``, are as many equations for the ``k`` numbers ``U_i``:

       (J x)_i - \sum_j (J s_c(j))_i s_j x_j = U_i (V x - \sum_j V s_c(j) s_j x_j),     j over the entries of row i.

   A symmetric ``J`` needs none of these: ``U = V' M``, and the combinations of 1. are ``w'J = (w'V') M V`` there, of which
   the ``k^2`` numbers ``M`` are the least squares.

Source: the first is a randomised range finder (Halko, Martinsson & Tropp 2011, SIAM Review 53, algorithm 4.1) of a matrix
with entries left out, the second the estimate of Curtis, Powell & Reid (1974) of what remains; the combination is this
library's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation import graph, seeded
from implicitkit.sparsity.colouring import groups_of_columns
from implicitkit.sparsity.index_sets import IndexSets, take
from implicitkit.sparsity.last_entries import LastEntries, Sizes
from implicitkit.sparsity.same_pattern import Pattern

_GROUPS = 3  # of rows, for V
_COVER = 0.05  # of the columns that one group meets, at most
_RARE = 4  # rows that use a number, at most, for them to be found each by itself
_MORE = 4  # equations for U_i beside the k there are
_RANK = 1e-11  # of the largest singular value: less is rounding
_CHUNK = 1 << 20  # numbers in one batch of products
_Product = Callable[[Tensor], Tensor]


class Entries(NamedTuple):
    """What there is of every sample's matrix ``A + U V``: ``A`` ``(batch, nnz)`` in the order of the pattern, ``U``
    ``(batch, m, k)``, and ``V`` ``(batch, k, n)``, its rows orthonormal, or zero where fewer are enough."""

    A: np.ndarray
    U: np.ndarray
    V: np.ndarray


class LowRank(NamedTuple):
    """``A + U V`` of one sample, to multiply with."""

    A: sp.csr_matrix
    U: np.ndarray
    V: np.ndarray

    def __matmul__(self, v: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.A @ v + self.U @ (self.V @ v)
        return found


@dataclass(frozen=True)
class Bordered(Pattern):
    """The pattern of ``A + U V``: that of ``A``.

    Attributes:
        colours: of its columns, ``(n,)``. count: of colours.
        rank: ``k``, at most, without the rows ``alone`` that are found each by itself, and have no entry in ``pattern``.
        groups: other rows for finding ``V``, and the columns that they meet.
    """

    colours: np.ndarray
    count: int
    rank: int
    alone: np.ndarray
    groups: tuple[tuple[np.ndarray, np.ndarray], ...]

    def with_rows(self, entries: Entries, weights: np.ndarray) -> Entries:
        """The entries of matrices whose rows are so many times as long, ``(batch, m)``."""
        lengths = np.repeat(weights, np.diff(self.pattern.indptr), axis=1)
        return Entries(entries.A * lengths, entries.U * weights[:, :, None], entries.V)

    @property
    def products(self) -> int:
        """How many show the entries, and check them."""
        return self.count + self.rank + _MORE + _GROUPS * self.rank + len(self.alone) + 1

    def values(self, mv: _Product, rmv: _Product, batch: int, like: Tensor) -> tuple[Entries, np.ndarray]:
        """The entries of every sample's matrix, and how far it is from a product, relative, ``(batch,)``.

        Args:
            mv: ``(batch, n) -> (batch, m)``. rmv: its transposed. like: a tensor with their dtype and device.
        """
        last: LastEntries = self.analysed(LastEntries)
        found = last.same(mv, batch, like)
        if found is None:
            found = self._from_products(mv, rmv, batch, like)
            entries, count = found[0], sum(part.size for part in found[0])
            last.keep(*found, mv, like, count, lambda: self._sizes(entries))
        return found

    def _sizes(self, entries: Entries) -> Sizes:
        """The largest entries of the columns, and how ``|A| + |U| |V|`` multiplies."""
        parts = zip(*map(np.abs, entries), strict=True)
        matrices = [LowRank(self.matrix(a), u, v) for a, u, v in parts]
        columns = [np.maximum(A.max(0).toarray()[0], U.max(0, initial=0.0) @ V) for A, U, V in matrices]
        return Sizes(np.stack(columns), lambda v: np.stack([A @ w for A, w in zip(matrices, v, strict=True)]))

    def _from_products(self, mv: _Product, rmv: _Product, batch: int, like: Tensor) -> tuple[Entries, np.ndarray]:
        """The entries and their error as of :meth:`values`, from products with all seeds."""
        (m, n), k = self.pattern.shape, self.rank
        weights = np.zeros((_GROUPS * k + len(self.alone), m))
        weights[np.arange(_GROUPS * k, len(weights)), self.alone] = 1
        for g, (rows, _) in enumerate(self.groups):
            weights[g * k : (g + 1) * k, rows] = seeded.normal(k, len(rows), seed=0x10A + g).numpy()
        seen = _shown(rmv, weights, batch, like)
        spaces = [self._row_space(seen[: _GROUPS * k, i]) for i in range(batch)]
        V, symmetric = np.stack([rows for rows, _ in spaces]), mv == rmv
        signs = seeded.signs(n, seed=0x51).numpy().astype(float)
        seeds = np.zeros((self.count + (0 if symmetric else k + _MORE) + 1, n))
        seeds[self.colours, np.arange(n)] = signs
        seeds[self.count :] = seeded.normal(len(seeds) - self.count, n, seed=0x52).numpy()
        shown = _shown(mv, seeds, batch, like)
        parts = [
            self._symmetric_parts(shown[:-1, i], *spaces[i], weights[: _GROUPS * k], seeds[:-1], signs)
            if symmetric
            else self._parts(shown[:-1, i], V[i], seeds[:-1], signs)
            for i in range(batch)
        ]
        A, U = np.stack([a for a, _ in parts]), np.stack([u for _, u in parts])
        U, V = self._with_rows(U, V, seen[_GROUPS * k :].transpose(1, 0, 2))
        error = np.empty(batch)
        for i in range(batch):
            v, product = seeds[-1], shown[-1, i]
            mine = self.matrix(A[i])
            size = abs(mine) @ np.abs(v) + np.abs(U[i]) @ np.abs(V[i] @ v)
            with np.errstate(divide="ignore", invalid="ignore"):
                wrong = np.abs(mine @ v + U[i] @ (V[i] @ v) - product)
                error[i] = np.where(wrong > 0, wrong / size, 0.0).max(initial=0.0)
        rank = int(V.any(2).sum(1).max(initial=0))
        return Entries(A, U[:, :, :rank], V[:, :rank]), error

    def _row_space(self, seen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Orthonormal rows ``V`` ``(k, n)`` that span those of ``V``, and ``L`` ``(3 k, k)`` with which the ``3 k``
        combinations are ``L V``, where ``A`` adds nothing."""
        k, n = self.rank, self.pattern.shape[1]
        V, L = np.zeros((k, n)), np.zeros((_GROUPS * k, k))
        shows = np.ones((_GROUPS, n), dtype=bool)
        for g, (_, columns) in enumerate(self.groups):
            shows[g, columns] = False
        if not np.isfinite(seen).all():
            return V, L
        shown = seen[:, shows.all(0)]
        R = np.asarray(np.linalg.qr(shown.T, mode="r"))
        left, sizes, _ = np.linalg.svd(R.T, full_matrices=False)
        rank = min(k, int((sizes > _RANK * sizes[0]).sum()))
        Q = left[:, :rank]
        V[:rank, shows.all(0)] = Q.T @ shown
        for hidden in range(_GROUPS):  # columns that one group does not show
            rows = np.repeat(np.arange(_GROUPS) != hidden, k)
            V[:rank, ~shows[hidden]] = np.linalg.lstsq(Q[rows], seen[np.ix_(rows, ~shows[hidden])], rcond=None)[0]
        basis, R = np.linalg.qr(V[:rank].T)
        V[:rank], L[:, :rank] = basis.T, Q @ R.T
        return V, L

    def _with_rows(self, U: np.ndarray, V: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``U`` and ``V`` with the rows of ``J`` that are :attr:`alone`, ``(batch, alone, n)``, too."""
        if not len(self.alone):
            return U, V
        U[:, self.alone] = 0
        own = np.zeros((len(U), U.shape[1], len(self.alone)))
        own[:, self.alone, np.arange(len(self.alone))] = 1
        Q, R = np.linalg.qr(np.concatenate([V, np.where(np.isfinite(rows), rows, 0.0)], 1).transpose(0, 2, 1))
        U = np.concatenate([U, own], 2) @ R.transpose(0, 2, 1)
        U[~np.isfinite(rows).all((1, 2))] = np.nan
        return U, Q.transpose(0, 2, 1)

    def _parts(
        self, shown: np.ndarray, V: np.ndarray, seeds: np.ndarray, signs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """``A`` and ``U`` of a sample from the products that show them, and ``V``."""
        m = self.pattern.shape[0]
        rows = np.repeat(np.arange(m), np.diff(self.pattern.indptr))
        columns = self.pattern.indices
        colour, sign = self.colours[columns], signs[columns]
        W, X = V @ seeds.T, seeds[self.count :]  # (k, colours and random), (random, n)
        entries = shown[colour, rows] * sign  # A_ij + U_i (V s_c) s_j
        part = (X[:, columns] * sign).T
        add = sp.csr_matrix((np.ones(len(rows)), (rows, np.arange(len(rows)))), shape=(m, len(rows)))
        taken = sp.csr_matrix((entries, columns, self.pattern.indptr), shape=self.pattern.shape) @ X.T
        right = shown[self.count :].T - taken  # (m, random)
        matrix = np.empty((m, len(W), len(X)))
        for a, w in enumerate(W):
            matrix[:, a] = w[self.count :] - add @ (part * w[colour][:, None])
        normal = matrix @ matrix.transpose(0, 2, 1)
        used = V.any(1)
        normal[:, ~used, ~used] = 1.0
        U = np.linalg.solve(normal, matrix @ right[:, :, None])[:, :, 0]
        return entries - np.einsum("el,le->e", U[rows], W[:, colour]) * sign, U

    def _symmetric_parts(
        self, shown: np.ndarray, V: np.ndarray, L: np.ndarray, weights: np.ndarray, seeds: np.ndarray, signs: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """``A`` and ``U`` of a sample's symmetric matrix ``A + V' M V``, from the combinations with these ``weights``, which
        are ``L V``."""
        M = np.linalg.lstsq(weights @ V.T, L, rcond=None)[0]
        U = V.T @ (0.5 * (M + M.T))
        rows, columns = np.repeat(np.arange(len(U)), np.diff(self.pattern.indptr)), self.pattern.indices
        colour, sign = self.colours[columns], signs[columns]
        of_colours = U @ (V @ seeds.T)
        return (shown[colour, rows] - of_colours[rows, colour]) * sign, U


def bordered(pattern: IndexSets, n: int) -> Bordered | None:
    """A :class:`Bordered` pattern made ready for use: ``pattern`` of ``A``, ``n`` columns, and of ``U``; ``None`` where no
    number is shared, there are too few rows to find ``V`` from, or ``A`` is hardly sparse."""
    used = sp.csr_matrix(pattern[:, n:]).astype(np.int32)
    rare = (np.asarray(used.sum(0)).reshape(-1) <= _RARE).astype(np.int32)
    alone = np.flatnonzero(used @ rare)
    rows = np.arange(pattern.shape[0])
    rows[alone] = -1  # the empty set
    kept = take(pattern, rows)
    A, used = sp.csr_matrix(kept[:, :n]), sp.csr_matrix(kept[:, n:])
    A.sort_indices()
    uses, rank = np.flatnonzero(np.diff(used.indptr)), len(np.unique(used.indices))
    if not rank and not len(alone):
        return None
    found = groups_of_columns(A)
    groups = _groups(A, uses) if rank else ((uses, uses),) * _GROUPS
    if found is None or groups is None:
        return None
    return Bordered(A, found[0], found[1], rank, alone, groups)


def _groups(A: IndexSets, uses: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], ...] | None:
    """Groups of those rows, each with the columns that it meets: no column is met by two."""
    n, rng = A.shape[1], np.random.default_rng(0)
    taken, found = np.zeros(n, dtype=bool), []
    left = rng.permutation(uses)
    counts = np.diff(A.indptr)
    for g in range(_GROUPS):
        free = np.asarray(A[left].astype(np.int32) @ taken.astype(np.int32)).reshape(-1) == 0 if g else slice(None)
        left = left[free]
        rows = left[: max(1, int(np.searchsorted(np.cumsum(counts[left]), _COVER * n, side="right")))]
        if g < _GROUPS - 1:
            rows = rows[: max(1, len(left) // (_GROUPS - g))]
        if not len(rows):
            return None
        columns = np.unique(A[rows].indices)
        if len(columns) > 0.25 * n:
            return None
        taken[columns] = True
        found.append((rows, columns))
        left = left[len(rows) :]
    return tuple(found)


def _shown(product: _Product, vectors: np.ndarray, batch: int, like: Tensor) -> np.ndarray:
    """``product`` of each vector, the same for all samples: ``(count, batch, width)``, double precision, on the host."""
    some = max(1, _CHUNK // max(1, batch * vectors.shape[1]))
    parts = []
    for first in range(0, len(vectors), some):
        given = torch.from_numpy(vectors[first : first + some]).to(like).unsqueeze(1).expand(-1, batch, -1)
        parts.append(graph.each(product, given).detach().to(device="cpu", dtype=torch.float64).numpy())
    return np.concatenate(parts)
