r"""A point that satisfies the constraints, whatever the objective, or a proof that there is none.

Each constraint has a tangent plane, in units of a row of length one, at each point looked at so far, and the next point is
where the most violated of all planes is least so, near the last one:

    minimise  s^2 / 2 + 1e-7 |x - z|^2 / 2   subject to   c_k + a_k (x - z) <= s,   lower <= x <= upper

An equality has two, at the last point only.  The multipliers ``y`` of the planes are Farkas's where ``s > 0``: ``y'a`` is
zero, but for the bounds' forces and the second term, and ``y'c`` positive.  Convex constraints lie above their planes, so
that ``sum y c(x) > 0`` for every ``x``, however large, and no point satisfies them.

A violation may also vanish at infinity only, as that of ``exp(z) <= 0``: then its logarithm falls along the last step, and
falls the less, the farther out, until rounding takes it to zero.

Source: Kelley (1960), "The cutting-plane method for solving convex programs", J. SIAM 8, 703-712; Farkas (1902).
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.solver.constrained.model import Local, Model
from implicitkit.solver.constrained.step_program import solved

_BESIDE = 1e-7  # of s: the weight of the way there
_SAME = 1e-12  # of a row of length one: another plane differs by more
_LOOKS = 16  # points at most
_LAST = 6  # of them, the distances of whose planes have not fallen below ...
_AS_FAR = 0.9  # ... that of the last one
_SURE = 30.0  # times what counts as none: a violation
_FAR = 1e4  # of 1 + |z|: how far out there may be a point for all that is proved
_OUT = 1e3  # of 1 + |z|: planes that lead farther say nothing
_FACTORS = tuple(2.0**k for k in range(25))  # of the last step
_EXPLAINED = 0.9  # of the logarithm of the smallest number
_STRAIGHT = 1e-3  # of a slope of logarithms: less is rounding


class Ended(NamedTuple):
    """Where one sample has come.

    Attributes:
        z: ``(1, n)``. y: weights of the constraints, ``(1, m)``, ``None`` where these hold. level: ``y'c(x)`` is no less
            anywhere, if ``y'c`` is convex.
    """

    z: Tensor
    y: Tensor | None
    level: float


class _Planes:
    """``rows x <= level + s``, ``(k, n)`` and ``(k,)``, of the constraints ``of`` with a ``sign``, both ``(k,)``, that are
    ``steep`` there."""

    def __init__(self, model: Model, z: Tensor) -> None:
        self.model, self.bounds = model, model.bounds(z)
        none, index = z.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=z.device)
        self.rows, self.level, self.weight, self.of = z.new_zeros(0, model.size), none, none, index

    def add(self, here: Local, z: Tensor) -> None:
        sided, J, c = self.model.one_sided, here.jacobian[0], here.constraints[0]
        weight = 1 / torch.linalg.vector_norm(J, dim=1)
        number = torch.arange(len(c), device=z.device)
        other = (self.rows - (weight.unsqueeze(1) * J)[self.of]).abs().amax(1) > _SAME
        old = sided[self.of] & other  # equalities are those of the last point
        parts = self.rows[old], self.level[old], self.weight[old], self.of[old]
        for sign, which in ((1, slice(None)), (-1, ~sided)):
            w = sign * weight[which]
            rows = w.unsqueeze(1) * J[which]
            new = rows, rows @ z[0] - w * c[which], w, number[which]
            parts = tuple(torch.cat(pair) for pair in zip(parts, new, strict=True))  # type: ignore[assignment]
        self.rows, self.level, self.weight, self.of = parts

    def least(self, z: Tensor, unit: float) -> tuple[Tensor, Tensor] | None:
        """The next point ``(1, n)`` and the multipliers of all planes ``(k,)``; ``None`` where there is none."""
        n, k = self.model.size, len(self.rows)
        G = torch.cat([self.rows, -self.rows.new_ones(k, 1)], 1)
        h = (self.level - self.rows @ z[0]) / unit
        if self.bounds is not None:
            eye = torch.eye(n, n + 1, dtype=z.dtype, device=z.device)
            G = torch.cat([G, eye, -eye])
            h = torch.cat([h, (self.bounds[1] - z)[0] / unit, (z - self.bounds[0])[0] / unit])
        held = torch.isfinite(h)
        P = torch.diag(torch.cat([z.new_full((n,), _BESIDE), z.new_ones(1)]))
        empty = z.new_zeros(1, 0, n + 1), z.new_zeros(1, 0)
        data = P.unsqueeze(0), z.new_zeros(1, n + 1), *empty, G[held].unsqueeze(0), h[held].unsqueeze(0)
        (point, _, lam), failed = solved(data, z)
        return None if bool(failed) else (z + unit * point[:, :n], lam[0, :k])

    def proved(self, z: Tensor, x: Tensor, lam: Tensor, none: float) -> Ended | None:
        """That no point satisfies the constraints, from the least ``x`` beside ``z``; ``none``: what is no violation."""
        away = self.rows @ x[0] - self.level
        support, total = float(lam @ away), float(lam.sum())
        if not total > 0 or not support > _SURE * none * total:
            return None
        slope = (lam @ self.rows).unsqueeze(0)
        if self.bounds is not None:  # a bound in the way takes what leads across it
            low, high = (x <= self.bounds[0]) & (slope > 0), (x >= self.bounds[1]) & (slope < 0)
            slope = torch.where(low | high, 0, slope)
        far = _FAR * (1 + float(torch.maximum(z.abs(), x.abs()).amax()))
        if not float(slope.abs().sum()) * far < support:
            return None
        y = z.new_zeros(self.model.count).index_add(0, self.of, lam * self.weight)
        return Ended(x, y.unsqueeze(0), support)

    def prune(self, lam: Tensor) -> None:
        """Without planes that have no force."""
        kept = lam > torch.finfo(lam.dtype).eps ** 0.75 * lam.max()
        self.rows, self.level, self.weight, self.of = (t[kept] for t in (self.rows, self.level, self.weight, self.of))


def ended(model: Model, z: Tensor, looks: int = _LOOKS) -> Ended | None:
    """Where one sample comes to from ``z`` ``(1, n)`` on: a point that satisfies the constraints, or a proof that there is
    none; ``None`` where there is neither.  An evaluation and ``m`` products a point, ``looks`` at most, and 25
    evaluations."""
    planes, near, last = _Planes(model, z), torch.finfo(z.dtype).eps ** 0.5, []
    z = model.inside(z)
    for _ in range(looks):
        here = model.local(z)
        none = near * (1 + float(z.abs().max()))
        violated = _beyond(model, here)
        if not math.isfinite(violated):
            return None
        if violated <= none:
            return Ended(z, None, 0.0)
        planes.add(here, z)
        found = planes.least(z, violated)
        if found is None or not float((found[0] - z).abs().max()) <= _OUT * (1 + float(z.abs().max())):
            return None
        x, lam = found
        proof = planes.proved(z, x, lam, none)
        if proof is not None:
            return proof
        last.append(violated)
        before, z = z, x
        planes.prune(lam)
    as_far = looks == _LOOKS and all(new > _AS_FAR * old for old, new in itertools.pairwise(last[-_LAST:]))
    return _vanishing(model, before, x - before) if as_far else None


def _beyond(model: Model, here: Local) -> float:
    """The largest violation, in units of rows of length one; infinite where a constraint that is violated has no slope."""
    steep, violated = torch.linalg.vector_norm(here.jacobian, dim=2), model.violation(here.constraints)
    return float(torch.where(violated > 0, violated / steep, 0.0).nan_to_num(torch.inf).amax())


def _vanishing(model: Model, z: Tensor, d: Tensor) -> Ended | None:
    """That the violation at ``z`` vanishes at infinity only, in the direction ``d``."""
    c = model.values(z)[1]
    worst = int(model.violation(c).argmax())
    y = torch.zeros_like(c)
    y[0, worst] = 1.0 if bool(model.one_sided[worst]) else float(c[0, worst].sign())
    smallest = _EXPLAINED * math.log(torch.finfo(z.dtype).tiny)
    at, value, slope = 0.0, math.log(float((y * c).sum())), -math.inf
    for factor in _FACTORS:
        there = float((y * model.values(z + factor * d)[1]).sum())
        if there == 0 and value + slope * (factor - at) < smallest:  # rounded away
            return Ended(z, y, 0.0)
        if not 0 < there < math.inf:
            return None
        new = (math.log(there) - value) / (factor - at)
        if not slope - _STRAIGHT * abs(new) <= new < 0:
            return None
        at, value, slope = factor, math.log(there), new
    return Ended(z, y, 0.0)
