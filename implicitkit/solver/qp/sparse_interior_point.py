r"""A sparse quadratic program from inside: Mehrotra's method (1992, SIAM J. Optim. 2(4)), and the active set it leads to.

The inequalities of rows and bounds are ``G d + s = g`` with slacks ``s > 0`` and multipliers ``z > 0``.  Every step solves
one system ``[[H + L, C'], [C, -E]]``, ``L`` and ``E`` the ratios of multiplier and slack of bounds and rows, with sparse
factors, for a predictor and a corrector.  Where these cannot be had to
some digits (rows that depend on each other, unknowns without curvature) steps are those of the proximal method from there on
(Friedlander & Orban 2012).  The set of conditions whose multiplier is larger than their slack, each in its unit, is right
well before the end: where a step has hardly changed it, the solution for it is looked at, and is the end if its signs are
right (finite termination: Ye 1992, Math. Prog. 57).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from implicitkit.linear.factors.arrowhead import ArrowheadMatrix
from implicitkit.solver.qp.sparse import Active, SparsePoint, SparseProgram, active_set

_SHIFTS = 16  # by factors of eight
_STEPS = 80  # of the interior-point method
_NEARNESS = (0.0, 1e-8, 1e-6)  # of its steps, where systems cannot be solved without
_CLOSE = 1e-9  # relative residual at which it ends
_NEAR = 1e-1  # ... and from which on the active set is looked at
_HARDLY = (2, 1e-3)  # conditions, or of all, that a step may change in one that is looked at
_FEW = 2  # active sets that are tried from there
_REFINED = 1e-12  # backward error of its systems
_WRONG = 1e-4  # ... that is too large for a step
_SHARE = 0.995  # of the way to where a slack or a multiplier is zero
_ROOM = 0.1  # of the ends of rows: less no slack is at the start


class _Point(NamedTuple):
    """``d`` ``(n,)``, multipliers ``y`` of all rows ``(m,)``; slacks ``s`` and multipliers ``z`` of the inequalities, those
    of rows as they stand in ``y``: or changes of all four."""

    d: np.ndarray
    y: np.ndarray
    s: np.ndarray
    z: np.ndarray

    def moved(self, step: _Point, t: float) -> _Point:
        """By ``t`` of a step."""
        return _Point(*(a + t * b for a, b in zip(self, step, strict=True)))

    def reach(self, step: _Point) -> float:
        """How far slacks and multipliers stay positive along a step, at most 1."""
        return min(1.0, _reach(self.s, step.s), _reach(self.z, step.z))


class _Missed(NamedTuple):
    """What is left of stationarity ``(n,)``, of the rows that hold with equality (zero in others), ``(m,)``, and of
    ``G d + s = g``."""

    slope: np.ndarray
    rows: np.ndarray
    slacks: np.ndarray


@dataclass(frozen=True)
class _Inequalities:
    """``G d <= g``: some rows of ``C``, then the lower, then the upper bounds that unknowns have.

    Attributes:
        rows, low, high: their numbers. ends: ``g``. shape: ``(n, m)``.
    """

    rows: np.ndarray
    low: np.ndarray
    high: np.ndarray
    ends: np.ndarray
    shape: tuple[int, int]

    @classmethod
    def of(cls, p: SparseProgram) -> _Inequalities:
        """The inequalities of a program; unknowns whose bounds are equal have none."""
        open_ = p.lower < p.upper
        low, high = np.flatnonzero(open_ & np.isfinite(p.lower)), np.flatnonzero(open_ & np.isfinite(p.upper))
        rows = np.flatnonzero(p.one_sided)
        ends = np.concatenate([p.b[rows], -p.lower[low], p.upper[high]])
        return cls(rows, low, high, ends, (p.size, len(p.b)))

    def __len__(self) -> int:
        return len(self.ends)

    def product(self, d: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """``G d``; ``rows``: ``C d``."""
        return np.concatenate([rows[self.rows], -d[self.low], d[self.high]])

    def push(self, z: np.ndarray, sign: float = -1.0) -> np.ndarray:
        """``G'z`` of the bounds alone, ``(n,)``; with ``sign`` 1 that of their moduli."""
        found, k = np.zeros(self.shape[0]), len(self.rows)
        found[self.low] = sign * z[k : k + len(self.low)]
        found[self.high] += z[k + len(self.low) :]
        return found

    def diagonal(self, stiff: np.ndarray) -> np.ndarray:
        """``(L, -E)`` where multipliers are ``stiff`` times as large as slacks, ``(n + m,)``."""
        soft = np.zeros(self.shape[1])
        soft[self.rows] = -1 / stiff[: len(self.rows)]
        return np.concatenate([self.push(stiff, 1.0), soft])

    def active(self, p: SparseProgram, at: _Point, stiff: float) -> Active:
        """The conditions whose multiplier is more than ``stiff`` times as large as their slack, as an active set."""
        k, more = len(self.rows), at.z > stiff * at.s
        bounds, rows = np.where(p.lower == p.upper, 1, 0), ~p.one_sided
        bounds[self.low[more[k : k + len(self.low)]]] = -1
        bounds[self.high[more[k + len(self.low) :]]] = 1
        rows[self.rows[more[:k]]] = True
        return Active(bounds, rows, at.y)


def interior_point(program: SparseProgram, convex: bool = False) -> SparsePoint | None:
    """The solution by active sets from inside; ``None`` where that does not get there.  ``convex``: ``H`` is known to be
    positive semidefinite."""
    for active, near in _approached(program, convex):
        point = active_set(program, active) if near else active_set(program, active, sets=_FEW)
        if near or (point is not None and point.settled and not point.shift):
            return point
    return None


def _approached(p: SparseProgram, convex: bool) -> Iterator[tuple[Active, bool]]:
    """Active sets on the way to the solution by Mehrotra's method, with their multipliers, and is it that at its end?"""
    inequalities, n = _Inequalities.of(p), p.size
    free = np.concatenate([p.lower < p.upper, np.ones(len(p.b), dtype=bool)])
    shift = 0.0 if convex else _convex_shift(p, free)
    if not len(inequalities) or shift is None:
        return
    at = _begun(p, inequalities)
    unit = _largest(p.q) + _largest(at.z)  # of the objective, whatever that is measured in
    curvature = float(np.abs(p.K.diagonal()[:n]).mean())
    near, last, tried = 0, None, False
    for _ in range(_STEPS):
        product = p.K @ np.concatenate([at.d, at.y])
        value = (p.K @ np.concatenate([at.d, 0 * at.y]))[n:]
        missed = _Missed(
            np.where(free[:n], p.q + product[:n] + shift * at.d + inequalities.push(at.z), 0.0),
            np.where(p.one_sided, 0.0, value - p.b),
            inequalities.product(at.d, value) + at.s - inequalities.ends,
        )
        size, far = unit + _largest(product[:n]), 1 + _largest(at.d)
        left = max(
            _largest(missed.slope) / size,
            _largest(missed.rows) / (1 + _largest(p.b)),
            _largest(missed.slacks) / (far + _largest(p.b)),
            float(at.s @ at.z) / (size * far),
        )
        active = inequalities.active(p, at, curvature or unit / far)
        if left <= _CLOSE:
            yield active, True
            return
        if left <= _NEAR and last is not None:
            changes = active.changes(last)
            hardly = changes <= max(_HARDLY[0], _HARDLY[1] * len(inequalities))
            if hardly and (changes or not tried):
                yield active, False
            tried = hardly
        last, step = active, None
        while step is None and near < len(_NEARNESS):
            step = _mehrotra(p, inequalities, at, missed, free, shift, _NEARNESS[near])
            near += step is None
        if step is None:
            return
        at = at.moved(step, min(1.0, _SHARE * at.reach(step)) if at.reach(step) < 1 else 1.0)


def _mehrotra(
    p: SparseProgram,
    inequalities: _Inequalities,
    at: _Point,
    missed: _Missed,
    free: np.ndarray,
    shift: float,
    near: float,
) -> _Point | None:
    """Predictor and corrector.

    ``near``: what the square of a change costs, in the units of the scaled ``K``: the proximal method (Friedlander & Orban
    2012), whose systems have factors where rows depend on each other or ``H`` has none of some unknowns, and whose solution
    is the same."""
    n, k, (_, _, s, z) = p.size, len(inequalities.rows), at
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        stiff = z / s
        diagonal = inequalities.diagonal(stiff)
    if not np.isfinite(diagonal).all():  # a slack that is zero to the last bit
        return None
    if near:
        diagonal += np.where(np.arange(len(diagonal)) < n, near, -near) / p.scale**2
    saddle = p.system(free, shift, diagonal)
    if saddle.lu is None:
        return None

    def solve(c: np.ndarray) -> _Point | None:
        """Where the products of slack and multiplier are to become ``c``."""
        rows = -missed.rows
        with np.errstate(all="ignore"):  # farther than there are numbers
            known = c / s - z + stiff * missed.slacks  # dz = known + stiff G dd
            rows[inequalities.rows] = -(known / stiff)[:k]
        x, left = saddle.solve(
            np.where(free, np.concatenate([-missed.slope - inequalities.push(known), rows]), 0.0), _REFINED
        )
        if left > _WRONG:
            return None
        dd, dy = x[:n], x[n:]
        dz = known + stiff * inequalities.product(dd, 0 * dy)
        dz[:k] = dy[inequalities.rows]
        with np.errstate(all="ignore"):
            step = _Point(dd, dy, (c - s * dz) / z - s, dz)
        return step if all(np.isfinite(part).all() for part in step) else None

    affine = solve(0 * s)
    if affine is None:
        return None
    mu, after = s @ z / len(s), at.moved(affine, at.reach(affine))
    aim = mu * max(0.0, min(1.0, float(after.s @ after.z) / len(s) / max(mu, 1e-300))) ** 3
    return solve(aim - affine.s * affine.z)


def _convex_shift(p: SparseProgram, free: np.ndarray) -> float | None:
    """What makes ``H`` positive definite on the null space of the equalities; nothing where it is a diagonal without a
    negative entry."""
    n, m = p.size, len(p.b)
    if isinstance(p.matrix, ArrowheadMatrix) and bool((p.matrix.d >= 0).all()):
        return 0.0
    shift, size = 0.0, float(np.abs(p.K.diagonal()[:n]).max(initial=0.0)) or 1.0
    free = free & np.concatenate([np.ones(n, dtype=bool), ~p.one_sided])
    for _ in range(_SHIFTS):
        if p.system(free, shift).negative == m:
            return shift
        shift = max(8 * shift, 1e-5 * size)
    return None


def _begun(p: SparseProgram, inequalities: _Inequalities) -> _Point:
    """A start: inside the bounds, near zero, multipliers as large as the slope there, or as curvature where that is zero."""
    n, k, none = p.size, len(inequalities.rows), 0 * p.b
    d, force = _inside(p), _largest(p.q) or _largest(p.K.diagonal()[:n]) or 1.0
    s = inequalities.ends - inequalities.product(d, (p.K @ np.concatenate([d, none]))[n:])
    s[:k] = np.maximum(s[:k], _ROOM * (1 + np.abs(inequalities.ends[:k])))
    return _Point(d, np.where(p.one_sided, force, 0.0), s, np.full(len(s), force))


def _inside(p: SparseProgram) -> np.ndarray:
    """The point nearest to 0 that keeps a distance from the bounds."""
    width = np.where(np.isfinite(p.upper - p.lower), p.upper - p.lower, np.inf)
    room = np.minimum(1e-1 * width, 1e-2 * (1 + np.minimum(np.abs(p.lower), np.abs(p.upper))))
    d = np.clip(
        0.0, p.lower + np.where(np.isfinite(p.lower), room, 0), p.upper - np.where(np.isfinite(p.upper), room, 0)
    )
    return np.where(p.lower == p.upper, p.upper, d)


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x).max(initial=0.0))


def _reach(x: np.ndarray, dx: np.ndarray) -> float:
    """How far ``x + t dx`` stays positive."""
    down = dx < 0
    with np.errstate(over="ignore"):  # farther than there are numbers
        return float((-x[down] / dx[down]).min(initial=np.inf))
