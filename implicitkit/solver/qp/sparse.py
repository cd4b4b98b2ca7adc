r"""One quadratic program with sparse matrices, by the set of its active conditions.

    minimise  d'Hd/2 + q'd   subject to   C_i d = b_i  or  C_i d <= b_i,   lower <= d <= upper

With the active set known, the solution is that of one linear system: the active bounds fix their unknowns, the active rows
hold with equality.  From a guess, the set is taken anew from the signs of the multipliers and from what is violated, until
it repeats: the primal-dual active set method (Hintermüller, Ito & Kunisch 2003, SIAM J. Optim. 13(3)), which is Newton's
method for the optimality conditions and from a good guess takes one to three systems.  Where it does not settle, an interior
point (:mod:`implicitkit.solver.qp.sparse_interior_point`) gives another guess.

``H`` need not be definite: where it is not, on the null space of the active rows, ``shift`` is added to its diagonal until
the inertia is right (Wächter & Biegler 2006, Math. Prog. 106, section 3.1).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np
import scipy.sparse as sp

from implicitkit.linear.conditions.part_saddle import PartSaddle
from implicitkit.linear.conditions.sparse_saddle import (
    ENOUGH,
    Layout,
    SaddleMatrix,
    SparseSaddle,
    both_sides,
    equilibrated,
)
from implicitkit.linear.factors.arrowhead import ArrowheadMatrix
from implicitkit.sparsity.same_pattern import with_entries

_SETS = 30  # active sets that are tried from one guess
_SLOW = 6  # of them that changed by more than half as many conditions as the one before
_ACCURATE = 1e-7  # residual of a linear system, relative, that is too large to tell signs by
_SHIFTS = 16  # by factors of eight
_CHEAP = (
    1 << 23
)  # multiplications of a system that is solved rather than a function evaluated: half a millisecond or so
_NOISE = 1e-13  # of the largest: a multiplier whose sign means nothing
Factored: TypeAlias = SparseSaddle | PartSaddle
_MOST = 0.5  # of the entries of K that are left: fewer are factored without the others


@dataclass(frozen=True)
class SparseProgram:
    """The data, double precision.

    Attributes:
        K: ``[[H, C'], [C, 0]]``, ``(n + m, n + m)``, symmetric, with its whole diagonal. q: ``(n,)``. b: ``(m,)``.
        one_sided: which rows are ``<=``, ``(m,)`` bool. lower, upper: ``(n,)``, infinite where there is none.
        shared: of ``K``, where other programs have it, too.
    """

    K: sp.csc_matrix
    q: np.ndarray
    b: np.ndarray
    one_sided: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    shared: SaddleMatrix | None = None

    @property
    def size(self) -> int:
        """``n``."""
        return len(self.q)

    def without_curvature(self) -> SparseProgram:
        """This program with ``H = 0``."""
        layout = self._forms.layout
        K = with_entries(self.K, np.where(layout.among(self.size), 0.0, self.K.data))
        return replace(self, K=K, shared=SaddleMatrix(K, self.size, layout))

    @property
    def largest_of_hessian(self) -> float:
        """The largest entry of ``|H|``."""
        return float(np.abs(self.K.data[self._forms.layout.among(self.size)]).max(initial=0.0))

    def system(self, free: np.ndarray, shift: float, diagonal: np.ndarray | None = None) -> Factored:
        """``K`` with ``diagonal`` and ``shift`` on that of ``H`` added, in the unknowns and rows that are ``free``; of the
        others nothing is left but 1 (unknowns) and -1 (rows) on the diagonal."""
        at, n = self._forms, self.size
        shared, whole = at.layout, at.scaled
        if isinstance(whole, ArrowheadMatrix) and diagonal is None:
            return PartSaddle(whole, free, shift * at.scale[:n] ** 2, at.scale, shared)
        layout: Layout | None = shared
        there = free.astype(float)
        added = np.zeros(len(free)) if diagonal is None else diagonal.copy()
        added[:n] += shift
        # what is left of K has its scales, unless the diagonal has grown beyond it
        scale = np.where(free, at.scale, 1.0)
        added = np.where(free, added * scale**2, np.where(np.arange(len(free)) < n, 1.0, -1.0))
        matrix: sp.csc_matrix | ArrowheadMatrix
        if isinstance(whole, ArrowheadMatrix):
            matrix = whole.both_sides(there).shifted(added)
        else:
            data = whole.data * there[shared.rows] * there[shared.columns]
            data[shared.diagonal] += added
            if np.count_nonzero(data) >= _MOST * len(data):
                matrix = with_entries(whole, data)
            else:  # an order that is known is worth more than few zeros
                keep = data != 0
                keep[shared.diagonal] = True
                pointer = np.concatenate([[0], np.cumsum(keep)])[whole.indptr]
                matrix, layout = sp.csc_matrix((data[keep], shared.rows[keep], pointer), shape=whole.shape), None
        if diagonal is None:
            return SparseSaddle(matrix, n, scale, layout)
        more = equilibrated(matrix)
        return SparseSaddle(both_sides(matrix, more), n, scale * more, layout)

    @property
    def matrix(self) -> sp.csc_matrix | ArrowheadMatrix:
        """``K`` in the form in which it is multiplied with fastest."""
        return self._forms.matrix

    @property
    def scale(self) -> np.ndarray:
        """By what rows and columns of ``K`` are multiplied to have the size one."""
        return self._forms.scale

    def sizes_of_rows(self, d: np.ndarray) -> np.ndarray:
        """``|C| |d|``, ``(m,)``."""
        moduli = self._forms.moduli
        if isinstance(moduli, ArrowheadMatrix):
            return moduli.C @ np.abs(d)
        found: np.ndarray = moduli @ np.concatenate([np.abs(d), np.zeros(len(self.b))])
        return found[self.size :]

    @functools.cached_property
    def _forms(self) -> SaddleMatrix:
        return SaddleMatrix(self.K, self.size) if self.shared is None else self.shared

    @functools.cached_property
    def fixed(self) -> np.ndarray:
        """Which unknowns have one value, ``(n,)``."""
        return self.lower == self.upper

    @functools.cached_property
    def largest_slope(self) -> float:
        """``max |q|``."""
        return float(np.abs(self.q).max(initial=0.0))

    @functools.cached_property
    def most(self) -> np.ndarray:
        """``b``, and what rounding may add to it."""
        return self.b + _NOISE * (1 + np.abs(self.b))


class Active(NamedTuple):
    """``bounds``: ``(n,)``, -1 where the lower one is active, 1 the upper, 0 neither; ``rows``: ``(m,)`` bool; ``y``:
    ``(m,)``, multipliers near those of the rows, if they are known."""

    bounds: np.ndarray
    rows: np.ndarray
    y: np.ndarray | None = None

    def changes(self, other: Active) -> int:
        """How many conditions are active in one of both only."""
        return int((self.bounds != other.bounds).sum() + (self.rows != other.rows).sum())


class SparsePoint(NamedTuple):
    """``d``, the multipliers ``y`` of the rows, the active set that they say, the shift of ``H`` that was needed, whether it
    is the set that they were found with, and the factors of that."""

    d: np.ndarray
    y: np.ndarray
    active: Active
    shift: float
    settled: bool
    saddle: Factored


def guess(program: SparseProgram, y: np.ndarray) -> Active:
    """From the multipliers so far, at ``d = 0``: conditions whose multiplier outweighs their distance, in units of ``H`` and
    ``C``."""
    n = program.size
    diagonal = program.matrix.diagonal()
    curvature = np.abs(diagonal[:n])
    curvature = np.where(curvature > 0, curvature, curvature.max(initial=0.0) or 1.0)
    slope = program.q + (program.matrix @ np.concatenate([np.zeros(n), y]))[:n]
    step = -slope / curvature
    bounds = np.where(step > program.upper, 1, np.where(step < program.lower, -1, 0))
    rows = ~program.one_sided
    if not rows.all():
        C = program.K[n:, :n]
        each = C.multiply(C) @ (1 / curvature)
        rows = rows | (y * np.where(each > 0, each, 1.0) > program.b)
    return Active(np.where(program.fixed, 1, bounds), rows, y)


def lacks_curvature(program: SparseProgram, active: Active) -> bool:
    """Is the system singular where ``H`` is a diagonal, since more free unknowns have none than there are active rows?"""
    K = program.matrix
    flat = isinstance(K, ArrowheadMatrix) and np.count_nonzero((active.bounds == 0) & (K.d == 0))
    return bool(flat > active.rows.sum())


def is_cheap(program: SparseProgram) -> bool:
    """Does a system cost less than to evaluate a function and its gradient, whatever that is?"""
    K = program.matrix
    return isinstance(K, ArrowheadMatrix) and len(K.d) * len(K.E) ** 2 <= _CHEAP


def active_set(
    program: SparseProgram,
    start: Active,
    shift: float = 0.0,
    sets: int = _SETS,
    convex: bool = False,
    enough: float = ENOUGH,
) -> SparsePoint | None:
    """The solution by active sets from ``start`` on; ``None`` where they do not settle, settle slowly, or a system cannot be
    solved.  Of fewer ``sets`` than that takes, the last point.  ``convex``: ``None`` where ``H`` would have to be
    shifted.  Where ``start`` has multipliers what is solved for is the difference from those, and beside that a short
    ``d`` has digits of its own.  Where active conditions depend on each other (an assignment) multipliers are not unique,
    and those from inside, positive all of them, keep the set that they say.  ``enough``: the backward error to which
    systems are solved."""
    active, before, slow = start, np.inf, 0
    y = np.zeros(len(program.b)) if start.y is None else start.y
    for k in range(sets):
        found = _with_active(program, active, shift, 1 if convex else _SHIFTS, y, enough)
        if found is None:
            return None
        d, y, shift, saddle, product = found
        following = _following(program, active, (d, y), product, shift)
        changes = following.changes(active)
        if not changes or (k + 1 == sets < _SETS):
            return SparsePoint(d, y, following, shift, not changes, saddle)
        slow += changes > 0.5 * before
        if slow > _SLOW:
            return None
        active, before = following, changes
    return None


def _with_active(
    program: SparseProgram, active: Active, shift: float, shifts: int, near: np.ndarray, enough: float
) -> tuple[np.ndarray, np.ndarray, float, Factored, np.ndarray] | None:
    """``d``, ``y``, the shift and the factors with this active set, and ``K (d, y)``; ``shifts``: tried at most. ``near``:
    of ``y``."""
    n, m = program.size, len(program.b)
    free = np.concatenate([active.bounds == 0, active.rows])
    fixed = np.where(active.bounds > 0, program.upper, np.where(active.bounds < 0, program.lower, 0.0))
    known = np.concatenate([fixed, np.where(active.rows, near, 0.0)])
    rhs = np.where(free, np.concatenate([-program.q, program.b]) - program.matrix @ known, 0.0)
    for _ in range(shifts):
        saddle = program.system(free, shift)
        if saddle.negative == m:
            x, left = saddle.solve(rhs, enough)
            x += known  # zero in rows that are not active
            product = program.matrix @ x
            if left > _ACCURATE or not _holds(program, active.rows, x[:n], product[n:]):
                return None
            return x[:n], x[n:], shift, saddle, product
        size = float(np.abs(program.matrix.diagonal()[:n]).max(initial=0.0)) or 1.0
        shift = max(8 * shift, 1e-5 * size)
    return None


def _holds(program: SparseProgram, rows: np.ndarray, d: np.ndarray, value: np.ndarray) -> bool:
    """Does ``C d = b`` hold in these rows?  (Not where the active bounds leave no such ``d``, however large ``y``.)
    ``value``: ``C d``."""
    left, size = np.abs(value - program.b)[rows].max(initial=0.0), np.abs(program.b)
    if left <= _ACCURATE * size.max(initial=0.0):
        return True
    return bool(left <= _ACCURATE * (size + program.sizes_of_rows(d)).max(initial=0.0))


def _following(
    program: SparseProgram, active: Active, at: tuple[np.ndarray, np.ndarray], product: np.ndarray, shift: float
) -> Active:
    """The active set that multipliers and violations say at ``(d, y)``; ``product``: ``K (d, y)``."""
    n, (d, y) = program.size, at
    force = -(program.q + product[:n] + shift * d)  # the multiplier of an active bound, positive at an upper one
    noise = _NOISE * max(program.largest_slope, np.abs(product[:n]).max(initial=0.0))
    room = _NOISE * (1 + np.abs(d))
    upper = np.where(active.bounds > 0, force > -noise, d > program.upper + room) | program.fixed
    lower = np.where(active.bounds < 0, force < noise, d < program.lower - room) & ~upper
    rows = ~program.one_sided
    if not rows.all():
        weak = _NOISE * np.abs(y).max(initial=0.0)
        rows = rows | np.where(active.rows, y > -weak, product[n:] > program.most)
    return Active(upper.astype(int) - lower, rows)


def least_squares_multipliers(program: SparseProgram, rows: np.ndarray) -> np.ndarray:
    """``y`` that minimises ``|q + C'y|`` over the given rows (Nocedal & Wright 2006, eq. 18.22); the others zero."""
    n, m = program.size, len(program.b)
    free = np.concatenate([np.ones(n, dtype=bool), rows])
    ones = np.concatenate([np.ones(n), np.zeros(m)])
    system = program.without_curvature().system(free, 0.0, ones)
    x, left = system.solve(np.where(free, np.concatenate([-program.q, np.zeros(m)]), 0.0))
    return np.where(rows, x[n:], 0.0) if left <= _ACCURATE else np.zeros(m)


def penalised(p: SparseProgram, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """``d`` and ``y`` of the program with ``rho |C d - b|^2 / 2`` in place of the rows that are violated at 0, without the
    other rows, cut off at the bounds; ``rho``: ``weight (1 + |H|) / |C|^2``, by the largest entries."""
    n, m = p.size, len(p.b)
    wrong = ~p.one_sided | (p.b < 0)
    sizes = np.abs(p.matrix.diagonal()[:n]).max(initial=0.0)
    rho = weight * (1 + sizes) / max(float(np.abs(p.K[n:, :n].data).max(initial=0.0)) ** 2, 1e-12)
    free = np.concatenate([p.lower < p.upper, wrong])
    shift = 0.0
    for _ in range(_SHIFTS):
        saddle = p.system(free, shift, np.concatenate([np.zeros(n), np.full(m, -1 / rho)]))
        if saddle.negative == m:
            break
        shift = max(8 * shift, 1e-5 * (sizes or 1.0))
    x, left = saddle.solve(np.where(free, np.concatenate([-p.q, p.b]), 0.0))
    if left > 1e-4:
        return np.clip(-p.q, p.lower, p.upper), np.zeros(m)
    return np.clip(x[:n], p.lower, p.upper), np.where(wrong, x[n:], 0.0)
