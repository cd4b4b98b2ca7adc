"""Solvers in turn, each for the samples that those before it could not solve."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.foundation.options import at_least, check_options, finite, flag, instance, optional, part
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome, Solver, account
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.constrained.early_verdicts import settled_without_others
from implicitkit.solver.constrained.kinked import in_a_kink
from implicitkit.solver.constrained.no_point import no_point_satisfies
from implicitkit.solver.costs import have_one_matrix
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.meeting_kinks import meets_kinks
from implicitkit.solver.norms import start_size
from implicitkit.solver.starts_without_slope import has_no_slope
from implicitkit.solver.subset import subset
from implicitkit.solver.verdict.kinks import Kinks
from implicitkit.solver.verdict.newton_correction import DENSE
from implicitkit.solver.verdict.no_solution import DRIFTS, drifts, refuse_noise

_ENOUGH = 2  # stages that find that an objective falls forever, or that say a sample has run away
_SURE = (
    3  # ... of a program, whose multipliers may run away beside a solution, and of a minimum that may be further out
)
_SOON, _FEW = 12, 25  # steps of the first and of the second method, before the epigraphs of kinks


@dataclass(frozen=True)
class Stage:
    """One member of a polyalgorithm.

    Args:
        solver: a registered name or a configured object. options: for a name.
        max_steps: steps it may take; ``None``: its own default.
        sparse: only where the Jacobian of the residual has a sparsity pattern. shared: only where it has none, and is the
            same for all samples, wherever they are.
        scale: begin at ``scale * z0``; ``None``: at the best point found so far.  Starts nearer to the origin help where
            the given one is so far out that ``|F|`` overflows, or is flat, or has been descended into a wrong valley.

    Raises:
        ValueError: ``max_steps`` below 1, or ``scale`` not finite.
    """

    solver: Any
    options: tuple[tuple[str, Any], ...] = ()
    max_steps: int | None = None
    scale: float | None = 1.0
    sparse: bool = False
    shared: bool = False

    def __post_init__(self) -> None:
        check_options(
            self,
            solver=part("solver", Solver),
            options=instance("a tuple of pairs (name, value)", tuple),
            max_steps=optional(at_least(1)),
            scale=optional(finite()),
            sparse=flag(),
            shared=flag(),
        )

    def begin(self, z0: Tensor, best: Tensor) -> Tensor:
        """Where it begins."""
        return best if self.scale is None else z0 if self.scale == 1 else self.scale * z0

    def serves(self, f: Evaluations, z0: Tensor) -> bool:
        """Is it for a Jacobian like this?"""
        if self.shared:
            return len(z0) > 1 and not f.is_sparse(z0) and have_one_matrix(f, z0)
        return not self.sparse or f.is_sparse(z0)

    def make(self) -> Any:
        """The configured solver."""
        return get_solver(self.solver, **dict(self.options))


@dataclass(frozen=True)
class Polyalgorithm(Solver):
    """Solvers in turn; each sees only the samples that none before it has solved.

    All of them solve ``F(z) = 0``, ``(batch, n)``, to the same ``|F(z)| <= atol + rtol * scale``, that of the start.  A
    sample that none solves gets the best point that any of them has seen.  ``solution.solver`` says which of them finished;
    ``max_steps`` of the solve limits the steps of all stages together.  Source: Rice (1968), "On the construction of
    polyalgorithms for automatic numerical analysis".

    Args:
        stages: registered names, configured solvers or :class:`Stage` objects; at least one.

    Raises:
        ValueError: no stage.
    """

    stages: tuple[Any, ...]
    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        check_options(self, stages=instance("a tuple of solvers", tuple, list))
        if not self.stages:
            raise ValueError("a polyalgorithm needs at least one stage")
        check = part("solver", Solver, Stage)
        for i, stage in enumerate(self.stages):
            check.check(f"stages[{i}]", stage, f"{type(self).__name__}: ")
        members = tuple(s if isinstance(s, Stage) else Stage(s) for s in self.stages)
        object.__setattr__(self, "stages", members)

    @functools.cached_property
    def solves(self) -> str:  # type: ignore[override]
        """What the first stage solves."""
        return str(self.stages[0].make().solves)

    @property
    def scales(self) -> bool:  # type: ignore[override]
        """Whether one of the stages does."""
        return any(stage.make().scales for stage in self.stages)

    def keeps_graphs(self, z0: Tensor) -> bool:
        return self.stages[0].make().keeps_graphs(z0)

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        stages = _serving(self.stages, f, z0)
        start = f.residual(z0) if len(stages) > 1 else z0  # remembered by f: the first stage begins there
        soon = options.lifts and not f.kind.returns_program and f.system.lifted.kinked
        stages, total = _begin(stages, f, z0, _limited(options, _SOON) if soon else options)
        cut = soon and int(total.steps.max()) >= _SOON
        first = total.solver or stages[0].make().name
        total.solver = _title(self.name, [first])
        if total.all_converged or len(stages) == 1:
            return total
        total.descended = False
        if refuse_noise(f, total):
            return total
        failed = total.status != int(Status.CONVERGED)
        finishers = [] if bool(failed.all()) else [first]
        total.solver = _title(self.name, finishers)
        if bool((total.status == int(Status.STOPPED)).any()):
            return total
        # no stage gets away from where there is no slope: find begins beside it
        waiting = failed & (total.z == z0).all(1)
        if f.kind.minimisation or f.kind.returns_program:  # whose residual is a slope
            waiting = waiting & ~torch.isfinite(total.residual_norm)
        f.evaluations, f.sample_evaluations = total.evaluations, total.sample_evaluations
        drifting = drifts(f, z0, failed) if f.kind.iteration and options.max_steps is None else torch.zeros_like(failed)
        if bool(drifting.any()):
            total.status, total.message = torch.where(drifting, int(Status.DIVERGED), total.status), DRIFTS
        waiting = waiting & ~drifting
        if bool(waiting.any()):
            waiting = has_no_slope(f, z0, waiting).any(1)
        waiting = waiting | drifting
        if bool(waiting.any()):
            total.evaluations, total.sample_evaluations = f.evaluations, f.sample_evaluations
            if bool((waiting == failed).all()):
                return total
        left = options.max_steps is None or int(total.steps.max()) < options.max_steps
        if f.kind.returns_program:  # the other stages would go on for long
            failed = (total.status != int(Status.CONVERGED)) & torch.isfinite(total.z).all(1)
            falls, none = settled_without_others(f, z0, total, failed)
            waiting = waiting | none
            failed = failed & ~falls
        open_ = options.lifts and left and bool((failed & ~waiting).any())
        kinked = open_ and (soon or f.kind.returns_program) and meets_kinks(f, total.z)
        if f.kind.returns_program and left and not kinked:
            waiting = waiting | in_a_kink(f, total, failed & ~waiting)
        total.evaluations, total.sample_evaluations = f.evaluations, f.sample_evaluations
        rows, start_norm = start.abs(), options.size(start)
        options = replace(options, start_size=start_size(z0) if f.kind.minimisation else None, start_rows=rows)
        ends, known = [total.z], (f, z0, options, total, start_norm, waiting, finishers)
        for stage in stages[1:3] if kinked and not f.kind.returns_program else ():
            total = self._go_on((replace(stage, max_steps=_FEW),), *known, ends)
            kinked = total.all_converged or any(meets_kinks(f, z, since=z0) for z in ends)
            total.evaluations, total.sample_evaluations = f.evaluations, f.sample_evaluations
            if kinked:  # one that lies off the minimum rarely stops both
                break
        if kinked:
            total.lifts = not total.all_converged
        else:
            total = self._go_on(stages if cut else stages[1:], *known)
        total.solver = _title(self.name, finishers)
        return total

    def _go_on(
        self,
        stages: tuple[Stage, ...],
        f: Evaluations,
        z0: Tensor,
        options: Options,
        total: Outcome,
        start_norm: Tensor,
        waiting: Tensor,
        finishers: list[str],
        ends: list[Tensor] | None = None,
    ) -> Outcome:
        """Some stages for the samples that are open and not ``waiting``; adds to ``finishers``, and to ``ends`` where the
        last of them has come to."""
        falls = (total.status == int(Status.UNBOUNDED)).long()  # how many stages have said so ...
        gone = (total.status == int(Status.DIVERGED)).long()  # ... and so
        onward, latest, kinks = total.z if total.onward is None else total.onward, None, Kinks(waiting)
        began: dict[int, Tensor] = {}  # from where a stage has gone on: once more would end where it did
        for stage in stages:
            open_ = _open(f, total, start_norm, stage, falls, gone) & ~waiting & ~kinks.found
            shown, later = total.shown, options.after(total.taken, total.shown)
            if not bool(open_.any()):
                continue
            if later.max_steps is not None and later.max_steps < 1:  # what one method gave up others were to go on with
                gave_up = open_ & (total.status == int(Status.STALLED))
                total.status = torch.where(gave_up, int(Status.MAX_STEPS), total.status)
                break
            if not stage.serves(f, z0):
                continue
            if latest is not None and stage.scale is None:
                onward, latest = _lowest(f, onward, latest, total), None
            begin = stage.begin(z0, onward)
            open_ = open_ & (begin != began.get(id(stage), torch.nan)).any(1)
            if not bool(open_.any()):
                continue
            began.update({id(stage): begin} if stage.scale is None else {})
            samples, part = _part(f, open_, options, stage, total)
            begin = torch.where(open_.unsqueeze(1), begin, total.z).index_select(0, samples)
            if (granted := self._granted(stage, part, begin)) is None:
                continue
            solver, norms = granted.make(), start_norm.index_select(0, samples)
            later = _limited(_limited(later, granted.max_steps), kinks.limit(samples))
            found = _run(solver, part, begin, _of_samples(later, samples, norms))
            if found is None:
                total.evaluations, total.sample_evaluations = part.evaluations, part.sample_evaluations
                continue
            for count, said in ((falls, Status.UNBOUNDED), (gone, Status.DIVERGED)):
                count.index_add_(0, samples, (found.status == int(said)).long())
            if _merge(total, found, samples, open_.index_select(0, samples)):
                finishers.append(found.solver or solver.name)
            if f.kind.minimisation:
                kinks.look(part, found, samples, open_, norms, total)
            waiting = waiting | _in_vain(f, total, open_)
            if not (part.of_gradient or part.solves == f.kind.name):
                blind = torch.zeros_like(open_).index_copy(0, samples, found.status == int(Status.CONVERGED)) & open_
                total.blind = blind if total.blind is None else total.blind | blind
            total.shown = shown + found.shown
            latest = onward.index_copy(0, samples, found.z if found.onward is None else found.onward)
        if ends is not None and latest is not None:
            ends.append(latest)
        kinks.close(total)
        return _closed(f, total, falls)

    def _granted(self, stage: Stage, f: Evaluations, z: Tensor) -> Stage | None:
        """A stage as it may run from ``z`` on; ``None``: it is left out."""
        return stage


def _closed(f: Evaluations, total: Outcome, falls: Tensor) -> Outcome:
    """The total of all stages, of which so many have said that a sample ``falls`` forever."""
    if f.kind.minimisation:
        forever = (falls >= _ENOUGH) & (total.status != int(Status.CONVERGED))
        total.status = torch.where(forever, int(Status.UNBOUNDED), total.status)
    f.evaluations, f.sample_evaluations = total.evaluations, total.sample_evaluations
    return total


def _part(f: Evaluations, open_: Tensor, options: Options, stage: Stage, total: Outcome) -> tuple[Tensor, Evaluations]:
    """The samples that are ``open_``, by number, and what a stage evaluates of them."""
    samples, system, theta = subset(f, open_, whole=options.watched)
    part = Evaluations(system, theta, stage.make().solves)
    part.evaluations, part.sample_evaluations = total.evaluations, total.sample_evaluations
    part.doubted = open_.index_select(0, samples)
    return samples, part


def _open(f: Evaluations, total: Outcome, start_norm: Tensor, stage: Stage, falls: Tensor, gone: Tensor) -> Tensor:
    """Samples for another stage; of a program none that falls forever, that enough stages have seen to run away, or whose
    start is not finite: no stage has another.
    Of a minimisation none that enough stages have seen to fall forever; and what enough have seen to run away goes on from
    no point out there, only from the start, until three have: a minimum may be further out than one of them has come.  One
    is enough of many unknowns, where it is steps that say so: those of another one need not."""
    open_ = (total.status != int(Status.CONVERGED)) & (total.status != int(Status.STOPPED))
    if f.kind.returns_program:
        open_ = open_ & (total.status != int(Status.UNBOUNDED)) & torch.isfinite(start_norm) & (gone < _SURE)
    if f.kind.minimisation:
        open_ = open_ & (falls < _ENOUGH) & (gone < _SURE)
        away = (total.status == int(Status.DIVERGED)) & (gone >= (_ENOUGH if f.size <= DENSE else 1))
        open_ = open_ if stage.scale is not None else open_ & ~away
    return open_


def _of_samples(options: Options, samples: Tensor, start_norm: Tensor) -> Options:
    """The options of a stage for these samples."""
    sizes = None if options.start_size is None else options.start_size.index_select(0, samples)
    rows = None if options.start_rows is None else options.start_rows.index_select(0, samples)
    return replace(options, start_norm=start_norm, start_size=sizes, start_rows=rows)


def _in_vain(f: Evaluations, total: Outcome, open_: Tensor) -> Tensor:
    """Samples that are ``open_`` and have stalled, whose constraints no point seems to satisfy, ``(batch,)``."""
    stalled = open_ & (total.status == int(Status.STALLED))
    if not f.kind.returns_program:
        return stalled & False
    f.evaluations, f.sample_evaluations = total.evaluations, total.sample_evaluations
    found = no_point_satisfies(f, total.z, stalled)
    total.evaluations, total.sample_evaluations = f.evaluations, f.sample_evaluations
    return found


def _serving(stages: tuple[Stage, ...], f: Evaluations, z0: Tensor) -> tuple[Stage, ...]:
    """The stages from the first one that serves; the last one does."""
    while len(stages) > 1 and not stages[0].serves(f, z0):
        stages = stages[1:]
    return stages


def _begin(
    stages: tuple[Stage, ...], f: Evaluations, z0: Tensor, options: Options
) -> tuple[tuple[Stage, ...], Outcome]:
    """The stages from the first one whose derivatives are there, and what that one finds."""
    while len(stages) > 1:
        found = _run(stages[0].make(), f, z0, _limited(options, stages[0].max_steps))
        if found is not None:
            return stages, found
        stages = _serving(stages[1:], f, z0)
    return stages, stages[0].make().run(f, z0, _limited(options, stages[0].max_steps))


def _run(solver: Solver, f: Evaluations, z: Tensor, options: Options) -> Outcome | None:
    """What a stage finds; ``None`` where it asks a program for a derivative that is not there: others do without."""
    try:
        return solver.run(f, z, options)
    except RuntimeError as error:
        if not f.kind.returns_program or not autodiff.lacks_second_derivative(error):
            raise
        return None


def _limited(options: Options, max_steps: int | None) -> Options:
    """The options with the smaller of two step limits."""
    if max_steps is None or (options.max_steps is not None and options.max_steps <= max_steps):
        return options
    # not dataclasses.replace, which costs four times as much: this is on the way of every solve
    return Options(
        options.rtol, options.atol, max_steps, options.trace, options.callback, options.start_norm, options.norm,
        options.atol_is_default, options.start_size, options.start_rows, options.lifts
    )  # fmt: skip


def _lowest(f: Evaluations, onward: Tensor, latest: Tensor, total: Outcome) -> Tensor:
    """Where to go on from: the best point; of a minimisation, the lower of where this was and where the last stage came."""
    if not f.kind.minimisation:
        return total.z
    probe = Evaluations(f.system, f.theta, "minimise")
    lower = probe.value(latest) < probe.value(onward)
    account(total, probe)
    return torch.where(lower.unsqueeze(1), latest, onward)


def _merge(total: Outcome, found: Outcome, samples: Tensor, open_: Tensor) -> bool:
    """Write a stage's results for its open samples into the total; did it solve one?"""
    where = samples[open_]
    old, new = total.residual_norm[where], found.residual_norm[open_]
    solved = found.status[open_] == int(Status.CONVERGED)
    better = solved | (new < old) | ~torch.isfinite(old)
    index = where[better]
    total.z = total.z.index_copy(0, index, found.z[open_][better])
    total.residual_norm = total.residual_norm.index_copy(0, index, new[better])
    if total.tolerance is not None and found.tolerance is not None:
        total.tolerance = total.tolerance.index_copy(0, index, found.tolerance[open_][better].to(total.tolerance))
    # how the point that is kept came about; a step limit says less than anything else
    says_more = better | (total.status[where] == int(Status.MAX_STEPS))
    total.status = total.status.index_copy(0, where[says_more], found.status[open_][says_more])
    total.obey(found.status)
    total.halted = total.halted or found.halted
    total.steps = total.steps.index_add(0, where, found.steps[open_])
    total.evaluations, total.sample_evaluations = found.evaluations, found.sample_evaluations
    total.trace = total.trace + found.trace[1:]
    total.message = found.message
    return bool(solved.any())


def _title(name: str, finishers: list[str]) -> str:
    """``auto (newton)``, ``auto (newton, trust_region)``, or the bare name if nothing was solved."""
    return f"{name} ({', '.join(dict.fromkeys(finishers))})" if finishers else name
