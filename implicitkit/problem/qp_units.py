r"""A quadratic program in other units, where its own hide one part behind another.

The natural map compares multipliers with slacks, and a norm of it unknowns with unknowns: with rows between 1e-8 and 1e8, or
all unknowns of the size 1e-12, neither the active set nor the tolerance means what it should.  So it is solved for ``z / t``
with rows ``r_i`` and the objective ``c`` times as large,

    c T P T,   c T q,   R A T,   R b,   R G T,   R h;        z = T z',   y = R y' / c,   lam = R lam' / c,

``T`` such that ``P / |q|`` has the diagonal one and, where it has none, columns the size one, ``R`` such that rows have.
They are constants: derivatives reach the data through these products.  A program whose rows and columns differ by less
than 1e4, and are neither tiny nor huge, is solved as it stands; a relaxed one is not, whose ``lam s = kappa``, in these
units ``c kappa``, asks for digits of both.  A batch has one choice of units, and none where its programs themselves differ
by more than that.

Source: Ruiz (2001), "A scaling algorithm to equilibrate both rows and columns norms in matrices"; Stellato, Banjac, Goulart,
Bemporad & Boyd (2020), Math. Prog. Comp. 12 (OSQP), section 5.1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import compat, recording

UNEVEN = 1e4  # between the largest and the least row or column, or between either and one
_ROUNDS = 20  # each halves the exponents


class Units(NamedTuple):
    """``t`` ``(n,)`` of the unknowns, ``r`` of the rows of ``A`` ``(p,)`` and ``G`` ``(m,)`` (empty of an absent part), and
    ``c`` ``()``."""

    z: Tensor
    y: Tensor
    lam: Tensor
    cost: Tensor

    def of(self, parts: dict[str, Tensor], places: dict[str, Any]) -> dict[str, Tensor]:
        """The parts in these units; of sparse matrices the entries."""
        rows = {"A": self.y, "b": self.y, "G": self.lam, "h": self.lam, "lower": self.lam}

        def scaled(name: str, t: Tensor) -> Tensor:
            left = self.cost * self.z if name in ("P", "q") else rows[name]
            if name not in ("P", "A", "G"):
                return t * left
            if name in places:
                return t * left.index_select(0, places[name].at_row) * self.z.index_select(0, places[name].at_column)
            return t * left.unsqueeze(1) * self.z

        return {name: scaled(name, t) for name, t in parts.items()}

    def start(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state in these units."""
        own = self._sizes()
        return {name: t / own[name] for name, t in state.items()}

    def back(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """A state in the units of the user."""
        own = self._sizes()
        return {name: t * own[name] for name, t in state.items()}

    def _sizes(self) -> dict[str, Tensor]:
        return {"z": self.z, "y": self.y / self.cost, "lam": self.lam / self.cost}


@recording.unrecorded()
def units_of(parts: dict[str, Tensor], places: dict[str, Any], uneven: float) -> Units | None:
    """The units in which rows and columns have the size one; ``None`` where they need no others.

    Args:
        parts: by name, each ``(*batch, ...)``; of sparse matrices the entries. places: of these. uneven: by what
            rows and columns may differ.
    """
    q = _largest(parts["q"], 1)
    n = len(q)
    there = {name: _Sizes(_largest(parts[name], 1 if name in places else 2), places.get(name)) for name in _MATRICES
             if name in parts}  # fmt: skip
    P, rows = there.pop("P", None), list(there.values())
    one = torch.ones_like(q)
    sizes = [matrix.rows(one) for matrix in rows]
    columns = [matrix.columns(size.new_ones(len(size))) for matrix, size in zip(rows, sizes, strict=True)]
    widths = [torch.stack(columns).amax(0)] if columns else []
    if not _are_uneven([*sizes, *widths], uneven) and (P is None or not _are_uneven([P.rows(one)], uneven, each=False)):
        return None
    if any(_differ(parts[name], 1 if name in places else 2) for name in _MATRICES if name in parts):
        return None
    T, R = one, [torch.ones_like(size) for size in sizes]
    steepest = torch.where(q.max() > 0, q.max(), 1)  # the objective's own unit says nothing of z
    curvature = torch.zeros_like(q) if P is None else P.diagonal() / steepest
    curved = curvature > 0
    T = torch.where(curved, 1 / _root(curvature), 1)  # |P_ij| is no more than the root of P_ii P_jj
    for _ in range(_ROUNDS if rows and not bool(curved.all()) else 0):
        R = [r / _root(r * matrix.rows(T)) for r, matrix in zip(R, rows, strict=True)]
        across = torch.stack([matrix.columns(r) for r, matrix in zip(R, rows, strict=True)]).amax(0)
        T = torch.where(curved, T, T / _root(T * across))
    R = [r / _root(r * matrix.rows(T)).square() for r, matrix in zip(R, rows, strict=True)]
    slope = torch.maximum((T * q).max(), (T * P.rows(T)).max()) if P is not None else (T * q).max()
    cost = torch.where(slope > 0, 1 / slope, 1)
    lengths = dict(zip(there, R, strict=True))
    return Units(T, lengths.get("A", q.new_zeros(0)), lengths.get("G", q.new_zeros(0)), cost) if n else None


_MATRICES = ("P", "A", "G")


class _Sizes:
    """The sizes of a matrix' entries, dense ``(rows, columns)`` or ``(nnz,)`` at some ``places``."""

    def __init__(self, entries: Tensor, places: Any) -> None:
        self.entries, self.places = entries, places

    def rows(self, columns: Tensor) -> Tensor:
        """The largest entry of each row, its columns multiplied."""
        if self.places is None:
            return (self.entries * columns).amax(1) if len(columns) else self.entries.sum(1)
        at = self.places
        return self._gathered(self.entries * columns.index_select(0, at.at_column), at.at_row, at.extent[0])

    def columns(self, rows: Tensor) -> Tensor:
        """The largest entry of each column, its rows multiplied."""
        if self.places is None:
            return (self.entries * rows.unsqueeze(1)).amax(0) if len(rows) else self.entries.sum(0)
        at = self.places
        return self._gathered(self.entries * rows.index_select(0, at.at_row), at.at_column, at.extent[1])

    def diagonal(self) -> Tensor:
        """Its diagonal, of a square matrix."""
        if self.places is None:
            return self.entries.diagonal()
        at = self.places
        there = at.at_row == at.at_column
        return self._gathered(self.entries[there], at.at_row[there], at.extent[0])

    @staticmethod
    def _gathered(values: Tensor, where: Tensor, size: int) -> Tensor:
        return values.new_zeros(size).scatter_reduce(0, where, values, "amax")


def _largest(t: Tensor, dims: int) -> Tensor:
    """The sizes of its entries, the largest of all programs of the batch; what is not finite counts as zero."""
    plain = compat.batches_in_front(t)[0].abs()
    plain = torch.where(plain < torch.inf, plain, 0).double()
    lead = plain.ndim - dims
    return (
        plain.flatten(0, lead - 1).amax(0)
        if lead and plain.numel()
        else plain.sum(tuple(range(lead)))
        if lead
        else plain
    )


def _differ(t: Tensor, dims: int) -> bool:
    """Are the programs of a batch themselves in units of their own, so that none suit all?"""
    plain = compat.batches_in_front(t)[0].abs()
    if plain.ndim == dims or not plain.numel():
        return False
    sizes = torch.where(plain < torch.inf, plain, 0).double().flatten(0, plain.ndim - dims - 1).flatten(1).amax(1)
    sizes = sizes[sizes > 0]
    return bool(len(sizes)) and float(sizes.max()) > UNEVEN * float(sizes.min())


def _are_uneven(sizes: list[Tensor], uneven: float, each: bool = True) -> bool:
    """Do these differ by more than ``uneven``, beside each other (or, not ``each``, their largest) and one?"""
    if not sizes:
        return False
    whole = torch.cat(sizes)
    whole = whole[whole > 0]
    if not len(whole):
        return False
    low, high = (float(t) for t in whole.aminmax())
    low = low if each else high
    return low < 1 / uneven or high > uneven


def _root(size: Tensor) -> Tensor:
    return torch.where(size > 0, size, 1).sqrt()
