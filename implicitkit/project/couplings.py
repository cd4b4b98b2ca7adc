"""Couplings, by a quadratic program, and in the Kullback-Leibler divergence: entropic optimal transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.problem.quadratic_program import QuadraticProgram
from implicitkit.sets.base import Projection, check_tensors, check_values
from implicitkit.sets.simplex import EntropicProjection
from implicitkit.solving.verbs import root, solve

_LEVELS = 6  # of Sinkhorn's smoothing, each four times the one before
_SWEEPS = 10


@dataclass(frozen=True)
class _GivenSums(Projection):
    rows: Tensor
    columns: Tensor
    dims: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_tensors(self, "rows", "columns")


@dataclass(frozen=True)
class Transport(_GivenSums):
    """``{X >= 0, X 1 = r, X' 1 = c}``: matrices with given row sums ``r`` ``(*batch, n)`` and column sums ``c``
    ``(*batch, m)``, of equal totals; by a quadratic program in ``n m`` unknowns.

    Raises:
        ValueError: matrices of another shape, totals that differ, negative sums.
    """

    by_program: ClassVar[bool] = True

    def project(self, v: Tensor) -> Tensor:
        return _couple(v, self.rows.to(v), self.columns.to(v))


@dataclass(frozen=True)
class Birkhoff(Projection):
    """Doubly stochastic matrices: ``{X >= 0, X 1 = 1, X' 1 = 1}``.

    Raises:
        ValueError: the matrices are not square.
    """

    by_program: ClassVar[bool] = True

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
    check_values(_check_sums, rows.expand(*lead, n), columns.expand(*lead, m))
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


def _check_sums(rows: Tensor, columns: Tensor) -> None:
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


@dataclass(frozen=True)
class KLTransport(_GivenSums, EntropicProjection):
    r"""``{X >= 0, X 1 = r, X' 1 = c}`` in the Kullback-Leibler divergence: ``X_ij = r_i softmax_j(V_ij + g_j)`` with ``g``
    such that the column sums are ``c``.

    With ``V = -C / \epsilon`` it is the entropic optimal transport of cost ``C`` (Cuturi 2013).  A few sweeps of Sinkhorn's
    scaling in logarithms, then Newton's method for ``g``, whose convergence does not slow down with ``\epsilon``; the
    derivative is that of the equation, whatever the iterations.

        plan = ik.project.kl_transport(r, c)(-cost / 0.1)

    Args:
        rows: ``r``, ``(*batch, n)``, not negative. columns: ``c``, ``(*batch, m)``, positive, of the same total.

    Raises:
        ValueError: matrices of another shape, totals that differ, negative sums. ConvergenceError: a column sum is zero, or
            ``v`` spreads over so many units that rounding hides the coupling.
    """

    def project(self, v: Tensor) -> Tensor:
        return _couple_entropic(v, self.rows.to(v), self.columns.to(v))


@dataclass(frozen=True)
class KLBirkhoff(EntropicProjection):
    """Doubly stochastic matrices in the Kullback-Leibler divergence: ``X 1 = 1``, ``X' 1 = 1`` (Sinkhorn & Knopp 1967), as
    :class:`KLTransport`.

        ik.project.kl_birkhoff()(scores)

    Raises:
        ValueError: the matrices are not square.
    """

    def project(self, v: Tensor) -> Tensor:
        one = ones_beside(v, self)
        return _couple_entropic(v, one, one)


def _coupling(v: Tensor, rows: Tensor, g: Tensor) -> Tensor:
    return rows.unsqueeze(-1) * torch.softmax(v + g.unsqueeze(-2), -1)


def _couple_entropic(v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    n, m = check_sums(v, rows, columns)
    batch = torch.broadcast_shapes(v.shape[:-2], rows.shape[:-1], columns.shape[:-1])
    v, rows, columns = v.expand(*batch, n, m), rows.expand(*batch, n), columns.expand(*batch, m)

    def excess(u: Tensor, unit: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """How far the column sums are off, as a share of all; a number added to all of ``g`` changes nothing, and its mean
        is to be zero (the sum of all conditions says so, where the totals agree)."""
        g = unit * u
        share = (_coupling(v, rows, g).sum(-2) - columns) / columns.sum(-1, keepdim=True)
        return share + g.mean(-1, keepdim=True) / g.shape[-1]

    unit = v.detach().abs().amax((-2, -1)).clamp_min(1).unsqueeze(-1)  # of g, which spreads as v does
    found = root(
        excess,
        _sinkhorn(v.detach(), rows.detach(), columns.detach()) / unit,
        (unit, v, rows, columns),
        batch_dims=len(batch),
        in_dims=(0, 0, 0, 0) if batch else None,
        rtol=0,
        atol=m * 100 * torch.finfo(v.dtype).eps,
    )
    return _coupling(v, rows, unit * found.value)


@torch.no_grad()
def _sinkhorn(v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """A first ``g``: Sinkhorn's sweeps, from a smoothed problem to the one given (Kosowsky & Yuille 1994)."""
    g = torch.zeros_like(columns)
    log_rows, log_columns = rows.log(), columns.log()
    for level in range(_LEVELS - 1, -1, -1):
        part = v * 0.25**level
        g = 4 * g
        for _ in range(_SWEEPS):
            f = log_rows - torch.logsumexp(part + g.unsqueeze(-2), -1)
            g = log_columns - torch.logsumexp(part + f.unsqueeze(-1), -2)
    return g - g.mean(-1, keepdim=True)
