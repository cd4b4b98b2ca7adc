r"""From a solver's answer to rounding, and the verdict: Newton steps for the natural map of a quadratic program.

    Pz + q + A'y + G'lam = 0,    Az - b = 0,    lam - max(lam + Gz - h, 0) = 0

The map is piecewise linear: with the right set of active rows one step is exact (Robinson 1992; Facchinei & Pang 2003,
section 7.2), whatever the accuracy of the point that it starts from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.numbers import largest_moduli
from implicitkit.linear.conditions.saddle import Saddle
from implicitkit.linear.factors.dense import cholesky_batched, lstsq_batched, mv
from implicitkit.problem.qp_data import QPData, natural_jacobian, natural_residual
from implicitkit.solution import Status


class QPPoint(NamedTuple):
    """A point with its multipliers, ``z (B, n)``, ``y (B, p)``, ``lam (B, m)``, and its end: ``status (B,)`` of
    :class:`~implicitkit.Status` numbers and ``steps (B,)``."""

    z: Tensor
    y: Tensor
    lam: Tensor
    status: Tensor
    steps: Tensor

    def with_rows(self, rows: Tensor, others: QPPoint) -> QPPoint:
        """These, with the ``others`` in the place of some."""
        return QPPoint(*(old.index_copy(0, rows, new.to(old.dtype)) for old, new in zip(self, others, strict=True)))

    def with_rest(self, data: QPData, solve: Callable[[QPData], QPPoint]) -> QPPoint:
        """These, and for the programs that are not solved what another solver finds."""
        left = (self.status != int(Status.CONVERGED)).nonzero().squeeze(1)
        return self.with_rows(left, solve(data.rows(left))) if len(left) else self


def polish(data: QPData, point: QPPoint, tol: float, *, sweeps: int = 6) -> QPPoint:
    """Newton steps for the natural map, and the verdict on every sample: the best point that they meet.

    With the set of active rows known, the solution is that of a linear system: one step goes from a rough point to
    rounding, which is measured by what takes part: rows that are not active count for nothing, however large ``h`` is.
    Where the guess was wrong the residual may grow first: the next step takes the set of active rows from there
    (Hintermueller, Ito & Kunisch 2003, "The primal-dual active set strategy as a semismooth Newton method").
    """
    z, y, lam, status, steps = point
    norm, size = _measure(data, z, y, lam)
    at = best = torch.cat([z, y, lam], 1)
    parts = [z.shape[1], y.shape[1], lam.shape[1]]
    wanted = _open(status)
    for sweep in range(sweeps):
        # once in any case: what is rounding in the residual may be much more in an ill-conditioned point
        rows = (wanted & (norm > (size if sweep else 0)) & norm.isfinite()).nonzero().squeeze(1)
        if not len(rows):
            break
        part = data if len(rows) == len(z) else data.rows(rows)
        x, _, v = at.index_select(0, rows).split(parts, 1)
        active = v + mv(part.G, x) - part.h > 0
        # unknown are the new point and multipliers themselves, not the change of them: the least-norm multipliers are
        # those of the program, whatever the dependence of active rows
        e = torch.cat([torch.zeros_like(part.b), torch.where(active, 0.0, torch.inf)], 1)
        saddle = Saddle(part.P, torch.cat([part.A, part.G], 1), e)
        trial = torch.cat(saddle.solve(-part.q, torch.cat([part.b, part.h], 1), rtol=1e-16)[:2], 1)
        new, floor = _measure(part, *trial.split(parts, 1))
        better = new < norm[rows]
        found = rows[better]
        at, best = at.index_copy(0, rows, trial), best.index_copy(0, found, trial[better])
        wanted = wanted.index_copy(0, rows, better | (norm[rows] > 1e3 * size[rows]))
        norm, size = norm.index_copy(0, found, new[better]), size.index_copy(0, found, floor[better])
    z, y, lam = best.split(parts, 1)
    bounds = largest_moduli(data.b) + largest_moduli(torch.where(data.h.isfinite(), data.h, 0))
    loose = 1e-11 * (1 + largest_moduli(data.q) + bounds + largest_moduli(z))
    left = _open(status) & (norm > loose)
    left = (left & (norm <= 1e-4 * (1 + largest_moduli(data.q)))).nonzero().squeeze(1)
    if len(left):
        z, y, lam = _nearest(data, z, y, lam, left)
        norm = _joint(natural_residual(z, y, lam, data))
    forces = sum(largest_moduli(mv(M, x)) for M, x in ((data.P, z), (data.A.mT, y), (data.G.mT, lam)))
    size = 1 + largest_moduli(data.q)
    # what pulls is no smaller because ``z`` is far out: else a ray along which the objective falls for ever ended there
    pull = largest_moduli(natural_residual(z, y, lam, data)[0]) / (size + forces)
    return QPPoint(z, y, lam, _verdict(status, torch.maximum(norm / (size + largest_moduli(z)), pull), tol), steps)


def _open(status: Tensor) -> Tensor:
    """Is there a point, for the residual to judge?"""
    found = torch.zeros_like(status, dtype=torch.bool)
    for end in (Status.CONVERGED, Status.INACCURATE, Status.MAX_STEPS, Status.STALLED):
        found |= status == int(end)
    return found


def _verdict(status: Tensor, share: Tensor, tol: float) -> Tensor:
    """What a point is, by the ``share`` of its parts that the residual is; a proof that there is none, or that the data are
    unfit, stands."""
    verdict = torch.where(share <= 1e-4, int(Status.INACCURATE), int(Status.MAX_STEPS))
    verdict = torch.where(share <= 10 * tol, int(Status.CONVERGED), verdict)
    return torch.where(_open(status), verdict, status)


def _measure(data: QPData, z: Tensor, y: Tensor, lam: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the natural map, and what of it rounding alone may be, each ``(batch,)``."""
    P, q, A, b, G, h = data
    terms = mv(P, z), mv(A.mT, y), mv(G.mT, lam)
    v = lam + mv(G, z) - h
    active = v > 0
    residual = q + terms[0] + terms[1] + terms[2], mv(A, z) - b, torch.where(active, lam - v, lam)
    size = sum((largest_moduli(t) for t in (*terms, b, lam, torch.where(active, h, 0))), largest_moduli(q))
    return _joint(residual), 1e-14 * size


def _nearest(data: QPData, z: Tensor, y: Tensor, lam: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the active set does not determine the point (a face of solutions): to the nearest solution, by Newton steps
    of least norm."""
    part = data.rows(which)
    P, _, A, _, G, h = part
    at = (z[which], y[which], lam[which])
    n, p, m = P.shape[1], A.shape[1], G.shape[1]
    for _ in range(3):
        r = torch.cat(natural_residual(*at, part), 1)
        D = (at[2] + mv(G, at[0]) - h > 0).to(P)
        d = lstsq_batched(natural_jacobian(P, A, G, D), -r, rcond=1e-10)[0].split([n, p, m], 1)
        trial = (at[0] + d[0], at[1] + d[1], at[2] + d[2])
        lower = (_joint(natural_residual(*trial, part)) < torch.linalg.vector_norm(r, dim=1)).unsqueeze(1)
        if not bool(lower.any()):
            break
        at = tuple(torch.where(lower, new, old) for new, old in zip(trial, at, strict=True))  # type: ignore[assignment]
    z, y, lam = (t.index_copy(0, which, new) for t, new in zip((z, y, lam), at, strict=True))
    return z, y, lam


def _joint(residual: tuple[Tensor, ...]) -> Tensor:
    return torch.linalg.vector_norm(torch.cat(residual, 1), dim=1)


def convex(P: Tensor) -> Tensor:
    """Which of the matrices ``(batch, n, n)`` are positive semidefinite, to 1e-9 of their largest entry, ``(batch,)``."""
    size = P.abs().flatten(1).amax(1)
    lifted = P + 0
    lifted.diagonal(dim1=1, dim2=2).add_((1e-9 * size).unsqueeze(1))
    return cholesky_batched(lifted)[1] | (size == 0)
