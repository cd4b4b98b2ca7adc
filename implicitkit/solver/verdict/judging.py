r"""What "converged" means: a verdict on a point, whoever found it and wherever the search began.

A fixed point has converged when ``|F(z)| <= atol + rtol |z|``: its residual has the units of ``z`` (in a composition,
those of each part).  Any other residual has units of its own, and only the function says what is small: a point is taken
when ``|F(z)| <= atol``, or when every equation holds to ``|F_i| <= atol + rtol S_i``, where ``S_i`` is the size of what
cancels in it *near* ``z`` (:func:`~implicitkit.solver.verdict.scales.row_scales`).  That is asked only where a sample claims
to have converged while ``|F| > atol``.  What rounding leaves of ``F`` is measured too: less cannot be asked for.

Where nobody gave an ``atol``, it must not depend on the units: it is then ``min(eps^(2/3), rtol s)``, with ``s = |F(z0)|``
(of fixed points, and other residuals in the units of ``z``, ``|z0| + |F(z0)|``), so that ``10^-12 F(z) = 0`` and
``F(10^12 z) = 0`` have the solutions of ``F(z) = 0``.  Nor on the units of single equations: one that has not come down
from where it began by ``rtol``, ``|F_i| > 10 rtol |F_i(z0)|``, is asked for ``S_i`` whatever ``|F|`` is, since a norm hides
equations in small units behind others in large ones (a penalty of 1e13).

A residual can also vanish because ``z`` runs away (``exp(-z)``, prices at infinity, ``z = sqrt(z^2 + 1)``).  Such a point is
no solution, however small ``|F|`` is (:func:`~implicitkit.solver.verdict.probing.runs_away`): ``DIVERGED``.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from implicitkit.solution import Status
from implicitkit.solver.base import Options
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.norms import start_size
from implicitkit.solver.steps.factored import is_noise
from implicitkit.solver.subset import ask
from implicitkit.solver.verdict.asked import Asked
from implicitkit.solver.verdict.excess import by_pieces, excess
from implicitkit.solver.verdict.fits import DENSE
from implicitkit.solver.verdict.probing import runs_away
from implicitkit.solver.verdict.scales import NOISE, in_working_precision, rounding, steepness
from implicitkit.solver.verdict.settled import is_minimum, last_jacobian, settled, still_holds
from implicitkit.solver.verdict.strides import falls_on, gets_on
from implicitkit.solver.verdict.vanishing import AWAY, STANDS, vanishes

_FAR, _FAR_FIXED = 5.0, 8.0  # max |z| beyond which a vanishing residual, a fixed point's, may vanish at infinity ...
_GROWN = 100.0  # ... or |z| of so many times |z0| + |F(z0)|
_LENIENT = 100.0  # times rtol: what is taken in the end of a residual that the solver cannot lower
_AGAIN = 0.9  # a claim that was refused is looked at again when the residual has fallen by this
_UNSIGNED = 100.0  # |A| |z| of so many times a change of F with z may be one without its signs
_LEAST = 2e-16  # of |F(z0)|: units of a single equation that holds at the start, at least
_HIDDEN = 10.0  # times rtol: what is left of an equation that is small in the norm only
_FAST = 0.1  # a step that leaves so little of |F| has not met rounding yet, and the next one costs less than to ask
_LOOSE = 1e-8  # of z_j, by which it may be wrong where |F| <= atol, or ten times rtol if that is more
_Maybe = Tensor | None
_BY_SAMPLE = ["start_norm", "first", "bound", "floor", "_start_rows", "_reach", "_least", "_rows", "_began", "_unit"]


class Judge:
    """Judges the samples of one solve.

    A claim begins with ``|F| <= tolerance``, which costs nothing: ``atol + rtol scale``, scale being ``|z|`` for fixed
    points and else ``|F(z0)|``.  :meth:`examine` says which claims hold, and lowers what is asked of the others;
    :meth:`review` has the last word when the solver has done all it can.
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
        self._again: Tensor | None = None  # |F| at which a claim below atol is looked at once more; or see falls_on
        self._rows: Tensor | None = None
        self._began: Tensor | None = None  # |z0|, likewise
        self.first: Tensor | None = None  # what is asked at first, where it is not relative to the state
        self.bound: Tensor | None = None  # ... and now
        self._reach: Tensor | None = None  # of a fixed point: how far |z| may come without being asked
        self._rate: Any = None  # rtol and the floor as tensors: a number costs an operation four times as much
        self._least: Any = None
        self._last: tuple[Tensor, Tensor] | None = None  # a point, and |z| of each sample there
        self._largest: tuple[Tensor, float] | None = None  # a point, and the largest entry there
        self.asked = Asked()  # who was asked at a point whether he runs away
        self.came_from: tuple[Tensor, Tensor] | None = None  # the points a step ago, and F there
        self._healthy: tuple[Tensor, Tensor] | None = None  # a point, whose equations all change there far more than F
        self._held: tuple[Tensor, Tensor] | None = None  # a point, and where a zero is near by factors that hold there
        self._settled: tuple[Tensor, Tensor] | None = None  # a point, and where one is near by factors of the last step

    def norm(self, residual: Tensor) -> Tensor:
        """``|F|`` of each sample, ``(batch,)``: its 2-norm, unless the user has one of his own."""
        return self.size(residual)

    def tolerance(self, z: Tensor, norm: Tensor) -> Tensor:
        """What ``|F|`` must come down to before a sample may claim to have converged, ``(batch,)``; ``norm``: that at ``z``
        (at the start in the first call)."""
        if self.relative_to_state:
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
        if self.bound is None:
            if self.f.kind.minimisation:
                self._unit = start_size(z) if self._unit is None else self._unit
                self._walks = self._unit == 0 if not bool((self._unit > 0).all()) else None
            norm = norm if self.start_norm is None else self.start_norm
            self.floor = self._floor_of(self.size_of(z) + norm if self.f.kind.like_state else norm)
            self.first = self.bound = torch.nan_to_num(norm * self.rtol, 0, 0, 0).add_(self.atol)
            if self._has_rows:
                self._began = z.abs()
                rows = in_working_precision(self.f.residual(z)).abs()
                # a condition of optimality that holds from the beginning need not be in small units
                rows = torch.where(rows > 0, rows, torch.inf) if self.f.kind.returns_program else rows
                # what holds at the start, but for rounding, says nothing of its units but that they are no smaller than this
                least = _LEAST * norm.nan_to_num(0, 0, 0).unsqueeze(1)
                first = rows if self._start_rows is None else in_working_precision(self._start_rows)
                self._rows, tiny = torch.maximum(rows, least), (rows < least) & (rows > 0)
                tiny = (tiny & (first > 0) & (first < least)).any(1) if bool(tiny.any()) else tiny
                if bool(tiny.any()):
                    noise = ask(self.f, rounding, z, tiny, self._began)
                    self._rows = torch.where(tiny.unsqueeze(1) & (rows > NOISE * noise), rows, self._rows)
        elif self._walks is not None and self._unit is not None and self.came_from is not None:
            self._unit = self._unit.maximum(self._walks * start_size(z - self.came_from[0]))
        return self.bound

    def measured(self, z: Tensor, norm: Tensor) -> Tensor:
        """``|F|``, NaN where ``z``, or ``|z|`` if that measures it, is not finite: which solves nothing, ``(batch,)``."""
        measure = self.size_of(z) if self.relative_to_state else norm
        whole = math.isfinite(self.largest(z) + float(measure.sum()))
        return norm if whole else torch.where(torch.isfinite(z).all(1) & torch.isfinite(measure), norm, torch.nan)

    def aim(self, z: Tensor) -> Tensor:
        """What a solver that is told its tolerance beforehand should come down to, if the solution is near ``z``."""
        return self.norm(z) * self.rtol + self.floor

    def select(self, samples: Tensor, f: Evaluations | None = None) -> Judge:
        """The judge of these samples only, which ``f`` evaluates."""
        judge = copy.copy(self)
        judge.f, judge._last, judge.asked = (self.f if f is None else f), None, self.asked.select(samples)
        judge._healthy = judge._held = judge._settled = judge.came_from = None
        for name in (*_BY_SAMPLE, "_again", "_walks"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.ndim:
                setattr(judge, name, value.index_select(0, samples))
        return judge

    # ---------------------------------------------------------------------------------------------------------- verdicts
    def examine(self, z: Tensor, norm: Tensor, claims: Tensor, before: _Maybe = None, stuck: _Maybe = None) -> Tensor:
        """Which of the ``claims`` hold by the scale near ``z``, ``(batch,)``; what is asked of the others is lowered to what
        that demands.  Where nothing is asked of them but ``|F| <= atol``, or they are fixed points, they hold; unless nobody
        gave an ``atol``, and steps still get on (those that are ``stuck`` do not).

        ``before``: ``|F|`` a step ago.  Of many unknowns, whether it is rounding that refuses a claim is not asked while
        steps take ``|F|`` down to a tenth: the claim may be made again.
        """
        if self.relative_to_state:
            return claims if before is None or not self._by_default else claims & ~self._falls_on(z, norm, before)
        doubtful = claims & (norm > self.floor)
        if self._rows is not None:
            doubtful = doubtful | (claims & self.hides(z))
        claims = self._but_loose(z, norm, claims, doubtful if stuck is None else doubtful | stuck, before)
        if bool(doubtful.any()):
            doubtful = doubtful & ~self._is_noise(z, norm, doubtful)
        if not bool(doubtful.any()):
            return claims
        fast = before is not None and z.shape[1] > DENSE and bool((norm <= _FAST * before)[doubtful].all())
        excess = self._excess(z, doubtful, self.rtol, careful=False, noise=not fast)
        refused = doubtful & ~(excess <= 1)
        if not fast:
            self._lower(refused, norm * torch.clamp(1 / excess, max=_AGAIN))
        # of a fit the residual vector says more than its gradient, wherever z is
        far = doubtful & ~refused
        far = far if self.f.kind.of_residuals and z.shape[1] <= DENSE else far & self._is_far(z)
        if bool(far.any()):
            far = self._runs_away(z, far)
            self._lower(far, 0.1 * norm)
            refused = refused | far
        return claims & ~refused

    def _but_loose(self, z: Tensor, norm: Tensor, claims: Tensor, others: Tensor, before: _Maybe) -> Tensor:
        """The claims but those which ``|F| <= atol`` alone lets stop while steps get on (``z^2 = 1e-12`` from 1 at 4e-6)."""
        if not self._by_default or before is None or self.came_from is None:
            return claims
        rtol = max(_HIDDEN * self.rtol, _LOOSE)
        loose = claims & ~others & gets_on(z, norm, self.came_from[0], before, rtol) & (norm > self.rtol * self.floor)
        if not bool(loose.any()):
            return claims
        self._again = torch.full_like(norm, math.inf) if self._again is None else self._again
        asked = loose & (norm <= self._again)
        if bool(asked.any()):
            fair = asked & (self._excess(z, asked, rtol, careful=False, noise=False, floor=0.0) <= 1)
            loose, self._again = loose & ~fair, torch.where(asked, _FAST * norm, self._again)
        return claims & ~loose

    def _falls_on(self, z: Tensor, norm: Tensor, before: Tensor) -> Tensor:
        """Samples of a fixed point which ``|F| <= atol`` alone lets stop while it falls (``z = z / 2 + 1e-12`` from 1)."""
        loose = (norm > max(_HIDDEN * self.rtol, _LOOSE) * self.size_of(z)) & (norm > self.rtol * self._least)
        loose, self._again = falls_on(self.f, z, norm, loose & (norm < before), self._reach, self._again)
        return loose

    def hides(self, z: Tensor) -> Tensor:
        """Which samples have an ``F_i`` that has hardly come down since the start, however small ``|F|``, ``(batch,)``."""
        if self._rows is None:
            return torch.zeros(len(z), dtype=torch.bool, device=z.device)
        return (self.f.residual(z).abs() > _HIDDEN * self.rtol * self._rows).any(1)

    def hiding(self, z: Tensor, which: Tensor) -> Tensor:
        """:meth:`hides`, of the samples ``which`` at another point, asked beside ``f``; ``(batch,)``."""
        if self._rows is None or not bool(which.any()):
            return torch.zeros_like(which)
        residual = self.f.beside("root").residual(z)
        return which & (residual.abs() > _HIDDEN * self.rtol * self._rows).any(1)

    def _floor(self) -> float | Tensor:
        """What is small whatever cancels, for each ``F_i``: in its own units, where nobody gave an ``atol``."""
        floor = self.floor.unsqueeze(1) if isinstance(self.floor, Tensor) else self.floor
        if self._rows is None or not isinstance(floor, Tensor):
            return floor
        return torch.fmin(floor, self.rtol * self._rows)

    def _is_noise(self, z: Tensor, norm: Tensor, which: Tensor) -> Tensor:
        """Which of these samples have nothing but rounding errors left by the last factors, ``(batch,)``.

        They are those of a point before, where the equations may be steeper by any factor (``exp(z)`` far out): ``F`` must
        change with ``z`` as they say it does, but for what they add up without signs.  What is below the floor of its own
        equation is small whatever is added up in it (a boundary value of zero: nothing but ``z_i = 1e-27`` itself).
        """
        known = self.f.system.factored
        if known is None or len(z) != self.f.system.batch:
            return torch.zeros_like(which)
        F = self.f.residual(z)
        noise = which & is_noise(known, z, norm, torch.where(F.abs() <= self._floor(), 0, F))
        if bool(noise.any()) and not (self.f.kind.returns_program and bool((self._is_settled(z) | ~noise).all())):
            size = torch.linalg.vector_norm(known.size(z), dim=1)
            if self._has_factors(z, exact=True) and bool(noise.all()):
                steep, held = ask(self.f, still_holds, z, noise, known).unbind(1)
                self._held = z, held > 0
            else:
                steep = ask(self.f, steepness, z, noise)
            noise = noise & (_UNSIGNED * steep >= size)
        return noise

    def gone(self, z: Tensor, which: Tensor, strode: Tensor | None = None) -> Tensor:
        """Which of these samples are on the way to infinity, where the residual vanishes, ``(batch,)``; asked of those far
        out, and of others that ``strode`` to where they are, or had to be saved by the last word."""
        far = which & (self._is_far(z) if strode is None else strode | self._is_far(z))
        return self._runs_away(z, far) if bool(far.any()) else far

    def _runs_away(self, z: Tensor, far: Tensor) -> Tensor:
        """Which of the samples ``far`` out are on the way to infinity; who was asked at this point is not asked again."""
        (asked, away), known = self.asked.at(z), self.f.system.factored
        open_ = far & ~asked
        if bool(open_.any()):
            unknown = open_ & ~self._is_settled(z)
            if bool(unknown.all()) and self._has_factors(z, exact=True):
                unknown = unknown & (ask(self.f, still_holds, z, unknown, known)[:, 1] == 0)
            if bool(unknown.any()):
                away = torch.where(unknown, ask(self.f, runs_away, z, unknown, *self.asked.clues(self.came_from)), away)
            self.asked.note(z, asked | open_, away, self.came_from)
        return far & away

    def _is_settled(self, z: Tensor) -> Tensor:
        """Where factors of the last step say that a zero is near, ``(batch,)``; a point is looked at once."""
        held = self._held[1] if self._held is not None and self._held[0] is z else None
        none = torch.zeros(len(z), dtype=torch.bool, device=z.device) if held is None else held
        if bool(none.all()) or self.came_from is None:
            return none
        if self._settled is None or self._settled[0] is not z:
            known = self.f.system.factored if self._has_factors(z) else last_jacobian(self.f, self.came_from[0])
            near = none if known is None else settled(self.f, known, z, *self.came_from)
            self._settled = z, near
        return none | self._settled[1]

    def _has_factors(self, z: Tensor, exact: bool = False) -> bool:
        """Are there factors of ``dF/dz``, or if they need not be ``exact`` of something like it, and many unknowns?"""
        known = self.f.system.factored
        there = known is not None and not (exact and getattr(known, "rough", False)) and not self.relative_to_state
        return there and z.shape[1] > DENSE and len(z) == self.f.system.batch

    def last_word(self, z: Tensor, norm: Tensor, failed: Tensor) -> Tensor:
        """Which of the ``failed`` samples have converged after all, ``(batch,)``: by the scale near ``z``, or because the
        residual has fallen as far as was asked at first and the solver can do no more about what is left of it."""
        open_ = failed & torch.isfinite(norm)
        if self.relative_to_state:
            return open_ & (norm <= self.tolerance(z, norm))
        if self.first is None or not bool(open_.any()):
            return torch.zeros_like(failed)
        began = (self.first - self.atol) / max(self.rtol, _LEAST)
        # |F| has not fallen, and z is so large that rounding hides what F was made of at the start (z + sin(z))
        open_ = open_ & ((norm < began) | (began <= self.atol) | (z.abs().amax(1) * self.f.eps < 1))
        lenient = max(self.rtol, min(_LENIENT * self.rtol, self.f.eps**0.5))
        rtol = torch.where(norm <= self.first, lenient, self.rtol).unsqueeze(1)
        return open_ & (self._excess(z, open_, rtol, careful=True) <= 1)

    def asks_for_strides(self) -> bool:
        """Does the last step count?  Not of fixed points at a loose tolerance: slow maps stride to their ends."""
        return not self.relative_to_state or self.rtol <= self.f.eps**0.5

    def review(
        self, z: Tensor, norm: Tensor, status: Tensor, steep: Tensor | None = None, converged: bool = False
    ) -> Tensor:
        """The status of every sample, once the solver has done all it can: some that it gave up have converged
        (:meth:`last_word`), and others have come to rest nowhere (:meth:`gone`, and
        :func:`~implicitkit.solver.verdict.vanishing.vanishes` unless the way there was ``steep``: of fixed points that means
        where they strode out).  ``converged``: the caller knows that every one has."""
        beginning = None if self.f.problem.determined else self._may_vanish(z, norm, status, steep)
        if beginning is not None:
            nowhere = ask(self.f, vanishes, z, beginning)
            if bool(nowhere.any()):
                status = torch.where(nowhere == AWAY, int(Status.DIVERGED), status)
                known = self._reviewed(z, norm, status, None, False)
                return torch.where(nowhere == STANDS, int(Status.STALLED), known)
        counts = steep is not None and self.relative_to_state and self.asks_for_strides() and bool(steep.any())
        return self._reviewed(z, norm, status, steep if counts else None, converged)

    def _reviewed(self, z: Tensor, norm: Tensor, status: Tensor, strode: Tensor | None, converged: bool) -> Tensor:
        if strode is None and (converged or not int(status.count_nonzero())) and self._all_are_near(z):
            return status
        failed = (status == int(Status.MAX_STEPS)) | (status == int(Status.STALLED))
        if bool(failed.any()):
            saved = self.last_word(z, norm, failed)
            status = torch.where(saved, int(Status.CONVERGED), status)
            if in_working_precision(z) is z:  # of fewer digits no correction is next to nothing
                out = saved & (z.abs().amax(1) > (1 if self._unit is None else self._unit))  # further than its start
                strode = out if strode is None else strode | out
        small = (status == int(Status.CONVERGED)) | ((failed | (status == int(Status.NONFINITE))) & (norm <= self.atol))
        return torch.where(self.gone(z, small, strode), int(Status.DIVERGED), status)

    def _may_vanish(self, z: Tensor, norm: Tensor, status: Tensor, steep: Tensor | None) -> Tensor | None:
        """Samples whose only merit may be that every ``|F_i| <= 2 atol`` (of more than 64 unknowns that ``|F| <= atol``:
        corrections by products do not tell single equations), ``(batch,)``; ``None``: there are none.
        How ``F`` changes with ``z`` is known of those whose claim has been looked at."""
        if self.relative_to_state or self.f.kind.returns_program or (steep is not None and bool(steep.all())):
            return None
        several = 2 * math.sqrt(z.shape[1]) if z.shape[1] <= DENSE else 1
        beginning = (status == int(Status.CONVERGED)) & (norm <= self.atol * several)
        beginning = beginning if steep is None else beginning & ~steep
        for known in (self._healthy, self._held):
            if known is not None and known[0] is z:
                beginning = beginning & ~known[1]
        for holds in (is_minimum, lambda _, z: self._is_settled(z)):  # the first is asked of minima in any case
            beginning = beginning & ~holds(self.f, z) if bool(beginning.any()) else beginning
        return beginning if bool(beginning.any()) else None

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

    def _is_far(self, z: Tensor) -> Tensor:
        if self._reach is not None:
            return (z.abs().amax(1) > _FAR_FIXED) | (self.size_of(z) > self._reach)
        return z.abs().amax(1) > (_FAR if self._unit is None else _FAR * self._unit)

    def _excess(
        self, z: Tensor, which: Tensor, rtol: Any, careful: bool, noise: bool = True, floor: Any = None
    ) -> Tensor:
        """The largest (or the user's own norm of) ``|F_i| / (atol + rtol S_i)``, below 1 where ``F`` is nothing but rounding
        errors (which is asked if ``noise``); ``(batch,)``.  Samples whose every ``F_i`` is far below ``S_i``, or which
        are accepted as rounding, are kept."""
        question = partial(excess, careful=careful, noise=noise, worst=self._worst)
        floor = self._floor() if floor is None else floor
        found, healthy = ask(self.f, question, z, which, rtol, floor, self._began).unbind(1)
        self._healthy = z, (healthy > 0) & which
        return found

    def _worst(self, ratios: Tensor) -> Tensor:
        return self.size(ratios) if self.own_norm else ratios.amax(1)
