r"""The quadratic program of one step of sequential quadratic programming, and what takes its place where it has no solution.

    minimise  d'Hd/2 + q'd   subject to   h + Jh d = 0,   g + Jg d <= 0,   lower <= z + d <= upper

Where no ``d`` meets the linearised constraints, those may be violated at a price (elastic mode):

    minimise  d'Hd/2 + q'd + sum_i w_i t_i   subject to   |h + Jh d| <= t,   g + Jg d <= t,   t >= 0,   the bounds

with ``w`` the weights of the exact penalty, so that no multiplier is above the weight of its constraint.

Source: Gill, Murray & Saunders (2005), "SNOPT: an SQP algorithm for large-scale constrained optimization", SIAM Review 47,
section 1.3; Nocedal & Wright 2006, section 18.5.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from implicitkit.foundation.numbers import largest_moduli
from implicitkit.problem.qp_data import QPData
from implicitkit.solution import Status
from implicitkit.solver.constrained.model import Local, Model
from implicitkit.solver.qp.bounds import Box, bounds_first, within_boxes, worth_sets
from implicitkit.solver.qp.interior_point import interior_point
from implicitkit.solver.qp.polish import QPPoint

_TOL = 1e-10  # of the program, relative to the step
_PRICE = 10.0  # of a violation, times what the objective's model can gain by it


class Program:
    """The constraints of the step at ``z``; see the equations above.

    Args:
        model: the program's parts. z: ``(batch, n)``. at: first order there. bounds: ``lower`` and ``upper`` of ``z``.
    """

    def __init__(self, model: Model, z: Tensor, at: Local, bounds: tuple[Tensor, Tensor] | None) -> None:
        self.model, self.at, self.z, self.bounds = model, at, z, bounds
        sided = model.one_sided
        self.A, self.b = at.jacobian[:, ~sided], -at.constraints[:, ~sided]
        self.G, self.h = at.jacobian[:, sided], -at.constraints[:, sided]
        self.room = None if bounds is None else (bounds[0] - z, bounds[1] - z)

    @functools.cached_property
    def box(self) -> tuple[Tensor, Tensor]:
        """The bounds as inequalities ``G d <= h``, upper ones first."""
        z, n = self.z, self.model.size
        if self.room is None:
            return z.new_zeros(len(z), 0, n), z.new_zeros(len(z), 0)
        eye = torch.eye(n, dtype=z.dtype, device=z.device).expand(len(z), n, n)
        return torch.cat([eye, -eye], 1), torch.cat([self.room[1], -self.room[0]], 1)

    def _within_box(self, H: Tensor, slope: Tensor, unit: Tensor) -> QPPoint | None:
        """By sets of active bounds, where there is no other inequality, and that is worth a try."""
        if self.room is None or self.G.shape[1] or not worth_sets(slope, from_inside=True):
            return None
        data = H, slope / unit, self.A, self.b / unit, *(side / unit for side in self.room)
        return within_boxes(Box(*(t.to(torch.float64) for t in data)))

    def solve(self, H: Tensor, slope: Tensor, near: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The step ``(batch, n)``, the multipliers of the constraints ``(batch, m)``, and where there are none.  ``near``:
        multipliers so far; with Newton's step for each unknown alone they say which conditions may be active."""
        unit, sided = _unit(H, slope, self.at, self.model, self.z), self.model.one_sided
        known = self._within_box(H, slope, unit)
        if known is not None and bool((known.status == int(Status.CONVERGED)).all()):
            point, failed = (known.z.to(slope), known.y.to(slope), known.lam.to(slope)), known.status != known.status
        else:
            point, failed = self._with_rows(H, slope, unit, near, known)
        multipliers, sides = slope.new_zeros(len(slope), self.model.count), self.G.shape[1]
        multipliers[:, ~sided] = point[1] * unit
        multipliers[:, sided] = point[2][:, :sides] * unit
        return self._at_bounds(point[0] * unit, point[2][:, sides:] * unit), multipliers, failed

    def _with_rows(
        self, H: Tensor, slope: Tensor, unit: Tensor, near: Tensor | None, known: QPPoint | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """With the bounds as rows: ``z``, ``y`` and ``lam`` in the ``unit``, and where there are none; ``known``: of some
        samples."""
        G, h = torch.cat([self.G, self.box[0]], 1), torch.cat([self.h, self.box[1]], 1)
        sided, begin = self.model.one_sided, None
        curvature = H.diagonal(dim1=1, dim2=2)
        if near is not None and G.shape[1] and bool((curvature > 0).all()):
            alone = -(slope + (near.unsqueeze(1) @ self.at.jacobian).squeeze(1)) / curvature
            lam = torch.cat([near[:, sided], torch.zeros_like(self.box[1])], 1)
            begin = torch.nan_to_num(alone / unit), near[:, ~sided] / unit, lam / unit
        return solved((H, slope / unit, self.A, self.b / unit, G, h / unit), slope, begin, known)

    def _at_bounds(self, d: Tensor, lam: Tensor) -> Tensor:
        """The step, to a bound itself where that holds with force ``lam`` and is a rounding error away: a solution from
        inside is at none, and what is next to a corner is not known to be one."""
        if self.bounds is None:
            return d
        near, least = (_TOL * largest_moduli(t).unsqueeze(1) for t in (d, lam))
        for force, bound in zip(lam.tensor_split(2, 1), self.bounds[::-1], strict=True):
            room = bound - self.z
            d = torch.where(((room - d).abs() <= near) & (force > least), room, d)
        return d

    def solve_elastic(self, H: Tensor, slope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Step, multipliers and failures as of :meth:`solve`, where the constraints may be violated, at the price ``weight``
        ``(batch, m)`` or what would outweigh the objective, whichever is more."""
        n, m, sided = self.model.size, self.model.count, self.model.one_sided
        batch, eye = len(slope), torch.eye(m, dtype=slope.dtype, device=slope.device)
        J, c = self.at.jacobian, self.at.constraints
        steep = J.abs().amax(2)
        steep = torch.where(steep > 0, steep, 1)
        unit = _unit(H, slope, self.at, self.model, self.z)
        gain = largest_moduli(slope).unsqueeze(1) + H.abs().flatten(1).amax(1, keepdim=True) * unit
        price = torch.maximum(weight * steep, _PRICE * gain)  # of J-rows of unit size
        rows, values = J / steep.unsqueeze(2), c / (steep * unit)
        slack = -eye.expand(batch, m, m)
        both = torch.cat([rows, slack], 2)
        down = torch.cat([-rows, slack], 2)[:, ~sided]
        none = torch.cat([rows.new_zeros(batch, m, n), slack], 2)[:, sided]
        box = torch.cat([self.box[0], rows.new_zeros(batch, self.box[0].shape[1], m)], 2)
        G = torch.cat([both, down, none, box], 1)
        h = torch.cat([-values, values[:, ~sided], torch.zeros_like(values[:, sided]), self.box[1] / unit], 1)
        P = H.new_zeros(batch, n + m, n + m)
        P[:, :n, :n] = H
        q = torch.cat([slope / unit, price / unit], 1)
        point, failed = solved((P, q, P[:, :0], q[:, :0], G, h), slope)
        multipliers = point[2][:, :m].clone()
        multipliers[:, ~sided] -= point[2][:, m : m + int((~sided).sum())]
        return point[0][:, :n] * unit, multipliers * unit / steep, failed


def solved(
    data: tuple[Tensor, ...],
    like: Tensor,
    near: tuple[Tensor, ...] | None = None,
    known: QPPoint | None = None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """``z``, ``y`` and ``lam`` of a quadratic program, and where they are worth nothing; ``near``: such as may be near;
    ``known``: of some."""
    double = lambda parts: tuple(t.to(torch.float64) for t in parts)  # noqa: E731
    begin = None if near is None else double(near)

    def from_inside(rest: QPData) -> QPPoint:
        return interior_point(rest, tol=_TOL, near=begin if len(rest.q) == len(like) else None)

    programs = QPData(*double(data))
    if known is None:
        point = bounds_first(programs, from_inside, from_inside=True)
    else:
        point = known.with_rest(programs, from_inside)
    failed = (point.status != int(Status.CONVERGED)) & (point.status != int(Status.INACCURATE))
    found = point.z.to(like), point.y.to(like), point.lam.to(like)
    return found, failed | ~found[0].isfinite().all(1)


def _unit(H: Tensor, slope: Tensor, at: Local, model: Model, z: Tensor) -> Tensor:
    """The length of the step by its causes, ``|df| / |H|`` and ``|violation| / |J|``, ``(batch, 1)``; never zero.  In these
    units the tolerance of the program is relative to the step however small it is.  A linear objective leads to a corner
    whatever its slope: there it is the length of ``z``, where a violation is rounding beside that."""
    length = largest_moduli(slope) / H.abs().flatten(1).amax(1)
    if model.count:
        steep, size = at.jacobian.abs().flatten(1).amax(1), largest_moduli(z)
        wrong = largest_moduli(model.violation(at.constraints)) / steep
        rounded = ~length.isfinite() & (wrong > 0) & (wrong <= torch.finfo(z.dtype).eps ** 0.75 * size)
        wrong = torch.where(rounded, size, wrong)
        length = torch.where(steep > 0, torch.maximum(torch.where(length.isfinite(), length, 0), wrong), length)
    return torch.where(length.isfinite() & (length > 1e-150), length, 1.0).unsqueeze(1)
