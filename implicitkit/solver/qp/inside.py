r"""The active set of a sparse quadratic program from inside: Mehrotra's method (1992, SIAM J. Optim. 2(4)).

Every step solves one system ``[[H + L, C'], [C, -E]]``, ``L`` and ``E`` the ratios of multiplier and slack of bounds and
rows, with sparse factors, for a predictor and a corrector.  Where these cannot be had to some digits (rows that depend on
each other, unknowns without curvature) steps are those of the proximal method from there on (Friedlander & Orban 2012).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from implicitkit.solver.qp.sparse import Active, SparseProgram

__all__ = ["interior_point"]

_SHIFTS = 16  # by factors of eight
_STEPS = 80  # of the interior-point method
_NEARNESS = (0.0, 1e-8, 1e-6)  # of its steps, where systems cannot be solved without
_CLOSE = 1e-9  # relative residual at which it ends


class _Inside(NamedTuple):
    """Slacks and multipliers that must stay positive: rows, lower bounds, upper bounds (where there are such)."""

    s: np.ndarray
    y: np.ndarray
    below: np.ndarray
    low: np.ndarray
    above: np.ndarray
    high: np.ndarray


def interior_point(program: SparseProgram) -> Active | None:
    """The active set at the solution and its multipliers, by Mehrotra's method; ``None`` where it does not get there."""
    p, n = program, program.size
    sided, has_low, has_high = p.one_sided, np.isfinite(p.lower), np.isfinite(p.upper)
    pinned = p.lower == p.upper
    free = np.concatenate([~pinned, np.ones(len(p.b), dtype=bool)])
    has_low, has_high = has_low & ~pinned, has_high & ~pinned
    count = int(sided.sum() + has_low.sum() + has_high.sum())
    if not count:
        return None
    shift = _convex_shift(p, free)
    if shift is None:
        return None
    d = _inside(p)
    y = np.where(sided, 1.0, 0.0) * max(1.0, np.abs(p.q).max(initial=0.0))
    force = np.full(n, max(1.0, np.abs(p.q).max(initial=0.0)))
    s = np.maximum(p.b - (p.K @ np.concatenate([d, 0 * y]))[n:], 1e-1 * (1 + np.abs(p.b)))
    low, high = np.where(has_low, force, 0.0), np.where(has_high, force, 0.0)
    near = _NEARNESS[0]
    for _ in range(_STEPS):
        below, above = np.where(has_low, d - p.lower, 1.0), np.where(has_high, p.upper - d, 1.0)
        product = p.K @ np.concatenate([d, y])
        r_d = np.where(pinned, 0.0, p.q + product[:n] + shift * d - low + high)
        r_p = (p.K @ np.concatenate([d, 0 * y]))[n:] + np.where(sided, s, 0.0) - p.b
        at = _Inside(s, y, below, low, above, high)
        gap = float((s * y)[sided].sum() + (below * low).sum() + (above * high).sum())
        size = 1 + np.abs(p.q).max(initial=0.0) + np.abs(product[:n]).max(initial=0.0)
        if (
            np.abs(r_d).max(initial=0.0) <= _CLOSE * size
            and np.abs(r_p).max(initial=0.0) <= _CLOSE * (1 + np.abs(p.b).max(initial=0.0))
            and gap <= _CLOSE * size * (1 + np.abs(d).max(initial=0.0))
        ):
            bounds = np.where(pinned | (has_high & (high > above)), 1, np.where(has_low & (low > below), -1, 0))
            return Active(bounds, ~sided | (y > s), y)
        step = None
        for nearness in _NEARNESS[_NEARNESS.index(near) :]:
            step = _mehrotra(p, at, r_d, r_p, gap / count, free, shift, nearness)
            if step is not None:
                near = nearness
                break
        if step is None:
            return None
        dd, dy, ds, dlow, dhigh = step
        t = min(_reach(s[sided], ds[sided]), _reach(y[sided], dy[sided]), _reach(below[has_low], dd[has_low]),
                _reach(above[has_high], -dd[has_high]), _reach(low[has_low], dlow[has_low]),
                _reach(high[has_high], dhigh[has_high]))  # fmt: skip
        t = min(1.0, 0.995 * t)
        d, y, s, low, high = d + t * dd, y + t * dy, s + t * ds, low + t * dlow, high + t * dhigh
    return None


def _mehrotra(
    p: SparseProgram,
    at: _Inside,
    r_d: np.ndarray,
    r_p: np.ndarray,
    mu: float,
    free: np.ndarray,
    shift: float,
    near: float,
) -> tuple[np.ndarray, ...] | None:
    """Predictor and corrector: changes of ``d``, ``y``, ``s`` and of the multipliers of the bounds.

    ``near``: what the square of a change costs, in the units of the scaled ``K``: the proximal method (Friedlander & Orban
    2012), whose systems have factors where rows depend on each other or ``H`` has none of some unknowns, and whose solution
    is the same."""
    n, sided = p.size, p.one_sided
    s, y, below, low, above, high = at
    with np.errstate(divide="ignore", invalid="ignore"):
        diagonal = np.concatenate([low / below + high / above, -np.where(sided, s / y, 0.0)])
    if not np.isfinite(diagonal).all():  # a slack that is zero to the last bit
        return None
    E = -diagonal[n:]
    if near:
        diagonal += np.where(np.arange(len(diagonal)) < n, near, -near) / p.scale**2
    saddle = p.system(free, shift, diagonal)
    if saddle.lu is None:
        return None

    def solve(c_s: np.ndarray, c_low: np.ndarray, c_high: np.ndarray) -> tuple[np.ndarray, ...] | None:
        """Where the products of slack and multiplier are to become ``c``."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = np.where(sided, c_s / y - s, 0.0)
        top = -r_d + c_low / below - low - c_high / above + high
        x, left = saddle.solve(np.where(free, np.concatenate([top, -r_p - rows]), 0.0))
        if left > 1e-4:
            return None
        dd, dy = x[:n], x[n:]
        ds = rows - E * dy
        return dd, dy, ds, c_low / below - low - low / below * dd, c_high / above - high + high / above * dd

    affine = solve(0 * s, 0 * low, 0 * high)
    if affine is None:
        return None
    dd, dy, ds, dlow, dhigh = affine
    has_low, has_high = low > 0, high > 0
    t = min(1.0, _reach(s[sided], ds[sided]), _reach(y[sided], dy[sided]), _reach(below[has_low], dd[has_low]),
            _reach(above[has_high], -dd[has_high]), _reach(low[has_low], dlow[has_low]),
            _reach(high[has_high], dhigh[has_high]))  # fmt: skip
    count = int(sided.sum() + has_low.sum() + has_high.sum())
    after = float(((s + t * ds) * (y + t * dy))[sided].sum() + ((below + t * dd) * (low + t * dlow))[has_low].sum()
                  + ((above - t * dd) * (high + t * dhigh))[has_high].sum()) / count  # fmt: skip
    aim = mu * max(0.0, min(1.0, after / max(mu, 1e-300))) ** 3
    c_low, c_high = np.where(has_low, aim - dd * dlow, 0.0), np.where(has_high, aim + dd * dhigh, 0.0)
    return solve(np.where(sided, aim - ds * dy, 0.0), c_low, c_high)


def _convex_shift(p: SparseProgram, free: np.ndarray) -> float | None:
    """What makes ``H`` positive definite on the null space of the equalities."""
    n, m = p.size, len(p.b)
    shift, size = 0.0, float(np.abs(p.K.diagonal()[:n]).max(initial=0.0)) or 1.0
    free = free & np.concatenate([np.ones(n, dtype=bool), ~p.one_sided])
    for _ in range(_SHIFTS):
        if p.system(free, shift).negative == m:
            return shift
        shift = max(8 * shift, 1e-5 * size)
    return None


def _inside(p: SparseProgram) -> np.ndarray:
    """The point nearest to 0 that keeps a distance from the bounds."""
    width = np.where(np.isfinite(p.upper - p.lower), p.upper - p.lower, np.inf)
    room = np.minimum(1e-1 * width, 1e-2 * (1 + np.minimum(np.abs(p.lower), np.abs(p.upper))))
    d = np.clip(
        0.0, p.lower + np.where(np.isfinite(p.lower), room, 0), p.upper - np.where(np.isfinite(p.upper), room, 0)
    )
    return np.where(p.lower == p.upper, p.upper, d)


def _reach(x: np.ndarray, dx: np.ndarray) -> float:
    """How far ``x + t dx`` stays positive."""
    down = dx < 0
    with np.errstate(over="ignore"):  # farther than there are numbers
        return float((-x[down] / dx[down]).min(initial=np.inf))
