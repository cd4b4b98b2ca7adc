r"""Is a stationary point of a constrained minimisation a minimum, and is there a minimum at all?

    minimise  f(z) + phi(z)   subject to   h(z) = 0,   g(z) <= 0

At a minimum ``v' H v >= 0`` for ``H`` the Hessian of the Lagrangian and every ``v`` along which the active constraints and
bounds hold to first order (Nocedal & Wright 2006, theorem 12.5).  A set or a term ``phi`` enters by its proximal map: with
``D`` the derivative of ``prox(., s)`` at ``z - s dL/dz``, symmetric, and ``v = D u``,

    q(u) = v' H v + (u - v)' v / s >= 0

where the second term is the curvature of ``phi``: ``D^{-1} = I + s d^2 phi`` on its range (Parikh & Boyd 2014, section
3.3); it vanishes for a polyhedron.  Lanczos finds a ``u`` with ``q(u) < 0``, as without constraints
(:mod:`implicitkit.solver.verdict.curvature`), and a lower feasible point beside ``z`` is the proof; of a term nobody knows
the value, and the curvature has to do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.numbers import largest_moduli
from implicitkit.linear.factors.dense import lstsq_batched, svd_batched
from implicitkit.problem.argmin import Bounded, Projected
from implicitkit.solver.constrained.model import Model
from implicitkit.solver.constrained.step_program import solved
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.curvature import (
    LENGTHS,
    SHORT,
    difference_step,
    lanczos,
    lanczos_steps,
    promised,
    random_unit,
)
from implicitkit.solver.verdict.inflection import inflected
from implicitkit.solver.verdict.rounding_level import ROUNDING
from implicitkit.solver.verdict.unbounded import POWERS

_AFFORDABLE = 2e8  # numbers times rows of the constraints' Jacobian up to which its null space is looked for
_LONG = 100.0  # times 1 / |H|: the step s, so that a kink that is just active counts as open
_HIDDEN = 1e3  # units in the last place of a slope, of which so large a ``z`` has few digits left beside it
_INWARDS, _FAR_LOWER = 1e-6, 1e-2  # of |z|, and of the objective: so much lower so close by is no minimum
_SHORTER = 20  # times a tenth of it, at least
_CURVED = 1e-2  # of |H|: less than this is not told from errors of a proximal map that is only known by differences
_LEAVES = 0.1  # of what moves along a row of the constraints' Jacobian: a violation below is of second order
_HOLDS, _ALONG = 1e-6, 1e-9  # of that, where a ray begins, and along it: what is linear stays far below
_NEAR, _OUT = 1e-7, 1e3  # of |z|, up to so much: a violation that is none, where a ray of recession begins
_STRAIGHT, _LEAST = 1e-11, 1e-6  # ... along one of recession; and the least of a slope that is not across them


def downhill_within(f: Evaluations, w: Tensor, which: Tensor, descended: Tensor) -> Tensor:
    """Points from which the objective falls below that of the stationary points ``which``, feasible to first order; ``w``
    itself where there are none, ``(batch, n + m)``.

    Args:
        f: the problem's. w: points and multipliers, ``(batch, n + m)``. which: ``(batch,)``, the samples in question.
            descended: those of them to which the objective has fallen step by step; these are looked at less closely.
    """
    if f.curved is not None and len(f.curved.units) == len(w) and bool((which & descended).any()):
        which = which & ~(descended & _is_convex(f, w))
        if not bool(which.any()):
            return w
    look = _Look(f, w)
    z, eps = look.z, torch.finfo(w.dtype).eps
    if look.unknown or not bool(which.any()):
        return w
    inwards = _off_an_edge(look, which)
    if inwards is not None:
        return torch.cat([inwards, w[:, look.model.size :]], 1)
    start = random_unit(z)
    if not look.curved:  # in a corner, where nothing is free, every way leads up
        start = look.unit(start)
        which = which & (start != 0).any(1)
        if not bool(which.any()):
            return w
    steps = min(z.shape[1], lanczos_steps(which, descended))
    lowest, u, largest = lanczos(look.curvature, z, steps, start)
    suspect = which & (lowest < -(_CURVED if look.curved else eps**0.5) * largest)
    suspect = suspect & (lowest < -look.rounding()) if look.curved else suspect
    if not look.curved and bool((which & ~suspect).any()):
        h = difference_step(z, eps**0.5)
        flat, along = inflected(
            look.objective, look.tangential, z, look.tangential(z), which & ~suspect, (lowest, u, largest), steps, h
        )
        suspect, u = suspect | flat, torch.where(flat.unsqueeze(1), along, u)
    if not bool(suspect.any()):
        return w
    v = look.unit(u)
    here = look.merit(z, 0 * look.value)[0]
    least, best = here - ROUNDING * eps * look.value.abs(), z
    reach = z.abs().amax(1, keepdim=True).clamp_min(1)
    for t in LENGTHS:
        trial = look.feasible(z + t * reach * v)
        new, holds = look.merit(trial, abs(t) * reach.squeeze(1))
        lower = suspect & holds & torch.isfinite(new) & (new < least)
        best, least = torch.where(lower.unsqueeze(1), trial, best), torch.where(lower, new, least)
    walled = suspect & (lowest < 0) & (best == z).all(1)
    for t in SHORT if bool(walled.any()) else ():
        trial = look.feasible(z + t * reach * v)
        new, holds = look.merit(trial, abs(t) * reach.squeeze(1))
        lower = walled & holds & (new < least) & (here - new >= promised(t * reach.squeeze(1), lowest))
        best, least = torch.where(lower.unsqueeze(1), trial, best), torch.where(lower, new, least)
    return torch.cat([best, w[:, look.model.size :]], 1)


def _off_an_edge(look: _Look, which: Tensor) -> Tensor | None:
    """Points of the set close to those of the samples ``which`` whose ``z`` has hardly a digit left in ``z - dL/dz``, or no
    value, where the objective is far lower, ``(batch, n)``, others as they are; ``None`` where there are none.

    The edge of an objective's domain (``-log(1 - |z|^2)`` in the ball), where it is infinite or NaN but for rounding, is
    stationary by rounding alone."""
    z, eps = look.z, torch.finfo(look.z.dtype).eps
    steep = torch.linalg.vector_norm(look.slope, dim=1, keepdim=True)
    hidden = torch.linalg.vector_norm(z, dim=1) <= _HIDDEN * eps * steep.squeeze(1)
    lost = which & (hidden | ~torch.isfinite(look.value))
    if not bool(lost.any()):
        return None
    size, best, least = torch.linalg.vector_norm(z, dim=1, keepdim=True), z, look.value
    for t in (_INWARDS, -_INWARDS):
        trial = look.feasible(z + t * size * look.slope / steep.clamp_min(torch.finfo(z.dtype).tiny))
        new = look.model.values(trial)[0]
        far = ~torch.isfinite(least) | (least - new > _FAR_LOWER * torch.maximum(least.abs(), new.abs()))
        lower = lost & torch.isfinite(new) & far
        best, least = torch.where(lower.unsqueeze(1), trial, best), torch.where(lower, new, least)
    return best if bool((best != z).any()) else None


def _is_convex(f: Evaluations, w: Tensor) -> Tensor:
    """Where the Hessian of the Lagrangian is what it was in the last step, positive definite, ``(batch,)``; one evaluation,
    or two where the graph at ``w`` is gone."""
    model = Model(f)
    z, multipliers = model.split(w)
    slope = lambda z, *at: model.slope(z, lambda _: multipliers, *at)[2]  # noqa: E731
    here, h = slope(z, w), difference_step(z, torch.finfo(z.dtype).eps ** 0.5)
    held: Tensor = f.curved.hold(lambda q: (slope(z + h * q) - here) / h, z)
    return held


def falls_forever_within(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """Where the objective falls within set and constraints along the steepest feasible ray as far as it is followed, at
    least a hundredth as fast as at its beginning; ``(batch,)``.

    Of a term nobody knows the value: with one, and no constraints, where the natural map ``F``, a slope, stays what it is
    along ``-F``.
    """
    look = _Look(f, w, ray=True)
    if look.unknown or (look.term and look.model.count):
        return torch.zeros_like(which)
    if look.term:
        return _stays(f, w, which)
    size = look.z.abs().amax(1).clamp_min(1)
    within = look.violated <= _HOLDS * size.unsqueeze(1) * look.steep
    which = which & within.all(1)  # it begins within the constraints
    falls = _falls_along(look, look.tangent(-look.slope), size, which, _ALONG)
    near = look.violated <= _NEAR * size.clamp_max(_OUT).unsqueeze(1) * look.steep
    which = which & ~falls & near.all(1)  # far out a violation is not told from rounding
    if look.model.count and not look.curved and bool(which.any()):
        falls = falls | _falls_along(look, _recession(look), size, which, _STRAIGHT)
    return falls


def _falls_along(look: _Look, ray: Tensor, size: Tensor, which: Tensor, share: float) -> Tensor:
    """Where the objective of the samples ``which`` falls along a ray, ``(batch,)``; ``share``: as of :meth:`_Look.merit`."""
    slope = torch.linalg.vector_norm(ray, dim=1)
    ray = ray / slope.clamp_min(torch.finfo(ray.dtype).tiny).unsqueeze(1)
    falls = which & torch.isfinite(look.value) & torch.isfinite(slope) & (slope > 0)
    last = look.value
    for power in POWERS:
        if not bool(falls.any()):
            break
        t = size * 10.0**power
        new, holds = look.merit(look.model.proximal(look.z + t.unsqueeze(1) * ray, 1.0), t, share)
        falls = falls & holds & ((new < last) | (new == -torch.inf)) & (look.value - new >= 1e-2 * t * slope)
        last = new
    return falls


def _recession(look: _Look) -> Tensor:
    """The negative slope of the objective, projected on the directions along which all constraints and bounds hold for ever,
    to first order (Moreau 1962), ``(batch, n)``; zero where there is none, or it is not known to rounding."""
    model, z, J = look.model, look.z, look.jacobian / torch.where(look.steep > 0, look.steep, 1).unsqueeze(2)
    bounds, eye = model.bounds(z), torch.eye(model.size, dtype=z.dtype, device=z.device).expand(len(z), -1, -1)
    G, A = J[:, model.one_sided], J[:, ~model.one_sided]
    if bounds is not None:
        G = torch.cat([G, *(s * b.isfinite().unsqueeze(2) * eye for s, b in zip((-1, 1), bounds, strict=True))], 1)
    size = largest_moduli(look.slope).clamp_min(torch.finfo(z.dtype).tiny).unsqueeze(1)
    none = A.new_zeros(A.shape[:2]), (G == 0).all(2).to(G)  # a row of zeros holds anyway
    (d, _, lam), failed = solved((eye, look.slope / size, A, none[0], G, none[1]), z)
    held = torch.cat([A, G * (lam > torch.finfo(z.dtype).eps ** 0.5).unsqueeze(2)], 1)
    d = d - lstsq_batched(held, (held @ d.unsqueeze(2)).squeeze(2))[0]
    beyond = torch.cat([(A @ d.unsqueeze(2)).abs(), (G @ d.unsqueeze(2)).clamp_min(0)], 1).squeeze(2)
    good = ~failed & (largest_moduli(beyond) <= _STRAIGHT * largest_moduli(d)) & (largest_moduli(d) > _LEAST)
    return torch.where(good.unsqueeze(1), d * size, 0.0)


def _stays(f: Evaluations, w: Tensor, which: Tensor) -> Tensor:
    """Where ``F(z - t d)`` is ``F(z)`` to a hundredth for ``t`` up to ``1e12 / |F|``, ``(batch,)``; ``d`` is ``F`` without
    what is small in it, of unknowns that have come to rest."""
    F, size = f.residual(w), w.abs().amax(1).clamp_min(1)
    d = torch.where(F.abs() >= 1e-2 * F.abs().amax(1, keepdim=True), F, 0)
    slope = torch.linalg.vector_norm(F, dim=1)
    stays = which & torch.isfinite(slope) & (slope > 0)
    for power in POWERS:
        if not bool(stays.any()):
            break
        there = f.residual(w - (size * 10.0**power / slope).unsqueeze(1) * d)
        stays = stays & (torch.linalg.vector_norm(there - F, dim=1) <= 1e-2 * slope)
    return stays


class _Look:
    """A program near one point.

    Attributes:
        z: ``(batch, n)``. value: of the objective there. slope: of the Lagrangian, without what is hardly active.
        unknown: is there more than can be looked at? term: is there a term whose value nobody knows? curved: is the proximal
            map known by differences only?
    """

    def __init__(self, f: Evaluations, w: Tensor, *, ray: bool = False) -> None:
        self.model = model = Model(f)
        self.z, multipliers = model.split(w)
        prox: Any = model.problem.prox
        self.curved = prox is not None and not isinstance(prox, Bounded)
        self.term = self.curved and not isinstance(prox, Projected)
        rows, n = model.count, model.size
        # of a program whose steps are sparse, a dense null space would cost more than they did
        self.unknown = rows > 0 and (len(w) * rows * n * min(rows, n) > _AFFORDABLE or model.is_sparse(w))
        if self.unknown:
            return
        self.value, self.slope, constraints, self.jacobian = model.local(self.z, w)
        if ray:  # what would be violated along it; nothing is held
            slopes = (self.jacobian @ self.slope.unsqueeze(2)).squeeze(2)
            active, multipliers = ~model.one_sided | ((constraints >= 0) & (slopes < 0)), torch.zeros_like(multipliers)
        else:
            active = self._active(multipliers, constraints)
        self.forces = torch.where(active, multipliers, 0)
        self.slope = self.slope + (self.forces.unsqueeze(1) @ self.jacobian).squeeze(1)
        self.binding = ~model.one_sided | (self.forces > 0)
        self.violated = self._beyond(constraints)
        self.steep = torch.linalg.vector_norm(self.jacobian, dim=2)
        self.free = self._free()
        self.s = self._long_step()
        self.normals = self._normals(self.jacobian * active.unsqueeze(2))

    def _active(self, multipliers: Tensor, constraints: Tensor) -> Tensor:
        """The constraints that hold with force, ``(batch, m)``: on them ``lam - max(lam + g, 0)`` depends.  In units of rows
        of ``J`` of length one: a constraint times a number is the same constraint."""
        steep = torch.linalg.vector_norm(self.jacobian, dim=2)
        steep = torch.where(steep > 0, steep, 1)
        forces, values = multipliers * steep, constraints / steep
        size = largest_moduli(forces).unsqueeze(1)
        return ~self.model.one_sided | (forces > torch.finfo(self.z.dtype).eps ** 0.5 * size + values.abs())

    def _free(self) -> Tensor | None:
        """Unknowns that no bound holds with force, ``(batch, n)``; ``None``: all."""
        bounds = None if self.curved else self.model.bounds(self.z)
        if bounds is None:
            return None
        left = largest_moduli(self.z - (self.z - self.slope).clamp(*bounds)).unsqueeze(1)
        most = largest_moduli(self.slope).unsqueeze(1)
        at_rest = self.slope.abs() <= torch.finfo(self.z.dtype).eps ** 0.5 * most + 10 * left
        low, high = (self.z <= bounds[0]) & (self.slope > 0), (self.z >= bounds[1]) & (self.slope < 0)
        return ~((low | high) & ~at_rest) & (bounds[0] < bounds[1])

    def _normals(self, rows: Tensor) -> Tensor | None:
        """An orthonormal basis of ``D`` times the rows of the active constraints, ``(batch, k, n)``; ``None``: there is
        none."""
        if not rows.shape[1]:
            return None
        small = _CURVED if self.curved else torch.finfo(rows.dtype).eps ** 0.5
        steep = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        rows = torch.stack([self._derivative(row) for row in rows.unbind(1)], 1)
        length = torch.linalg.vector_norm(rows, dim=2, keepdim=True)
        rows = torch.where(length > small * steep, rows / length, 0)  # no row is small beside another
        _, sizes, V = svd_batched(rows)
        rank = sizes > small * sizes[:, :1]
        return torch.nan_to_num(V * rank.unsqueeze(2))

    def _long_step(self) -> Tensor:
        """``s``, ``(batch, 1)``."""
        if not self.curved:
            return self.z.new_ones(len(self.z), 1)
        v = torch.where(self.slope.abs().amax(1, keepdim=True) > 0, self.slope, 1.0)
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
        size = torch.linalg.vector_norm(self.hessian(v), dim=1, keepdim=True)
        return self._shortened(torch.where(size > 0, _LONG / size, 1.0))

    def _shortened(self, s: Tensor) -> Tensor:
        """``s`` where ``P(z - s dL/dz)`` is ``z``, as at a stationary point of a convex set; of another (a sphere: its map
        is another beyond the centre) as much less as it takes."""
        if self.term:
            return s
        near = torch.finfo(self.z.dtype).eps ** 0.25 * torch.linalg.vector_norm(self.z, dim=1, keepdim=True)
        for _ in range(_SHORTER):
            moved = self.model.proximal(self.z - s * self.slope, 1.0) - self.z
            past = torch.linalg.vector_norm(moved, dim=1, keepdim=True) > near
            if not bool(past.any()):
                break
            s = torch.where(past, 0.1 * s, s)
        return s

    def hessian(self, v: Tensor) -> Tensor:
        """``d^2 L/dz^2 v``, ``(batch, n)``, by a difference of gradients."""
        h = difference_step(self.z, torch.finfo(self.z.dtype).eps ** 0.5)
        return torch.nan_to_num((self.model.slope(self.z + h * v, lambda _: self.forces)[2] - self.slope) / h)

    def _derivative(self, u: Tensor) -> Tensor:
        """``D u``, ``(batch, n)``."""
        if not self.curved:
            return u if self.free is None else u * self.free
        step = self.s.squeeze(1)
        y, h = self._differenced()
        length = torch.linalg.vector_norm(u, dim=1, keepdim=True)
        unit = torch.where(length > 0, u / length, 0)
        change = self.model.proximal(y + h * unit, step) - self.model.proximal(y - h * unit, step)
        return torch.nan_to_num(length * change / (2 * h))

    def _differenced(self) -> tuple[Tensor, Tensor]:
        """Where the proximal map is differenced, ``(batch, n)``, and by what step, ``(batch, 1)``."""
        y = self.z - self.s * self.slope
        return y, difference_step(y, torch.finfo(y.dtype).eps ** (1 / 3))

    def rounding(self) -> Tensor:
        """What rounding of the proximal map may leave in :meth:`curvature`, where that is ``v / s - D v / s``, ``(batch,)``:
        far out it is more than the curvature of a term that is hardly curved."""
        y, h = self._differenced()
        return (ROUNDING * torch.finfo(y.dtype).eps * largest_moduli(y).unsqueeze(1) / (h * self.s)).squeeze(1)

    def _along(self, u: Tensor) -> Tensor:
        """``u`` without what ``D`` takes out of the active constraints."""
        return u if self.normals is None else u - (self.normals.mT @ (self.normals @ u.unsqueeze(2))).squeeze(2)

    def tangent(self, u: Tensor) -> Tensor:
        """``v = D u``, along the active constraints."""
        return self._derivative(self._along(u))

    def unit(self, u: Tensor) -> Tensor:
        """:meth:`tangent` of length one; zero in a corner, where nothing is free and what is left of ``u`` is rounding."""
        v = self.tangent(u)
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        return torch.where(length > torch.finfo(v.dtype).eps ** 0.5, v / length, 0)

    def objective(self, z: Tensor) -> Tensor:
        """The Lagrangian at the point of the set near ``z``, infinite where that violates a constraint, ``(batch,)``."""
        point = self.feasible(z)
        value, holds = self.merit(point, largest_moduli(point - self.z))
        return torch.where(holds, value, torch.inf)

    def tangential(self, z: Tensor) -> Tensor:
        """Its gradient, along the active constraints, ``(batch, n)``."""
        return self.tangent(self.model.slope(z, lambda _: self.forces)[2])

    def curvature(self, u: Tensor) -> Tensor:
        """The matrix of ``q`` times ``u``, ``v / s + D (H v - v / s)``."""
        v = self.tangent(u)
        length = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        Hv = length * self.hessian(torch.where(length > 0, v / length, 0))
        return self._along(v / self.s + self._derivative(Hv - v / self.s))

    def feasible(self, z: Tensor) -> Tensor:
        """A point of the set near ``z``, the constraints that are violated met to first order."""
        if self.model.count:
            violated = self.model.violation(self.model.values(z)[1])
            rows = self.jacobian * (violated > 0).unsqueeze(2)
            z = z - lstsq_batched(rows, violated * self.model.values(z)[1].sign())[0].nan_to_num()
        return self.model.proximal(z, 0.0 * self.value + 1e-6) if self.term else self.model.proximal(z, 1.0)

    def _beyond(self, constraints: Tensor) -> Tensor:
        """How far constraints are from where they hold, those with a force from where they are active, ``(batch, m)``."""
        return torch.where(self.binding, constraints.abs(), self.model.violation(constraints))

    def merit(self, z: Tensor, moved: Tensor, share: float = _LEAVES) -> tuple[Tensor, Tensor]:
        """The Lagrangian, and whether each constraint holds to first order after a way ``moved``, all ``(batch,)``; far
        inside of one that has a force, the Lagrangian says nothing of the objective."""
        value, constraints = self.model.values(z)
        holds = (self._beyond(constraints) <= self.violated + share * moved.unsqueeze(1) * self.steep).all(1)
        return value + (self.forces * constraints).sum(1), holds
