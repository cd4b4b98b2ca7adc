r"""Barrier problems of programs: where an iterate stands, what is wrong there, and Newton's step, batched.

    minimise  phi(z, s) = f(z) - mu (sum log(z - lower) + sum log(upper - z) + sum log s)
    subject to  h(z) = 0,   g(z) + s = 0

With multipliers ``y`` of the rows and ``low``, ``high`` of the bounds the optimality conditions are

    df + J'y - low + high = 0,     (z - lower) low = mu,   (upper - z) high = mu,   s y = mu  (inequalities)

whose Newton step is that of the symmetric system of :mod:`implicitkit.solver.constrained.barrier_systems` with
``D = low / (z - lower) + high / (upper - z)`` and ``E = s / y``; the changes of ``s``, ``low`` and ``high`` follow (Wächter
& Biegler 2006, Math. Prog. 106, section 2.2, equations 11 to 13).  ``mu`` is in the units of the objective.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicitkit.foundation.numbers import largest_moduli
from implicitkit.solver.constrained.barrier_systems import Systems
from implicitkit.solver.constrained.limits import Limits
from implicitkit.solver.constrained.model import Model

_LARGE = 1e3  # multipliers of a start that are larger are no estimate
_FAR = 1e10  # multipliers stay within this factor of mu / slack
_MEAN = 100.0  # multipliers that are larger on average excuse errors as much larger
_LITTLE = 1e-3  # of the barrier where only the violation is to fall
_TINY = 1e-300


class Interior(NamedTuple):
    """An iterate: unknowns ``(batch, n)`` strictly inside, multipliers of the rows ``(batch, m)``, slacks (1 in equalities),
    multipliers of the bounds ``(batch, n)``; the objective ``(batch,)`` and the constraints there."""

    z: Tensor
    y: Tensor
    s: Tensor
    low: Tensor
    high: Tensor
    value: Tensor
    constraints: Tensor


class Step(NamedTuple):
    """Changes of an :class:`Interior`."""

    z: Tensor
    y: Tensor
    s: Tensor
    low: Tensor
    high: Tensor


class Scales(NamedTuple):
    """What objective ``(batch,)`` and constraints ``(batch, m)`` are multiplied by where errors meet numbers."""

    objective: Tensor
    rows: Tensor


class Barrier:
    """The barrier problem of every sample at an iterate.

    Args:
        model, systems: of the program there. at: the iterate. limits, scales. gradient: of the Lagrangian without bounds,
            ``(batch, n)``. mu: ``(batch,)``.
    """

    def __init__(
        self, model: Model, systems: Systems, at: Interior, limits: Limits, scales: Scales, gradient: Tensor, mu: Tensor
    ) -> None:
        self.model, self.systems, self.at, self.limits, self.scales = model, systems, at, limits, scales
        self.gradient, self.mu, self.sided = gradient, mu, model.one_sided.expand_as(at.s)
        self.free, self.has_low, self.has_high = limits.free, limits.below, limits.above
        self.room_low, self.room_high = self.room(at.z)

    # ------------------------------------------------------------------------------------------------ what is there
    def room(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Distances to the bounds, 1 where there is none."""
        return (
            torch.where(self.has_low, z - self.limits.lower, 1.0),
            torch.where(self.has_high, self.limits.upper - z, 1.0),
        )

    def missing(self, constraints: Tensor, s: Tensor) -> Tensor:
        """``h`` and ``g + s``."""
        return torch.where(self.sided, constraints + s, constraints)

    def violation(self, constraints: Tensor, s: Tensor) -> Tensor:
        """``theta``, the sum of their moduli, scaled, ``(batch,)``."""
        return (self.scales.rows * self.missing(constraints, s)).abs().sum(1)

    def square(self, constraints: Tensor, s: Tensor) -> Tensor:
        """The sum of their squares."""
        return (self.scales.rows * self.missing(constraints, s)).square().sum(1)

    def objective(self, z: Tensor, s: Tensor, value: Tensor) -> Tensor:
        """``phi``, ``(batch,)``; NaN outside."""
        below, above = self.room(z)
        return value - self.mu * ((below.log() + above.log()).sum(1) + s.log().sum(1))

    def slope(self, step: Step) -> Tensor:
        """The derivative of ``phi`` along a step."""
        return (self._gradient(self.mu) * step.z).sum(1) - self.mu * torch.where(
            self.sided, step.s / self.at.s, 0.0
        ).sum(1)

    def error(self, mu: Tensor) -> Tensor:
        """The largest error in the optimality conditions, scaled, ``(batch,)`` (equations 5 and 6 there): that of
        stationarity by ``s_d``, those of products by ``s_c``, the mean of all multipliers and of the positive ones."""
        at, u, scale = self.at, mu.unsqueeze(1), self.scales.objective
        bounds = self.has_low.sum(1) + self.has_high.sum(1)
        forces = at.low.sum(1) + at.high.sum(1)
        every = (forces + at.y.abs().sum(1)) / (bounds + at.y.shape[1]).clamp_min(1)
        positive = forces + torch.where(self.sided, at.y, 0.0).sum(1)
        positive = positive / (bounds + self.sided.sum(1)).clamp_min(1)
        stationarity, complementarity = ((scale * mean / _MEAN).clamp_min(1) for mean in (every, positive))
        products = (
            torch.where(self.has_low, self.room_low * at.low - u, 0.0),
            torch.where(self.has_high, self.room_high * at.high - u, 0.0),
            torch.where(self.sided, at.s * at.y - u, 0.0),
        )
        slope = torch.where(self.free, self.gradient - at.low + at.high, 0.0)
        wrong = largest_moduli(slope) / stationarity
        wrong = scale * torch.maximum(wrong, largest_moduli(torch.cat(products, 1)) / complementarity)
        return torch.maximum(wrong, largest_moduli(self.scales.rows * self.missing(at.constraints, at.s)))

    def _gradient(self, mu: Tensor) -> Tensor:
        """The gradient of ``phi`` by ``z``."""
        return torch.where(self.free, self.systems.slope - self._force(mu), 0.0)

    def _force(self, mu: Tensor) -> Tensor:
        u = mu.unsqueeze(1)
        return torch.where(self.has_low, u / self.room_low, 0.0) - torch.where(self.has_high, u / self.room_high, 0.0)

    # ------------------------------------------------------------------------------------------------ steps
    @property
    def diagonal(self) -> Tensor:
        """``(D, -E)``."""
        at = self.at
        stiff = torch.where(self.has_low, at.low / self.room_low, 0.0)
        stiff = stiff + torch.where(self.has_high, at.high / self.room_high, 0.0)
        return torch.cat([stiff, -torch.where(self.sided, at.s / at.y.clamp_min(_TINY), 0.0)], 1)

    def newton(self, missing: Tensor) -> Step:
        """Newton's step, with ``missing`` in the place of ``h`` and ``g + s``; the systems are factored."""
        at, u, n = self.at, self.mu.unsqueeze(1), self.model.size
        y = at.y.clamp_min(_TINY)
        target = torch.where(self.sided, u / y - at.s, 0.0)
        x = self.systems.solve(torch.cat([self._force(self.mu) - self.gradient, -missing - target], 1))
        dz, dy = torch.where(self.free, x[:, :n], 0.0), x[:, n:]
        low = torch.where(self.has_low, (u - at.low * dz) / self.room_low - at.low, 0.0)
        high = torch.where(self.has_high, (u + at.high * dz) / self.room_high - at.high, 0.0)
        return Step(dz, dy, torch.where(self.sided, target - at.s / y * dy, 0.0), low, high)

    def restoring(self, which: Tensor, damping: Tensor) -> Step:
        """Levenberg and Marquardt's step for :meth:`square` alone, with little of the barrier, of the samples ``which``."""
        at, n, rows = self.at, self.model.size, self.scales.rows
        mu = _LITTLE * self.mu * self.scales.objective
        u = mu.unsqueeze(1)
        stiff = torch.where(self.has_low, u / self.room_low.square(), 0.0)
        stiff = stiff + torch.where(self.has_high, u / self.room_high.square(), 0.0)
        near = damping.unsqueeze(1) / (1 + at.z.abs()).square()
        soft = torch.where(self.sided, at.s.square() / u, 0.0)
        self.systems.factor(which, torch.cat([near + stiff, -(1 / rows.square() + soft)], 1), 0 * mu, plain=True)
        missing = self.missing(at.constraints, at.s) + torch.where(self.sided, at.s, 0.0)
        x = self.systems.solve(torch.cat([self._force(mu), -missing], 1))
        dz, none = torch.where(self.free, x[:, :n], 0.0), torch.zeros_like(at.z)
        return Step(dz, torch.zeros_like(at.y), torch.where(self.sided, at.s - soft * x[:, n:], 0.0), none, none)

    def longest(self, step: Step, share: Tensor) -> Tensor:
        """How much of a step may be taken if ``share`` of the way to a bound is allowed, at most 1, ``(batch,)``."""
        low = _reach(self.room_low, step.z, self.has_low, share)
        high = _reach(self.room_high, -step.z, self.has_high, share)
        return torch.minimum(torch.minimum(low, high), _reach(self.at.s, step.s, self.sided, share))

    def longest_of_multipliers(self, step: Step, share: Tensor) -> Tensor:
        """How much of a step the multipliers may take, as :meth:`longest` has it of the point."""
        low = _reach(self.at.low, step.low, self.has_low, share)
        high = _reach(self.at.high, step.high, self.has_high, share)
        return torch.minimum(torch.minimum(low, high), _reach(self.at.y, step.y, self.sided, share))

    def moved(self, step: Step, t: Tensor) -> tuple[Tensor, Tensor]:
        """``z`` and ``s`` moved by ``t`` of a step, off the bounds by a rounding error at least."""
        limits, eps = self.limits, torch.finfo(t.dtype).eps
        z = self.at.z + t.unsqueeze(1) * step.z
        room = lambda bound: eps * bound.abs().clamp_min(1e-3)  # noqa: E731
        z = torch.where(self.has_low, z.maximum(limits.lower + room(limits.lower)), z)
        z = torch.where(self.has_high, z.minimum(limits.upper - room(limits.upper)), z)
        return z, self.at.s + t.unsqueeze(1) * step.s

    def multipliers(self, step: Step, z: Tensor, s: Tensor, t: Tensor, dual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``y``, ``low``, ``high`` after ``t`` of a step (``dual`` of those that must stay positive), near ``mu / slack``
        (equation 16 there)."""
        at, u, far = self.at, self.mu.unsqueeze(1), dual.unsqueeze(1)
        below, above = self.room(z)

        def near(value: Tensor, room: Tensor, where: Tensor, other: Tensor) -> Tensor:
            return torch.where(where, value.maximum(u / (_FAR * room)).minimum(_FAR * u / room), other)

        y = near(at.y + far * step.y, s, self.sided, at.y + t.unsqueeze(1) * step.y)
        none = torch.zeros_like(z)
        low, high = at.low + far * step.low, at.high + far * step.high
        return y, near(low, below, self.has_low, none), near(high, above, self.has_high, none)


def estimated(model: Model, systems: Systems, which: Tensor, bound: Tensor) -> Tensor:
    """Least-squares multipliers of the rows, where those of the bounds are ``bound``; zero where they are large."""
    n, m = model.size, model.count
    if not m:
        return bound.new_zeros(len(bound), 0)
    none = bound.new_zeros(len(bound), m)
    systems.factor(which, torch.cat([torch.ones_like(bound), none], 1), bound.new_zeros(len(bound)), plain=True)
    y = torch.nan_to_num(systems.solve(torch.cat([bound - systems.slope, none], 1))[:, n:])
    return torch.where((y.abs().amax(1) <= _LARGE).unsqueeze(1), y, 0.0)


def _reach(x: Tensor, dx: Tensor, where: Any, share: Tensor) -> Tensor:
    if not x.shape[1]:
        return torch.ones_like(share)
    return torch.where(where & (dx < 0), -share.unsqueeze(1) * x / dx, 1.0).amin(1).clamp(max=1.0)
