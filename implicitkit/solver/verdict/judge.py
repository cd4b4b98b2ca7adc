r"""The judge: which claims hold while a solve runs, and what each sample has come to once it has ended.

The verdict is on the point, whoever found it and wherever the search began; the package says what is asked in which order
(:mod:`implicitkit.solver.verdict`).  A point that has run away is no solution, however small ``|F|`` is: ``DIVERGED``.
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
from implicitkit.solver.steps.factored import is_noise
from implicitkit.solver.subset import ask
from implicitkit.solver.verdict.backward_error import backward_error
from implicitkit.solver.verdict.differences import directions, in_working_precision, steepness
from implicitkit.solver.verdict.kantorovich import (
    changes_as_told,
    distant_factors_hold,
    last_jacobian,
    minimum_is_near,
    moved,
    zero_is_near,
)
from implicitkit.solver.verdict.last_step import falls_on, gets_on
from implicitkit.solver.verdict.newton_correction import DENSE
from implicitkit.solver.verdict.runaway import runs_away
from implicitkit.solver.verdict.runaway_near_origin import AWAY, STANDS, vanishes
from implicitkit.solver.verdict.runaway_record import RunawayRecord
from implicitkit.solver.verdict.stationary_fit import LONG, halves
from implicitkit.solver.verdict.tolerance import HIDDEN, LEAST, Tolerance

_LENIENT = 100.0  # times rtol: what is taken in the end of a residual that the solver cannot lower
_AGAIN = 0.9  # a claim that was refused is looked at again when the residual has fallen by this
_UNSIGNED = 100.0  # times the change of F with z: |A| |z| at most, since terms of J z may cancel
_FAST = 0.1  # a step that leaves so little of |F| has not met rounding yet, and the next one costs less than to ask
_LOOSE = 1e-8  # of z_j, by which it may be wrong where |F| <= atol, or ten times rtol if that is more
_Maybe = Tensor | None


class Judge(Tolerance):
    """Judges the samples of one solve.

    A claim begins with ``|F| <= tolerance``, which costs nothing.  :meth:`examine` says which claims hold, and lowers what
    is asked of the others; :meth:`review` has the last word when the solver has done all it can.
    """

    def __init__(self, f: Evaluations, options: Options) -> None:
        super().__init__(f, options)
        # |F| at which a claim below atol is looked at once more; of a fixed point, what :func:`falls_on` knows
        self._again: Tensor | None = None
        self.asked = RunawayRecord()  # which were asked at a point whether they run away
        self._healthy: tuple[Tensor, Tensor] | None = None  # a point, whose equations all change there far more than F
        self._held: tuple[Tensor, Tensor] | None = None  # a point, and where a zero is near by factors that hold there
        self._settled: tuple[Tensor, Tensor] | None = None  # a point, and where one is near by factors of the last step

    def select(self, samples: Tensor, f: Evaluations | None = None) -> Judge:
        """The judge of these samples only, which ``f`` evaluates."""
        judge = copy.copy(self)
        judge.f, judge._last, judge.asked = (self.f if f is None else f), None, self.asked.select(samples)
        judge._healthy = judge._held = judge._settled = judge.came_from = None
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.ndim:  # one of each sample
                setattr(judge, name, value.index_select(0, samples))
        return judge

    # -------------------------------------------------------------------------------------- while a solve runs: 1 to 4
    def examine(self, z: Tensor, norm: Tensor, claims: Tensor, before: _Maybe = None, stuck: _Maybe = None) -> Tensor:
        """Which of the ``claims`` hold by the scale near ``z``, ``(batch,)``; what is asked of the others is lowered to what
        that demands.  Where nothing is asked of them but ``|F| <= atol``, or they are fixed points, they hold; unless nobody
        gave an ``atol``, and steps still get on (those that are ``stuck`` do not).

        ``before``: ``|F|`` a step ago.  Of many unknowns, whether it is rounding that refuses a claim is not asked while
        steps take ``|F|`` down to a tenth: the claim may be made again.
        """
        if self.relative_to_state:
            return claims if before is None or not self._by_default else self._but_falling(z, norm, claims, before)
        # 1. small by the tolerance alone, and in its own units?  4. not while steps get on
        doubtful = claims & (norm > self.floor)
        if self._rows is not None:
            doubtful = doubtful | (claims & self.hides(z))
        claims = self._but_loose(z, norm, claims, doubtful if stuck is None else doubtful | stuck, before)
        if bool(doubtful.any()):  # 3. nothing but rounding, by the last factors?
            doubtful = doubtful & ~self._is_noise(z, norm, doubtful)
        if not bool(doubtful.any()):
            return claims
        # 2. the backward error, and 3. by differences
        fast = before is not None and z.shape[1] > DENSE and bool((norm <= _FAST * before)[doubtful].all())
        excess = self._excess(z, doubtful, self.rtol, careful=False, noise=not fast)
        refused = doubtful & ~(excess <= 1)
        if not fast:
            self._lower(refused, norm * torch.clamp(1 / excess, max=_AGAIN))
        # 6. on the way to infinity?  Of a fit the residual vector says more than its gradient, wherever z is
        far = doubtful & ~refused
        far = far if self.f.kind.of_residuals and z.shape[1] <= DENSE else far & self._is_far(z)
        if bool(far.any()):
            far = self._runs_away(z, far)
            self._lower(far, 0.1 * norm)
            refused = refused | far
        return claims & ~refused

    def _but_loose(self, z: Tensor, norm: Tensor, claims: Tensor, others: Tensor, before: _Maybe) -> Tensor:
        """The claims but those which ``|F| <= atol`` alone lets stop while steps get on (``z^2 = 1e-12`` from 1 at 4e-6), or
        while a fit is on its way along a valley, where its gradient is small in the units of the unknowns."""
        if not self._by_default or before is None or self.came_from is None:
            return claims
        rtol = max(HIDDEN * self.rtol, _LOOSE)
        loose = claims & ~others & self._is_above(z, norm)
        if (
            self.f.kind.of_residuals
            and bool(loose.any())
            and bool(((z - self.came_from[0]).abs() > LONG * z.abs()).any())
        ):
            on_its_way = ask(self.f, halves, z, loose)
            claims, loose = claims & ~on_its_way, loose & ~on_its_way
        F = None if self._rows is None or self.f.kind.returns_program else self.f.residual(z)
        loose = loose & gets_on(z, norm, self.came_from, before, rtol, F)
        if not bool(loose.any()):
            return claims
        self._again = torch.full_like(norm, math.inf) if self._again is None else self._again
        asked = loose & (norm <= self._again)
        if bool(asked.any()):
            fair = asked & (self._excess(z, asked, rtol, careful=False, noise=False, floor=0.0) <= 1)
            loose, self._again = loose & ~fair, torch.where(asked, _FAST * norm, self._again)
        return claims & ~loose

    def _is_above(self, z: Tensor, norm: Tensor) -> Tensor:
        """Where ``|F|`` is more than ``rtol`` times the floor, or an ``F_i`` than that of its own equation, ``(batch,)``."""
        above = norm > self.rtol * self.floor
        if self._rows is None or self.f.kind.returns_program:
            return above
        return above | (self.f.residual(z).abs() > self.rtol * self._floor()).any(1)

    def _but_falling(self, z: Tensor, norm: Tensor, claims: Tensor, before: Tensor) -> Tensor:
        """The claims of fixed points but those which ``|F| <= atol`` alone lets stop while it falls (``z = z / 2 + 1e-12``
        from 1)."""
        loose = (norm > max(HIDDEN * self.rtol, _LOOSE) * self.size_of(z)).logical_and_(claims)
        if not int(loose.count_nonzero()):
            return claims
        loose = loose & (norm > self.rtol * self._least) & (norm < before)
        falls, self._again = falls_on(self.f, z, norm, loose, self._reach, self._again)
        return claims & ~falls

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
        if bool(noise.any()) and not (self.f.kind.returns_program and bool((self._zero_is_near(z) | ~noise).all())):
            size = torch.linalg.vector_norm(known.size(z), dim=1)
            if self._has_factors(z) and bool((self._changed_as_told(z, F, known) | ~noise).all()):
                steep = torch.linalg.vector_norm(moved(known)(directions(z, most=2)[-1]), dim=1)
            elif self._has_factors(z, exact=True) and bool(noise.all()):
                steep, held = ask(self.f, distant_factors_hold, z, noise, known).unbind(1)
                self._held = z, held > 0
            else:
                steep = ask(self.f, steepness, z, noise)
            noise = noise & (_UNSIGNED * steep >= size)
        return noise

    def _changed_as_told(self, z: Tensor, F: Tensor, known: Any) -> Tensor:
        """Whose equations changed along the last step as its factors say, ``(batch,)``: these are no others at its end."""
        if self.came_from is None or moved(known) is None:
            return torch.zeros(len(z), dtype=torch.bool, device=z.device)
        point, before = self.came_from
        return changes_as_told(known, *(in_working_precision(t) for t in (z - point, F, before)))

    # ---------------------------------------------------------------------------------- once a solver has ended: 5 to 7
    def gone(self, z: Tensor, which: Tensor, strode: Tensor | None = None) -> Tensor:
        """Which of these samples are on the way to infinity, where the residual vanishes, ``(batch,)``; asked of those far
        out, and of others that ``strode`` to where they are, or had to be saved by the last word."""
        far = which & (self._is_far(z) if strode is None else strode | self._is_far(z))
        return self._runs_away(z, far) if bool(far.any()) else far

    def _runs_away(self, z: Tensor, far: Tensor) -> Tensor:
        """Which of the samples ``far`` out are on the way to infinity; none is asked at a point twice."""
        (asked, away), known = self.asked.at(z), self.f.system.factored
        open_ = far & ~asked
        if bool(open_.any()):
            unknown = open_ & ~self._zero_is_near(z)
            if bool(unknown.all()) and self._has_factors(z, exact=True):
                unknown = unknown & (ask(self.f, distant_factors_hold, z, unknown, known)[:, 1] == 0)
            if bool(unknown.any()):
                away = torch.where(unknown, ask(self.f, runs_away, z, unknown, *self.asked.clues(self.came_from)), away)
            self.asked.note(z, asked | open_, away, self.came_from)
        return far & away

    def _zero_is_near(self, z: Tensor) -> Tensor:
        """Where factors of the last step say that a zero is near, ``(batch,)``, of minima first what is asked of them in any
        case; a point is looked at once."""
        held = self._held[1] if self._held is not None and self._held[0] is z else None
        none = torch.zeros(len(z), dtype=torch.bool, device=z.device) if held is None else held
        if bool(none.all()):
            return none
        if self._settled is None or self._settled[0] is not z:
            near = minimum_is_near(self.f, z)
            if self.came_from is not None and not bool(near.all()):
                known = self.f.system.factored if self._has_factors(z) else last_jacobian(self.f, self.came_from[0])
                near = near if known is None else near | zero_is_near(self.f, known, z, *self.came_from)
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
        began = (self.first - self.atol) / max(self.rtol, LEAST)
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
        """The status of every sample: some that the solver gave up have converged (:meth:`last_word`), and others have come
        to rest nowhere (:meth:`gone`; :func:`~implicitkit.solver.verdict.runaway_near_origin.vanishes` unless the way was
        ``steep``, of fixed points where they strode out).  ``converged``: every one has."""
        beginning = None if self.f.problem.determined else self._may_vanish(z, norm, status, steep)
        if beginning is not None:  # 7. small near the origin, whatever the units of z
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
        if bool(beginning.any()):
            beginning = beginning & ~self._zero_is_near(z)
        return beginning if bool(beginning.any()) else None

    def _excess(
        self, z: Tensor, which: Tensor, rtol: Any, careful: bool, noise: bool = True, floor: Any = None
    ) -> Tensor:
        """The largest (or the user's own norm of) ``|F_i| / (atol + rtol S_i)``, below 1 where ``F`` is nothing but rounding
        errors (which is asked if ``noise``); ``(batch,)``.  Samples whose every ``F_i`` is far below ``S_i``, or which
        are accepted as rounding, are kept."""
        question = partial(backward_error, careful=careful, noise=noise, worst=self._worst)
        floor = self._floor() if floor is None else floor
        found, healthy = ask(self.f, question, z, which, rtol, floor, self._began).unbind(1)
        self._healthy = z, (healthy > 0) & which
        return found

    def _worst(self, ratios: Tensor) -> Tensor:
        return self.size(ratios) if self.own_norm else ratios.amax(1)
