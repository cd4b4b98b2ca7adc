r"""From the parameter vector to the data of a cone program, and from its unknowns back to the variables asked for.

A dense program is made smaller on the way: variables that only name something are left out.

cvxpy writes ``sum_squares(S x)`` as ``t't`` with ``t = S x``.  Where an equality gives a variable that cvxpy itself
introduced, ``D t = b_E - E x`` with ``D`` diagonal and constant, it is substituted, ``t = T x + t_0``:

    P <- P_xx + P_xt T + T'P_tx + T'P_tt T,         q <- q_x + P_xt t_0 + T'(P_tt t_0 + q_t)
    A <- A_x + A_t T,                               b <- b - A_t t_0

which leaves the user's variables, a quarter of the KKT matrix for a least-squares objective, and all other multipliers
unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit import extend
from implicitkit_cvxpy.affine import AffineMap, Vector
from implicitkit_cvxpy.compat import CanonicalProgram
from implicitkit_cvxpy.cones.form import Cones
from implicitkit_cvxpy.storage import DENSE, Entries

Array = Any
_LARGE = 500  # unknowns and multipliers from which it is asked
_FULL = 16  # one entry in so many, above which a program is dense


class Assembly:
    """``p -> (P, q, A, b)``, each with a leading batch dimension.

    Attributes:
        cones: of the rows that are left. n: columns that are left.
        columns, rows: which columns of ``x`` and rows of ``y`` of the canonical program those are.
        linear: the objective has no quadratic part, whatever the parameters.
        constraining: positions of the parameter vector that enter anything but ``q``.
        P_held, A_held: every entry.
    """

    P_held = A_held = DENSE

    def __init__(self, program: CanonicalProgram, keep_rows: Array, offsets: Array) -> None:
        n, m, width = program.n, program.cones.size, program.q.shape[1]
        pivot_rows, pivot_columns, pivots = _pivots(program, keep_rows)
        x = np.setdiff1d(np.arange(n), pivot_columns)
        r = np.setdiff1d(np.arange(m), pivot_rows)
        t, e = pivot_columns, pivot_rows
        zero = program.cones.zero - len(e)
        old = program.cones
        self.cones = Cones(zero, old.nonneg, old.soc, old.psd, old.exp, old.power)
        self.n, self.columns, self.rows = len(x), x, r

        def block(matrix: Any, row: Array, column: Array, columns: int) -> AffineMap:
            return AffineMap(_block(matrix, row, column, columns), (len(row), len(column)), offsets)

        def vector(matrix: Any, row: Array) -> AffineMap:
            return AffineMap(_rows(matrix, row), (len(row),), offsets)

        self.P_xx, self.P_xt, self.P_tt = (block(program.P, i, j, n) for i, j in ((x, x), (x, t), (t, t)))
        self.q_x, self.q_t = vector(program.q, x), vector(program.q, t)
        self.A_x, self.A_t = (block(program.A, i, j, n) for i, j in ((r, x), (r, t)))
        self.b_r = vector(program.b, r)
        self.eliminated = len(t)
        turn = _block(program.A, e, x, n)
        turn.data = -turn.data / pivots[turn.row // max(len(x), 1)]
        self.T = AffineMap(turn, (len(e), len(x)), offsets)
        shift = _rows(program.b, e)
        shift.data = shift.data / pivots[shift.row]
        self.t_0 = AffineMap(shift, (len(e),), offsets)
        self._diagonal = _constant_diagonal(program.P, t, n, width)
        self._unit = self._diagonal is not None and bool((self._diagonal == 1).all())
        self.linear = self.P_xx.empty and self.P_xt.empty and self.P_tt.empty
        self.constraining = np.unique(np.concatenate([program.P.col, program.A.col, program.b.col]))

    def __call__(self, p: Vector) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The data for each sample, float64."""
        P, q, A, b = self.P_xx(p), self.q_x(p), self.A_x(p), self.b_r(p)
        if not self.eliminated:
            return P, q, A, b
        T = self.T(p)
        t_0 = None if self.t_0.empty else self.t_0(p)
        slope = None if self.q_t.empty else self.q_t(p)  # P_tt t_0 + q_t
        if not self.P_tt.empty:
            if self._diagonal is None:
                P_tt = self.P_tt(p)
                P_T, P_t_0 = P_tt @ T, None if t_0 is None else DENSE.times(P_tt, t_0)
            else:
                d = self._diagonal.to(p.device)
                P_T = T if self._unit else T * d.unsqueeze(1)
                P_t_0 = None if t_0 is None else t_0 * d
            P = T.mT @ P_T if self.P_xx.empty else P + T.mT @ P_T
            slope = P_t_0 if slope is None else slope if P_t_0 is None else slope + P_t_0
        if slope is not None:
            q = q + DENSE.times(T.mT, slope)
        if not self.P_xt.empty:
            P_xt = self.P_xt(p)
            cross = P_xt @ T
            P = P + cross + cross.mT
            q = q if t_0 is None else q + DENSE.times(P_xt, t_0)
        if not self.A_t.empty:
            A_t = self.A_t(p)
            A = A + A_t @ T
            b = b if t_0 is None else b - DENSE.times(A_t, t_0)
        return P, q, A, b


def _pivots(program: CanonicalProgram, keep_rows: Array) -> tuple[Array, Array, Array]:
    """Rows, columns and values of a constant diagonal block of the equalities, in auxiliary variables."""
    n, width = program.n, program.A.shape[1]
    row, column = np.divmod(program.A.row.astype(np.int64), n)
    equality = row < program.cones.zero
    row, column, parameter, value = (v[equality] for v in (row, column, program.A.col, program.A.data))
    pairs = np.unique(np.stack([row, column]), axis=1) if len(row) else np.zeros((2, 0), dtype=np.int64)
    uses = np.bincount(pairs[1], minlength=n)
    varying = np.zeros(n, dtype=bool)
    varying[column[parameter != width - 1]] = True
    eligible = (uses[column] == 1) & program.auxiliary[column] & ~varying[column] & ~np.isin(row, keep_rows)
    eligible &= np.abs(value) > 1e-3
    row, column, value = row[eligible], column[eligible], value[eligible]
    row, first = np.unique(row, return_index=True)
    return row, column[first], value[first]


def _rows(matrix: Any, wanted: Array) -> sp.coo_array:
    place = np.full(matrix.shape[0], -1, dtype=np.int64)
    place[wanted] = np.arange(len(wanted))
    keep = place[matrix.row] >= 0
    return sp.coo_array(
        (matrix.data[keep], (place[matrix.row[keep]], matrix.col[keep])), shape=(len(wanted), matrix.shape[1])
    )


def _block(matrix: Any, rows: Array, columns: Array, width: int) -> sp.coo_array:
    """Rows and columns of a matrix stored row by row with ``width`` columns."""
    height = matrix.shape[0] // width if width else 0
    row_place, column_place = np.full(height, -1, dtype=np.int64), np.full(width, -1, dtype=np.int64)
    row_place[rows], column_place[columns] = np.arange(len(rows)), np.arange(len(columns))
    row, column = np.divmod(matrix.row.astype(np.int64), width)
    keep = (row_place[row] >= 0) & (column_place[column] >= 0)
    where = row_place[row[keep]] * len(columns) + column_place[column[keep]]
    return sp.coo_array(
        (matrix.data[keep], (where, matrix.col[keep])), shape=(len(rows) * len(columns), matrix.shape[1])
    )


def _constant_diagonal(P: Any, t: Array, n: int, width: int) -> Tensor | None:
    """The block ``P_tt`` as a vector, if it is diagonal whatever the parameters."""
    block = _block(P, t, t, n)
    row, column = np.divmod(block.row, max(len(t), 1))
    if (row != column).any() or (block.col != width - 1).any():
        return None
    diagonal = np.zeros(len(t))
    np.add.at(diagonal, row, block.data)
    return torch.from_numpy(diagonal)


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


@dataclass
class Reader:
    """One variable: ``coefficient * w[index]``, with ``index`` pointing at a zero behind ``w`` where there is nothing."""

    shape: tuple[int, ...]
    index: Tensor
    coefficient: Tensor | None
    span: tuple[int, int] | None  # the index is this range
    exp: bool


class Variables:
    """``w (batch, n + m)`` of the reduced program to a tuple of tensors."""

    def __init__(self, program: CanonicalProgram, assembly: Assembly | SparseAssembly) -> None:
        size = assembly.n + assembly.cones.size
        column = np.full(program.n + 1, size, dtype=np.int64)
        column[assembly.columns] = np.arange(assembly.n)
        row = np.full(program.cones.size + 1, size, dtype=np.int64)
        row[assembly.rows] = assembly.n + np.arange(len(assembly.rows))
        self.readers = []
        for r in program.variables:
            index: Any = (row if r.dual else column)[r.index]
            first = int(index[0]) if len(index) else 0
            straight = len(index) > 0 and bool((index == first + np.arange(len(index))).all()) and index[-1] < size
            weight = None if (r.coefficient == 1).all() else torch.from_numpy(r.coefficient.astype(np.float64))
            span = (first, first + len(index)) if straight else None
            self.readers.append(Reader(r.shape, torch.from_numpy(index), weight, span, r.exp))

    def __call__(self, w: Tensor, lead: tuple[int, ...]) -> list[Tensor]:
        """Each variable, ``lead + shape``."""
        padded = None
        out = []
        for reader in self.readers:
            if reader.span is not None:
                part = w[:, slice(*reader.span)]
            else:
                padded = torch.cat([w, w.new_zeros(w.shape[0], 1)], 1) if padded is None else padded
                part = padded.index_select(1, reader.index.to(w.device))
            if reader.coefficient is not None:
                part = part * reader.coefficient.to(w.device)
            part = part.exp() if reader.exp else part
            out.append(part.reshape(lead + reader.shape))
        return out

    def empty(self, lead: tuple[int, ...], dtype: torch.dtype, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The results for a batch of no samples, on the graph of the parameters."""
        anchor = sum(v.sum() * 0 for v in values if v.numel() == 0)
        return tuple(anchor + torch.zeros(*lead, *r.shape, dtype=dtype, device=values[0].device) for r in self.readers)
