r"""Is a stationary point a minimum?  Curvature of the objective, to second order.

A vanishing gradient is all that a minimiser sees of a solution, and a maximum or a saddle point has one too.  A few
Lanczos steps on the Hessian (its products are differences of gradients) look for a direction in which the objective falls.
Every Ritz value is a Rayleigh quotient, hence a negative one is proof of negative curvature, and a lower point beside
``z`` is proof that ``z`` is no minimum.

Lanczos: Golub & Van Loan, *Matrix Computations* (4th ed., 2013), algorithm 10.1.1, with full reorthogonalisation.

Where a fit has few unknowns, or has left factors of something positive definite near its Hessian ``H``, ``N = R'R``, the
eigenvalues of ``N^{-1} H`` say the same (Sylvester), and say it sooner: all but few of them are one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps.normal_equations import factors_of_fit
from implicitkit.solver.verdict.differences import in_working_precision
from implicitkit.solver.verdict.inflection import inflected
from implicitkit.solver.verdict.kinks import jumps_at
from implicitkit.solver.verdict.rounding_level import ROUNDING

_PRODUCTS = 12  # Lanczos steps where the solver may have climbed, or not moved
_FEW = 3  # ... where it has come down to the point
_LONGER, _UNLIKE = 16.0, 0.1  # times as far a difference of gradients is like another but for this
_FINE = 1e-6  # where differences of gradients tell jumps: not in half precision
_JUMPS = 1e-6  # of the gradient at the start: a change of it over half the digits that may be a jump
LENGTHS = (1.0, -1.0, 1e-1, -1e-1, 1e-2, -1e-2, 1e-3, -1e-3)  # of the step off a saddle, relative to max(|z|, 1)
SHORT = tuple(s * float(f"1e-{k}") for k in range(4, 9) for s in (1, -1))  # ... where a wall is near, with a share ...
SHOWN = 0.1  # ... of the fall that the curvature promises
_LIKE = 0.5  # of one, how far eigenvalues of N^-1 H may be from it for H to be taken for positive definite
_ALIKE = 1e-4  # how far a random vector may be from an eigenvector of N^-1 H for it to be a multiple of one
_FORMED = 32  # unknowns of a fit, whose R'R costs less than what it saves
_UNITS = 4  # in the last place, by which z moves at least in a difference


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
    steps = min(z.shape[1], lanczos_steps(which, descended))
    at = f if f.of_gradient else probe  # which remembers what it has found there
    g, h = at(z), difference_step(z, eps**0.5)
    moved = h
    tried: list[tuple[Tensor, Tensor]] = []

    def product(q: Tensor) -> Tensor:
        tried.append((q, hessian_times(probe, z, g, moved, q)))
        return tried[-1][1]

    if f.curved is not None and len(f.curved.units) == len(z):
        which = which & ~(f.curved.hold(product, z) & descended)
        if not bool(which.any()):
            return z
    known = f.system.factored
    if known is None and f.kind.of_residuals and z.shape[1] <= _FORMED:
        known = factors_of_fit(f, z, g)
    if getattr(known, "positive", False) and len(known.units) == len(z):
        which = which & ~(_away(product, known, z, steps) <= _LIKE)
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
    odd = norm(hessian_times(probe, z, g, _LONGER * h, q) - Hq) > _UNLIKE * size
    if bool(both.any()):
        odd = odd | (both & (norm(hessian_times(probe, z, g, -h, q) - Hq) > _UNLIKE * size))
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


def hessian_times(gradient: Callable[[Tensor], Tensor], z: Tensor, g: Tensor, h: Tensor, q: Tensor) -> Tensor:
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


def lanczos_steps(which: Tensor, descended: Tensor) -> int:
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


def unlike(f: Evaluations, z: Tensor, N: Any) -> Tensor:
    """How far from one eigenvalues of ``N^{-1} H`` are, about, ``(batch,)``, of the Hessian of a fit at ``z``; by an
    evaluation or two, and none if that is known."""
    probe, g, h = f.beside("minimise"), f.residual(z), difference_step(z, f.eps**0.5)
    return _away(lambda q: hessian_times(probe, z, g, h, q), N, z, min(z.shape[1], _FEW))


def _away(product: Callable[[Tensor], Tensor], N: Any, z: Tensor, steps: int) -> Tensor:
    """How far from one Ritz values of ``N^{-1} H`` are, at most, ``(batch,)``; infinite where they are not finite, and noted
    in ``N.unlike``.  ``N``: something positive definite of which there are factors.  Of the last point it is remembered.

    Where all are near one, ``H`` is no saddle point's.  Nor is it an inflection's: along what the residuals hardly change
    with, ``R'R`` is of second order and ``H`` of first.

    Args:
        product: ``H q`` for unit vectors, ``(batch, n)``. N: with ``solve``, and ``units``, those of a gradient.
    """
    if N.looked is not None and N.looked[0] is z and N.looked[1] >= steps:
        found: Tensor = N.looked[2]
        return found
    T = in_working_precision(z).new_zeros(len(z), steps, steps)
    T.diagonal(dim1=1, dim2=2).fill_(1)  # as if one
    basis: list[tuple[Tensor, Tensor]] = []  # orthonormal by N, and N times that
    w, alive = seeded.normal(z.shape[1], seed=0).to(z) * N.units.to(z), torch.ones_like(z[:, :1], dtype=torch.bool)
    seen: float = steps
    for k in range(steps):
        v = N.solve(w)
        square = (v * w).sum(1, keepdim=True)
        if k:
            alive = alive & ~(square.abs() <= _ALIKE**2)
            T[:, k, k - 1] = T[:, k - 1, k] = torch.where(alive, square.sqrt(), 0).squeeze(1)  # NaN if negative
        if not bool(alive.any()):
            seen = math.inf  # there are no others
            break
        q, Nq = (torch.where(alive, t / square.sqrt(), 0) for t in (v, w))
        basis.append((q, Nq))
        length = torch.linalg.vector_norm(q, dim=1, keepdim=True)
        w = length * product(torch.where(length > 0, q / length, 0))
        T[:, k, k] = torch.where(alive, (w * q).sum(1, keepdim=True), 1).squeeze(1)
        for _ in range(2 if k + 1 < steps else 0):
            shares = [(w * q).sum(1, keepdim=True) for q, _ in basis]
            for share, (_, Nq) in zip(shares, basis, strict=True):
                w = w - share * Nq
    finite = torch.isfinite(T).flatten(1).all(1)
    away = (torch.linalg.eigvalsh(torch.where(finite[:, None, None], T, 0)) - 1).abs().amax(1)
    N.unlike = float(away.amax()) if bool(finite.all()) else math.inf
    away = torch.where(finite, away, torch.inf)
    N.looked = z, seen, away
    return away


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
