r"""The solution of least norm of a singular sparse system that has solutions, by factors.

    minimise  |x|^2 / 2   subject to   A x = b:        [ I   A' ] [ x ]   [ 0 ]
                                                       [ A   0  ] [ w ] = [ b ]

``x`` is unique although ``w`` is not where rows of ``A`` depend on each other.  With ``[c, 0]`` on the right it is the part
of ``c`` in the null space, ``A x = 0``, and ``c = x + A' w``.  The matrix is regularised,
``diag(rho, -delta)``, factored as a quasi-definite one, and refinement takes out again what that has put in, since ``b`` is
in the range of ``A`` (:mod:`implicitkit.linear.conditions.sparse_saddle`).  Where it is not, or singular values are so
small that ``delta`` hides them, a residual is left: whoever asks judges it.

That squares the condition of ``A``.  Conditions of optimality ``[[H, C'], [-C, 0]]`` are monotone, and there

    x <- x + (A + delta)^{-1} (b - A x)

leaves ``delta / (|lambda| + delta)`` of the error along an eigenvalue ``lambda``, and adds nothing along the null space,
which is that of ``A'``, too: it has the digits that ``A`` itself allows (:func:`by_shifts`).

Source: Saunders (1995), "Solution of sparse rectangular systems using LSQR and Craig", BIT 35, section 4; Rockafellar
(1976), SIAM J. Control Optim. 14(5), for the proximal point method of monotone operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from torch import Tensor

from implicitkit.foundation.numbers import array
from implicitkit.linear.conditions.sparse_saddle import Layout, SparseSaddle, both_sides, equilibrated
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.sparsity.same_pattern import with_entries

_ROUNDS = 3  # of refinement, each of several sweeps
_SHIFT = 1e-10  # of rows of size one
_SWEEPS = 40
_FALLS = 0.9  # what a sweep must leave of the residual
_ENOUGH = 1e-15  # of right-hand side and solution


def least_norm(blocks: Any, b: Tensor) -> Tensor | None:
    """``A^+ b`` of every block, ``(batch, n)``, NaN where there are no factors; ``None`` of matrices that are not sparse."""
    return _each(blocks, b, _one)


def by_shifts(blocks: Any, b: Tensor) -> Tensor | None:
    """A solution of ``A x = b`` of every singular block that is monotone but for the signs of its rows, as of conditions of
    optimality; as :func:`least_norm`."""
    return _each(blocks, b, _by_shifts)


def _each(blocks: Any, b: Tensor, solve: Callable[[SparseBlocks, np.ndarray, np.ndarray], np.ndarray]) -> Tensor | None:
    if not isinstance(blocks, SparseBlocks):
        return None
    rhs = array(b)
    x = np.full(rhs.shape, np.nan)
    for i, values in enumerate(blocks.values):
        if not rhs[i].any():
            x[i] = 0.0
        elif np.isfinite(rhs[i]).all():
            x[i] = solve(blocks, values, rhs[i])
    return torch.from_numpy(x).to(b)


class Doubled:
    """Where the entries of matrices of one pattern, ``A`` or the transposed of ``A``, stand in what stands above.

    Args:
        pattern: of ``A``, ``(n, n)``. transposed: is it the transposed of ``A`` that is meant?
    """

    def __init__(self, pattern: sp.csr_matrix, transposed: bool = False) -> None:
        self.n = n = pattern.shape[0]
        numbers = sp.csr_matrix((np.arange(2.0, pattern.nnz + 2), pattern.indices, pattern.indptr), shape=pattern.shape)
        numbers, one = numbers.T if transposed else numbers, sp.identity(n)
        self.K = sp.csc_matrix(sp.bmat([[one, numbers.T], [numbers, one]], format="csc"))
        self.K.sort_indices()
        self.layout, self._numbers = Layout(self.K), self.K.data.astype(np.intp)
        self._numbers[self.layout.diagonal[n:]] = 0  # there, and zero

    def matrix(self, A: sp.csr_matrix) -> sp.csc_matrix:
        """The one of this ``A``."""
        return with_entries(self.K, np.concatenate([[0.0, 1.0], A.data])[self._numbers])


class LeastNorm:
    """A matrix ``A (n, n)``, singular or not, by the factors of what stands above.

    Args:
        A: with finite entries. doubled: of its pattern, where others have it, too; or of that of its transposed.
    """

    def __init__(self, A: sp.csr_matrix, doubled: Doubled | None = None) -> None:
        doubled = Doubled(A) if doubled is None else doubled
        self.n, self.K = doubled.n, doubled.matrix(A)
        self._saddle = SparseSaddle(self.K, self.n, layout=doubled.layout)

    def solve(self, b: np.ndarray) -> np.ndarray:
        """``A^+ b``, ``(n,)``; NaN where there are no factors."""
        return self._solve(np.concatenate([np.zeros(self.n), b]))[: self.n]

    def split(self, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``x`` and ``w``, ``(n,)`` each, with ``c = x + A' w`` and ``A x = 0``; NaN where there are no factors."""
        found = self._solve(np.concatenate([c, np.zeros(self.n)]))
        return found[: self.n], found[self.n :]

    def _solve(self, right: np.ndarray) -> np.ndarray:
        found = np.zeros(len(right))
        for _ in range(_ROUNDS):
            more, left = self._saddle.solve(right - self.K @ found)
            if not np.isfinite(left):
                return np.full(len(right), np.nan)
            found = found + more
            if not np.abs(more).max(initial=0.0) > _ENOUGH * np.abs(found).max(initial=0.0):
                break
        return found


def _one(blocks: SparseBlocks, values: np.ndarray, b: np.ndarray) -> np.ndarray:
    ready = blocks.ready
    return LeastNorm(ready.matrix(values), ready.analysed(Doubled, blocks.transposed)).solve(b)


def _by_shifts(blocks: SparseBlocks, values: np.ndarray, b: np.ndarray) -> np.ndarray:
    A = blocks.ready.matrix(values)
    A = sp.csc_matrix(A.T if blocks.transposed else A)
    scale = equilibrated(sp.csc_matrix(abs(A) + abs(A.T)))
    S, rhs = both_sides(A, scale), b * scale
    # a row without a diagonal whose entries stand in its column with the same signs is one of [[H, C'], [C, 0]]
    mirrored = np.asarray(S.multiply(S.T).sum(1)).reshape(-1) - S.diagonal() ** 2
    signs = np.where(S.diagonal() != 0, np.sign(S.diagonal()), np.where(mirrored > 0, -1.0, 1.0))
    try:
        lu = sla.splu(sp.csc_matrix(S + sp.diags_array(_SHIFT * signs)))
    except RuntimeError:  # singular with the shift as well
        return np.full(len(b), np.nan)
    x, left = np.zeros(len(b)), rhs
    norm = float(np.abs(left).max())
    for _ in range(_SWEEPS):
        trial = x + lu.solve(left)
        rest = rhs - S @ trial
        new = float(np.abs(rest).max())
        if not new < _FALLS * norm:
            break
        x, left, norm = trial, rest, new
        if norm <= _ENOUGH * (np.abs(rhs).max() + np.abs(x).max()):
            break
    return np.asarray(x * scale)
