"""Couplings in the Kullback-Leibler divergence: entropic optimal transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from implicitkit.project.couplings import check_sums, ones_beside
from implicitkit.sets.base import check_tensors
from implicitkit.sets.entropic import EntropicProjection
from implicitkit.solving.verbs import root

__all__ = ["KLBirkhoff", "KLTransport"]

_LEVELS = 6  # of smoothing, each four times the one before
_SWEEPS = 10


@dataclass(frozen=True)
class KLTransport(EntropicProjection):
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

    rows: Tensor
    columns: Tensor
    dims: ClassVar[int] = 2

    def __post_init__(self) -> None:
        check_tensors(self, "rows", "columns")

    def project(self, v: Tensor) -> Tensor:
        return _couple(v, self.rows.to(v), self.columns.to(v))


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
        return _couple(v, one, one)


def _coupling(v: Tensor, rows: Tensor, g: Tensor) -> Tensor:
    return rows.unsqueeze(-1) * torch.softmax(v + g.unsqueeze(-2), -1)


def _couple(v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
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
