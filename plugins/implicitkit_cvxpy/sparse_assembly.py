"""From the parameter vector to the entries of a sparse cone program, as cvxpy reduced it."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit import extend
from implicitkit_cvxpy.affine import AffineMap, Vector
from implicitkit_cvxpy.compat import CanonicalProgram
from implicitkit_cvxpy.held import Entries

__all__ = ["SparseAssembly", "is_sparse"]

_LARGE = 500  # unknowns and multipliers from which it is asked
_FULL = 16  # one entry in so many, above which a program is dense


def is_sparse(program: CanonicalProgram) -> bool:
    """Is a program large, and its KKT matrix mostly zeros, so that sparse factors are the cheaper ones?"""
    n, m = program.n, program.cones.size
    curved = program.cones.soc + tuple(k * (k + 1) // 2 for k in program.cones.psd)
    entries = len(np.unique(program.P.row)) + 2 * len(np.unique(program.A.row)) + sum(k * k for k in curved)
    return n + m >= _LARGE and _FULL * entries <= (n + m) ** 2


class SparseAssembly:
    """``p -> (P, q, A, b)``, matrices by their entries ``(batch, nnz)``; nothing is substituted.

    Attributes:
        cones, n, columns, rows, linear, constraining: as those of the dense :class:`~implicitkit_cvxpy.assembly.Assembly`.
        P_held, A_held: where the entries stand.
    """

    def __init__(self, program: CanonicalProgram, offsets: Any) -> None:
        n, m = program.n, program.cones.size
        self.cones, self.n = program.cones, n
        self.columns, self.rows = np.arange(n), np.arange(m)
        self.P_held, self._P = _entries(program.P, (n, n), offsets)
        self.A_held, self._A = _entries(program.A, (m, n), offsets)
        self._q, self._b = AffineMap(program.q, (n,), offsets), AffineMap(program.b, (m,), offsets)
        self.linear = not self._P.size
        self.constraining = np.unique(np.concatenate([program.P.col, program.A.col, program.b.col]))

    def __call__(self, p: Vector) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The data for each sample, float64."""
        return self._P(p), self._q(p), self._A(p), self._b(p)


def _entries(matrix: Any, shape: tuple[int, int], offsets: Any) -> tuple[Entries, AffineMap]:
    """The places of a matrix whose entries, row by row, depend on the parameters as ``matrix`` says; and these entries."""
    coo = matrix.tocoo()
    kept = coo.data != 0
    where, position = np.unique(coo.row[kept].astype(np.int64), return_inverse=True)
    row, column = (torch.from_numpy(v) for v in np.divmod(where, max(shape[1], 1)))
    entries = sp.coo_array((coo.data[kept], (position, coo.col[kept])), shape=(len(where), matrix.shape[1]))
    return Entries(extend.Places(row, column, shape)), AffineMap(entries, (len(where),), offsets)
