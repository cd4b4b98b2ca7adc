"""Polytopes of couplings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.problem.quadratic_program import QuadraticProgram
from implicitkit.sets.base import Projection, check_tensors
from implicitkit.sets.constants import constants
from implicitkit.solving.verbs import solve

__all__ = ["Birkhoff", "Transport"]


@dataclass(frozen=True)
class Transport(Projection):
    """``{X >= 0, X 1 = r, X' 1 = c}``: matrices with given row sums ``r`` ``(*batch, n)`` and column sums ``c``
    ``(*batch, m)``, of equal totals; by a quadratic program in ``n m`` unknowns.

    Raises:
        ValueError: matrices of another shape, totals that differ, negative sums.
    """

    rows: Tensor
    columns: Tensor
    dims: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_tensors(self, "rows", "columns")

    def project(self, v: Tensor) -> Tensor:
        return _couple(v, self.rows.to(v), self.columns.to(v))


@dataclass(frozen=True)
class Birkhoff(Projection):
    """Doubly stochastic matrices: ``{X >= 0, X 1 = 1, X' 1 = 1}``.

    Raises:
        ValueError: the matrices are not square.
    """

    def project(self, v: Tensor) -> Tensor:
        one = ones_beside(v, self)
        return _couple(v, one, one)


def ones_beside(v: Tensor, projection: Projection) -> Tensor:
    """The row sums, and the column sums, of doubly stochastic matrices of the size of ``v``, ``(n,)``.

    Raises:
        ValueError: ``v`` is not square.
    """
    if v.ndim < 2 or v.shape[-1] != v.shape[-2]:
        raise ValueError(f"{type(projection).__name__} projects square matrices, got shape {tuple(v.shape)}")
    return torch.ones(v.shape[-1], dtype=v.dtype, device=v.device)


def check_sums(v: Tensor, rows: Tensor, columns: Tensor) -> tuple[int, int]:
    """How many rows and columns ``v`` has.

    Raises:
        ValueError: another number of sums, negative sums, totals that differ.
    """
    n, m = v.shape[-2:]
    if rows.shape[-1] != n or columns.shape[-1] != m:
        raise ValueError(
            f"matrices of shape {n} x {m} need {n} row sums and {m} column sums; got {rows.shape[-1]}, {columns.shape[-1]}"
        )
    lead = torch.broadcast_shapes(rows.shape[:-1], columns.shape[:-1])
    constants(_check_sums, rows.expand(*lead, n), columns.expand(*lead, m))
    return n, m


def _couple(v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    n, m = check_sums(v, rows, columns)
    eye_n, eye_m = (torch.eye(k, dtype=v.dtype, device=v.device) for k in (n, m))
    A = torch.cat([eye_n.repeat_interleave(m, 1), eye_m.repeat(1, n)], 0)
    lead = torch.broadcast_shapes(rows.shape[:-1], columns.shape[:-1])
    b = torch.cat([rows.expand(*lead, n), columns.expand(*lead, m)], -1)
    eye = torch.eye(n * m, dtype=v.dtype, device=v.device)
    zero = torch.zeros(n * m, dtype=v.dtype, device=v.device)
    flat = solve(QuadraticProgram(eye, -v.flatten(-2), A, b, -eye, zero)).value
    return flat.unflatten(-1, (n, m))


def _check_sums(rows: Tensor, columns: Tensor) -> Tensor:
    least = min(float(t.min()) for t in (rows, columns)) if rows.numel() and columns.numel() else 0.0
    if least < 0:
        raise ValueError(f"the row and column sums of a coupling must not be negative, the smallest is {least:.6g}")
    have, want = rows.sum(-1), columns.sum(-1)
    off = (have - want).abs() > torch.finfo(rows.dtype).eps ** 0.75 * want.abs()
    if bool(off.any()):
        raise ValueError(
            f"the row sums add up to {float(have[off][0]):.6g}, the column sums to {float(want[off][0]):.6g}: there is no "
            "coupling unless the totals agree"
        )
    return have
