"""The one loop that runs every iterative method.

Per sample: convergence is judged by the norm of the problem's residual at the very point that is returned; a sample
that has converged, or whose residual is no longer finite, is frozen, and once a fifth of the rows in work have nothing
left to do they are dropped from all later evaluations (where the system allows it).  The best iterate is kept.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from implicitkit.foundation.unversioned_writes import Values
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome
from implicitkit.solver.constrained.restoring import put_inside
from implicitkit.solver.costs import dropping_pays
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.return_checks import kept, stepped
from implicitkit.solver.starts import has_a_value
from implicitkit.solver.subset import WholeBatch
from implicitkit.solver.verdict.judging import Judge
from implicitkit.solver.verdict.minima import Progress
from implicitkit.solver.verdict.strides import by_the_last_step

_DROP = 0.8  # rows are dropped when no more than this share of them is still at work
_RESCUES = 30  # steps out of the domain that plain ones take the place of
_AS_GOOD = 2.0  # times the least |F|: rounding errors of the same size


class Steps(Protocol):
    """What the loop asks of a method (see :class:`~implicitkit.solver.method.Method`)."""

    @property
    def default_max_steps(self) -> int:
        """Steps allowed when nobody says how many."""

    @property
    def keeps_best(self) -> bool:
        """Is the point with the smallest residual returned?"""

    @property
    def hands_over(self) -> bool:
        """Is what it gives up for others to go on with, and to judge?"""

    @property
    def encloses(self) -> bool:
        """Does every step get on, whatever ``|F|`` is after it?"""

    def init(self, f: Evaluations, z: Tensor) -> Any:
        """The state before the first step."""

    def step(self, f: Evaluations, z: Tensor, state: Any) -> tuple[Tensor, Any]:
        """One step."""

    def keep(self, state: Any) -> dict[str, Tensor]:
        """What is kept of the final state."""

    def select(self, state: Any, index: Tensor) -> Any:
        """The state of some samples."""


def iterate(method: Steps, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
    """``z <- method.step(z)`` until every sample has ended."""
    loop = _Loop(method, f, z0, options)
    while loop.look():
        loop.advance()
    return loop.outcome()


class _Loop:
    """One run of a method.

    Attributes:
        z, norm: the points ``(batch, n)`` and ``|F|`` there. best, best_norm: what is returned.
        active: samples still at work. alive: how many are in the evaluations. at_work: how many of them are active.
        last: the point before and its norm. steep: what the last step says of samples (:func:`by_the_last_step`).
        everything: results in full length, once rows have been dropped. whole: the judge of all samples.
        all_converged: every sample has, at the present points (which saves counting).
        own: a method of this library. foreign: one of somebody else, of which no step has been looked at.
    """

    def __init__(self, method: Steps, f: Evaluations, z0: Tensor, options: Options) -> None:
        self.method, self.f, self.options = method, f, options
        self.max_steps = options.max_steps or method.default_max_steps
        self.judge = self.whole = Judge(f, options)
        self.z = self.best = z0
        self.batch = self.alive = self.at_work = z0.shape[0]
        self.everything: WholeBatch | None = None
        self.norm = self.judge.norm(f.residual(z0))
        self.infinity = self.norm.new_full((), math.inf)  # a tensor: compared in a third of the time
        self.best_norm = torch.full_like(self.norm, math.inf)
        self.active = f.active
        self.steps = torch.zeros(self.batch, dtype=torch.int64, device=z0.device)
        self.status = torch.full_like(self.steps, int(Status.MAX_STEPS))
        doubted = f.doubted if self.judge.relative_to_state else None  # another may have come to rest nowhere
        self.steep = torch.zeros_like(self.active) if doubted is None else doubted.clone()
        self.last: tuple[Tensor, Tensor, Tensor] | None = None  # z, |F| and F, a step ago
        self.length: Tensor | None = None  # |z| then, where that is measured
        self.all_converged = self.halted = f.weighs = False
        self.state = method.init(f, z0)
        self.stuck: Tensor | None = None
        self.settled: Tensor | None = None
        self.traces: list[Tensor] = []
        self.watched, self.step, self.rescues = options.watched, 0, 0
        self.own = type(method).__module__.partition(".")[0] == "implicitkit"
        self.foreign = not self.own
        self.tolerance, self.remark, self.progress = self.norm, "", Progress()

    def look(self) -> bool:
        """Judge the present points; are there samples to go on with?"""
        norm = self.norm
        self.tolerance = tolerance = self.judge.tolerance(self.z, norm)
        running = norm.gt(tolerance)  # false for NaN
        if self.at_work < self.alive:
            running.logical_and_(self.active)
        if self.stuck is not None:
            running.logical_and_(~self.stuck)
        # false for NaN, and for frozen samples, whose norm does not change
        improved = (
            norm.lt(self.best_norm) if self.method.keeps_best else norm.lt(self.infinity).logical_and_(self.active)
        )
        left, better = _count(running, improved)
        sound = self.stuck is None  # whoever ends here meets what is asked
        if better < self.at_work:  # what has improved is finite
            finite = norm.lt(self.infinity)
            if _count(finite)[0] < self.alive:
                sound = False
                if self.f.kind.iteration and self.own and self._comes_back():
                    return self.look()
                running.logical_and_(finite)
                left = _count(running)[0]
        if left < self.at_work:
            running, left, better = self._end(running, improved, left, better, sound)
        if better == self.at_work:  # frozen samples stand at their best
            self.best, self.best_norm = self.z, norm
        elif better:
            self.best = torch.where(improved.unsqueeze(1), self.z, self.best)
            self.best_norm = torch.where(improved, norm, self.best_norm)
        self.active, self.at_work = running, left
        if self.watched and self._stopped():
            return False
        return left > 0 and self.step < self.max_steps

    def _comes_back(self) -> bool:
        """Samples that an accelerated step of an iteration has led out of the domain (a capital below zero, where the map
        takes a power of it) take the plain step instead; is there one?  It would hide faults of other people's methods."""
        if self.last is None or self.rescues >= _RESCUES:
            return False
        lost = self.active.logical_and(~(self.norm < math.inf))
        if not _count(lost)[0]:
            return False
        plain = self.last[0] + self.last[2]
        lost.logical_and_((self.z != plain).any(1))
        if not _count(lost)[0]:
            return False
        self.rescues += 1
        self.z = torch.where(lost.unsqueeze(1), plain, self.z)
        self.norm = self.judge.norm(self.f.residual(self.z))
        return True

    def _end(self, running: Tensor, improved: Tensor, left: int, better: int, sound: bool) -> tuple[Tensor, int, int]:
        """Some samples end here: judge their claims, and say how they end.  ``sound``: nothing is stuck, and all norms are
        finite, so that whoever ends meets what is asked.

        Returns which go on, how many they are, and how many of ``improved``, which may change, hold.
        """
        relative = self.judge.relative_to_state
        sized = not relative or math.isfinite(float(self.judge.size_of(self.z).sum()))
        asks = self.judge.own_norm or not relative  # |z| does not tell
        if not sized or (asks and not math.isfinite(self.judge.largest(self.z))):
            self.norm, sound = self.judge.measured(self.z, self.norm), False
            improved.logical_and_(self.norm < math.inf)
            better = _count(improved)[0]
        done = self.active.logical_xor(running) if sound else self.norm.le(self.tolerance)
        claims = done if sound or self.at_work == self.alive else done.logical_and(self.active)
        claimed = self.at_work - left if sound else _count(claims)[0]
        if claimed:
            before = None if self.last is None else 2 * self.norm if self.method.encloses else self.last[1]
            holds = self.judge.examine(self.z, self.norm, claims, before, self.stuck)
            if holds is not claims:
                refused = claims.logical_xor(holds)
                done, claims = done.logical_and(~refused), holds
                running = running.logical_or(refused if self.stuck is None else refused & ~self.stuck)
                claimed, left = _count(claims, running)
                self.tolerance = self.judge.tolerance(self.z, self.norm)
        if better < self.at_work:  # a sample that has converged is returned where it did
            improved.logical_or_(claims)
            if self.stuck is not None:  # of equations in several units |F| may have been smaller elsewhere
                left_here = self.active.logical_xor(running).logical_and_(self._rests()).logical_and_(~improved)
                improved.logical_or_(self.judge.hiding(self.best, left_here))
            better = self.alive if claimed == self.alive else _count(improved)[0]
        if claimed and self.last is not None and self.judge.asks_for_strides(self.z):
            point, _, before = self.last
            F = self.f.residual(self.z)
            sizes = None if self.length is None else (self.judge.size_of(self.z), self.length)
            said = by_the_last_step(relative, self.z, F, point, before, claims, sizes)
            self.steep = torch.where(claims, said, self.steep)
        if claimed == self.alive:  # every one, here and now
            self.steps.fill_(self.step)
            self.status.zero_()  # CONVERGED
            self.all_converged = self.everything is None
            return running, left, better
        ended = claims if sound else self.active.logical_xor(running)
        self.steps.masked_fill_(ended, self.step)
        self.status.masked_fill_(ended, int(Status.CONVERGED))
        if not sound and _count(done)[0] < self.alive - left:
            failed = ended.logical_and_(~done)
            self.status.masked_fill_(failed, int(Status.NONFINITE))
            if self.step and self.f.kind.minimisation:  # a kink, where the gradient of sqrt(z^2) is NaN
                kink = has_a_value(self.f, self.z, failed & ~(self.norm < math.inf))
                self.status.masked_fill_(kink, int(Status.STALLED))
            if self.stuck is not None:
                self.status.masked_fill_(failed & (self.norm < math.inf), int(Status.STALLED))
                if self.progress.unbounded is not None:
                    self.status.masked_fill_(failed & self.stuck & self.progress.unbounded, int(Status.UNBOUNDED))
            if self.settled is not None:
                self.status.masked_fill_(failed & self.settled, int(Status.CONVERGED))
        return running, left, better

    def _rests(self) -> Tensor:
        """Which samples are where no step can do better; or where their method gives up, if that is as good in the norm as
        the best point and in every equation."""
        assert self.stuck is not None
        near = self.stuck & (self.norm <= _AS_GOOD * self.best_norm)
        rests = near & ~self.judge.hides(self.z)
        return rests if self.settled is None else rests | self.settled

    def _stopped(self) -> bool:
        """Trace and callback; has it asked to stop?"""
        norm = self.norm if self.everything is None else self.everything.merge(self.norm, "norm")
        if self.options.trace:
            self.traces.append(norm)
        if self.options.callback is None or self.step == 0:
            return False
        z = self.z if self.everything is None else self.everything.merge(self.z, "z")
        self.halted = self.options.callback(self.step, z, norm) is True
        if self.halted and self.at_work:
            self.status = torch.where(self.active, int(Status.STOPPED), self.status)
        return self.halted

    def advance(self) -> None:
        """One step of the method for the samples at work."""
        if self.at_work < self.alive and self.f.system.can_select:
            self._drop()
        f = self.f
        f.active, f.norm, f.tolerance, f.stuck, f.falling = self.active, self.norm, self.tolerance, None, None
        f.best, f.best_norm, f.at_rounding = self.best, self.best_norm, None
        f.ahead, f.taken, f.at_work, f.dear = 1 if self.watched else self.max_steps - self.step, 1, self.at_work, 0
        if self.judge.own_norm:  # methods compare with 2-norms of their own
            f.norm = torch.linalg.vector_norm(f.residual(self.z), dim=1).to(self.norm)
            units = torch.where(self.norm > 0, f.norm / self.norm, 1)
            f.tolerance, f.best_norm = self.tolerance * units, self.best_norm * units
        self.last = self.z, self.norm, f.residual(self.z)
        self.length = self.judge.size_of(self.z) if self.judge.relative_to_state and not self.judge.own_norm else None
        self.judge.came_from = self.z, self.last[2]
        written, values = _writes(self.z), Values([self.z]) if self.foreign else None
        self.foreign = self.foreign and not values  # of a state that is zero nothing is seen
        z, self.state = stepped(self.method.step(f, self.z, self.state), self.z, type(self.method).__name__)
        if _writes(self.z) != written or (values is not None and values.changed()):
            raise TypeError(
                f"{type(self.method).__name__}.step wrote into the z that it was given, of which f remembers the values: "
                "return another tensor (z.clone() first, or operations without an underscore)"
            )
        self.stuck, self.settled = f.stuck, f.at_rounding
        self.remark = f.remark or self.remark
        if f.falling is not None or Progress.due(f, self.step):
            look = self.progress
            spent = look.spent(f, self.z) if f.falling is None else look.fallen(f, z, f.falling)
            self.stuck = spent if self.stuck is None else self.stuck | spent
        self.z = z if self.at_work == self.alive else torch.where(self.active.unsqueeze(1), z, self.best)
        self.step += f.taken
        self.norm = self.judge.norm(f.residual(self.z))

    def _drop(self) -> None:
        """Leave rows in which nothing is at work out of all later evaluations, if they are many enough."""
        per_row = self.f.system.samples_per_row
        if per_row == 1:
            if self.at_work > _DROP * self.alive or not dropping_pays(self.f, self.at_work / self.alive):
                return
            keep = samples = self.active.nonzero().squeeze(1)
        else:
            rows = self.active.view(-1, per_row).any(1)
            keep = rows.nonzero().squeeze(1)
            if len(keep) > _DROP * len(rows):
                return
            samples = rows.repeat_interleave(per_row).nonzero().squeeze(1)
        self.everything = self.everything or WholeBatch(self.batch)
        self._store({})
        gone = (~self.active).nonzero().squeeze(1)
        self.everything.store_some(gone, self._kept(self._state_of(gone), len(gone)))
        self.everything.narrow(samples)
        self.f.residual(self.z)
        self.f = self.f.select(keep, samples)
        self.judge = self.judge.select(samples, self.f)
        self.progress.select(samples)
        self.state = self._state_of(samples)
        self.z = self.f.selected()
        for name in ("norm", "tolerance", "best", "best_norm", "active", "steps", "status", "steep"):
            setattr(self, name, getattr(self, name).index_select(0, samples))
        self.alive = len(samples)

    def _state_of(self, samples: Tensor) -> Any:
        """The method's state of some samples."""
        try:
            return self.method.select(self.state, samples)
        except IndexError as error:
            raise TypeError(
                f"{type(self.method).__name__}: a tensor in its state has fewer rows than the batch, {self.alive}: every "
                "tensor there has one row a sample, and what all samples share is a number"
            ) from error

    def _kept(self, state: Any, rows: int) -> dict[str, Tensor]:
        return kept(self.method.keep(state), rows, type(self.method).__name__)

    def _store(self, kept: dict[str, Tensor]) -> None:
        assert self.everything is not None
        named = {f"kept {name}": value for name, value in kept.items()} | {"tolerance": self.tolerance}
        self.everything.store(z=self.best, norm=self.best_norm, steps=self.steps, status=self.status, **named)
        self.everything.store(steep=self.steep)

    def outcome(self) -> Outcome:
        """What came of it, for all samples."""
        if self.at_work:
            self.steps = torch.where(self.active, self.step, self.steps)
        keep = self._kept(self.state, self.alive)
        best, norm, steps, status, steep = self.best, self.best_norm, self.steps, self.status, self.steep
        tolerance = self.tolerance
        if self.everything is not None:
            self._store(keep)
            values = self.everything.values
            keep = {name[5:]: value for name, value in values.items() if name.startswith("kept ")}
            best, norm, steps, status, steep = (values[k] for k in ("z", "norm", "steps", "status", "steep"))
            tolerance = values["tolerance"]
        if not self.all_converged and int(torch.count_nonzero(status)):
            norm = torch.where(torch.isinf(norm), torch.nan, norm)
        status, tolerance = self._last_word(best, norm, status, steep, tolerance)
        if self.f.kind.returns_program and self.f.solves == "root":
            best = put_inside(self.whole.f, best, status == int(Status.CONVERGED), self.f)
        remark = self.remark or (self.f.inner if int(torch.count_nonzero(status)) else "")
        figures = self.f.evaluations, self.f.sample_evaluations, self.traces, remark
        if self.halted:  # a sample that its method gave up in that step is not for others to go on with
            status = torch.where(status != int(Status.CONVERGED), int(Status.STOPPED), status)
        onward, halted = self._onward(), self.halted
        left = self.z if self.everything is None and self.f.kind.minimisation else None
        return Outcome(
            best, norm, steps, status, *figures, "", keep, tolerance=tolerance, onward=onward, halted=halted, left=left
        )

    def _onward(self) -> Tensor | None:
        """Where a minimisation that has run out of steps stands, if that is not its best point: along a valley ``|F|`` rises
        and falls, and says nothing of how far it has come."""
        if not (self.at_work and self.f.of_gradient and self.f.kind.minimisation) or self.best is self.z:
            return None
        z = torch.where(self.active.unsqueeze(1), self.z, self.best)
        return z if self.everything is None else self.everything.merge(z, "z")

    def _last_word(
        self, z: Tensor, norm: Tensor, status: Tensor, steep: Tensor, tolerance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Samples that were stopped short of what they need not meet have converged; others have run away.  And what was
        asked of them at these points."""
        if self.method.hands_over and bool((status == int(Status.STALLED)).all()):
            return status, tolerance
        judge, f = self.whole, self.whole.f
        before = f.evaluations, f.sample_evaluations
        found, status = status, judge.review(z, norm, status, steep, self.all_converged)
        if judge.relative_to_state and status is not found:
            tolerance = judge.tolerance(z, norm)
        if f is not self.f:
            self.f.evaluations += f.evaluations - before[0]
            self.f.sample_evaluations += f.sample_evaluations - before[1]
        return status, tolerance


def _count(*masks: Tensor) -> list[int]:
    """How many entries hold in each mask, with one synchronisation on a device that needs one."""
    if masks[0].device.type == "cpu":
        return [*map(int, map(torch.count_nonzero, masks))]
    return torch.stack(masks).sum(1).tolist()


def _writes(z: Tensor) -> int:
    """How often a tensor has been written into, as far as torch counts that."""
    return 0 if z.is_inference() else z._version
