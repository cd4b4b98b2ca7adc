r"""Sparse normal equations ``(R'R + \mu D^2) p = -g``, sample by sample, by SuperLU with diagonal pivots.

The matrix is symmetric and, for ``\mu > 0``, definite: the minimum degree ordering of its own pattern, no pivoting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import scipy.sparse as sp
import torch
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.factors.augmented import least_squares
from implicitkit.linear.factors.direct import Verdict
from implicitkit.linear.factors.gram import Gram, Orders, of_low_rank, of_sparse, product_of_all
from implicitkit.linear.factors.gram_entries import long_rows
from implicitkit.linear.price import Work, price_of_sparse_fit
from implicitkit.sparsity.compression import Coloured
from implicitkit.sparsity.low_rank import Bordered, LowRank

_SWEEPS = 5


class SparseNormal:
    """``R'R`` of every sample.

    Args:
        ready: the pattern of ``R``, ``(m, n)``. values: its entries, ``(batch, nnz)``, or :class:`Entries`.
        like: a tensor ``(batch, n)``. settled: samples of which nothing is asked any more, ``(batch,)`` bool: they keep what
            they have in ``before``, the factors of another point, and cost nothing.

    Attributes:
        columns: the norms of the columns of ``R``, ``(batch, n)``. factors: those of the last :meth:`solve`, if it could
            factor every sample and nothing was :meth:`restrict`-ed.
    """

    direct: ClassVar[bool] = True

    def __init__(
        self,
        ready: Coloured | Bordered,
        values: Any,
        like: Tensor,
        before: NormalFactors | None = None,
        settled: Tensor | None = None,
    ) -> None:
        self.like, self.orders, self.rows = like, ready.analysed(Orders), ready.shape[0]
        self.factors: NormalFactors | None = None
        self._matrix: Callable[[int], sp.csr_matrix] | None = None  # of one of those at work
        self.N: list[Any] = [None] * len(like) if before is None else list(before.scaled)
        self._lus: list[Any] = [None] * len(like) if before is None else list(before.lus)
        self.settled = np.zeros(len(like), bool) if before is None or settled is None else settled.cpu().numpy()
        self.at_work = np.flatnonzero(~self.settled)
        if isinstance(ready, Coloured):
            values = values if len(self.at_work) == len(values) else values[self.at_work]  # a copy is nobody's
            self._product, squares = lambda p: _stacked(ready, values, p), of_sparse(ready, values)
            self._matrix = lambda i: ready.matrix(values[i])
        else:
            R = [LowRank(ready.matrix(values[0][i]), values[1][i], values[2][i]) for i in self.at_work]
            self._product = lambda p: np.stack([r @ x for r, x in zip(R, p, strict=True)])
            squares = [of_low_rank(r.A, r.U, r.V) for r in R]
        for i, N in zip(self.at_work, squares, strict=True):
            self.N[i], self._lus[i] = N, None
        self.damping = np.zeros(len(like)) if before is None else before.damping.numpy().copy()
        self.D = np.ones(like.shape) if before is None else np.where(self.settled[:, None], before.D, 1.0)
        self.columns = self._tensor(np.stack([np.sqrt(N.diagonal()) for N in self.N]) * ~self.settled[:, None])
        self.restricted = False

    def restrict(self, free: Tensor) -> None:
        """Only these unknowns are solved for from now on, ``(batch, n)`` bool."""
        self.restricted = True
        for i in self.at_work:
            self.N[i].both_sides(free[i].cpu().numpy().astype(float))

    def within(self, g: Tensor, lower: Tensor, upper: Tensor, which: Tensor) -> Tensor | None:
        """No matrix of all unknowns is kept."""
        return None

    def scale(self, D: Tensor) -> None:
        """The unknowns are measured in units of ``1 / D`` from now on."""
        self.D = np.where(self.settled[:, None], self.D, array(D))
        for i in self.at_work:
            self.N[i].both_sides(1 / self.D[i])

    def largest(self) -> Tensor:
        """The largest eigenvalue of ``D^-1 R'R D^-1``, about, by a few steps of the power method; ``(batch,)``."""
        sizes, least = np.zeros(len(self.N)), np.finfo(float).tiny
        if len(self.at_work):
            times, v = product_of_all([self.N[i] for i in self.at_work]), np.ones((len(self.at_work), self.D.shape[1]))
            for _ in range(_SWEEPS):
                v = times(v)
                size = np.linalg.norm(v, axis=1)
                v = v / np.maximum(size, least)[:, None]
            sizes[self.at_work] = size
        return self._tensor(sizes)

    def solve(self, mu: Tensor, g: Tensor, which: Tensor | None = None) -> Tensor:
        """``p`` with ``(R'R + mu D^2) p = -g``; NaN where SuperLU meets a pivot that is zero.  Of samples that are not asked
        for, ``which`` ``(batch,)`` bool, ``p = 0``, and factors that have been made are not made anew."""
        rhs, shift = -array(g) / self.D, array(mu)
        asked = ~self.settled if which is None else which.cpu().numpy() & ~self.settled
        p = np.where(asked[:, None], np.nan, np.zeros(rhs.shape))
        for i, N in enumerate(self.N):
            if not asked[i] and self._lus[i] is not None:
                continue
            sound = N.finite and np.isfinite(rhs[i]).all() and np.isfinite(shift[i])
            self._lus[i] = N.factor(float(shift[i]), self.orders) if sound else None
            self.damping[i] = shift[i]
            if asked[i] and self._lus[i] is not None:
                p[i] = self._lus[i].solve(rhs[i]) / self.D[i]
        whole = all(lu is not None for lu in self._lus) and not self.restricted
        factors = NormalFactors(list(self._lus), self.N, self.D, self.damping.copy(), self.orders.last.forget)
        self.factors = factors if whole else None
        return self._tensor(p)

    def without_squares(self, r: Tensor, which: Tensor) -> Tensor | None:
        """The minimisers of ``|R p + r|``, ``(batch, n)``, of the samples ``which``, zero for the others, found from ``R``
        itself; ``None`` where it is not sparse, or some unknowns are not solved for."""
        if self.restricted or self._matrix is None:
            return None
        rhs, p = array(r), np.zeros(self.D.shape)
        for place, i in enumerate(self.at_work):
            if bool(which[i]):
                p[i] = least_squares(self._matrix(place), self.D[i], -rhs[i])
        return self._tensor(p)

    def times(self, p: Tensor) -> Tensor:
        """``R p``, ``(batch, m)``."""
        found = np.zeros((len(self.N), self.rows))
        if len(self.at_work):
            found[self.at_work] = self._product(array(p)[self.at_work])
        return self._tensor(found)

    def _tensor(self, a: np.ndarray) -> Tensor:
        return torch.from_numpy(a).to(self.like)


class NormalFactors:
    r"""``R'R + \mu D^2`` with its factors: something near the Hessian of half the squared norm, where residuals or their
    curvature are small.  It is never believed: solutions are refined and judged by products with the Hessian.

    Attributes:
        unlike: how far from one eigenvalues of ``N^{-1} H`` have been found at the solution; infinite: nobody has asked.
        looked: where it was asked, among how many, and of every sample.
    """

    rough = positive = True
    gone = False
    looked: tuple[Tensor, float, Tensor] | None = None

    def __init__(
        self,
        lus: list[Any],
        scaled: list[Gram],
        D: np.ndarray,
        mu: np.ndarray,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self.lus, self.scaled, self.D, self._forget = lus, scaled, D, forget
        self.damping, self.unlike = torch.from_numpy(mu), math.inf  # ``mu`` of every sample, ``(batch,)``
        self.factor = Verdict(torch.ones(len(lus), dtype=torch.bool, device="cpu"))

    @property
    def T(self) -> NormalFactors:
        """The transposed: the same."""
        return self

    def let_go(self) -> None:
        """Give their memory back: nobody is going to use them."""
        self.lus, self.scaled, self.gone = [], [], True
        self._forget()

    @property
    def units(self) -> Tensor:
        """``D``: those of a gradient, ``(batch, n)``."""
        return torch.from_numpy(self.D)

    def solve(self, b: Tensor) -> Tensor:
        """``(R'R + mu D^2) x = b``, ``(batch, n)`` or ``(batch, n, k)``."""
        rhs = array(b)
        columns = rhs[:, :, None] if b.ndim == 2 else rhs
        x = np.zeros(columns.shape)
        for i in np.flatnonzero(columns.any((1, 2))):
            d = self.D[i][:, None]
            x[i] = self.lus[i].solve(np.ascontiguousarray(columns[i] / d)) / d
        return torch.from_numpy(x[:, :, 0] if b.ndim == 2 else x).to(b)

    def moved(self, x: Tensor) -> Tensor:
        """``R'R x``, ``(batch, n)``: what the gradient changes by along ``x`` where the residuals are linear."""
        return torch.from_numpy(self.D * product_of_all(self.scaled)(self.D * array(x))).to(x)

    def most(self, x: Tensor) -> Tensor:
        """No less than the norm of :meth:`size` ``(batch,)``: ``max D |D^-1 R'R D^-1|_F |D x|``; by no product."""
        bound = [float(d.max() * N.most()) for d, N in zip(self.D, self.scaled, strict=True)]
        return torch.tensor(bound, dtype=torch.float64, device="cpu").to(x) * torch.linalg.vector_norm(
            x * self.units.to(x), dim=1
        )

    def size(self, x: Tensor) -> Tensor:
        """``|R'R| |x|``, shaped as ``x``."""
        given = np.abs(array(x))
        columns = given[:, :, None] if x.ndim == 2 else given
        out = np.stack([d[:, None] * N.size(d[:, None] * c) for N, c, d in
                        zip(self.scaled, columns, self.D, strict=True)])  # fmt: skip
        return torch.from_numpy(out[:, :, 0] if x.ndim == 2 else out).to(x)


def _stacked(ready: Coloured, values: np.ndarray, p: np.ndarray) -> np.ndarray:
    """``R p`` of every sample, ``(batch, m)``, from the entries of its matrix."""
    found: np.ndarray = (ready.stacked(values) @ p.reshape(-1)).reshape(len(p), -1)
    return found


def price_of_factors(batch: int, ready: Coloured | Bordered, work: Work) -> float:
    """What ``batch`` matrices ``R`` of a pattern and the factors of ``R'R`` cost, in products with that."""
    entries, reach = ready.analysed(_squared)
    border = 2 * (ready.rank + len(ready.alone)) if isinstance(ready, Bordered) else len(ready.analysed(long_rows))
    entries += 2 * border * ready.shape[1]
    fill = ready.analysed(Orders).fill
    return price_of_sparse_fit(batch, ready.shape[1], ready.products, entries, work, fill, reach)


def _squared(pattern: sp.csr_matrix) -> tuple[int, int]:
    """Entries of ``R'R``, long rows apart, and how far from the diagonal they are when it is renumbered for that."""
    rows = long_rows(pattern)
    if len(rows):
        keep = np.ones(pattern.shape[0], dtype=bool)
        keep[rows] = False
        pattern = sp.csr_matrix(pattern[keep])
    R = sp.csr_matrix((np.ones(pattern.nnz, dtype=np.float32), pattern.indices, pattern.indptr), shape=pattern.shape)
    N = sp.csr_matrix(R.T @ R)
    place = np.empty(N.shape[0], dtype=np.int64)
    place[reverse_cuthill_mckee(N, symmetric_mode=True)] = np.arange(N.shape[0])
    rows = np.repeat(np.arange(N.shape[0]), np.diff(N.indptr))
    return N.nnz, int(np.abs(place[rows] - place[N.indices]).max(initial=0))
