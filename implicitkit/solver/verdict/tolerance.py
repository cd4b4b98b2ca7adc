r"""How small must ``|F|`` be?  What is asked of a residual, in whatever units it is, before anything costs evaluations.

A fixed point has converged when ``|F(z)| <= atol + rtol |z|``: its residual has the units of ``z`` (in a composition,
those of each part).  Any other residual has units of its own; ``|F| <= atol + rtol |F(z0)|`` is where its claim begins, and
the backward error decides (:mod:`~implicitkit.solver.verdict.backward_error`).

Where nobody gave an ``atol``, it is ``min(eps^(2/3), rtol s)``, with ``s = |F(z0)|`` (of residuals in the units of ``z``,
``|z0| + |F(z0)|``), so that ``10^-12 F(z) = 0`` and ``F(10^12 z) = 0`` have the solutions of ``F(z) = 0``.  And an equation
that has not come down by ``rtol``, ``|F_i| > 10 rtol |F_i(z0)|``, is asked for its backward error whatever ``|F|`` is, since
a norm hides equations in small units behind others in large ones (a penalty of 1e13).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.base import Options
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.norms import start_size
from implicitkit.solver.subset import ask
from implicitkit.solver.verdict.backward_error import by_pieces
from implicitkit.solver.verdict.differences import in_working_precision
from implicitkit.solver.verdict.rounding_level import NOISE, rounding

_FAR, _FAR_FIXED = 5.0, 8.0  # max |z| beyond which a vanishing residual, a fixed point's, may vanish at infinity ...
_GROWN = 100.0  # ... or |z| of so many times |z0| + |F(z0)|
LEAST = 2e-16  # of |F(z0)|: units of a single equation that holds at the start, at least
HIDDEN = 10.0  # times rtol: what is left of an equation that is small in the norm only


class Tolerance:
    """What is asked of the samples of one solve, and where ``z`` is far out.

    Attributes:
        floor: what is small whatever cancels, ``(batch,)``: ``atol``, or less where nobody gave it.
        first, bound: what is asked at first, and now, where it is not relative to the state.
        came_from: the points a step ago, and ``F`` there.
    """

    def __init__(self, f: Evaluations, options: Options) -> None:
        self.rtol, self.atol = options.rtol, options.atol
        self.size, self.own_norm = options.size, options.norm is not None
        self.relative_to_state = f.kind.iteration
        self.start_norm, self._start_rows = options.start_norm, options.start_rows
        self.f = f
        self._pieces: tuple[int, ...] | None = f.problem.pieces(f.system.layout) if f.kind.iteration else None
        self.floor: float | Tensor = self.atol  # what is small whatever cancels, ``(batch,)``: ``atol``, or less
        self._floor_of = options.floor
        # |F_i(z0)|, where nobody gave ``atol`` and the equations may have units of their own, ``(batch, n)``
        self._by_default = options.atol_is_default and options.rtol > 0 and not f.kind.like_state
        self._unit: Tensor | None = options.start_size  # of a minimum, what is far in units of its start: at most 1
        self._walks: Tensor | None = None  # which began at zero, and have their largest step for a unit
        self._has_rows = self._by_default and not f.kind.iteration and f.system.size > 1
        self._rows: Tensor | None = None
        self._began: Tensor | None = None  # |z0|, likewise
        self.first: Tensor | None = None  # what is asked at first, where it is not relative to the state
        self.bound: Tensor | None = None  # ... and now
        self._reach: Tensor | None = None  # of a fixed point: how far |z| may come without being asked
        self._rate: Any = None  # rtol and the floor as tensors: a number costs an operation four times as much
        self._least: Any = None
        self._last: tuple[Tensor, Tensor] | None = None  # a point, and |z| of each sample there
        self._largest: tuple[Tensor, float] | None = None  # a point, and the largest entry there
        self.came_from: tuple[Tensor, Tensor] | None = None  # the points a step ago, and F there

    def norm(self, residual: Tensor) -> Tensor:
        """``|F|`` of each sample, ``(batch,)``: its 2-norm, unless the user has one of his own."""
        return self.size(residual)

    def tolerance(self, z: Tensor, norm: Tensor) -> Tensor:
        """What ``|F|`` must come down to before a sample may claim to have converged, ``(batch,)``; ``norm``: that at ``z``
        (at the start in the first call)."""
        if self.relative_to_state:
            return self._of_iterations(z, norm)
        if self.bound is None:
            self._begin(z, norm if self.start_norm is None else self.start_norm)
        elif self._walks is not None and self._unit is not None and self.came_from is not None:
            self._unit = self._unit.maximum(self._walks * start_size(z - self.came_from[0]))
        assert self.bound is not None
        return self.bound

    def _of_iterations(self, z: Tensor, norm: Tensor) -> Tensor:
        """``floor + rtol |z|``; of a composition, where every part of it holds."""
        size = self.size_of(z)
        if self._reach is None:
            reach = size.add(norm)
            self.floor = self._floor_of(reach)
            self._reach = reach.mul_(size.new_full((), _GROWN))
            self._rate = size.new_full((), self.rtol)
            self._least = self.floor if isinstance(self.floor, Tensor) else size.new_full((), self.floor)
        if self._pieces is not None:
            return by_pieces(self.f.residual(z), z, self._pieces, self.norm, norm, size, self.floor, self.rtol)
        return torch.addcmul(self._least, size, self._rate)

    def _begin(self, z: Tensor, norm: Tensor) -> None:
        """What is asked by where a solve begins, ``|F(z0)| = norm``, and the units of its equations there."""
        if self.f.kind.minimisation:
            self._unit = start_size(z) if self._unit is None else self._unit
            self._walks = self._unit == 0 if not bool((self._unit > 0).all()) else None
            if self._walks is not None:  # another method may have come from there to here
                self._unit = self._unit.maximum(self._walks * start_size(z))
        self.floor = self._floor_of(self.size_of(z) + norm if self.f.kind.like_state else norm)
        self.first = self.bound = torch.nan_to_num(norm * self.rtol, 0, 0, 0).add_(self.atol)
        if not self._has_rows:
            return
        self._began = z.abs()
        rows = in_working_precision(self.f.residual(z)).abs()
        # a condition of optimality that holds from the beginning need not be in small units
        rows = torch.where(rows > 0, rows, torch.inf) if self.f.kind.returns_program else rows
        # what holds at the start, but for rounding, says nothing of its units but that they are no smaller than this; what
        # holds to the last bit (a boundary value of zero), that no step need leave less than rounding does
        share = torch.where(rows == 0, max(LEAST, self.f.eps), LEAST)
        least = share * norm.nan_to_num(0, 0, 0).unsqueeze(1)
        first = rows if self._start_rows is None else in_working_precision(self._start_rows)
        self._rows, tiny = torch.maximum(rows, least), (rows < least) & (rows > 0)
        tiny = (tiny & (first > 0) & (first < least) & ~self.f.rounded(z)).any(1) if bool(tiny.any()) else tiny
        if bool(tiny.any()):
            noise = ask(self.f, rounding, z, tiny, self._began)
            self._rows = torch.where(tiny.unsqueeze(1) & (rows > NOISE * noise), rows, self._rows)

    def measured(self, z: Tensor, norm: Tensor) -> Tensor:
        """``|F|``, NaN where ``z``, or ``|z|`` if that measures it, is not finite: which solves nothing, ``(batch,)``."""
        measure = self.size_of(z) if self.relative_to_state else norm
        whole = math.isfinite(self.largest(z) + float(measure.sum()))
        return norm if whole else torch.where(torch.isfinite(z).all(1) & torch.isfinite(measure), norm, torch.nan)

    def aim(self, z: Tensor) -> Tensor:
        """What a solver that is told its tolerance beforehand should come down to, if the solution is near ``z``."""
        return self.norm(z) * self.rtol + self.floor

    def hides(self, z: Tensor) -> Tensor:
        """Which samples have an ``F_i`` that has hardly come down since the start, however small ``|F|``, ``(batch,)``."""
        if self._rows is None:
            return torch.zeros(len(z), dtype=torch.bool, device=z.device)
        return (self.f.residual(z).abs() > HIDDEN * self.rtol * self._rows).any(1)

    def hiding(self, z: Tensor, which: Tensor) -> Tensor:
        """:meth:`hides`, of the samples ``which`` at another point, asked beside ``f``; ``(batch,)``."""
        if self._rows is None or not bool(which.any()):
            return torch.zeros_like(which)
        residual = self.f.beside("root").residual(z)
        return which & (residual.abs() > HIDDEN * self.rtol * self._rows).any(1)

    def _floor(self) -> float | Tensor:
        """What is small whatever cancels, for each ``F_i``: in its own units, where nobody gave an ``atol``."""
        floor = self.floor.unsqueeze(1) if isinstance(self.floor, Tensor) else self.floor
        if self._rows is None or not isinstance(floor, Tensor):
            return floor
        return torch.fmin(floor, self.rtol * self._rows)

    def _lower(self, which: Tensor, to: Tensor) -> None:
        assert self.bound is not None
        to = to.clamp_min(self.floor) if self._rows is None else to  # |F| says nothing of small units
        self.bound = torch.where(which, torch.minimum(self.bound, to), self.bound)

    def _all_are_near(self, z: Tensor) -> bool:
        """Is :meth:`_is_far` true of no sample?  By the largest entry, which is cheaper."""
        if self._reach is None:
            near = self.f.problem.determined or self.largest(z) <= _FAR
            return near and (self._unit is None or not bool(self._is_far(z).any()))
        return self.largest(z) <= _FAR_FIXED and not int(self.size_of(z).gt(self._reach).count_nonzero())

    def _is_far(self, z: Tensor) -> Tensor:
        if self._reach is not None:
            return (z.abs().amax(1) > _FAR_FIXED) | (self.size_of(z) > self._reach)
        return z.abs().amax(1) > (_FAR if self._unit is None else _FAR * self._unit)

    def largest(self, z: Tensor) -> float:
        """The largest ``|z_i|`` of all samples, NaN where there is one; of the last point it is remembered, by identity."""
        if self._largest is None or self._largest[0] is not z:
            # four times as fast as the norm on a processor, and one synchronisation as well
            low, high = torch.aminmax(z)
            self._largest = z, float(torch.maximum(low.neg(), high))
        return self._largest[1]

    def size_of(self, z: Tensor) -> Tensor:
        """``|z|`` of each sample; of the last point it is remembered, by identity."""
        if self._last is None or self._last[0] is not z:
            self._last = z, self.norm(z)
        return self._last[1]
