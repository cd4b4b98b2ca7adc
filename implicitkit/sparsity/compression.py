"""A sparse Jacobian from a few products, and the check that its pattern holds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.sparsity.colouring import Colouring, colour
from implicitkit.sparsity.index_sets import IndexSets

__all__ = ["Coloured", "as_pattern", "coloured", "known_entries"]

_CHUNK = 1 << 18  # numbers in one batch of products: fewer cost more calls, more take memory and save no time
_CHUNK_ELSEWHERE = 1 << 25
_Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Coloured:
    """A pattern ``(m, n)`` with a colouring and the places where products show its entries.

    Attributes:
        pattern: in compressed rows. colouring: how its entries are found.
        origin: who said so: ``"detected"`` or ``"given"``.
        places: for every entry, in the order of the rows, where it stands among the flattened products.
    """

    pattern: IndexSets
    colouring: Colouring
    origin: str = "detected"
    places: np.ndarray = field(repr=False, default_factory=lambda: np.zeros(0, dtype=np.int64))
    _analysis: dict[Any, Any] = field(repr=False, default_factory=dict, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        """``(m, n)``."""
        shape: tuple[int, int] = self.pattern.shape
        return shape

    def analysed(self, analyse: Callable[[IndexSets], Any]) -> Any:
        """``analyse(pattern)``, computed once."""
        if analyse not in self._analysis:
            self._analysis[analyse] = analyse(self.pattern)
        return self._analysis[analyse]

    def values(self, mv: _Product, rmv: _Product, batch: int, like: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """The entries of every sample's matrix, and how far it is from the products.

        Args:
            mv: ``(batch, n) -> (batch, m)``. rmv: its transposed. like: a tensor with their dtype and device.

        Returns:
            ``(batch, nnz)`` in the order of :attr:`pattern`, and ``(batch,)``: for a random vector ``v``, the
            relative error ``max_i |(A v - mv(v))_i| / (|A| |v|)_i``; rounding if the pattern holds, else far from it.
        """
        c = self.colouring
        (m, n), plan = self.shape, c
        own, other = (rmv, mv) if c.by_rows else (mv, rmv)
        size_in, size_out = (m, n) if c.by_rows else (n, m)
        random = seeded.uniform(1, size_in, seed=0x5EED) + 0.5
        seeds = torch.zeros(plan.count + 1, size_in, dtype=torch.float64, device="cpu")
        seeds[torch.from_numpy(c.groups), torch.arange(size_in, device="cpu")] = 1
        seeds[-1] = random  # where those without a group have been put
        apart = torch.zeros(c.apart_count, size_out, dtype=torch.float64, device="cpu")
        if len(c.apart):
            apart[torch.from_numpy(c.apart_groups), torch.from_numpy(c.apart)] = 1
        if own == other:  # of a symmetric matrix: one call, not two
            shown = _products(own, torch.cat([apart, seeds]), n, batch, like)
            shown, single = shown[:, len(apart) :], shown[:, : len(apart)]
        else:
            shown = _products(own, seeds, max(m, n), batch, like)  # (batch, count + 1, size_out)
            single = _products(other, apart, max(m, n), batch, like) if len(c.apart) else shown[:, :0]
        check, flat = shown[:, -1].numpy(), shown[:, :-1].reshape(batch, -1)
        if len(c.apart):
            flat = torch.cat([flat, single.reshape(batch, -1)], 1)
        values = np.take(flat.numpy(), self.places, axis=1)
        return values, self._error(values, random.numpy()[0], check)

    def _error(self, values: np.ndarray, v: np.ndarray, product: np.ndarray) -> np.ndarray:
        errors = np.empty(len(values))
        for i, entries in enumerate(values):
            A, size = (
                self.matrix(e).T if self.colouring.by_rows else self.matrix(e) for e in (entries, np.abs(entries))
            )
            wrong, size = np.abs(A @ v - product[i]), np.maximum(size @ v, np.abs(product[i]))  # v is positive
            with np.errstate(divide="ignore", invalid="ignore"):
                errors[i] = np.where(wrong > 0, wrong / size, 0.0).max(initial=0.0)
        return errors

    def matrix(self, values: np.ndarray) -> sp.csr_matrix:
        """One sample's matrix from its entries."""
        return sp.csr_matrix((values, self.pattern.indices, self.pattern.indptr), shape=self.shape)


def coloured(pattern: IndexSets, origin: str = "detected", symmetric: bool = False) -> Coloured | None:
    """A pattern made ready for use; ``None`` if no colouring halves the products that a dense matrix takes.

    ``symmetric``: the matrix is.
    """
    pattern = sp.csr_matrix(pattern).astype(bool)
    if symmetric:
        pattern = sp.csr_matrix(pattern + pattern.T)
    pattern.sum_duplicates()
    pattern.sort_indices()
    plan = colour(pattern, symmetric=symmetric)
    if plan is None or 2 * plan.products > min(pattern.shape):
        return None
    rows, columns = _coordinates(pattern)
    group_of, inside = (rows, columns) if plan.by_rows else (columns, rows)
    width = pattern.shape[1] if plan.by_rows else pattern.shape[0]
    places = plan.groups[group_of] * width + inside
    if len(plan.apart):
        number = np.full(width, -1, dtype=np.int64)
        number[plan.apart] = plan.apart_groups
        alone, first = number[inside] >= 0, plan.count * width
        other_width = pattern.shape[0] if plan.by_rows else pattern.shape[1]
        places = np.where(alone, first + number[inside] * other_width + group_of, places)
        if symmetric:  # an entry is found where the one across the diagonal is
            across = ~alone & (number[group_of] >= 0)
            places = np.where(across, first + number[group_of] * other_width + inside, places)
    return Coloured(pattern, plan, origin, places)


def known_entries(pattern: IndexSets) -> Coloured:
    """A pattern whose entries are known, and need not be found from products."""
    none = np.zeros(0, dtype=np.int64)
    return Coloured(pattern, Colouring(False, none, 0, none, none, 0))


def _coordinates(pattern: IndexSets) -> tuple[np.ndarray, np.ndarray]:
    return np.repeat(np.arange(pattern.shape[0]), np.diff(pattern.indptr)), pattern.indices


def _products(product: _Product, seeds: Tensor, longest: int, batch: int, like: Tensor) -> Tensor:
    """``product`` of every seed, the same for each sample: ``(k, n) -> (batch, k, m)``, double precision, on the host;
    ``longest``: the larger of ``m`` and ``n``."""
    seeds = seeds.to(device=like.device, dtype=like.dtype)
    k, numbers = len(seeds), _CHUNK if like.device.type == "cpu" else _CHUNK_ELSEWHERE
    chunk = max(1, numbers // max(1, batch * longest))
    parts = []
    for some in seeds.split(min(chunk, max(1, math.ceil(k / math.ceil(k / chunk))))):
        vectors = some.unsqueeze(1).expand(-1, batch, -1)
        try:
            shown = torch.func.vmap(product)(vectors)
        except RuntimeError:  # an operation without a batching rule: one by one
            shown = torch.stack([product(v) for v in vectors])
        parts.append(shown.detach().to(device="cpu", dtype=torch.float64))
    return torch.cat(parts).transpose(0, 1)


def as_pattern(given: object, rows: int, columns: int, diagonal: bool = False) -> IndexSets:
    """A user's word for a pattern ``(rows, columns)``: a sparse or dense matrix, or bandwidths ``(lower, upper)``;
    with the diagonal added if asked for.

    Raises:
        ValueError: another shape, or negative bandwidths. TypeError: none of these.
    """
    if isinstance(given, (tuple, list)):
        if len(given) != 2 or not all(isinstance(k, int) and k >= 0 for k in given):
            raise ValueError(f"jac_sparsity as bandwidths is (lower, upper), two integers >= 0; got {given!r}")
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
