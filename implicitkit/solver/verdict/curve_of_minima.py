r"""Do minima as good go on along a curve?

``a exp(b - c x)`` fits data by one curve of parameters, ``a e^b`` being all that counts, and so does ``a b^3 exp(-c x)``:
the Hessian is singular at each of these minima, though none is on the way to infinity.  Unlike on such a way the gradient is
rounding all along the curve, wherever that comes nearer to the origin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicitkit.foundation import seeded
from implicitkit.foundation.autocast import HALF
from implicitkit.linear.factors.dense import svd_batched
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.verdict.differences import in_working_precision, own_units
from implicitkit.solver.verdict.rounding_level import NOISE, is_rounding

_FEW = 64  # unknowns, at most
_NEAR = 5.0  # max |z|: no farther out, nothing has run away
_STEP = 0.5  # of each unknown, at most: a step along the tangent ...
_ACROSS = 0.1  # of the largest, an unknown that crosses zero
_CORRECTIONS = 8  # ... and so many back to the curve, at most
_STEPS = 40  # along the curve
_OFF = 0.5  # of an unknown: a longer correction leads back to no curve
_STILL = 1e-3  # of each unknown: a step so short has come next to the point that is nearest to the origin
_INSIDE = 0.5  # of the way to a bound: no further


def on_a_curve_of_minima(f: Evaluations, z: Tensor, which: Tensor) -> Tensor:
    r"""Where minima go on from ``z`` towards the origin, until ``max |z|`` is 5 and a half of what it was at most, or they
    come no nearer, ``(batch,)``.  An unknown that comes near a bound stays there, and the others go on.

    With ``N`` the null space of ``J = dF/dz`` (singular values below ``sqrt(eps)`` of the largest, unknowns in units of
    their own, equations to equal size), steps go along ``-N N' z``, and corrections of the rank of ``J`` at ``z``,
    ``d = -J^+ F``, back to where ``F`` is nothing but rounding; else there is no family.  On the way to infinity what ``F``
    has along ``N`` grows with each step, and no correction takes it away.  Nor may the objective change (of a program, that
    its conditions hold has to do).  Where ``N N' z = 0`` (rotations, multipliers that may be any) minima must go on to both
    sides.

    A predictor-corrector method for curves of solutions: Allgower & Georg, *Introduction to Numerical Continuation Methods*
    (2003), chapter 2; of ``n`` products and a few evaluations a correction.
    """
    # with few digits nothing tells a curve of a program, whose objective is not asked; in half precision no curve at all
    digits = z.dtype == torch.float64 or (f.kind.minimisation and z.dtype not in HALF)
    if z.shape[1] > _FEW or not digits or not (f.kind.minimisation or f.kind.returns_program):
        return torch.zeros_like(which)
    if not bool(which.any()):
        return which
    curve = _Curve(f, z)
    point, open_, found = z, which.clone(), torch.zeros_like(which)
    before = torch.zeros_like(in_working_precision(z))
    near = (0.5 * curve.size(z)).clamp_max(_NEAR)
    for step in range(_STEPS):
        point, way, open_ = curve.reached(point, open_)
        still = curve.is_nearest(way, _STILL if step else torch.finfo(way.dtype).eps ** 0.5)
        if step:  # it is near, or its nearest point has been passed
            ends = (curve.size(point) <= near) | still | ((way * before).sum(1) < 0)
        else:
            open_ = open_ & curve.is_beside(point, z)
            ends = curve.goes_on_across(point, open_ & still)
            open_ = open_ & (ends | ~still)
        found, open_, before = found | (open_ & ends), open_ & ~ends, way
        if not bool(open_.any()):
            break
        point = curve.ahead(point, way, open_)
    return found


class _Curve:
    """``F = 0`` near ``z``.

    Within bounds alone ``z - P(z - g)`` is ``g`` only where that is small: the unknowns at bounds stay as they are, and of
    the others it is ``g``.  So do those that come near a bound on the way.
    """

    def __init__(self, f: Evaluations, z: Tensor) -> None:
        self.f, self.z = f, z
        self.limits = f.limits(z) if f.kind.returns_program else None
        plain = self.limits is not None and z.shape[1] == f.problem.size
        self.within = plain
        self.fixed = torch.zeros_like(z, dtype=torch.bool)
        if plain and self.limits is not None:
            self.fixed = (z <= self.limits[0]) | (z >= self.limits[1])
        self.kept = torch.zeros_like(self.fixed)  # of the singular directions, ``(batch, n)``
        self.anew = torch.ones_like(self.fixed[:, 0])  # where these are to be chosen
        self.by_bounds = torch.zeros_like(self.fixed[:, 0])  # where an unknown has come near a bound
        self.level: tuple[Tensor, Tensor] | None = None  # the objective on the curve, and what rounding leaves of it

    def residual(self, point: Tensor) -> Tensor:
        """``F``, ``(batch, n)``."""
        F = self.f.smooth(point) if self.within else self.f.residual(point)
        return in_working_precision(torch.where(self.fixed, point - self.z, F))

    def jacobian(self, point: Tensor) -> Tensor:
        """``dF/dz``, ``(batch, n, n)``; within bounds by differences."""
        if not self.within:
            J = in_working_precision(self.f.linearize(point).dense())
            return torch.where(self.fixed.unsqueeze(2), torch.eye(J.shape[1], dtype=J.dtype, device=J.device), J)
        h = torch.finfo(point.dtype).eps ** 0.5 * point.abs().amax(1).clamp_min(1e-3)
        moves = torch.diag_embed(h.unsqueeze(1).expand_as(point))
        there = [self.residual(point + move) - self.residual(point - move) for move in moves.unbind(1)]
        return torch.stack(there, 2) / (2 * h[:, None, None])

    def size(self, point: Tensor) -> Tensor:
        """``max |z_i|``, without multipliers, ``(batch,)``."""
        return (point[:, : self.f.problem.size] if self.f.kind.returns_program else point).abs().amax(1)

    def reached(self, point: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The points of the curve beside ``point``, the next step from there, and where there is such a point,
        ``(batch,)``: ``F`` is rounding there, and the objective as on the rest of the curve."""
        point, way, small = self.corrected(point, which)
        there = which & (
            small | is_rounding(self.f, point, in_working_precision(self.f.residual(point)), which & ~small)
        )
        return point, way, self.is_level(point, there & torch.isfinite(way).all(1))

    def is_level(self, point: Tensor, which: Tensor) -> Tensor:
        """Where the objective is as at the first point but for rounding, ``(batch,)``: of itself, and, where it is a sum of
        squares that vanish, of what they are made of."""
        if self.f.kind.returns_program or not bool(which.any()):
            return which
        value, eps = self.f.beside("minimise").value(point), torch.finfo(point.dtype).eps
        if self.level is None:
            self.level = value, NOISE * (eps**0.75 * value.abs() + NOISE * eps**2 * self.bend)
        return which & ((value - self.level[0]).abs() <= self.level[1])

    def is_beside(self, point: Tensor, other: Tensor) -> Tensor:
        """Where two points are next to each other, ``(batch,)``."""
        return ((point - other).abs() <= torch.finfo(point.dtype).eps ** 0.25 * self.unit).all(1)

    def is_nearest(self, way: Tensor, share: float) -> Tensor:
        """Where the curve comes no nearer to the origin than by a ``share`` of an unknown, ``(batch,)``: the group of
        rotations, say, keeps its distance."""
        return ((way / self.unit).abs() <= share).all(1)

    def goes_on_across(self, point: Tensor, which: Tensor) -> Tensor:
        """Where a curve goes on to both sides, ``(batch,)``."""
        N = self.null
        if not bool(which.any()):
            return which
        drawn = seeded.normal(point.shape[1], seed=0).to(self.unit) * self.unit
        across = self._limited((N.mT @ (N @ drawn.unsqueeze(2))).squeeze(2))
        which = which & (across != 0).any(1)
        for side in (1, -1):
            which = self.reached(point + (side * across).to(point), which)[2]
        return which

    def ahead(self, point: Tensor, way: Tensor, which: Tensor) -> Tensor:
        """A step along ``way``; one of an unknown towards a bound goes a part of the way there, and was its last."""
        step = torch.where(which.unsqueeze(1), way, 0).to(point)
        if self.limits is None:
            return point + step
        n, shares = self.f.problem.size, torch.ones_like(step)
        for bound in self.limits:
            room = (bound - point[:, :n]).abs()
            over = ((point[:, :n] + step[:, :n] - bound) * (point[:, :n] - bound) <= 0) & (step[:, :n] != 0)
            shares[:, :n] = torch.where(over, _INSIDE * room / step[:, :n].abs(), 1).minimum(shares[:, :n])
        share = shares.amin(1, keepdim=True)
        ahead, near = point + share * step, (shares == share) & (share < 1)
        self.fixed, self.z, self.anew = self.fixed | near, torch.where(near, ahead, self.z), near.any(1)
        self.by_bounds = self.by_bounds | self.anew
        return ahead

    def corrected(self, point: Tensor, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Points where ``F`` is as small as it gets, the next step from there ``(batch, n)``, NaN where an equation has no
        size, and where ``F`` is no more than rounding of ``z`` leaves of it, ``(batch,)``."""
        eps = torch.finfo(point.dtype).eps
        for correction in range(_CORRECTIONS + 1):
            F, J, unit = self.residual(point), self.jacobian(point), own_units(in_working_precision(point))
            if self.level is None:
                self.bend = (unit * (J.abs() @ unit.unsqueeze(2)).squeeze(2)).sum(1)
            rows = (J * unit.unsqueeze(1)).abs().amax(2)
            M = J * unit.unsqueeze(1) / torch.where(rows > 0, rows, 1).unsqueeze(2)
            usable = which & torch.isfinite(M).flatten(1).all(1) & torch.isfinite(F).all(1) & (rows > 0).all(1)
            U, S, V = svd_batched(torch.where(usable[:, None, None], M, 0))
            self.kept = torch.where(self.anew.unsqueeze(1), eps**0.5 * S[:, :1] < S, self.kept)
            self.anew = torch.zeros_like(self.anew)
            usable = usable & (self.by_bounds | ~self.kept.all(1))
            parts = (U.mT @ torch.where(usable.unsqueeze(1), -F / rows, 0).unsqueeze(2)).squeeze(2)
            d = (V.mT @ torch.where(self.kept & (S > 0), parts / S, 0).unsqueeze(2)).squeeze(2)
            small = (F.abs() <= NOISE * eps * rows * M.abs().sum(2)).all(1)
            usable = usable & (small | (d.abs().amax(1) <= _OFF))
            if correction == _CORRECTIONS or bool((small | ~usable).all()):
                break
            moved = point + (unit * d).to(point)
            point = torch.where((usable & ~small).unsqueeze(1), moved, point)
        way = self._inward(point, torch.where(self.kept.unsqueeze(2), 0, V), unit)
        return point, torch.where(usable.unsqueeze(1), way, torch.nan), small

    def _inward(self, point: Tensor, null: Tensor, unit: Tensor) -> Tensor:
        """The step ``-N N' z``, no longer than a share of each unknown; zero where there is no null space."""
        basis, back = null * (~self.fixed * unit).unsqueeze(1), in_working_precision(point).clone()
        if self.f.kind.returns_program:
            back[:, self.f.problem.size :] = 0  # multipliers may be as large as they like
        _, sizes, N = svd_batched(basis)  # what rounding leaves of a row of zeros has no direction
        self.unit, self.null = unit, N * (sizes > torch.finfo(unit.dtype).eps ** 0.75 * sizes[:, :1]).unsqueeze(2)
        return self._limited(-(self.null.mT @ (self.null @ back.unsqueeze(2))).squeeze(2))

    def _limited(self, way: Tensor) -> Tensor:
        """A step no longer than a share of each unknown; one on its way across zero counts as a tenth of the largest."""
        wide = self.unit.maximum(_ACROSS * self.unit.amax(1, keepdim=True))
        longest = (way / wide).abs().amax(1, keepdim=True)
        return torch.where(longest > _STEP, way * (_STEP / longest), way)
