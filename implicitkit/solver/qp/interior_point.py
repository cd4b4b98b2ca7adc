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
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.linear.dense import cholesky_batched, lstsq_batched
from implicitkit.linear.saddle import Saddle, mv
from implicitkit.problem.qp_data import QPData, natural_residual
from implicitkit.solution import Status

__all__ = ["QPData", "QPPoint", "convex", "interior_point", "natural_residual", "polish", "solve_qp"]


class QPPoint(NamedTuple):
    """A point with its multipliers, ``z (B, n)``, ``y (B, p)``, ``lam (B, m)``, and its end: ``status (B,)`` of
    :class:`~implicitkit.Status` numbers and ``steps (B,)``."""

    z: Tensor
    y: Tensor
    lam: Tensor
    status: Tensor
    steps: Tensor


def solve_qp(
    P: Tensor | None,
    q: Tensor,
    A: Tensor | None = None,
    b: Tensor | None = None,
    G: Tensor | None = None,
    h: Tensor | None = None,
    *,
    tol: float = 1e-9,
    max_steps: int = 60,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solve a batch of convex quadratic programs on plain tensors (no derivative: see ``ik.QuadraticProgram``).

    Args:
        P: ``(B, n, n)``, symmetric positive semidefinite, or ``None`` for a linear program. q: ``(B, n)``.
        A, b: ``(B, p, n)``, ``(B, p)``: ``Az = b``. G, h: ``(B, m, n)``, ``(B, m)``: ``Gz <= h``, with ``h = inf`` for
            rows that are absent.  Each pair may be ``None``.  Any of the tensors may lack the batch dimension if it is
            shared; without it in any, the batch is of one and the results have no batch dimension either.
        tol: relative accuracy of the interior-point phase; the polish then goes to rounding where it can.
        max_steps: interior-point steps.

    Returns:
        ``(z, y, lam, status)``: the point, the multipliers of ``Az = b`` and of ``Gz <= h`` (``lam >= 0``) and
        :class:`~implicitkit.Status` numbers, one a sample: ``CONVERGED``, ``INFEASIBLE``, ``UNBOUNDED``, ``INACCURATE``,
        ``MAX_STEPS``, ``NONFINITE`` (NaN in the data), ``NONCONVEX`` (``P`` is not positive semidefinite).

    Raises:
        ValueError: shapes do not fit.
    """
    data, batched = collect(P, q, A, b, G, h)
    dtype = q.dtype
    point = interior_point(QPData(*(t.to(torch.float64) for t in data)), tol=tol, max_steps=max_steps)
    z, y, lam = (t.to(dtype) for t in point[:3])
    return (z, y, lam, point.status) if batched else (z[0], y[0], lam[0], point.status[0])


def collect(
    P: Tensor | None, q: Tensor, A: Tensor | None, b: Tensor | None, G: Tensor | None, h: Tensor | None
) -> tuple[QPData, bool]:
    """Absent parts filled in, shared ones expanded to the batch; was there a batch dimension?

    Raises:
        ValueError: shapes do not fit.
    """
    n = q.shape[-1]
    if (A is None) != (b is None) or (G is None) != (h is None):
        raise ValueError("A and b, and G and h, come in pairs: give both or neither")
    parts: list[tuple[str, Tensor, int]] = [
        ("P", q.new_zeros(n, n) if P is None else P, 2),
        ("q", q, 1),
        ("A", q.new_zeros(0, n) if A is None else A, 2),
        ("b", q.new_zeros(0) if b is None else b, 1),
        ("G", q.new_zeros(0, n) if G is None else G, 2),
        ("h", q.new_zeros(0) if h is None else h, 1),
    ]
    batch: int | None = None
    for name, t, event in parts:
        if t.ndim not in (event, event + 1):
            raise ValueError(f"{name} must have {event} dimensions, or {event + 1} with a batch; got {tuple(t.shape)}")
        if t.ndim == event + 1:
            if batch is not None and t.shape[0] != batch:
                raise ValueError(f"batch sizes disagree: {name} has {t.shape[0]}, another part has {batch}")
            batch = t.shape[0]
    p, m = parts[2][1].shape[-2], parts[4][1].shape[-2]
    shapes = {"P": (n, n), "q": (n,), "A": (p, n), "b": (p,), "G": (m, n), "h": (m,)}
    for name, t, event in parts:
        if tuple(t.shape[-event:]) != shapes[name]:
            raise ValueError(f"{name} has shape {tuple(t.shape)}, but the other parts ask for {shapes[name]}")
    size = 1 if batch is None else batch
    return QPData(*(t.expand(size, *t.shape[-event:]) for _, t, event in parts)), batch is not None


# ------------------------------------------------------------------------------------------------------- the method
def interior_point(data: QPData, *, tol: float = 1e-9, max_steps: int = 60) -> QPPoint:
    """Solve float64 data; see :func:`solve_qp`."""
    batch = data.q.shape[0]
    finite = torch.ones(batch, dtype=torch.bool, device=data.q.device)
    for part in data:
        finite &= (~part.isnan() if part is data.h else part.isfinite()).flatten(1).all(1)
    finite &= (data.h > -torch.inf).all(1)
    if not bool(finite.all()):  # solved with harmless numbers, and marked
        keep = finite[:, None, None]
        P, q, A, b, G, h = data
        eye = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)
        data = QPData(
            torch.where(keep, P, eye),
            torch.where(keep[..., 0], q, 0),
            torch.where(keep, A, 0),
            torch.where(keep[..., 0], b, 0),
            torch.where(keep, G, 0),
            torch.where(keep[..., 0], h, 1),
        )
    scaled, undo = _scale(data)
    rows = data.G.shape[1]
    point = polish(scaled, _iterate(scaled, tol, max_steps), tol) if rows else _equalities_only(scaled, tol)
    point = point._replace(status=torch.where(convex(scaled.P), point.status, int(Status.NONCONVEX)))
    z, y, lam, status, steps = undo(point)
    z, y, lam = (torch.where(finite.unsqueeze(1), t, torch.nan) for t in (z, y, lam))
    return QPPoint(z, y, lam, torch.where(finite, status, int(Status.NONFINITE)), steps)


def _scale(data: QPData) -> tuple[QPData, Callable[[QPPoint], QPPoint]]:
    """Rows of ``A`` and ``G`` to unit length, the objective to unit size; absent rows to ``0 z <= 1``."""
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

    return scaled, undo


def _norm(x: Tensor) -> Tensor:
    """Largest entry of each sample."""
    return x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])


def _longest(x: Tensor, dx: Tensor) -> Tensor:
    """The largest step in ``[0, 1]`` that keeps ``x + t dx >= 0``."""
    return (torch.where(dx < 0, -x / dx, torch.inf)).amin(1).clamp(max=1.0)


class _Newton:
    """The regularised Newton system of a step, factored."""

    def __init__(self, data: QPData, weight: Tensor, rho: float, delta: float) -> None:
        self.data, self.weight, self.delta = data, weight, delta
        K = torch.baddbmm(data.P, data.G.mT * weight.unsqueeze(1), data.G)
        if data.A.shape[1]:
            K = torch.baddbmm(K, data.A.mT, data.A, alpha=1 / delta)
        K.diagonal(dim1=1, dim2=2).add_(rho)
        self.L, self.ok = cholesky_batched(K)

    def solve(self, r_d: Tensor, r_p: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``dz``, ``dy`` and ``G dz`` for ``(P + G'WG) dz + A'dy = -r_d - G' shift``, ``A dz = -r_p``."""
        A, G = self.data.A, self.data.G
        rhs = r_d + mv(G.mT, shift)
        if A.shape[1]:
            rhs = rhs + mv(A.mT, r_p) / self.delta
        dz = -torch.cholesky_solve(rhs.unsqueeze(2), self.L).squeeze(2)
        dy = (mv(A, dz) + r_p) / self.delta
        return dz, dy, mv(G, dz)


def _iterate(data: QPData, tol: float, max_steps: int) -> QPPoint:
    """Mehrotra's method until every sample has ended; the best that is known where it failed."""
    everything = data
    batch, m = data.q.shape[0], data.G.shape[1]
    device = data.q.device
    rho, delta = 1e-10, 1e-8
    first = _Newton(data, torch.ones_like(data.h), 1e-8, delta)
    z, y, Gz = first.solve(data.q, -data.b, -data.h)
    s = data.h - Gz
    shift = -s.amin(1, keepdim=True)
    lam = -s
    lam_shift = -lam.amin(1, keepdim=True)
    s = torch.where(shift < 0, s, s + 1 + shift)
    lam = torch.where(lam_shift < 0, lam, lam + 1 + lam_shift)
    out = QPPoint(
        z.clone(),
        y.clone(),
        lam.clone(),
        torch.full((batch,), int(Status.MAX_STEPS), device=device),
        torch.zeros(batch, dtype=torch.int64, device=device),
    )
    index = torch.arange(batch, device=device)
    scale_p = 1 + torch.maximum(_norm(data.b), _norm(data.h))
    scale_d = 1 + _norm(data.q)
    best = torch.full((batch,), torch.inf, dtype=z.dtype, device=device)
    stale = torch.zeros(batch, dtype=torch.int64, device=device)
    P, q, A, b, G, h = data
    for step in range(max_steps + 1):
        Pz, Aty, Gtl, Gz = mv(P, z), mv(A.mT, y), mv(G.mT, lam), mv(G, z)
        r_d, r_p, r_g = Pz + q + Aty + Gtl, mv(A, z) - b, Gz + s - h
        gap = (s * lam).sum(1)
        objective = (z * Pz).sum(1) * 0.5 + (q * z).sum(1)
        merit = torch.maximum(
            torch.maximum(_norm(r_d) / (scale_d + _norm(Pz)), torch.maximum(_norm(r_p), _norm(r_g)) / scale_p),
            gap / (1 + objective.abs()),
        )
        stale = torch.where(merit < 0.9 * best, 0, stale + 1)
        best = torch.minimum(best, merit)
        done = merit <= tol
        status = torch.where(done, int(Status.CONVERGED), int(Status.MAX_STEPS))
        if step >= 4:
            infeasible, unbounded = _certificates(P, q, A, b, G, h, z, y, lam, Aty + Gtl, Pz)
            status = torch.where(infeasible & ~done, int(Status.INFEASIBLE), status)
            status = torch.where(unbounded & ~infeasible & ~done, int(Status.UNBOUNDED), status)
        ended = (status != int(Status.MAX_STEPS)) | (stale > 12) | ~merit.isfinite()
        if step == max_steps:
            ended = torch.ones_like(ended)
        count = int(ended.sum())
        if count:
            where = index[ended]
            for name, value in (("z", z), ("y", y), ("lam", lam), ("status", status)):
                getattr(out, name)[where] = value[ended]
            out.steps[where] = step
            if count == len(index):
                break
            keep = (~ended).nonzero().squeeze(1)
            index = index[keep]
            P, q, A, b, G, h = everything.rows(index)
            z, y, lam, s, r_d, r_p, r_g, gap, scale_p, scale_d, best, stale = (
                t.index_select(0, keep) for t in (z, y, lam, s, r_d, r_p, r_g, gap, scale_p, scale_d, best, stale)
            )
        weight = lam / s
        newton = _Newton(QPData(P, q, A, b, G, h), weight, rho, delta)
        # predictor:  s dlam + lam ds = -s lam
        dz, dy, Gdz = newton.solve(r_d, r_p, weight * r_g - lam)
        ds = -r_g - Gdz
        dlam = -lam - weight * ds
        mu = gap / m
        reach = torch.minimum(_longest(s, ds), _longest(lam, dlam)).unsqueeze(1)
        centring = (((s + reach * ds) * (lam + reach * dlam)).sum(1) / m / mu.clamp_min(1e-300)).clamp(0, 1) ** 3
        # corrector:  s dlam + lam ds = -s lam - ds_aff dlam_aff + sigma mu
        target = ds * dlam - (centring * mu).unsqueeze(1)
        dz, dy, Gdz = newton.solve(r_d, r_p, weight * r_g - lam - target / s)
        ds = -r_g - Gdz
        dlam = -lam - weight * ds - target / s
        t = 0.99 * torch.minimum(_longest(s, ds), _longest(lam, dlam))
        t = torch.where(t > 0.98, 0.999 * t / 0.99, t).unsqueeze(1)
        z, y, lam, s = z + t * dz, y + t * dy, lam + t * dlam, s + t * ds
    return out


def _certificates(
    P: Tensor, q: Tensor, A: Tensor, b: Tensor, G: Tensor, h: Tensor, z: Tensor, y: Tensor, lam: Tensor, dual: Tensor,
    Pz: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Do the multipliers, or the point, prove that there is no solution?

    Infeasible: ``A'y + G'lam = 0``, ``b'y + h'lam < 0``, ``lam >= 0``.  Unbounded: ``Pz = 0``, ``Az = 0``, ``Gz <= 0``,
    ``q'z < 0``.  Each relative to the size of the vector, to 1e-7.
    """
    eps = 1e-7
    support = (b * y).sum(1) + (h * lam).sum(1)
    size = torch.maximum(_norm(y), _norm(lam)).clamp_min(1e-300)
    infeasible = (support < -1e-6 * size) & (_norm(dual) <= eps * -support) & (size > 1e3)
    slope = (q * z).sum(1)
    length = _norm(z)
    ray = torch.maximum(torch.maximum(_norm(Pz), _norm(mv(A, z))), mv(G, z).amax(1).clamp_min(0))
    unbounded = (slope < -1e-6 * length) & (ray <= eps * -slope) & (length > 1e3)
    return infeasible, unbounded


# ------------------------------------------------------------------------------------------------------- the finish
def polish(data: QPData, point: QPPoint, tol: float, *, sweeps: int = 4) -> QPPoint:
    """Newton steps for the natural map, while they lower its norm, and the verdict on every sample.

    With the set of active rows known, the solution is that of a linear system: one step goes from a rough point to
    rounding.
    """
    z, y, lam, status, steps = point
    r = natural_residual(z, y, lam, data)
    norm = _joint(r)
    floor = 1e-14 * (1 + _norm(data.q) + _norm(data.b) + _norm(torch.where(data.h.isfinite(), data.h, 0)) + _norm(z))
    wanted = (status == int(Status.CONVERGED)) | (status == int(Status.MAX_STEPS))
    C = torch.cat([data.A, data.G], 1)
    for _ in range(sweeps):
        open_ = wanted & (norm > floor) & norm.isfinite()
        if not bool(open_.any()):
            break
        active = lam + mv(data.G, z) - data.h > 0
        # unknown are the new point and multipliers themselves, not the change of them: the least-norm multipliers are
        # those of the program, whatever the dependence of active rows
        e = torch.cat([torch.zeros_like(y), torch.where(active, 0.0, torch.inf)], 1)
        x, v, _ = Saddle(data.P, C, e).solve(-data.q, torch.cat([data.b, data.h], 1))
        trial = x, v[:, : y.shape[1]], v[:, y.shape[1] :]
        new = _joint(natural_residual(*trial, data))
        better = open_ & (new < norm)
        if not bool(better.any()):
            break
        keep = better.unsqueeze(1)
        z, y, lam = (torch.where(keep, a, b) for a, b in zip(trial, (z, y, lam), strict=True))
        norm = torch.where(better, new, norm)
        wanted = wanted & better
    left = ((status == int(Status.CONVERGED)) | (status == int(Status.MAX_STEPS))) & (norm > 1e3 * floor)
    left = (left & (norm <= 1e-4 * (1 + _norm(data.q)))).nonzero().squeeze(1)
    if len(left):
        z, y, lam = _nearest(data, z, y, lam, left)
        norm = _joint(natural_residual(z, y, lam, data))
    scale = 1 + _norm(data.q) + _norm(z)
    ok = norm <= 10 * tol * scale
    near = norm <= 1e-4 * scale
    open_end = (status == int(Status.MAX_STEPS)) | (status == int(Status.CONVERGED))
    verdict = torch.where(near, int(Status.INACCURATE), int(Status.MAX_STEPS))
    verdict = torch.where(ok, int(Status.CONVERGED), verdict)
    status = torch.where(open_end, verdict, status)
    return QPPoint(z, y, lam, status, steps)


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
        J = torch.cat(
            [
                torch.cat([P, A.mT, G.mT], 2),
                torch.cat([A, A.new_zeros(len(which), p, p + m)], 2),
                torch.cat([-D.unsqueeze(2) * G, A.new_zeros(len(which), m, p), torch.diag_embed(1 - D)], 2),
            ],
            1,
        )
        d = lstsq_batched(J, -r, rcond=1e-10)[0].split([n, p, m], 1)
        trial = (at[0] + d[0], at[1] + d[1], at[2] + d[2])
        lower = (_joint(natural_residual(*trial, part)) < torch.linalg.vector_norm(r, dim=1)).unsqueeze(1)
        if not bool(lower.any()):
            break
        at = (
            torch.where(lower, trial[0], at[0]),
            torch.where(lower, trial[1], at[1]),
            torch.where(lower, trial[2], at[2]),
        )
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


def _equalities_only(data: QPData, tol: float) -> QPPoint:
    """No inequality: one linear system; where it is singular, the solution of least norm, if there is one."""
    batch, n = data.q.shape
    p = data.A.shape[1]
    saddle = Saddle(data.P, data.A, torch.zeros_like(data.b))
    z, y, norm = saddle.solve(-data.q, data.b)
    scale = 1 + _norm(data.q) + _norm(data.b)
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
