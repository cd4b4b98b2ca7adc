r"""Quadratic programs with sparse matrices: the optimality conditions, and their Jacobian from the entries.

The unknowns are ``(z, y, lam)`` as for dense matrices (:mod:`implicitkit.problem.quadratic_program`), and so are the
equations; a matrix is its entries, a vector ``(nnz,)``, and the places of them, which are no tensors to differentiate by:

    (M z)_i = sum over entries e in row i of  v_e z_{c_e}

The Jacobian of the natural map,

    [   P    A'     G'   ]
    [   A    0      0    ]          D = diag(d),  d_i the derivative of the clamp: 1 on active rows, 0 on others,
    [ -D G   0    I - D  ]

is written down entry by entry, factored by SuperLU, and used for the derivative in both modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.arrays import from_arrays
from implicitkit.foundation.operators import Operator
from implicitkit.linear.factors.entries import of_entries
from implicitkit.problem.complementarity import plus_slope

MATRICES = ("P", "A", "G")


@dataclass(frozen=True, eq=False)
class Places:
    """Where the entries of a matrix ``(rows, columns)`` stand, row by row; both ``(nnz,)``."""

    at_row: Tensor
    at_column: Tensor
    extent: tuple[int, int]

    def times(self, values: Tensor, x: Tensor) -> Tensor:
        """``M x``: ``(..., nnz)``, ``(..., columns) -> (..., rows)``."""
        return _gathered(values * x.index_select(-1, self.at_column), self.at_row, self.extent[0])

    def back(self, values: Tensor, x: Tensor) -> Tensor:
        """``M' x``: ``(..., nnz)``, ``(..., rows) -> (..., columns)``."""
        return _gathered(values * x.index_select(-1, self.at_row), self.at_column, self.extent[1])


def _gathered(terms: Tensor, where: Tensor, size: int) -> Tensor:
    return terms.new_zeros((*terms.shape[:-1], size)).index_add(-1, where, terms)


def sparse_jacobian(part: dict[str, Tensor], places: dict[str, Places], w: Tensor, kappa: float) -> Operator:
    """The Jacobian of the natural map at packed states ``w`` ``(batch, n + p + m)``, by its entries.

    Args:
        part: the data of every sample, of matrices the entries, ``(batch, ...)``. places: of these, by name.
    """
    q = part["q"]
    batch, n = q.shape
    p = places["A"].extent[0] if "A" in part else 0
    rows, columns, values = [], [], []

    def put(i: Tensor, j: Tensor, v: Tensor) -> None:
        rows.append(i)
        columns.append(j)
        values.append(v.expand(batch, -1))

    if "P" in part:
        at = places["P"]
        put(at.at_row, at.at_column, 0.5 * part["P"])
        put(at.at_column, at.at_row, 0.5 * part["P"])
    if "A" in part:
        at = places["A"]
        put(n + at.at_row, at.at_column, part["A"])
        put(at.at_column, n + at.at_row, part["A"])
    if "G" in part:
        at = places["G"]
        v = w[:, n + p :] + at.times(part["G"], w[:, :n])
        D = plus_slope(v - part["h"], kappa) if "h" in part else torch.zeros_like(v)
        if "lower" in part:
            D = D + plus_slope(part["lower"] - v, kappa)
        put(at.at_column, n + p + at.at_row, part["G"])
        put(n + p + at.at_row, at.at_column, -D.index_select(1, at.at_row) * part["G"])
        diagonal = n + p + torch.arange(at.extent[0], device=q.device)
        put(diagonal, diagonal, 1 - D)
    return of_entries(torch.cat(rows), torch.cat(columns), torch.cat(values, 1), w)


def is_sparse(part: Any) -> bool:
    """Is it a sparse matrix, torch's or SciPy's?"""
    if isinstance(part, Tensor):
        return part.layout is not torch.strided
    return type(part).__module__.startswith("scipy.sparse")


def as_sparse(name: str, part: Any, beside: Sequence[Tensor]) -> Tensor:
    """A sparse matrix of torch, entries that stand at the same place added; SciPy's go where the tensors ``beside`` are.

    Raises:
        TypeError: it is no matrix.
    """
    if name not in MATRICES or part.ndim != 2:
        raise TypeError(
            f"QuadraticProgram's {name} is sparse, with {part.ndim} dimensions: only P, A and G may be sparse, as matrices "
            "that all programs of a batch share"
        )
    if isinstance(part, Tensor):
        return part.to_sparse_coo().coalesce()
    csr = part.tocsr()
    csr.sum_duplicates()
    coo = csr.tocoo()
    row, col, data = from_arrays((coo.row, coo.col, coo.data), beside)
    places = torch.stack([row.long(), col.long()])
    # invariants are SciPy's: to check them is not possible below transforms
    return torch.sparse_coo_tensor(
        places, data, coo.shape, device=data.device, is_coalesced=True, check_invariants=False
    )


def as_entries(name: str, matrix: Tensor) -> tuple[Tensor, Places]:
    """The entries of a matrix, differentiable, and their places: all of them, if it is dense.

    Raises:
        TypeError: it has a batch dimension.
    """
    if matrix.ndim != 2:
        raise TypeError(
            f"QuadraticProgram's {name} has a batch dimension, and another part is sparse: then P, A and G must be matrices "
            "that all programs of a batch share"
        )
    m, n = matrix.shape
    if matrix.layout is torch.strided:
        row, column = torch.arange(m, device=matrix.device), torch.arange(n, device=matrix.device)
        values, row, column = matrix.reshape(-1), row.repeat_interleave(n), column.repeat(m)
    else:
        values, (row, column) = matrix.values(), matrix.indices()
    # places outlive the transforms around this call
    return values, Places(compat.physical(row), compat.physical(column), (m, n))
