r"""Factors of sparse blocks, for many right-hand sides and both ``A`` and ``A^T``.

- narrow bands, as they stand or after renumbering (reverse Cuthill & McKee 1969): LAPACK's banded LU with partial
  pivoting, all samples of a batch in one call, since blocks that are not coupled are a band as well;
- else SuperLU (Demmel, Eisenstat, Gilbert, Li & Liu 1999, SIAM J. Matrix Anal. 20(3)), sample by sample (small ones of a
  symmetric pattern in one call, where all are regular): with the minimum degree of ``A + A^T`` and diagonal pivots where the
  pattern is symmetric, or a row is long; else COLAMD and partial pivoting.  A pivot that is taken elsewhere undoes an order
  that keeps factors of ``A + A^T`` sparse (saddle points, 60 x 60 cells of a fluid: 2,000 times the time).  So an entry of
  the diagonal that is next to nothing is made a little larger, and refinement takes that out again (Li & Demmel 2003, ACM
  TOMS 29(2): static pivoting).  What that costs in accuracy is found out by a trial solve, and the block factored again
  with partial pivoting;
- of 4,096 unknowns and more, symmetric ones that turn out definite: CHOLMOD, where the package cvxopt is installed
  (:mod:`implicitkit.linear.factors.cholmod`);
- blocks whose unknowns can be solved for part after part: each part by itself
  (:mod:`implicitkit.linear.factors.block_triangular`);
- blocks that are complex matrices in real and imaginary parts: as those (:mod:`implicitkit.linear.factors.complex_pairs`);
- blocks that are hardly sparse: LAPACK's dense LU, sample by sample.

Rows are scaled to size one first.  A block is singular when a trial solve amplifies a right-hand side by more than
``0.05 / eps``, in units of the columns.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.linalg as la
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.factors.analysis import Analysis
from implicitkit.linear.factors.block_triangular import BlockTriangular
from implicitkit.linear.factors.cholmod import definite_factors, is_installed, is_symmetric
from implicitkit.linear.factors.complex_pairs import AsReal
from implicitkit.linear.factors.dense import NOT_FINITE, SINGULAR
from implicitkit.linear.factors.ordering import Stacked
from implicitkit.sparsity.compression import below_each_other
from implicitkit.sparsity.same_pattern import with_entries

_TOGETHER = 2000  # unknowns of a block, up to which one call factors all blocks of a batch: calls are dear for few
_FULL = 8  # one entry in so many, from which a dense matrix is
_SUPERNODES = 4096  # unknowns from which Cholesky factors by supernodes are worth another copy of the matrix
_AMPLIFIED = 0.05 / np.finfo(np.float64).eps
_DIAGONAL = 1e-8  # of the largest entry of a column: how large one of the diagonal is made at least, and its pivots are
_SWEEPS = 2  # of refinement that take that out again
_ACCURATE = 1e-9  # backward error of the trial solve above which pivots were badly preferred
_REFINED = 1e-13  # ... row by row, with factors of a matrix nearby: where they hide a zero some row leaves all


class SparseFactor:
    """Factors of every block.

    Args:
        analysis: of the common pattern. values: ``(batch, nnz)``, double precision, in the order of the pattern.
        factorise: makes factors of a block, with ``solve(b, trans)``, in place of these; ``None`` where it cannot.
        anywhere: where pivots from the diagonal do not do, partial pivoting follows; else the block counts as singular.

    Attributes:
        ok: ``(batch,)`` bool, the blocks that are finite and not singular. reason: one clause when not all are.
    """

    def __init__(
        self,
        analysis: Analysis,
        values: np.ndarray,
        factorise: Callable[[sp.csc_matrix], Any] | None = None,
        anywhere: bool = True,
    ) -> None:
        self.analysis, self._factorise, self._anywhere = analysis, factorise, anywhere
        self.size, self.batch = analysis.pattern.shape[0], len(values)
        finite = np.isfinite(values).all(1)
        largest = np.maximum.reduceat(
            np.abs(values), np.minimum(analysis.pattern.indptr[:-1], max(0, values.shape[1] - 1)), axis=1
        )
        hollow = ~(largest > 0) | (np.diff(analysis.pattern.indptr) == 0)
        self.scale = np.where(hollow | ~np.isfinite(largest), 1.0, largest)
        sound = finite & ~hollow.any(1)
        scaled = values / np.repeat(self.scale, np.diff(analysis.pattern.indptr), axis=1)
        if not sound.all():
            scaled[~sound] = (analysis.rows == analysis.columns).astype(float)
        self._scaled = scaled
        self._band = _BandFactor(analysis, scaled) if analysis.band is not None and factorise is None else None
        self._lus: list[Any] = []
        self._stacked: Stacked | _Refined | None = None
        if self._band is not None:
            sound = sound & self._band.ok
        else:
            small = self.batch > 1 and self.size <= _TOGETHER and not self._full
            if small and analysis.symmetric and factorise is None:
                self._stacked = self._together()
            if self._stacked is None:
                self._lus = [self._factors_of(i) for i in range(self.batch)]
                sound = sound & np.array([lu is not None for lu in self._lus])
        self.ok = torch.from_numpy(sound & self._regular())
        all_ok = bool(self.ok.all())
        self.reason = "" if all_ok else NOT_FINITE if not finite.all() else SINGULAR

    def solve(self, b: Tensor, transpose: bool = False) -> Tensor:
        """Solve ``A x = b`` or, with ``transpose``, ``A^T x = b``; ``b`` is ``(batch, n)`` or ``(batch, n, k)``.

        NaN throughout for a block that is not ``ok``, and for a right-hand side that is not finite.
        """
        rhs = array(b)
        columns = rhs[:, :, None] if b.ndim == 2 else rhs
        good = self.ok.numpy()[:, None, None] & np.isfinite(columns).all(1, keepdims=True)
        if not good.all():
            columns = np.where(good, columns, 0.0)  # a bad sample, or right-hand side, must not reach the others
        x = self._solve(columns if transpose else columns / self.scale[:, :, None], transpose)
        if transpose:
            x = x / self.scale[:, :, None]
        if not good.all():
            x = np.where(good, x, np.nan)
        return torch.from_numpy(x[:, :, 0] if b.ndim == 2 else x).to(device=b.device, dtype=b.dtype)

    # ------------------------------------------------------------------------------------------------------- details
    def _solve(self, columns: np.ndarray, transpose: bool) -> np.ndarray:
        """With the scaled blocks: ``(batch, n, k)``."""
        if self._band is not None:
            return self._band.solve(columns, transpose)
        if self._stacked is not None:
            return self._stacked.solve(columns, "T" if transpose else "N")
        x = np.empty(columns.shape)
        for i, lu in enumerate(self._lus):
            x[i] = np.nan if lu is None else lu.solve(np.ascontiguousarray(columns[i]), "T" if transpose else "N")
        return x

    def _together(self) -> Stacked | _Refined | None:
        """Factors of all blocks by one call; ``None`` where one of them is singular, or its pivots were badly preferred."""
        A, places = self.analysis.by_columns
        entries = np.take(self._scaled, places, axis=1)  # row after row, whatever the order of what is taken from
        diagonal = self.analysis.diagonal
        if diagonal is None:
            return None
        largest = np.maximum.reduceat(np.abs(entries), np.minimum(A.indptr[:-1], A.nnz - 1), axis=1)  # of a column
        missing = _missing(entries[:, diagonal], largest)
        near, whole = entries, below_each_other(A, entries)
        if missing.any():
            near = entries.copy()
            near[:, diagonal] += missing
        found: Stacked | _Refined | None = self.analysis.ordering.factor_together(A, near, _DIAGONAL)
        if found is None:
            return None
        found = _Refined(found, whole) if missing.any() else found
        b = self._trial()
        x = self._tried = found.solve(b)
        return found if _is_accurate(whole, x[:, :, 0], b[:, :, 0], bool(missing.any())) else None

    @property
    def _full(self) -> bool:
        return bool(self.analysis.pattern.nnz * _FULL > self.size**2)

    def _factors_of(self, i: int) -> Any:
        """The factors of block ``i``, scaled; ``None`` where there are none."""
        A = self._block(i)
        if self._factorise is not None:
            factors = self._factorise((sp.diags_array(self.scale[i]) @ A).tocsc())
            return None if factors is None else _Unscaled(factors, self.scale[i])
        if self._full or self.analysis.ordering.fills(self.size):
            return _Full(A)
        definite = self._definite(A, i)
        if definite is not None:
            return definite
        return self._complex(i) or _superlu(A, self.analysis, self._anywhere)

    def _complex(self, i: int) -> AsReal | None:
        """Factors of a scaled block that is a complex matrix; ``None`` where it is none, or has none."""
        if self.analysis.pairs is None:
            return None
        entries = self.analysis.pairs.entries(self._scaled[i])
        if entries is None:
            return None
        halved = self.analysis.halved
        factors = _superlu(with_entries(halved.pattern, entries).tocsc(), halved, self._anywhere)
        self.analysis.ordering.fill = self.analysis.ordering.fill or 2 * halved.ordering.fill
        return None if factors is None else AsReal(factors)

    def _definite(self, A: sp.csc_matrix, i: int) -> _Unscaled | None:
        """Cholesky factors of a scaled block, where they can be had and it is large; not again where blocks of
        the pattern have turned out not to be definite."""
        ordering = self.analysis.ordering
        if self.size < _SUPERNODES or not self.analysis.symmetric or ordering.indefinite or not is_installed():
            return None
        whole = (sp.diags_array(self.scale[i]) @ A).tocsc()
        factors = definite_factors(whole) if is_symmetric(whole) else None
        ordering.indefinite = factors is None
        return None if factors is None else _Unscaled(factors, self.scale[i])

    def _block(self, i: int) -> sp.csc_matrix:
        return with_entries(self.analysis.pattern, self._scaled[i]).tocsc()

    def _trial(self) -> np.ndarray:
        """A right-hand side of each block, ``(batch, n, 1)``."""
        return np.random.default_rng(0).uniform(0.5, 1.5, (self.batch, self.size, 1))

    def _regular(self) -> np.ndarray:
        with np.errstate(all="ignore"):
            x = np.abs((self._solve(self._trial(), False) if self._stacked is None else self._tried)[:, :, 0])
            amplified = np.where(np.isfinite(x).all(1), x.max(1, initial=0.0), np.inf)
            if (amplified >= _AMPLIFIED).any():  # in units of the columns, which may be bad
                columns = np.zeros_like(x)
                np.maximum.at(columns.T, self.analysis.columns, np.abs(self._scaled).T)
                amplified = np.where(np.isfinite(x).all(1), (columns * x).max(1, initial=0.0), np.inf)
        regular: np.ndarray = amplified < _AMPLIFIED
        return regular


def _superlu(A: sp.csc_matrix, analysis: Analysis, anywhere: bool = True) -> Any:
    """The factors, or ``None`` for a block that is exactly singular, or has no pivots on the diagonal and may not have them
    ``anywhere``."""
    if analysis.on_diagonal:
        near = _pivoted(A, analysis.diagonal)
        lu = analysis.ordering.factor(near, _DIAGONAL)
        b = np.random.default_rng(1).uniform(0.5, 1.5, (1, A.shape[0]))
        tried = () if lu is None else (lu, _Refined(lu, A)) if near is A else (_Refined(lu, A),)
        for factors in tried:
            if _is_accurate(A, factors.solve(b[0])[None], b, near is not A):
                return factors
        if not anywhere:
            return None
    if analysis.parts is not None:
        each = analysis.of_parts
        together = BlockTriangular(A, analysis.parts, lambda part, k: _superlu(part, each[k]))
        analysis.ordering.fill = analysis.ordering.fill or together.nnz
        return together if together.ok else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sla.MatrixRankWarning)
        try:
            found = sla.splu(A, permc_spec="COLAMD")
        except RuntimeError:  # "Factor is exactly singular"
            return None
    analysis.ordering.fill = analysis.ordering.fill or found.nnz
    return found


def _is_accurate(A: sp.csc_matrix, x: np.ndarray, b: np.ndarray, near: bool) -> bool:
    """Are these solutions, ``(batch, n)``, of ``A``, the blocks of which stand along its diagonal?  ``near``: they come from
    factors of another, which may hide that ``A`` is singular: each sweep adds as much as the first solution was."""
    flat = x.reshape(-1)
    with np.errstate(all="ignore"):
        left = np.abs(A @ flat - b.reshape(-1))
        if near:
            return bool((left <= _REFINED * (abs(A) @ np.abs(flat) + 1)).all())
        return bool((left.reshape(b.shape).max(1) <= _ACCURATE * (np.abs(x).max(1) + 1)).all())


def _pivoted(A: sp.csc_matrix, places: np.ndarray | None) -> sp.csc_matrix:
    """``A``, each entry of its diagonal (at ``places``) at least :data:`_DIAGONAL` times the largest of its column."""
    missing = _missing(A.diagonal(), abs(A).max(0).toarray().reshape(-1))
    if not missing.any():
        return A
    if places is None:
        return sp.csc_matrix(A + sp.diags_array(missing))
    near = A.copy()
    near.data[places] += missing
    return near


def _missing(diagonal: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """What entries of the diagonal are short of."""
    least = _DIAGONAL * largest
    return np.where(np.abs(diagonal) < least, least - diagonal, 0.0)


class _Refined:
    """Factors of a matrix near ``A``, for systems with ``A``: ``x <- x + M^{-1} (b - A x)``."""

    def __init__(self, lu: Any, A: sp.csc_matrix) -> None:
        self.lu, self.A = lu, A

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``A x = b``, or with ``"T"`` that of the transposed."""
        A = self.A.T if trans == "T" else self.A
        x: np.ndarray = self.lu.solve(b, trans)
        for _ in range(_SWEEPS):
            x = x + self.lu.solve(b - (A @ x.reshape(A.shape[1], -1)).reshape(b.shape), trans)
        return x


class _Full:
    """LAPACK's LU of a block, with the interface of SuperLU's; a pivot that is zero gives infinite solutions."""

    def __init__(self, A: sp.csc_matrix) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", la.LinAlgWarning)
            self.factor = la.lu_factor(A.toarray(), overwrite_a=True, check_finite=False)

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``A x = b``, or with ``"T"`` that of the transposed."""
        x: np.ndarray = la.lu_solve(self.factor, b, trans=int(trans == "T"), check_finite=False)
        return x


class _Unscaled:
    """Factors of ``A``, for systems with ``diag(scale)^-1 A``."""

    def __init__(self, factors: Any, scale: np.ndarray) -> None:
        self.factors, self.scale = factors, scale[:, None]

    def solve(self, b: np.ndarray, trans: str = "N") -> np.ndarray:
        """``diag(scale)^-1 A x = b``, or with ``"T"`` that of the transposed."""
        if trans == "T":
            return self.scale * np.asarray(self.factors.solve(b, "T"))
        return np.asarray(self.factors.solve(self.scale * b, "N"))


class _BandFactor:
    """LAPACK's ``gbtrf`` of all blocks, one below the other, or ``gttrf`` where they are tridiagonal (a third of the time);
    ``ok``: which have no pivot that is zero."""

    def __init__(self, analysis: Analysis, values: np.ndarray) -> None:
        assert analysis.band is not None
        lower, upper = analysis.band
        self.order, self.batch, self.size = analysis.order, len(values), analysis.pattern.shape[0]
        first = (np.arange(self.batch) * self.size)[:, None]
        band = np.zeros((2 * lower + upper + 1, self.batch * self.size), order="F")
        height = lower + upper + analysis.rows - analysis.columns
        band[np.broadcast_to(height, values.shape), first + analysis.columns] = values
        if lower == upper == 1 and band.shape[1] > 1:
            factor, back = la.get_lapack_funcs(("gttrf", "gttrs"), (band,))
            *factors, _ = factor(band[3, :-1], band[2], band[1, 1:])
            diagonal = factors[1]
            self._back = lambda b, trans: back(*factors, b, trans="NT"[trans])[0]
        else:
            factor, back = la.get_lapack_funcs(("gbtrf", "gbtrs"), (band,))
            lu, pivots, _ = factor(band, lower, upper, overwrite_ab=True)
            diagonal = lu[lower + upper]
            self._back = lambda b, trans: back(lu, lower, upper, b, pivots, trans=trans)[0]
        bad = (diagonal == 0) | ~np.isfinite(diagonal)
        diagonal[bad] = 1.0  # Inf would spread from one block to the next
        self.ok = ~bad.reshape(self.batch, self.size).any(1)

    def solve(self, columns: np.ndarray, transpose: bool) -> np.ndarray:
        """``(batch, n, k)``, both."""
        rhs = columns if self.order is None else columns[:, self.order]
        flat = rhs.reshape(self.batch * self.size, -1)
        x = np.asarray(self._back(flat, int(transpose))).reshape(columns.shape)
        if self.order is None:
            return np.array(x)
        back = np.empty_like(x)
        back[:, self.order] = x
        return back
