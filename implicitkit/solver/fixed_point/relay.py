"""Fixed points by a relay of methods: each hands over the samples on which it gets nowhere."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, optional, positive
from implicitkit.linear.price import CALL
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome
from implicitkit.solver.catalogue import register_solver
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.anderson import Anderson
from implicitkit.solver.fixed_point.continuation import Continuation
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.fixed_point.picard import Picard
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage
from implicitkit.solver.root.broyden import Broyden
from implicitkit.solver.root.newton_krylov import NewtonKrylov

_DENSE = 1024  # unknowns a sample up to which continuation, which factors Jacobians, is tried

_FEWEST = 50  # steps of continuation, below which it hardly arrives
_NEWTON_STEPS = 40  # of Newton's method, which its horizon hardly allows
_GMRES = 2.0  # evaluations that a step of GMRES costs, in which factors are priced

_LEFT_OUT = (
    "Members of the relay that factor Jacobians were left out, as too dear for this size: "
    "solver=ik.Relay(work=math.inf) asks them, too"
)

_ALMOST_ALL = 0.75  # of the samples: where more are left, the dear members begin with a few
_SMALLEST = 8  # ... of so many, at least
_IN_VAIN = (
    "The members of the relay that take derivatives of the map solved {solved} of {asked} samples that they were asked "
    "about first, and were not asked about the other {others}: solver=ik.Relay() asks about all"
)

_NEAR, _FAR = 10.0, 1000.0  # times the size of the start: how far out the later methods may go, and the very last


def _path(**options: Any) -> Impatient:
    return Impatient(Continuation(**options), horizon=math.inf, reach=_NEAR)


# steps shorter than a sixteenth lower the residual too slowly for the horizon
_KRYLOV = Impatient(NewtonKrylov(halvings=4), window=6, horizon=30)
_CHEAP = (Stage(Impatient(Anderson())), Stage(Impatient(Broyden(), reach=_NEAR), scale=None))
_NEWTON, _LAST = (Stage(replace(_KRYLOV, reach=reach), scale=None) for reach in (_NEAR, _FAR))
# the map's own path, along which the residual may stay or rise for some thirty steps before the map contracts: a chain of
# layers that is no loop is solved once its depth has been walked, and its Jacobian is the worst for everything else
_PLAIN = Stage(Impatient(Picard(), window=32, reach=_NEAR))
# the same path where the residual rises: past a point that is nearly fixed, where all that lowers the residual stays.  It
# may go round in circles, and a training counts what a relay costs: after what solves more
_PASSING = Stage(Impatient(Picard(), window=32, reach=_NEAR, follow=True), max_steps=200)
_STAGES = (
    *_CHEAP,
    _PLAIN,
    _NEWTON,
    Stage(_path(), max_steps=200),
    Stage(_path(), max_steps=200, scale=None),
    *(Stage(_path(stray=0.5, scatter=seed), max_steps=300, scale=None) for seed in range(3)),
    _PASSING,
    _LAST,
)
_LARGE = (*_CHEAP, _PLAIN, _NEWTON, _PASSING, _LAST)


@register_solver("relay", solves="fixed_point")
@dataclass(frozen=True)
class Relay(Polyalgorithm):
    """Fixed points of maps that need not contract: cheap methods first, then, sample by sample, what they cannot solve.

    1. Anderson acceleration, 2. Broyden's method with limited memory, from the best point so far, 3. the plain iteration
    from the start, 4. Newton's method with GMRES, from the best point, each only as long as a sample's residual falls fast
    enough to be done in reasonable time (:class:`Impatient`); 5. :class:`Continuation` in the strength of the map, up to
    1024 unknowns a sample, from the start, from the best point, and from three points around it; 6. the plain iteration
    again, up to 200 steps, also while the residual rises.  1., 2. and 4. are local: they depend on the Jacobian that they
    meet.  3. follows the map where the residual does not fall: a chain of layers is done once its depth has been walked,
    and what was trained by unrolled steps comes to rest along it.  5. is global: it finds a fixed point of a map that is
    smooth and bounded from almost every start, and of most that are only piecewise smooth.  6. passes by points where
    ``|f(z) - z|`` has a minimum that is not zero.  From 2. on no method may leave the ball of ten times the size of the
    start, since far out a map that is nearly the identity looks solved; only for what is left then Newton's method may go a
    hundred times as far.

    A sample that all fail on gets the best point that any of them has seen.  ``solution.solver`` names those that solved
    something.

    The equation is ``f(z) = z``; the strength of the map is the ``t`` of ``z = (1 - t) z0 + t f(z)``.  Source: the
    order and the limits are this library's, measured on maps of trained models; the stages name theirs.

    Args:
        stages: others instead, as for :class:`Polyalgorithm`.
        work: what each of the members that take derivatives of the map may take, in evaluations of it: continuation as many
            steps as that buys at the price of one (:mod:`implicitkit.linear.price`), or none where those are fewer than 50,
            Newton's method a fortieth in products a step; the first member is asked as it is.  ``None``: anything, but who
            calls a relay may set it.
        trial: about so many samples, or a quarter of those left, the members from the first on that takes derivatives are
            asked first, where those before it leave more than three quarters of the batch; about the others only if they
            solve half of these.  For who can do nothing with a batch of which most fail.  (Where rows can be left out of
            evaluations, nobody limits or watches the steps, and the numbers of a batch cost more than a call of torch.)
            ``None``: about all at once.

    Raises:
        ValueError: no stage, ``work`` not positive, or ``trial`` below 1.
    """

    stages: tuple[Any, ...] = _STAGES
    work: float | None = None
    trial: int | None = None
    name: ClassVar[str] = "relay"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, work=optional(positive()), trial=optional(at_least(1)))

    def brief(self) -> Relay:
        """The members before the first that takes derivatives of the map: from there on they take most of the evaluations
        for the fewest samples, so that this is for a caller who can do without a few, or comes back to them.

        Itself, where there is no such member, or nothing before it.
        """
        before = _cheap(self.stages)
        return replace(self, stages=before) if 0 < len(before) < len(self.stages) else self

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        """The stages that fit the size, in turn."""
        if z0.shape[1] <= _DENSE:
            total = super().run(f, z0, options)
            if not total.all_converged and any(self._granted(stage, f, z0) is None for stage in self.stages):
                total.message = f"{total.message}. {_LEFT_OUT}" if total.message else _LEFT_OUT
            return total
        members = tuple(s for s in self.stages if not _is(s, Continuation))
        runs = replace(self, stages=_LARGE if self.stages == _STAGES else members or self.stages)
        return super(Relay, runs).run(f, z0, options)

    def _go_on(
        self, stages: tuple[Stage, ...], f: Evaluations, z0: Tensor, options: Options, total: Outcome, *rest: Any
    ) -> Outcome:
        """The cheap ones of these members, and the dear ones for a few samples before they are asked about the others."""
        cheap, (norms, waiting, finishers) = _cheap(stages), rest
        unwatched = not options.watched and options.max_steps is None and f.system.can_select
        if self.trial is None or not unwatched or z0.numel() < CALL:
            return super()._go_on(stages, f, z0, options, total, *rest)
        total = super()._go_on(cheap, f, z0, options, total, *rest)
        left = ((total.status != int(Status.CONVERGED)) & ~waiting).nonzero().squeeze(1)
        if len(left) >= _SMALLEST and len(left) > _ALMOST_ALL * len(z0) and len(cheap) < len(stages):
            asked = left[:: max(4, -(-len(left) // self.trial))]  # of every part of the batch
            others = waiting.index_fill(0, left, True).index_fill(0, asked, False)
            total = super()._go_on(stages[len(cheap) :], f, z0, options, total, norms, others, finishers)
            solved = int((total.status[asked] == int(Status.CONVERGED)).sum())
            if 2 * solved < len(asked):
                total.message = _IN_VAIN.format(solved=solved, asked=len(asked), others=len(left) - len(asked))
                return total
            waiting = waiting.index_fill(0, asked, True)
        return super()._go_on(stages[len(cheap) :], f, z0, options, total, norms, waiting, finishers)

    def _granted(self, stage: Stage, f: Evaluations, z: Tensor) -> Stage | None:
        if self.work is None or math.isinf(self.work):
            return stage
        solver = stage.make()
        method = _method(solver)
        if isinstance(method, NewtonKrylov):
            products = min(method.inner_steps, max(1, int(self.work / _NEWTON_STEPS)))
            return replace(stage, solver=_with(solver, replace(method, inner_steps=products)), options=())
        if not isinstance(method, Continuation):
            return stage
        steps = int(self.work / (1 + _GMRES * f.price_of_dense(z)))  # one evaluation, and the factors
        if steps < _FEWEST:
            return None
        return replace(stage, max_steps=steps if stage.max_steps is None else min(steps, stage.max_steps))


def _cheap(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The members before the first that takes derivatives of the map."""
    return tuple(itertools.takewhile(lambda stage: not _is(stage, Continuation, NewtonKrylov), stages))


def _method(solver: Any) -> Any:
    """What a solver is, patient or not."""
    return solver.method if isinstance(solver, Impatient) else solver


def _with(solver: Any, method: Any) -> Any:
    """``solver``, as patient as it is, with another method."""
    return replace(solver, method=method) if isinstance(solver, Impatient) else method


def _is(stage: Stage, *kinds: type) -> bool:
    return isinstance(_method(stage.make()), kinds)
