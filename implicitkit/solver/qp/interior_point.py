r"""Batched primal-dual interior-point method for convex quadratic programs, on tensors.

    minimise  z'Pz/2 + q'z   subject to   Az = b,   Gz + s = h,   s >= 0

Mehrotra's predictor-corrector method with a primal-dual regularised Newton system, one Cholesky factor of an ``n x n``
matrix a step; every sample has its own step length, centring and end, and samples that have ended are dropped.  A polish
on the active set (Newton steps for the natural map, see :mod:`implicitkit.problem.quadratic_program`) takes the result
to rounding.

Sources: Mehrotra (1992), SIAM J. Optim. 2(4); Nocedal & Wright (2006), algorithm 16.4 and section 14.2; Friedlander &
Orban (2012), Math. Prog. Comp. 4 (regularisation); Vandenberghe (2010), "The CVXOPT linear and quadratic cone program
solvers", section 5.3 (start); Banjac, Goulart, Stellato & Boyd (2019), J. Optim. Theory Appl. 183 (certificates).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.numbers import largest_moduli
from implicitkit.linear.conditions.saddle import Saddle
from implicitkit.linear.factors.dense import cholesky_batched, lstsq_batched, mv
from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.qp.polish import QPPoint, convex, polish

_DELTA = 1e-8  # of the equalities, regularised
_SETS = 3  # active sets that are tried from a point nearby


def interior_point(
    data: QPData, *, tol: float = 1e-9, max_steps: int = 60, near: tuple[Tensor, Tensor, Tensor] | None = None
) -> QPPoint:
    """Solve float64 data; see :func:`solve_qp`.  ``near``: ``z``, ``y`` and ``lam`` that may show which rows are active: of
    the samples for which they do a few linear systems are all that is solved."""
    batch = data.q.shape[0]
    finite = torch.ones(batch, dtype=torch.bool, device=data.q.device)
    for part in data[:5]:
        finite &= part.isfinite().flatten(1).all(1)
    finite &= (data.h > -torch.inf).all(1)  # nor NaN
    if not bool(finite.all()):  # solved with harmless numbers, and marked
        eye = torch.eye(data.q.shape[1], dtype=data.q.dtype, device=data.q.device)
        harmless: tuple[Any, ...] = (eye, 0, 0, 0, 0, 1)
        keep = [finite.view(-1, *(1,) * (part.ndim - 1)) for part in data]
        data = QPData(*(torch.where(k, part, other) for k, part, other in zip(keep, data, harmless, strict=True)))
    scaled, undo, there = _scale(data)
    if not data.G.shape[1]:
        point = _equalities_only(scaled, tol)
    elif near is None:
        point = _to_rounding(scaled, tol, max_steps)
    else:
        point = _from_near(scaled, tol, max_steps, there(*near))
    point = point._replace(status=torch.where(convex(scaled.P), point.status, int(Status.NONCONVEX)))
    z, y, lam, status, steps = undo(point)
    z, y, lam = (torch.where(finite.unsqueeze(1), t, torch.nan) for t in (z, y, lam))
    return QPPoint(z, y, lam, torch.where(finite, status, int(Status.NONFINITE)), steps)


def _to_rounding(data: QPData, tol: float, max_steps: int) -> QPPoint:
    """The method and the polish; again, to a finer tolerance, for samples that the polish could not finish: a row whose
    multiplier and slack are both as small as the error so far belongs to neither side, and nearer to the solution does.
    """
    point = polish(data, _iterate(data, tol, max_steps), tol)
    for finer in (1e-2, 1e-4):
        left = (point.status == int(Status.INACCURATE)).nonzero().squeeze(1)
        if not len(left):
            break
        part = data.rows(left)
        again = polish(part, _iterate(part, finer * tol, max_steps), tol)
        good = again.status == int(Status.CONVERGED)
        point = point.with_rows(left[good], QPPoint(*(part[good] for part in again)))
    return point


def _from_near(data: QPData, tol: float, max_steps: int, near: QPPoint) -> QPPoint:
    """By active sets from a point nearby, and from inside where these do not come to the solution."""
    point = polish(data, near, tol, sweeps=_SETS)
    left = (point.status != int(Status.CONVERGED)).nonzero().squeeze(1)
    if not len(left):
        return point
    return point.with_rows(left, _to_rounding(data.rows(left), tol, max_steps))


def _scale(data: QPData) -> tuple[QPData, Callable[[QPPoint], QPPoint], Callable[..., QPPoint]]:
    """Rows of ``A`` and ``G`` to unit length, the objective to unit size; absent rows to ``0 z <= 1``.  Beside the data what
    takes a point out of these units, and what takes ``z``, ``y`` and ``lam`` there."""
    P, q, A, b, G, h = data
    a_norm = torch.linalg.vector_norm(A, dim=2)
    g_norm = torch.linalg.vector_norm(G, dim=2)
    a_norm, g_norm = torch.where(a_norm > 0, a_norm, 1), torch.where(g_norm > 0, g_norm, 1)
    absent = h == torch.inf
    cost = torch.maximum(P.abs().flatten(1).amax(1), q.abs().amax(1))
    cost = torch.where(cost > 0, cost, 1)
    scaled = QPData(
        P / cost[:, None, None],
        q / cost[:, None],
        A / a_norm.unsqueeze(2),
        b / a_norm,
        torch.where(absent.unsqueeze(2), 0, G / g_norm.unsqueeze(2)),
        torch.where(absent, 1, h / g_norm),
    )

    def undo(point: QPPoint) -> QPPoint:
        y, lam = point.y * cost[:, None] / a_norm, point.lam * cost[:, None] / g_norm
        return QPPoint(point.z, y, torch.where(absent, 0, lam), point.status, point.steps)

    def there(z: Tensor, y: Tensor, lam: Tensor) -> QPPoint:
        status = torch.full((len(z),), int(Status.MAX_STEPS), device=z.device)
        return QPPoint(z, y * a_norm / cost[:, None], lam * g_norm / cost[:, None], status, torch.zeros_like(status))

    return scaled, undo, there


def _longest(x: Tensor, dx: Tensor) -> Tensor:
    """The largest step in ``[0, 1]`` that keeps ``x + t dx >= 0``."""
    return (torch.where(dx < 0, -x / dx, torch.inf)).amin(1).clamp(max=1.0)


class _Rows(NamedTuple):
    """Rows of ``G`` with ``several`` entries; and those that have one in every sample, as bounds do: ``single``,
    ``(k,)``, where that stands and its square, ``(batch, k)``."""

    several: Tensor
    single: Tensor
    at: Tensor
    square: Tensor

    @staticmethod
    def of(G: Tensor) -> _Rows:
        """The rows of ``G`` ``(batch, m, n)``, looked at once."""
        few = (G.count_nonzero(2) <= 1).all(0)
        several, single = (~few).nonzero().squeeze(1), few.nonzero().squeeze(1)
        entries = G.index_select(1, single)
        at = entries.abs().argmax(2)
        return _Rows(several, single, at, entries.gather(2, at.unsqueeze(2)).squeeze(2).square())

    def rows(self, keep: Tensor) -> _Rows:
        """Some of the samples."""
        return self._replace(at=self.at.index_select(0, keep), square=self.square.index_select(0, keep))

    def gram(self, P: Tensor, G: Tensor, weight: Tensor) -> Tensor:
        """``P + G'WG``; what bounds add stands on the diagonal."""
        if not len(self.single):
            return torch.baddbmm(P, G.mT * weight.unsqueeze(1), G)
        G = G.index_select(1, self.several)
        K = torch.baddbmm(P, G.mT * weight.index_select(1, self.several).unsqueeze(1), G)
        K.diagonal(dim1=1, dim2=2).scatter_add_(1, self.at, self.square * weight.index_select(1, self.single))
        return K


class _Newton:
    """The regularised Newton system of a step, factored."""

    def __init__(self, data: QPData, rows: _Rows, weight: Tensor, rho: float = 1e-10) -> None:
        self.data = data
        K = rows.gram(data.P, data.G, weight)
        if data.A.shape[1]:
            K = torch.baddbmm(K, data.A.mT, data.A, alpha=1 / _DELTA)
        K.diagonal(dim1=1, dim2=2).add_(rho)
        self.L = cholesky_batched(K)[0]

    def solve(self, r_d: Tensor, r_p: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``dz``, ``dy`` and ``G dz`` for ``(P + G'WG) dz + A'dy = -r_d - G' shift``, ``A dz = -r_p``."""
        A, G = self.data.A, self.data.G
        rhs = r_d + mv(G.mT, shift)
        if A.shape[1]:
            rhs = rhs + mv(A.mT, r_p) / _DELTA
        dz = -torch.cholesky_solve(rhs.unsqueeze(2), self.L).squeeze(2)
        dy = (mv(A, dz) + r_p) / _DELTA
        return dz, dy, mv(G, dz)


class _Iterate(NamedTuple):
    """Where the samples that still run stand: the point, its multipliers and slacks, and how it went: the lowest merit so
    far and the steps since it fell by a tenth."""

    z: Tensor
    y: Tensor
    lam: Tensor
    s: Tensor
    best: Tensor
    stale: Tensor

    def rows(self, keep: Tensor) -> _Iterate:
        """Some of the samples."""
        return _Iterate(*(t.index_select(0, keep) for t in self))


class _Residual(NamedTuple):
    """What is left of the optimality conditions, each ``(batch, .)``; ``merit`` is their largest, relative, ``(batch,)``."""

    d: Tensor
    p: Tensor
    g: Tensor
    gap: Tensor
    merit: Tensor
    infeasible: Tensor
    unbounded: Tensor

    def rows(self, keep: Tensor) -> _Residual:
        """Some of the samples."""
        return _Residual(*(t.index_select(0, keep) for t in self))


def _start(data: QPData, rows: _Rows) -> _Iterate:
    """The solution of the least-squares problem behind the start of CVXOPT, moved inside."""
    z, y, Gz = _Newton(data, rows, torch.ones_like(data.h), 1e-8).solve(data.q, -data.b, -data.h)
    s = data.h - Gz
    shift = -s.amin(1, keepdim=True)
    lam = -s
    lam_shift = -lam.amin(1, keepdim=True)
    s = torch.where(shift < 0, s, s + 1 + shift)
    lam = torch.where(lam_shift < 0, lam, lam + 1 + lam_shift)
    best = torch.full_like(z[:, 0], torch.inf)
    return _Iterate(z, y, lam, s, best, torch.zeros_like(best, dtype=torch.int64))


def _measure(data: QPData, at: _Iterate, certify: bool) -> _Residual:
    """Primal residuals count relative to their own row's right-hand side: a constraint that is far away hides nothing."""
    P, q, A, b, G, h = data
    Pz, Aty, Gtl = mv(P, at.z), mv(A.mT, at.y), mv(G.mT, at.lam)
    r_d, r_p, r_g = Pz + q + Aty + Gtl, mv(A, at.z) - b, mv(G, at.z) + at.s - h
    gap = (at.s * at.lam).sum(1)
    objective = (at.z * Pz).sum(1) * 0.5 + (q * at.z).sum(1)
    primal = torch.maximum(largest_moduli(r_p / (1 + b.abs())), largest_moduli(r_g / (1 + h.abs())))
    dual = largest_moduli(r_d) / (1 + largest_moduli(q) + largest_moduli(Pz))
    merit = torch.maximum(torch.maximum(dual, primal), gap / (1 + objective.abs()))
    if certify:
        infeasible, unbounded = _certificates(data, at, Aty + Gtl, Pz)
    else:
        infeasible = unbounded = torch.zeros_like(merit, dtype=torch.bool)
    return _Residual(r_d, r_p, r_g, gap, merit, infeasible, unbounded)


def _advance(data: QPData, rows: _Rows, at: _Iterate, r: _Residual) -> _Iterate:
    """Mehrotra's predictor and corrector from one factor, and the step that stays inside."""
    z, y, lam, s = at[:4]
    weight, m = lam / s, data.G.shape[1]
    newton = _Newton(data, rows, weight)
    # predictor:  s dlam + lam ds = -s lam
    dz, dy, Gdz = newton.solve(r.d, r.p, weight * r.g - lam)
    ds = -r.g - Gdz
    dlam = -lam - weight * ds
    mu = r.gap / m
    reach = torch.minimum(_longest(s, ds), _longest(lam, dlam)).unsqueeze(1)
    centring = (((s + reach * ds) * (lam + reach * dlam)).sum(1) / m / mu.clamp_min(1e-300)).clamp(0, 1) ** 3
    # corrector:  s dlam + lam ds = -s lam - ds_aff dlam_aff + sigma mu
    target = ds * dlam - (centring * mu).unsqueeze(1)
    dz, dy, Gdz = newton.solve(r.d, r.p, weight * r.g - lam - target / s)
    ds = -r.g - Gdz
    dlam = -lam - weight * ds - target / s
    t = 0.99 * torch.minimum(_longest(s, ds), _longest(lam, dlam))
    t = torch.where(t > 0.98, 0.999 * t / 0.99, t).unsqueeze(1)
    return at._replace(z=z + t * dz, y=y + t * dy, lam=lam + t * dlam, s=s + t * ds)


def _iterate(data: QPData, tol: float, max_steps: int) -> QPPoint:
    """Mehrotra's method until every sample has ended; the last iterate where it failed."""
    everything, batch, device = data, data.q.shape[0], data.q.device
    rows = all_rows = _Rows.of(data.G)
    at = _start(data, rows)
    status = torch.full((batch,), int(Status.MAX_STEPS), device=device)
    out = QPPoint(at.z.clone(), at.y.clone(), at.lam.clone(), status, torch.zeros_like(status))
    index = torch.arange(batch, device=device)
    for step in range(max_steps + 1):
        r = _measure(data, at, step >= 4)
        stale = torch.where(r.merit < 0.9 * at.best, 0, at.stale + 1)
        at = at._replace(best=torch.minimum(at.best, r.merit), stale=stale)
        end = torch.full_like(stale, int(Status.MAX_STEPS))
        end = torch.where(r.unbounded, int(Status.UNBOUNDED), end)
        end = torch.where(r.infeasible, int(Status.INFEASIBLE), end)
        end = torch.where(r.merit <= tol, int(Status.CONVERGED), end)
        ended = (end != int(Status.MAX_STEPS)) | (stale > 12) | ~r.merit.isfinite() | (step == max_steps)
        count = int(ended.sum())
        if count:
            where = index[ended]
            for old, new in ((out.z, at.z), (out.y, at.y), (out.lam, at.lam), (out.status, end)):
                old[where] = new[ended]
            out.steps[where] = step
            if count == len(index):
                break
            keep = (~ended).nonzero().squeeze(1)
            index = index[keep]
            data, rows, at, r = everything.rows(index), all_rows.rows(index), at.rows(keep), r.rows(keep)
        at = _advance(data, rows, at, r)
    return out


def _certificates(data: QPData, at: _Iterate, dual: Tensor, Pz: Tensor) -> tuple[Tensor, Tensor]:
    """Do the multipliers, or the point, prove that there is no solution?

    Infeasible: ``A'y + G'lam = 0``, ``b'y + h'lam < 0``, ``lam >= 0``.  Unbounded: ``Pz = 0``, ``Az = 0``, ``Gz <= 0``,
    ``q'z < 0``.  Each relative to the size of the vector, to 1e-7; ``Pz`` to the size of ``P``, too: where it curves a
    little in all directions, the end is a long way off.
    """
    P, q, A, b, G, h = data
    z, y, lam = at[:3]
    eps = 1e-7
    support = (b * y).sum(1) + (h * lam).sum(1)
    size = torch.maximum(largest_moduli(y), largest_moduli(lam)).clamp_min(1e-300)
    infeasible = (support < -1e-6 * size) & (largest_moduli(dual) <= eps * -support) & (size > 1e3)
    slope = (q * z).sum(1)
    length = largest_moduli(z)
    ray = torch.maximum(torch.maximum(largest_moduli(Pz), largest_moduli(mv(A, z))), mv(G, z).amax(1).clamp_min(0))
    unbounded = (slope < -1e-6 * length) & (ray <= eps * -slope) & (length > 1e3)
    unbounded = unbounded & (largest_moduli(Pz) <= eps * largest_moduli(P.flatten(1)) * length)
    return infeasible, unbounded


def _equalities_only(data: QPData, tol: float) -> QPPoint:
    """No inequality: one linear system; where it is singular, the solution of least norm, if there is one."""
    batch, n = data.q.shape
    p = data.A.shape[1]
    saddle = Saddle(data.P, data.A, torch.zeros_like(data.b))
    z, y, norm = saddle.solve(-data.q, data.b)
    scale = 1 + largest_moduli(data.q) + largest_moduli(data.b)
    status = torch.where(norm <= tol * scale, int(Status.CONVERGED), int(Status.STALLED))
    bad = (status != int(Status.CONVERGED)).nonzero().squeeze(1)
    if len(bad):
        P, q, A, b, _, _ = data.rows(bad)
        K = torch.cat([torch.cat([P, A.mT], 2), torch.cat([A, A.new_zeros(len(bad), p, p)], 2)], 1)
        x, _, _ = lstsq_batched(K, torch.cat([-q, b], 1), rcond=1e-12)
        left = torch.cat([-q, b], 1) - mv(K, x)
        infeasible = torch.linalg.vector_norm(left[:, n:], dim=1) > 1e-7 * scale[bad]
        solved = torch.linalg.vector_norm(left, dim=1) <= 1e-7 * scale[bad]
        z[bad], y[bad] = x[:, :n], x[:, n:]
        verdict = torch.where(infeasible, int(Status.INFEASIBLE), int(Status.UNBOUNDED))
        status[bad] = torch.where(solved, int(Status.CONVERGED), verdict)
    return QPPoint(z, y, data.q.new_zeros(batch, 0), status, torch.ones_like(status))
