r"""Is a stationary point a minimum, does a minimisation still get on, and is there a minimum at all?

A vanishing gradient is all that a minimiser sees of a solution, and a maximum or a saddle point has one too.  A few
Lanczos steps on the Hessian (its products are differences of gradients) look for a direction in which the objective falls.
Every Ritz value is a Rayleigh quotient, hence a negative one is proof of negative curvature, and a lower point beside
``z`` is proof that ``z`` is no minimum.

Lanczos: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), algorithm 10.1.1, with full reorthogonalisation.

Where a fit has few unknowns, or has left factors of something positive definite near its Hessian ``H``, ``N = R'R``, the
eigenvalues of ``N^{-1} H`` say the same (Sylvester), and say it sooner: all but few of them are one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.normal_equations import factors_of_fit
from implicitkit.solver.verdict.inflection import inflected
from implicitkit.solver.verdict.kinks import jumps_at
from implicitkit.solver.verdict.scales import in_working_precision

_PRODUCTS = 12  # Lanczos steps where the solver may have climbed, or not moved
_FEW = 3  # ... where it has come down to the point
_LONGER, _UNLIKE = 16.0, 0.1  # times as far a difference of gradients is like another but for this
_FINE = 1e-6  # where differences of gradients tell jumps: not in half precision
_JUMPS = 1e-6  # of the gradient at the start: a change of it over half the digits that may be a jump
LENGTHS = (1.0, -1.0, 1e-1, -1e-1, 1e-2, -1e-2, 1e-3, -1e-3)  # of the step off a saddle, relative to max(|z|, 1)
SHORT = (
    1e-4,
    -1e-4,
    1e-5,
    -1e-5,
    1e-6,
    -1e-6,
    1e-7,
    -1e-7,
    1e-8,
    -1e-8,
)  # ... where a wall is near: with a share of the fall ...
SHOWN = 0.1  # ... that the curvature promises
POWERS = (2, 4, 6, 8, 10, 12)  # of ten: how far a ray is followed, likewise
_EVERY = 50  # steps between two looks at the progress
_PATIENCE = 3  # looks in a row without any, before a sample is given up
_STEEP = 0.9  # where the gradient has not come down to this, the objective may fall forever
_LOWER = 0.999  # it gets on if it has come down to this ...
_FALLEN = 1e-2  # ... or the objective by this share of what it has fallen since the first look ...
_STEADY = 0.25  # ... or by this share of what it has fallen between two looks on the average: it goes along a valley
_AS_MUCH = 0.8  # ... or by this share of what it fell between the two looks before: so does one on a bend of the valley
_LIKE = 0.5  # of one, how far eigenvalues of N^-1 H may be from it for H to be taken for positive definite
_SHARE = 1e-2  # of what a slope promises: so much an objective falls that falls forever
_FURTHER, _RUNS = 10.0, 2  # times as far out as a look before, so often in a row
_FORMED = 32  # unknowns of a fit, whose R'R costs less than what it saves
_UNITS = 4  # in the last place, by which z moves at least in a difference
ROUNDING = 100  # units of it that a difference of objectives must exceed


def downhill(
    f: Evaluations, z: Tensor, which: Tensor, descended: Tensor, steep: Tensor | None, kinked: Tensor
) -> Tensor:
    """Lower points beside the stationary points ``which`` that are no minima; ``z`` itself elsewhere, ``(batch, n)``.

    Args:
        f: the problem's. z: ``(batch, n)``. which: ``(batch,)``, the samples in question. descended: those of them to which
            the objective has fallen step by step; these are looked at less closely. steep: ``|g|`` at the start; ``None``:
            nobody asks for kinks. kinked: is set where the gradient jumps in ``z`` instead of vanishing, ``(batch,)``.
    """
    probe = f.beside("minimise")
    eps = f.eps
    steps = min(z.shape[1], products(which, descended))
    at = f if f.of_gradient else probe  # which remembers what it has found there
    g, h = at(z), difference_step(z, eps**0.5)
    moved = h
    tried: list[tuple[Tensor, Tensor]] = []

    def product(q: Tensor) -> Tensor:
        tried.append((q, beside(probe, z, g, moved, q)))
        return tried[-1][1]

    if f.curved is not None and len(f.curved.L) == len(z):
        which = which & ~(f.curved.hold(product, z) & descended)
        if not bool(which.any()):
            return z
    known = f.system.factored
    if known is None and f.kind.of_residuals and z.shape[1] <= _FORMED:
        known = factors_of_fit(f, z, g)
    if getattr(known, "positive", False) and len(known.units) == len(z):
        which = which & ~_is_like(product, known, z, steps)
        if not bool(which.any()):
            return z
    lowest, direction, largest = lanczos(product, z, steps)
    suspect = which & (lowest < -(eps**0.5) * largest)
    if bool(suspect.any()):
        h = difference_step(z, eps ** (1 / 3))
        there, back = (_tried(probe, z + s * direction, z, z) for s in (h, -h))
        there, back = (torch.where(torch.isfinite(t), t, g) for t in (there, back))
        curvature = ((there - back) * direction).sum(1) / (2 * h.squeeze(1))
        least = -30 * eps ** (2 / 3) * largest
        walled = suspect & ~(curvature < least)
        if bool(walled.any()):  # nearer than that
            curvature = torch.where(walled, torch.minimum(curvature, _curvature(probe, z, direction)), curvature)
        suspect = suspect & (curvature < least)
        lowest = torch.where(suspect, torch.maximum(lowest, curvature), lowest)
    best = _lower(probe, z, at.value(z), suspect, direction, lowest) if bool(suspect.any()) else z
    if steep is not None and eps < _FINE:
        doubtful = which & (best == z).all(1) & (~descended | (largest * moved.squeeze(1) >= _JUMPS * steep))
        if bool(doubtful.any()):
            doubtful = doubtful & _is_odd(probe, z, g, moved, *tried[0], doubtful & ~descended)
        if bool(doubtful.any()):
            jumps, q = jumps_at(probe, z, g, doubtful, steep)
            if bool(jumps.any()):  # it may fall from an edge
                best = torch.where(jumps.unsqueeze(1), _lower(probe, z, at.value(z), jumps, q), best)
            kinked |= jumps & (best == z).all(1)
    open_ = which & ~kinked & (best == z).all(1)
    if bool(open_.any()):
        h = difference_step(z, eps**0.5)
        objective = lambda y: at.value(y) if y is z else _tried(probe.value, y, z, y[:, 0])  # noqa: E731
        gradient = lambda y: _tried(probe, y, z, y)  # noqa: E731
        flat, along = inflected(objective, gradient, z, g, open_, (lowest, direction, largest), steps, h)
        if bool(flat.any()):
            best = torch.where(flat.unsqueeze(1), _lower(probe, z, at.value(z), flat, along), best)
    return best


def _is_odd(probe: Evaluations, z: Tensor, g: Tensor, h: Tensor, q: Tensor, Hq: Tensor, both: Tensor) -> Tensor:
    """Where a difference of gradients divided by its length, ``Hq``, is another over a longer way, or of ``both`` sides to
    the other side, ``(batch,)``; one evaluation or two."""
    norm = lambda t: torch.linalg.vector_norm(t, dim=1)  # noqa: E731
    size = norm(Hq)
    odd = norm(beside(probe, z, g, _LONGER * h, q) - Hq) > _UNLIKE * size
    if bool(both.any()):
        odd = odd | (both & (norm(beside(probe, z, g, -h, q) - Hq) > _UNLIKE * size))
    return odd


def _curvature(probe: Evaluations, z: Tensor, direction: Tensor) -> Tensor:
    """``d' H d``, ``(batch,)``, from derivatives; infinite where there are none."""
    try:
        return (probe.linearize(z).mv(direction) * direction).sum(1)
    except Exception:  # the gradient is not to be differentiated
        return torch.full_like(z[:, 0], torch.inf)


def _lower(
    probe: Evaluations, z: Tensor, value: Tensor, which: Tensor, direction: Tensor, curvature: Tensor | None = None
) -> Tensor:
    """The lowest of points along a line through ``z``, of the samples ``which``; ``z`` where none is lower.  Nearer ones,
    where a wall hides what the ``curvature`` promises further out, count if they are as much lower as that says."""
    best, least = z, value - ROUNDING * probe.eps * value.abs()
    length = z.abs().amax(1).clamp_min(1)
    for t in LENGTHS:
        trial = z + (t * length).unsqueeze(1) * direction
        new = _tried(probe.value, trial, z, value)
        lower = which & torch.isfinite(new) & (new < least)
        best = torch.where(lower.unsqueeze(1), trial, best)
        least = torch.where(lower, new, least)
    walled = which & (best == z).all(1)
    for t in SHORT if curvature is not None and bool(walled.any()) else ():
        trial = z + (t * length).unsqueeze(1) * direction
        fall = value - _tried(probe.value, trial, z, value)
        lower = walled & (fall >= promised(t * length, curvature)) & (value - fall < least)
        best, least = torch.where(lower.unsqueeze(1), trial, best), torch.where(lower, value - fall, least)
    return best


def promised(t: Tensor, curvature: Any) -> Tensor:
    """What an objective falls by at least on a short way ``t`` from a saddle with a negative ``curvature``, ``(batch,)``."""
    return SHOWN * 0.5 * t * t * (-curvature).clamp_min(0)


def beside(gradient: Callable[[Tensor], Tensor], z: Tensor, g: Tensor, h: Tensor, q: Tensor) -> Tensor:
    """``H q``, by the difference to one side, or where the function refuses that side to the other."""
    there = _tried(gradient, z + h * q, z, z)
    lost = ~torch.isfinite(there).all(1, keepdim=True)
    if bool(lost.any()):
        back = _tried(gradient, torch.where(lost, z - h * q, z), z, z)
        there = torch.where(lost, 2 * g - back, there)
    return (there - g) / h


def _tried(function: Callable[[Tensor], Tensor], moved: Tensor, z: Tensor, like: Tensor) -> Tensor:
    """The function beside ``z``; where it raises, sample by sample, and NaN of those that are outside its domain."""
    try:
        return function(moved)
    except Exception:
        out, mine = torch.full_like(like, torch.nan), torch.eye(len(z), dtype=torch.bool, device=z.device)
    for i in range(len(z)) if len(z) > 1 else ():
        with suppress(Exception):
            out[i] = function(torch.where(mine[i].unsqueeze(1), moved, z))[i]
    return out


def falls_forever(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    """Where the objective falls along a ray from ``z`` as far as it is followed, at least a hundredth as fast as the slope
    at ``z`` says, ``(batch,)``: along steepest descent, or, which waves do not turn aside, away from the origin."""
    probe = f.beside("minimise")
    g, value = probe(z), probe.value(z)
    slope = torch.linalg.vector_norm(g, dim=1)
    which = which & torch.isfinite(value) & torch.isfinite(slope) & (slope > 0)
    falls = _falls_along(probe, z, -g, which, value, slope)
    return falls | _falls_along(probe, z, z, which & ~falls & (z != 0).any(1), value, slope)


def _falls_along(f: Evaluations, z: Tensor, way: Tensor, which: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """Where the objective falls from its ``value`` at ``z`` along a ``way``, a hundredth as fast as ``slope`` or more."""
    length = torch.linalg.vector_norm(way, dim=1, keepdim=True)
    ray = way / length.clamp_min(torch.finfo(z.dtype).tiny)
    falls, size, last = which, z.abs().amax(1).clamp_min(1), value
    for power in POWERS:
        if not bool(falls.any()):
            break
        t = size * 10.0**power
        new = f.value(z + t.unsqueeze(1) * ray)
        falls = falls & ((new < last) | (new == -torch.inf)) & (value - new >= _SHARE * t * slope)
        last = new
    return falls


@dataclass
class Progress:
    """Looks every fifty steps whether a minimisation still gets on, ``(batch,)`` each.

    Attributes:
        first: the objective at the first look. value, norm: the least objective and gradient at the last one.
        fall: of the objective between the last two. slope: the gradient at the first look. looks: how many so far.
        far: ``max |z|``, 1 or more, at the last one. idle: looks in a row at which neither had come down.
        runs: looks in a row at which it had run on downhill.
        unbounded: samples whose gradient has not, and whose objective falls forever.
        endless: searches along a line without an end.
    """

    first: Tensor | None = None
    value: Tensor | None = None
    norm: Tensor | None = None
    fall: Tensor | None = None
    slope: Tensor | None = None
    far: Tensor | None = None
    idle: Tensor | None = None
    runs: Tensor | None = None
    unbounded: Tensor | None = None
    endless: Tensor | None = None
    looks: int = 0

    @staticmethod
    def due(f: Evaluations, step: int) -> bool:
        """Is there something to look at?"""
        return step % _EVERY == 0 and step > 0 and f.of_gradient and f.kind.minimisation

    def spent(self, f: Evaluations, z: Tensor) -> Tensor:
        """Samples to be given up; which of them are ``unbounded`` is kept."""
        value, norm = f.value(z), f.best_norm
        if self.first is None or self.value is None or self.norm is None or self.idle is None:
            self.first, self.value, self.norm, self.slope = value, value, norm, norm
            self.far = z.abs().amax(1).clamp_min(1)
            self.idle = self.runs = torch.zeros_like(norm, dtype=torch.int64)
            return self.idle > 0
        steep = f.active & ~(norm < _STEEP * self.norm)
        idle = f.active & ~(norm < _LOWER * self.norm)
        rounding = ROUNDING * f.eps * self.value.abs()
        self.looks += 1
        least = min(_FALLEN, _STEADY / self.looks) * (self.first - self.value)
        if self.fall is not None:
            least = torch.where(self.fall > 0, least.minimum(_AS_MUCH * self.fall), least)
        fallen = torch.maximum(rounding, least)
        self.unbounded = steep & self._runs_on(z, value)
        if bool((steep & ~self.unbounded).any()):
            self.unbounded = self.unbounded | falls_forever(f, z, steep & ~self.unbounded)
        self.idle, self.fall = torch.where(idle & ~(value < self.value - fallen), self.idle + 1, 0), self.value - value
        self.value, self.norm = torch.minimum(value, self.value), norm
        return self.unbounded | (self.idle >= _PATIENCE)

    def _runs_on(self, z: Tensor, value: Tensor) -> Tensor:
        """Where look after look has found ``z`` ten times as far out, and the objective lower by a hundredth of what its
        first slope promised over that way, ``(batch,)``: it falls forever, though no ray shows it that leads down on a
        wave (``z + sin(z)``) or beside the bottom of a valley."""
        assert self.far is not None and self.slope is not None and self.value is not None and self.runs is not None
        far = z.abs().amax(1).clamp_min(1)
        fallen = self.value - value >= _SHARE * self.slope * (far - self.far)
        self.runs = torch.where((far >= _FURTHER * self.far) & fallen, self.runs + 1, 0)
        self.far = far
        return self.runs >= _RUNS

    def fallen(self, f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
        """Samples to be given up among those for which a search along a line found no end: as ``unbounded``, or because it
        is not the first time (``-log(z)`` falls forever, ever more slowly)."""
        self.unbounded = falls_forever(f, z, which)
        self.endless = which.long() if self.endless is None else self.endless + which
        return self.unbounded | (self.endless >= _PATIENCE)

    def select(self, samples: Tensor) -> None:
        """Only these samples are left."""
        for name in ("first", "value", "norm", "fall", "slope", "far", "idle", "runs", "unbounded", "endless"):
            kept = getattr(self, name)
            setattr(self, name, kept if kept is None else kept.index_select(0, samples))


def products(which: Tensor, descended: Tensor) -> int:
    """How many products with a Hessian a look at the samples ``which`` may take."""
    return _PRODUCTS if bool((which & ~descended).any()) else _FEW


def difference_step(z: Tensor, relative: float) -> Tensor:
    """A step for differences, ``(batch, 1)``: relative to ``max |z|`` up to 1, and then of a few units in the last place:
    far out, a step of half the digits is longer than a period."""
    size = z.abs().amax(1, keepdim=True)
    step = relative * torch.where(size > 0, size, 1).clamp_max(1)
    return torch.maximum(step, _UNITS * torch.finfo(z.dtype).eps * size)


def random_unit(z: Tensor) -> Tensor:
    """One vector of length one for all samples, ``(batch, n)``, always the same."""
    q = seeded.normal(z.shape[1], seed=0).to(z).expand_as(z)
    return q / torch.linalg.vector_norm(q, dim=1, keepdim=True)


def _is_like(product: Callable[[Tensor], Tensor], N: Any, z: Tensor, steps: int) -> Tensor:
    """Where a Hessian ``H`` is like the positive definite ``N`` of which there are factors, ``(batch,)``: no Ritz value of
    ``N^{-1} H`` is far from one.

    So it is no saddle point's.  Nor is it an inflection's: along what the residuals hardly change with, ``R'R`` is of second
    order and ``H`` of first.

    Args:
        product: ``H q`` for unit vectors, ``(batch, n)``. N: with ``solve``, and ``units``, those of a gradient.
    """
    T = in_working_precision(z).new_zeros(len(z), steps, steps)
    basis: list[tuple[Tensor, Tensor]] = []  # orthonormal by N, and N times that
    w, alive = seeded.normal(z.shape[1], seed=0).to(z) * N.units.to(z), torch.ones_like(z[:, :1], dtype=torch.bool)
    for k in range(steps):
        v = N.solve(w)
        square = (v * w).sum(1, keepdim=True)
        if k:
            alive = alive & ~(square.abs() <= torch.finfo(z.dtype).eps)
            T[:, k, k - 1] = T[:, k - 1, k] = torch.where(alive, square.sqrt(), 0).squeeze(1)  # NaN if negative
        q, Nq = (torch.where(alive, t / square.sqrt(), 0) for t in (v, w))
        T[:, k, k] = (~alive).squeeze(1)  # as if one
        if not bool(alive.any()):
            continue
        basis.append((q, Nq))
        length = torch.linalg.vector_norm(q, dim=1, keepdim=True)
        w = length * product(torch.where(length > 0, q / length, 0))
        T[:, k, k] += (w * q).sum(1)
        for _ in range(2 if k + 1 < steps else 0):
            shares = [(w * q).sum(1, keepdim=True) for q, _ in basis]
            for share, (_, Nq) in zip(shares, basis, strict=True):
                w = w - share * Nq
    finite = torch.isfinite(T).flatten(1).all(1)
    values = torch.linalg.eigvalsh(torch.where(finite[:, None, None], T, 0))
    return finite & ((values - 1).abs() <= _LIKE).all(1)


def lanczos(
    product: Callable[[Tensor], Tensor], z: Tensor, steps: int, start: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The least Ritz value of each of a batch of symmetric matrices ``(batch,)``, its vector ``(batch, n)``, and the
    largest in size ``(batch,)``; ``product`` is that with unit vectors, ``(batch, n)`` like ``z``.

    ``start``: a unit vector of each sample, ``(batch, n)``, else a random one.  No step leaves the range of the matrix where
    that is in it, so that a zero of its null space is no Ritz value.
    """
    tiny = torch.finfo(z.dtype).tiny
    q = random_unit(z) if start is None else start
    basis: list[Tensor] = []
    diagonal: list[Tensor] = []  # (batch, 1) each, like those beside it
    beside: list[Tensor] = []
    size = torch.zeros_like(z[:, :1])
    for k in range(steps):
        basis.append(q)
        w = torch.nan_to_num(product(q), posinf=0.0, neginf=0.0)
        diagonal.append((w * q).sum(1, keepdim=True))
        size = torch.maximum(size, diagonal[-1].abs())
        if k + 1 == steps:
            break
        Q, column = torch.stack(basis, 1), w.unsqueeze(2)
        for _ in range(2):
            column = torch.baddbmm(column, Q.mT, torch.bmm(Q, column), alpha=-1)
        w = column.squeeze(2)
        norm = torch.linalg.vector_norm(w, dim=1, keepdim=True)
        alive = norm > torch.finfo(z.dtype).eps ** 0.5 * size
        q = torch.where(alive, w / norm.clamp_min(tiny), 0)
        beside.append(torch.where(alive, norm, 0))
        size = torch.maximum(size, beside[-1])
    Q = torch.stack(basis, 1)
    centre = torch.where((Q == 0).all(2), size, torch.cat(diagonal, 1))  # fewer eigenvalues than steps: no other value
    T = torch.diag_embed(in_working_precision(centre))
    if beside:
        off = torch.diag_embed(in_working_precision(torch.cat(beside, 1)), 1)
        T = T + off + off.mT
    values, vectors = torch.linalg.eigh(torch.nan_to_num(T, posinf=0.0, neginf=0.0))
    vector = torch.bmm(vectors[:, :, :1].mT, Q.to(vectors)).squeeze(1)
    length = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    return values[:, 0], (vector / length.clamp_min(tiny)).to(z), values.abs().amax(1)
