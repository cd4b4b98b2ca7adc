r"""Does a program have its solution in a kink of its inequalities, as of ``|z|_1 <= 1`` or of a maximum?

There no gradient of ``g`` balances that of the objective, but a convex combination of those nearby does (Clarke):

    df + J_h' y + sum_k lam_k g_k' = 0,   lam >= 0,   g_k' gradients of g about z

Sequential quadratic programming sees one of them at a time and goes from side to side.  With all that it has seen, each a
tangent plane that the constraint lies above, ``g(z_k) + g_k' (z - z_k) <= 0``, it comes to rest in the kink (Kelley's
cutting planes under a model of the objective; planes of curved branches bend, by the curvature of the constraint as it is
where the search is, and are taken once more nearer to there); and gradients at points about that say which branches meet
there.

Sources: Kelley (1960), J. SIAM 8, 703-712; Clarke (1983), *Optimization and Nonsmooth Analysis*, section 6.1; Kiwiel (1985),
*Methods of Descent for Nondifferentiable Optimization*.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation import seeded, trees
from implicitkit.foundation.numbers import largest_moduli
from implicitkit.problem.argmin import Bounded
from implicitkit.solution import Status
from implicitkit.solver.base import Outcome
from implicitkit.solver.constrained.model import Local, Model
from implicitkit.solver.constrained.step_program import solved
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.subset import each

_FEW, _SAMPLES = 64, 16  # unknowns, and constraint values, and samples at most
_STEPS = 40  # cutting planes at most, and two for each unknown
_REST, _SOON = 1e-9, 1e-7  # of |z|: a step that is none, and one that is none along curved branches
_HOLDS = 1e-7  # of |J| |z|: a violation that is none, and a plane that is active
_STALE, _CLOSE = 10.0, 3.0  # of a step: planes taken farther away are taken once more, as near as that
_CURVED = 1e-9  # of |d^2 L|
_FORCE = 1e-7  # of the largest multiplier: it is one
_FLAT = 0.1  # of |df| / |z|: curvature of the model of the objective at least
_NEAR = 1e-5  # of |z|: how far from the kink gradients are looked at ...
_JUMPS, _LIKE = 1e-2, 1e-3  # ... of |J|: by so much they differ across it, and by no more than that within a branch
_MORE = 8  # directions beyond the number of unknowns
_INDEPENDENT = 1e-4  # of |J|
_ASIDE = 1e-3  # of a way, turned to both sides
_NOTHING = 1e-8  # of the largest |z| on the way: it is none, and has no length of its own
_TURNED = (0.1, 0.1, 0.03, 0.01, 0.003)  # how much ways along a step are turned
_BALANCED = 1e-6  # of |z|: a step within all branches that is none


class Kink(NamedTuple):
    """A solution in a kink, of one sample.

    Attributes:
        w: the point and the constraints' multipliers, ``(1, n + m)``. ways: short ways into branches, ``(k, n)``. picks:
            pairs of a way and a constraint value, whose branches are independent of that along the first way. number: of the
            constraint.
    """

    w: Tensor
    ways: Tensor
    picks: tuple[tuple[int, int], ...]
    number: int

    @property
    def message(self) -> str:
        """Which constraint has the kink, and what to do about it."""
        return (
            f"constraints[{self.number}] has a kink at the solution (of |z|, a maximum, relu): its gradient jumps there, "
            "and only a mean of gradients on all sides balances the objective's. State a ball as a set "
            "(project=ik.project.l1_ball(), or linf_ball()), a maximum by its parts (ik.Inequality(lambda z: z - c) for "
            "max(z) <= c), or smooth it."
        )


def in_a_kink(f: Evaluations, total: Outcome, which: Tensor) -> Tensor:
    """Samples among ``which`` that have a solution in a kink of inequalities, ``(batch,)``: there they have ``STALLED``
    then.  Each is asked by itself, the first sixteen; a quadratic program and an evaluation a step."""
    model, found = Model(f), torch.zeros_like(which)
    few = 0 < model.count <= _FEW and 1 < model.size <= _FEW and total.z.dtype is torch.float64
    known = model.problem.prox is None or isinstance(model.problem.prox, Bounded)
    if not (few and known and bool(model.one_sided.any())):
        return found
    for mask, number, part in each(f, which, _SAMPLES):
        kink = None
        with suppress(Exception):  # beside a point whose domain ends there
            kink = _kink(Model(part), total.z[number : number + 1])
        if kink is not None:
            found, total.kink = found | mask, kink
            total.move(mask, kink.w, part.residual(kink.w), Status.STALLED)
    return found


def _kink(model: Model, w: Tensor) -> Kink | None:
    """The kink that one sample comes to from ``w`` ``(1, n + m)`` on, if there is one."""
    z, multipliers = model.split(w)
    size = _Size(z)
    planes = _Planes(model, z, size)
    rest = planes.rest(multipliers)
    return rest and _branches(model, *rest, planes.pressing(rest[0]), size)


class _Size:
    """How large one sample is: ``|z|``, or that of its start; of nearly nothing, the largest on the way."""

    def __init__(self, z: Tensor) -> None:
        self.least = self.most = float(z.abs().max())

    def of(self, z: Tensor) -> float:
        here = max(float(z.abs().max()), self.least)
        self.most = max(self.most, here)
        return (here if here > _NOTHING * self.most else self.most) or 1.0


class _Planes:
    """Tangent planes of the inequalities at all points so far; one sample.

    Attributes:
        rows, level: the planes ``rows z <= level``, ``(1, k m, n)`` and ``(1, k m)``. points: where they were taken,
            ``(k, n)``. forces: their multipliers, ``(k, m)``.
    """

    def __init__(self, model: Model, z: Tensor, size: _Size) -> None:
        self.model, self.z, self.size = model, z, size
        self.rows, self.level = z.new_zeros(1, 0, model.size), z.new_zeros(1, 0)
        self.points, self.forces = z.new_zeros(0, model.size), z.new_zeros(0, int(model.one_sided.sum()))
        self.bounds, self.curved = model.bounds(z), False

    def rest(self, multipliers: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where it comes to rest within the constraints, ``z`` and their multipliers ``(1, m)``; ``None`` if it does not."""
        model, z, sided = self.model, self.z, self.model.one_sided
        for _ in range(_STEPS + 2 * model.size):
            here = model.local(z)
            if not all(bool(t.isfinite().all()) for t in here):
                return None
            self._add(here, z)
            step = self.step(here, z, multipliers)
            if step is None:
                return None
            d, y, lam = step
            self.forces = lam[0, : self.level.shape[1]].view(len(self.points), -1)
            multipliers = torch.zeros_like(multipliers)
            multipliers[:, ~sided], multipliers[:, sided] = y, self.forces.sum(0)
            size = self.size.of(z)
            if bool((d.abs() <= (_SOON if self.curved else _REST) * size).all()):
                steep = here.jacobian.abs().amax(2)
                if bool((model.violation(here.constraints) > _HOLDS * size * steep).any()):
                    return None
                return z, multipliers
            z = z + d
            self._retake(z, float(torch.linalg.vector_norm(d)), multipliers)
        return None

    def pressing(self, z: Tensor) -> Tensor:
        """Ways from ``z`` to where the planes with a force were taken, ``(k, n)``."""
        away = self.points - z
        return away[(self.forces.amax(1) > _FORCE * self.forces.max()) & (away != 0).any(1)]

    def _retake(self, z: Tensor, step: float, multipliers: Tensor) -> None:
        """Planes with a force that were taken far away, once more nearer to ``z`` in the direction where they were: of a
        curved branch they lie far below it."""
        away = torch.linalg.vector_norm(self.points - z, dim=1)
        stale = (away > _STALE * step) & (self.forces.amax(1) > _FORCE * self.forces.max())
        if not bool(stale.any()) or not self._is_curved(z, multipliers):
            return
        for k in stale.nonzero().squeeze(1).tolist():
            point = z + (self.points[k] - z) * (_CLOSE * step / away[k])
            here = self.model.local(point)
            if all(bool(t.isfinite().all()) for t in here):
                self._put(here, point, k)

    def _is_curved(self, z: Tensor, multipliers: Tensor) -> bool:
        """Are branches of inequalities curved, as far as has been seen?"""
        if not self.curved:
            alone = torch.where(self.model.one_sided, 0, multipliers)
            both, less = self.model.hessian(z, multipliers), self.model.hessian(z, alone)
            self.curved = bool((both - less).abs().max() > _CURVED * both.abs().max())
        return self.curved

    def _add(self, here: Local, z: Tensor) -> None:
        """The planes at ``z``, and none of those from elsewhere in the same branches, which are nearly parallel."""
        n, count = self.model.size, self.forces.shape[1]
        J = here.jacobian[:, self.model.one_sided]
        apart = (self.rows.view(-1, count, n) - J).abs().amax(2) > _LIKE * J.abs().amax(2)
        keep = apart.any(1)
        self.points, self.forces = (
            torch.cat([self.points[keep], z]),
            torch.cat([self.forces[keep], z.new_zeros(1, count)]),
        )
        rows, level = self.rows.view(-1, count, n)[keep], self.level.view(-1, count)[keep]
        self.rows = torch.cat([rows.reshape(1, -1, n), torch.zeros_like(J)], 1)
        self.level = torch.cat([level.reshape(1, -1), torch.zeros_like(J[:, :, 0])], 1)
        self._put(here, z, len(self.points) - 1)

    def _put(self, here: Local, z: Tensor, k: int) -> None:
        """The planes at ``z``, in the place of those taken there or elsewhere."""
        sided, count = self.model.one_sided, self.forces.shape[1]
        J, part = here.jacobian[:, sided], slice(k * count, (k + 1) * count)
        self.rows[:, part], self.points[k] = J, z[0]
        self.level[:, part] = (J @ z.unsqueeze(2)).squeeze(2) - here.constraints[:, sided]

    def _bent(self, here: Local, z: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Curvature of the Lagrangian ``(1, n, n)``, and the planes: of curved branches, those that touch at ``z`` what the
        constraint's curvature there makes of them, which is never above its value, the greatest of branches."""
        if not self.curved:
            return self.model.hessian(z, multipliers), self.rows, self.level
        sided, rows, level = self.model.one_sided, self.rows.clone(), self.level.clone()
        alone = torch.where(sided, 0, multipliers)
        plain = self.model.hessian(z, alone)
        total, count, away = plain, self.forces.shape[1], z - self.points
        forces = multipliers[0, sided]
        for i in (forces > _FORCE * forces.max()).nonzero().squeeze(1).tolist():
            one, number = alone.clone(), sided.nonzero()[i]
            one[0, number] = forces[i]
            part = self.model.hessian(z, one) - plain
            total, bent = total + part, away @ part[0] / forces[i]
            taken = rows[0, i::count]
            value = (taken @ z[0]) - level[0, i::count] + 0.5 * (bent * away).sum(1)
            rows[0, i::count] = taken + bent
            level[0, i::count] = rows[0, i::count] @ z[0] - value.minimum(here.constraints[0, number])
        return total, rows, level

    def step(self, here: Local, z: Tensor, multipliers: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """The step and the multipliers of its equalities and of all planes."""
        sided, n = self.model.one_sided, self.model.size
        curvature, rows, level = self._bent(here, z, multipliers)
        values, V = torch.linalg.eigh(torch.nan_to_num(curvature))
        least = _FLAT * largest_moduli(here.slope) / self.size.of(z)
        H = (V * values.abs().maximum(least.unsqueeze(1)).unsqueeze(1)) @ V.mT
        G, h = rows, level - (rows @ z.unsqueeze(2)).squeeze(2)
        if self.bounds is not None:
            eye = torch.eye(n, dtype=z.dtype, device=z.device).unsqueeze(0)
            G, h = torch.cat([G, eye, -eye], 1), torch.cat([h, self.bounds[1] - z, z - self.bounds[0]], 1)
        A, b = here.jacobian[:, ~sided], -here.constraints[:, ~sided]
        # in units of the sample, of the slope and of each row
        unit, slope = self.size.of(z), float(largest_moduli(here.slope)) or 1.0
        steep, steep_A = (torch.where(t == 0, 1, t) for t in (G.abs().amax(2), A.abs().amax(2)))
        rows_A, rows_G = A / steep_A.unsqueeze(2), G / steep.unsqueeze(2)
        parts = H * (unit / slope), here.slope / slope, rows_A, b / (steep_A * unit), rows_G, h / (steep * unit)
        (d, y, lam), failed = solved(parts, z)
        return None if bool(failed.any()) else (d * unit, y * slope / steep_A, lam * slope / steep)


class _Ways:
    """Short ways from a point into the branches that meet there, and the Jacobians behind them.

    Attributes:
        ways: ``(k, n)``. J: ``(k, m, n)``. steep: ``|J|`` of each constraint value, ``(m,)``.
    """

    def __init__(self, model: Model, z: Tensor, size: _Size) -> None:
        self.model, self.z, self.size, self.length = model, z, size, _NEAR * size.of(z)
        self.ways, self.J = z.new_zeros(0, model.size), z.new_zeros(0, model.count, model.size)
        self.steep = z.new_full((model.count,), torch.finfo(z.dtype).tiny)

    def add(self, directions: Tensor) -> int:
        """As many as stay within one branch, and within that if turned a little."""
        count, aside = len(self.ways), _spread(len(directions), self.z, len(self.ways))
        for straight, turn in zip(_units(directions) * self.length, aside * self.length, strict=True):
            way = straight + _ASIDE * turn
            J, there = (self.model.local(self.z + s).jacobian for s in (way, 3 * straight - _ASIDE * turn))
            self.steep = torch.maximum(self.steep, J[0].abs().amax(1))
            if bool(((there - J)[0].abs().amax(1) <= _LIKE * self.steep).all()):  # false for NaN
                self.ways = torch.cat([self.ways, way.unsqueeze(0)])
                self.J = torch.cat([self.J, 1.5 * J - 0.5 * there])  # at the point itself
        return len(self.ways) - count

    def balance(self, multipliers: Tensor) -> bool:
        """Do the branches balance the objective?  Where a step within those known so far leads on, it leads into another."""
        model, z, sided = self.model, self.z, self.model.one_sided
        here, planes = model.local(z), _Planes(model, z, self.size)
        for number in range(_STEPS + 2 * model.size):
            planes.rows = self.J[:, sided].flatten(0, 1).unsqueeze(0)
            room = (-here.constraints[:, sided]).clamp_min(0).repeat(1, len(self.J))
            planes.level = (planes.rows @ z.unsqueeze(2)).squeeze(2) + room
            step = planes.step(here, z, multipliers)
            if step is None:
                return False
            if float(step[0].abs().max()) <= _BALANCED * self.size.of(z):
                return True
            known = len(self.J)
            if not self.add(
                _units(step[0]) + z.new_tensor(_TURNED).unsqueeze(1) * _spread(len(_TURNED), z, number)
            ) or not self._are_new(known):
                return False
        return False

    def _are_new(self, known: int) -> bool:
        """Is there a branch behind the ways after so many that is behind none of these?"""
        apart = (self.J[known:, None] - self.J[:known]).abs().amax(3)
        return bool((apart > _LIKE * self.steep).any(2).all(1).any())


def _spread(count: int, z: Tensor, seed: int) -> Tensor:
    """So many directions, ``(count, n)``, of which no entry is small, and few are alike."""
    n = z.shape[1]
    return _units(seeded.signs(count, n, seed=seed).to(z) * (1 + seeded.uniform(count, n, seed=seed).to(z)))


def _units(directions: Tensor) -> Tensor:
    return torch.nn.functional.normalize(directions, dim=1)


def _branches(model: Model, z: Tensor, multipliers: Tensor, pressing: Tensor, size: _Size) -> Kink | None:
    """The branches of active inequalities that ``pressing`` ways and others lead into and that meet in ``z``; ``None`` where
    none of those has a kink, or what is there is more than the greatest of branches, or no mean of their gradients balances
    the objective."""
    about, n, sided = _Ways(model, z, size), model.size, model.one_sided
    if not about.add(torch.cat([pressing, _spread(n + _MORE, z, 0)])) or not about.balance(multipliers):
        return None
    J, ways = about.J, about.ways
    kinked = (J - J[0]).abs().amax((0, 2)) > _JUMPS * about.steep
    rows = kinked & sided & (multipliers[0] > _FORCE * multipliers.max())
    rising = torch.einsum("kmn,jn->mkj", J[:, rows], ways)  # of each branch along each way: the own one is the greatest
    greatest = rising.diagonal(dim1=1, dim2=2) >= rising.amax(1) - _LIKE * about.length * about.steep[rows, None]
    if not bool(rows.any()) or not bool(greatest.all()) or bool((kinked & ~sided).any()):
        return None
    picks, w = _independent((J - J[0]) / about.steep.unsqueeze(1), rows), torch.cat([z, multipliers], 1)
    return Kink(w, ways, picks, _number(model.f, w, picks[0][1]))


def _independent(differ: Tensor, rows: Tensor) -> tuple[tuple[int, int], ...]:
    """Branches ``k`` and ``rows`` whose gradients' differences, ``(k, m, n)``, are independent: Gram-Schmidt."""
    picks, basis = [], differ.new_zeros(0, differ.shape[2])
    for row in rows.nonzero().squeeze(1).tolist():
        for k in range(1, len(differ)):
            left = differ[k, row]
            for _ in range(2):
                left = left - basis.mT @ (basis @ left)
            length = torch.linalg.vector_norm(left)
            if float(length) > _INDEPENDENT:
                basis = torch.cat([basis, (left / length).unsqueeze(0)])
                picks.append((k, row))
    return tuple(picks)


def _number(f: Evaluations, w: Tensor, row: int) -> int:
    """Which constraint a constraint value is of."""
    for number, part in enumerate(f.system.layout.unpack(w).multipliers):
        row -= sum(leaf.numel() for leaf in trees.tree_flatten(part)[0])
        if row < 0:
            return number
    return 0
