"""The one loop that runs every iterative method.

Per sample: convergence is judged by the norm of the problem's residual at the very point that is returned; a sample
that has converged, or whose residual is no longer finite, is frozen, and once a fifth of the rows in work have nothing
left to do they are dropped from all later evaluations (where the system allows it).  The best iterate is kept.
Claims of samples whose steps enclose a zero may wait for each other (:mod:`~implicitkit.solver.claims_that_wait`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.unversioned_writes import Values, version
from implicitkit.foundation.wording import in_a_solver
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome
from implicitkit.solver.claims_that_wait import Point, Waiting
from implicitkit.solver.coming_back import come_back
from implicitkit.solver.constrained.restoring import put_inside
from implicitkit.solver.costs import dropping_pays, slowest
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.protocol import Steps
from implicitkit.solver.return_checks import kept, stepped
from implicitkit.solver.starts_without_slope import has_a_value
from implicitkit.solver.steps.region import some_taken
from implicitkit.solver.subset import WholeBatch
from implicitkit.solver.verdict.judge import Judge
from implicitkit.solver.verdict.last_step import by_the_last_step
from implicitkit.solver.verdict.unbounded import Progress

_DROP = 0.8  # rows are dropped when no more than this share of them is still at work
_BY_SAMPLE = ("active", "steps", "status", "steep", "cleared")
_RESCUES = 30  # steps out of the domain that plain ones take the place of
_AS_GOOD = 2.0  # times the least |F|: rounding errors of the same size


def iterate(method: Steps, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
    """``z <- method.step(z)`` until every sample has ended."""
    loop = _Loop(method, f, z0, options)
    while loop.look():
        loop.advance()
    return loop.outcome()


class _Loop:
    """One run of a method.

    Attributes:
        z, norm: the points ``(batch, n)`` and ``|F|`` there. best, best_norm: what is returned. began: ``|F|`` at the start.
        active: samples still at work. alive: how many are in the evaluations. at_work: how many of them are active.
        last: the point before. steep: what the last step says of samples (:func:`by_the_last_step`). cleared: samples that
            were asked where they converged whether they run away.
        everything: results in full length, once rows have been dropped. whole: the judge of all samples.
        claimed: how many samples have ended by a claim that holds: if these are all, nobody need count any more.
        own: a method of this library. foreign: one of somebody else, of which no step has been looked at.
    """

    def __init__(self, method: Steps, f: Evaluations, z0: Tensor, options: Options) -> None:
        self.method, self.f, self.options = method, f, options
        self.max_steps = options.max_steps or method.default_max_steps
        self.judge = self.whole = Judge(f, options)
        self.z = self.best = z0
        self.batch = self.alive = self.at_work = z0.shape[0]
        self.everything: WholeBatch | None = None
        self.norm = self.began = self.judge.norm(f.residual(z0))
        self.infinity = self.norm.new_full((), math.inf)  # a tensor: compared in a third of the time
        self.best_norm = torch.full_like(self.norm, math.inf)
        self.active = f.active
        self.steps = torch.zeros(self.batch, dtype=torch.int64, device=z0.device)
        self.status = torch.full_like(self.steps, int(Status.MAX_STEPS))
        doubted = f.doubted if self.judge.relative_to_state else None  # another may have come to rest nowhere
        self.steep = torch.zeros_like(self.active) if doubted is None else doubted.clone()
        self.cleared = torch.zeros_like(self.active)
        self.last: Point | None = None  # a step ago
        self.halted, f.weighs, self.claimed = False, False, 0
        self.state = in_a_solver(method.init, f, z0)
        self.stuck: Tensor | None = None
        self.settled: Tensor | None = None
        self.traces: list[Tensor] = []
        self.watched, self.step, self.rescues = options.watched, 0, 0
        self.own = type(method).__module__.partition(".")[0] == "implicitkit"
        self.foreign = not self.own
        self.tolerance, self.remark, self.progress = self.norm, "", Progress()
        alone = self.batch < 2 or self.watched or not method.encloses or self.judge.relative_to_state
        self.waiting = None if alone or method.keep(self.state) else Waiting()
        self.refused: Tensor | None = None  # whose claims of this very step were

    def look(self) -> bool:
        """Judge the present points; are there samples to go on with?"""
        norm = self.norm
        self.tolerance = tolerance = self.judge.tolerance(self.z, norm)
        running = norm.gt(tolerance)  # false for NaN
        if self.at_work < self.alive:
            running.logical_and_(self.active)
        if self.refused is not None:
            running.logical_or_(self.refused)
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
                if (self.f.kind.iteration or self.f.kind.minimisation) and self.own and self._comes_back():
                    return self.look()
                running.logical_and_(finite)
                left = _count(running)[0]
        if self.waiting is not None and self.last is not None and (self.waiting.some or left < self.at_work):
            waits = sound and self._wait(self.waiting, self.last, self.active.logical_xor(running))
            if waits:
                running, left = self.active, self.at_work
            elif self.waiting.some:
                self._settle(self.waiting, self.last)
                return self.look()
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
        """Is there a sample that a step has led out of the domain, and that goes on from somewhere else?  It would hide
        faults of other people's methods."""
        if self.last is None or self.rescues >= _RESCUES:
            return False
        lost = self.active.logical_and(~(self.norm < math.inf))
        z = come_back(self.f, self.last, self.z, lost) if _count(lost)[0] else self.z
        if z is self.z or not _count((lost.unsqueeze(1) & (self.z != z)).any(1))[0]:
            return False
        self.rescues += 1
        self.z, self.norm = z, self.judge.norm(self.f.residual(z))
        return True

    def _wait(self, waiting: Waiting, last: Point, claims: Tensor) -> bool:
        """May these claims wait, and those that do already, while the samples that have none take another step?"""
        if not math.isfinite(self.judge.largest(self.z)):
            return False
        count = waiting.add(claims, last, Point(self.z, self.norm, self.f.residual(self.z)), self.step)
        return count < self.at_work and self.step < self.max_steps and waiting.pays(self.f)

    def _settle(self, waiting: Waiting, last: Point) -> None:
        """Look at the claims that wait: samples whose claims hold have ended where they made them."""
        held = waiting.look(self.judge, self.f)
        self.judge.came_from = last.z, last.F
        which, each = held.which, held.which.unsqueeze(1)
        F = torch.where(each, held.point.F, self.f.residual(self.z))
        self.z, self.norm = torch.where(each, held.point.z, self.z), torch.where(which, held.point.norm, self.norm)
        self.f.know(self.z, F)
        self.best = torch.where(each, self.z, self.best)
        self.best_norm = torch.where(which, self.norm, self.best_norm)
        self.steps = torch.where(which, held.steps, self.steps)
        self.status.masked_fill_(which, int(Status.CONVERGED))
        self.steep, self.cleared = torch.where(which, held.steep, self.steep), self.cleared | held.cleared
        self.active = self.active & ~which
        self.at_work = _count(self.active)[0]
        self.refused = held.refused if waiting.numbers[-1] == self.step else None

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
            before = None if self.last is None else 2 * self.norm if self.method.encloses else self.last.norm
            holds = self.judge.examine(self.z, self.norm, claims, before, self.stuck)
            asked = self.judge.asked.cleared(self.z)
            self.cleared = self.cleared if asked is None else self.cleared | (asked & holds)
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
        if claimed and self.last is not None and self.judge.asks_for_strides():
            F, last = self.f.residual(self.z), self.last
            sizes = None if last.size is None else (self.judge.size_of(self.z), last.size)
            said = by_the_last_step(relative, self.z, F, last.z, last.F, claims, sizes)
            self.steep = torch.where(claims, said, self.steep)
        self.claimed += claimed
        if claimed == self.alive:  # every one, here and now
            self.steps.fill_(self.step)
            self.status.zero_()  # CONVERGED
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
        sized = self.judge.relative_to_state and not self.judge.own_norm
        self.last = Point(self.z, self.norm, f.residual(self.z), self.judge.size_of(self.z) if sized else None)
        self.judge.came_from = self.z, self.last.F
        written, values = version(self.z), Values([self.z]) if self.foreign else None
        self.foreign = self.foreign and not values  # of a state that is zero nothing is seen
        z, self.state = stepped(self.method, f, self.z, self.state)
        if version(self.z) != written or (values is not None and values.changed()):
            raise TypeError(
                f"{type(self.method).__name__}.step wrote into the z that it was given, of which f remembers the values: "
                "return another tensor (z.clone() first, or operations without an underscore)"
            )
        self.stuck, self.settled, self.refused = f.stuck, f.at_rounding, None
        self.remark = f.remark or self.remark
        if f.falling is not None or Progress.due(f, self.step):
            look = self.progress
            spent = look.spent(f, self.z) if f.falling is None else look.fallen(f, z, f.falling)
            self.stuck = spent if self.stuck is None else self.stuck | spent
        self.z = z if self.at_work == self.alive else some_taken(self.active, z, self.best)
        self.step += f.taken
        self.norm = self.judge.norm(f.residual(self.z))

    def _drop(self) -> None:
        """Leave rows in which nothing is at work out of all later evaluations, if they are many enough."""
        per_row = self.f.system.samples_per_row
        if per_row == 1:
            ahead = lambda: slowest(self.norm / self.began, self.tolerance / self.norm, self.active, self.step)  # noqa: E731
            if self.at_work > _DROP * self.alive or not dropping_pays(self.f, self.at_work / self.alive, ahead):
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
        if keeps := self._kept(self.state, self.alive):  # of few numbers: a state may hold many
            gone = (~self.active).nonzero().squeeze(1)
            self.everything.store_some(gone, {name: t.index_select(0, gone) for name, t in keeps.items()})
        self.everything.narrow(samples)
        self.f.residual(self.z)
        self.f = self.f.select(keep, samples)
        self.judge = self.judge.select(samples, self.f)
        self.progress.select(samples)
        self.state = self._state_of(samples)
        self.z = self.f.selected()
        for name in ("norm", "tolerance", "began", "best", "best_norm", *_BY_SAMPLE):
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
        self.everything.store(steep=self.steep, cleared=self.cleared)

    def outcome(self) -> Outcome:
        """What came of it, for all samples."""
        self.steps = torch.where(self.active, self.step, self.steps) if self.at_work else self.steps
        keep = self._kept(self.state, self.alive)
        best, norm, steps, status = self.best, self.best_norm, self.steps, self.status
        steep, tolerance = self.steep, self.tolerance
        if self.everything is not None:
            self._store(keep)
            values = self.everything.values
            keep = {name[5:]: value for name, value in values.items() if name.startswith("kept ")}
            best, norm, steps, status, steep = (values[k] for k in ("z", "norm", "steps", "status", "steep"))
            tolerance, self.cleared = values["tolerance"], values["cleared"]
        if self.claimed < self.batch and int(torch.count_nonzero(status)):
            norm = torch.where(torch.isinf(norm), torch.nan, norm)
        status, tolerance = self._last_word(best, norm, status, steep, tolerance)
        if self.f.kind.returns_program and self.f.solves == "root":
            best = put_inside(self.whole.f, best, status == int(Status.CONVERGED), self.f)
        inner = self.f.inner
        remark = self.remark or (inner if inner and int(torch.count_nonzero(status)) else "")
        figures = self.f.evaluations, self.f.sample_evaluations, self.traces, remark
        if self.halted:  # a sample that its method gave up in that step is not for others to go on with
            status = torch.where(status != int(Status.CONVERGED), int(Status.STOPPED), status)
        left = self.z if self.everything is None and self.f.kind.minimisation else None
        return Outcome(
            best, norm, steps, status, *figures, "", keep, tolerance=tolerance, onward=self._onward(), halted=self.halted,
            left=left, descended=self.method.descends,
        )  # fmt: skip

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
        asked of them at these points.  Of samples that another method goes on with that one has the last word."""
        status, handed = self.judge.asked.handed_over(status) if self.method.hands_over else (status, None)
        if handed is not None and bool(handed.all()):
            return status, tolerance
        judge, f = self.whole, self.whole.f
        before = f.evaluations, f.sample_evaluations
        judge.asked.note(z, self.cleared, torch.zeros_like(self.cleared))
        asked = status if handed is None else status.masked_fill(handed, int(Status.STOPPED))
        found = judge.review(z, norm, asked, steep, self.claimed == self.batch)
        if judge.relative_to_state and found is not asked:
            tolerance = judge.tolerance(z, norm)
        status = found if handed is None else found.masked_fill(handed, int(Status.STALLED))
        if f is not self.f:
            self.f.evaluations += f.evaluations - before[0]
            self.f.sample_evaluations += f.sample_evaluations - before[1]
        return status, tolerance


def _count(*masks: Tensor) -> list[int]:
    """How many entries hold in each mask, with one synchronisation on a device that needs one."""
    counts = masks if masks[0].numel() == 1 else map(torch.count_nonzero, masks)  # one entry is its own
    return [*map(int, counts)] if masks[0].device.type == "cpu" else torch.stack(masks).sum(1).tolist()
