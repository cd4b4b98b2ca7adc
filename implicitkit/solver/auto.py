"""``solver="auto"``: one method after another, each for the samples that those before it could not solve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation.options import at_least, check_options, finite, flag, instance, optional, part
from implicitkit.problem.argmin import Bounded
from implicitkit.problem.base import Problem
from implicitkit.problem.bounded_least_squares import BoundedLeastSquares
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.problem.kind import Kind, as_kind
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.solution import Status
from implicitkit.solver.base import Options, Outcome, Solver
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.constrained.model import SPARSE
from implicitkit.solver.constrained.projected_levenberg_marquardt import ProjectedLevenbergMarquardt
from implicitkit.solver.constrained.second_order import falls_forever_within
from implicitkit.solver.evaluations import Evaluations, subset
from implicitkit.solver.fixed_point.attracting import PATH, PATH_STEPS, Attracting
from implicitkit.solver.fixed_point.frugal import FrugalAnderson
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.least_squares.frugal import FrugalLevenbergMarquardt
from implicitkit.solver.least_squares.levenberg_marquardt import LevenbergMarquardt
from implicitkit.solver.minimise.convex_newton import ConvexNewton
from implicitkit.solver.root.frugal import FrugalNewton
from implicitkit.solver.root.newton_krylov import NewtonKrylov
from implicitkit.solver.starts import has_no_slope
from implicitkit.sparsity.known import SMALLEST

__all__ = ["Polyalgorithm", "Stage", "choose", "stages"]

_DENSE = 1024  # unknowns a sample up to which Newton's dense Jacobian is the first choice
_DENSE_AT_ALL = 4096  # ... up to which it is the last resort
_DENSE_NUMBERS = 1 << 25  # numbers in all Jacobians of the batch, at most
_MOST_NUMBERS = 1 << 27  # ... for Newton's method alone, that gives way to products where these do
_SHARED_NUMBERS = 1 << 30  # ... where they are one
_NEWTON = 32  # unknowns a sample up to which minimisation begins with dense Hessians


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
            apart = torch.arange(len(z0), dtype=z0.dtype, device=z0.device).unsqueeze(1) * (1 + z0.abs())
            return len(z0) > 1 and not f.is_sparse(z0) and f.linearize(z0 + apart).alike()
        return not self.sparse or f.is_sparse(z0)

    def make(self) -> Any:
        """The configured solver."""
        return get_solver(self.solver, **dict(self.options))


def _stage(
    solver: str, *, max_steps: int | None = None, scale: float | None = 1.0, sparse: bool = False, **options: Any
) -> Stage:
    """A stage by its solver's name and options."""
    return Stage(solver, tuple(options.items()), max_steps, scale, sparse)


#: What is tried, in this order.  Monotone descent on ``|F|`` and undamped Newton steps fail on different problems.
_DENSE_NEWTON = (
    Stage(FrugalNewton(), max_steps=100),
    _stage("newton", line_search=False, max_steps=60),
    _stage("trust_region", max_steps=200),
    _stage("trust_region", subproblem="levenberg_marquardt", max_steps=300),
    _stage("newton", max_steps=100, scale=0.1),
    _stage("newton", max_steps=100, scale=0.01),
    _stage("trust_region", max_steps=200, scale=0.1),
    _stage("trust_region", max_steps=200, scale=0.01),
    _stage("df_sane", max_steps=500),
)
_MATRIX_FREE = (
    _stage("newton_krylov", max_steps=100),
    _stage("newton_krylov", max_steps=100, scale=0.1),
    _stage("newton_krylov", max_steps=100, scale=0.01),
    _stage("df_sane", max_steps=500),
)
#: Between the two: a dense Jacobian as soon as matrix-free steps have failed.
_EITHER = (
    Stage(Impatient(NewtonKrylov(), window=4, horizon=30), max_steps=100),
    *_DENSE_NEWTON[1:4],
    *_MATRIX_FREE[1:],
)
#: Newton's method above the size where a dense Jacobian is the first choice, for Jacobians that are sparse.
_SPARSE_NEWTON = (
    Stage(FrugalNewton(), max_steps=100, sparse=True),
    _stage("newton", line_search=False, max_steps=60, sparse=True),
)
#: Many dense Jacobians: for as long as products cost less, these.
_MANY_NEWTON = Stage(FrugalNewton(), max_steps=100)
#: A linear equation for many right-hand sides: one factorisation, whatever all samples' Jacobians would take.
_SHARED_NEWTON = Stage(FrugalNewton(), max_steps=100, shared=True)
#: Where sweeps are slow and factors are sparse Newton's method goes on; acceleration again where that takes more than a few
#: factorisations.  Where the residual has stopped falling the map's own path, along which it may rise first: it leads to no
#: fixed point that the map leaves again (a Riccati equation has those, too).
_ANDERSON = (
    Stage(Attracting(Impatient(FrugalAnderson(), window=50, horizon=1e4))),
    _stage("newton", max_steps=4, scale=None, sparse=True),
    Stage(PATH, max_steps=PATH_STEPS),
    _stage("anderson", max_steps=500, scale=None),
)
_MINIMISE = (
    _stage("lbfgs", max_steps=500),
    _stage("newton_cg", max_steps=200, scale=None),
    _stage("newton_cg", max_steps=500),
    _stage("lbfgs", scale=None),  # long valleys
)
#: Few unknowns: Newton's steps where they pay, and L-BFGS from where they no longer do.
_MINIMISE_FEW = (Stage(ConvexNewton(), max_steps=50), _stage("lbfgs", max_steps=500, scale=None), *_MINIMISE[1:])
#: Where the Hessian is sparse, its products do more than gradients, and so does a factorisation a step where these would be
#: too many.
_SPARSE_MINIMISE = (_stage("newton_cg", max_steps=100, sparse=True), *_MINIMISE)
_FIT = (Stage(FrugalLevenbergMarquardt(), max_steps=300), *_MINIMISE[1:3], _stage("lbfgs"))
#: Few unknowns under a robust loss, whose curvature Levenberg-Marquardt does not see: it is left where it is slow.
_ROBUST_FEW = (
    Stage(Impatient(LevenbergMarquardt(), window=4, horizon=8)),
    _stage("newton_cg", max_steps=30, scale=None),
    _stage("levenberg_marquardt", max_steps=300, scale=None),
    *_FIT[1:],
)


def stages(kind: Kind | str, batch: int, size: int) -> tuple[Stage, ...]:
    """The stages for a problem kind, samples and unknowns a sample.

    Equations and steady states: Newton with dense Jacobians up to 1,024 unknowns a sample, and with sparse ones beyond,
    Newton-Krylov where there is no pattern, and what they fail on by other routes (where a batch has more than 32 million
    numbers in dense Jacobians Newton-Krylov alone, and from 128 million on first of all); no factors are bought as long as
    Krylov vectors cost less (:class:`~implicitkit.solver.root.frugal.FrugalNewton`).  Fixed points: Anderson acceleration,
    from where it is slow and sparse factors are cheap Newton's method, from where it gets nowhere the plain iteration, then
    like equations.  Steady states: first along the
    flow, since Newton steps do not care for its direction and often end in a state that the flow leaves.
    Minimisation: up to 32 unknowns Newton steps, while the Hessian is positive definite and they pay
    (:class:`~implicitkit.solver.minimise.convex_newton.ConvexNewton`), of 128 and more Newton's in a trust region, where the
    Hessian has a sparsity pattern, by its products and, where these would cost more, its factors; then L-BFGS, then Newton
    with conjugate gradients in a trust region.
    Least squares: Levenberg-Marquardt first, at every size; by conjugate gradients while these cost less than factors
    (:class:`~implicitkit.solver.least_squares.frugal.FrugalLevenbergMarquardt`), and else whether its Jacobian is sparse,
    dense or never formed is for the method to say.
    """
    kind = as_kind(kind)
    affordable = batch * size * size <= _DENSE_NUMBERS
    if kind.minimisation:
        if not kind.of_residuals:
            if size <= _NEWTON and affordable:
                return _MINIMISE_FEW
            return _SPARSE_MINIMISE if size >= SMALLEST else _MINIMISE
        return _FIT
    equations: tuple[Stage, ...]
    if size <= _DENSE and affordable:
        equations = _DENSE_NEWTON
    elif size <= _DENSE_AT_ALL and affordable:
        equations = (*_SPARSE_NEWTON, *_EITHER)
    elif size <= _DENSE and batch * size * size <= _MOST_NUMBERS:
        equations = (_MANY_NEWTON, *_MATRIX_FREE)
    elif size <= _DENSE_AT_ALL and batch * size * size <= _SHARED_NUMBERS:
        equations = (*_SPARSE_NEWTON, _SHARED_NEWTON, *_MATRIX_FREE)
    else:
        equations = (*_SPARSE_NEWTON, *_MATRIX_FREE)
    if kind.flow > 0 and kind.equation:
        equations = (_stage("pseudo_transient", max_steps=100), *equations)
    return (*_ANDERSON, *equations) if kind.iteration else equations


def _program_stages(problem: ConstrainedMinimisation, batch: int) -> tuple[Stage, ...]:
    """Constrained minimisation: SQP where there are constraints and no set but bounds, proximal gradient where there is
    only a set or a term (of least squares within bounds first projected Levenberg-Marquardt steps), the augmented
    Lagrangian else; each finished by Newton steps on the natural map where dense Jacobians are affordable.  SQP and the
    Newton steps are for sparse matrices beyond that size, and from 256 unknowns on within bounds alone."""
    size = problem.size + len(problem.one_sided)
    fit = isinstance(problem, BoundedLeastSquares)
    dense = size <= _DENSE and batch * size * size <= _DENSE_NUMBERS
    polish = (_stage("newton", max_steps=30, scale=None),) if dense else ()
    bounded = problem.prox is None or isinstance(problem.prox, Bounded)
    if not dense and bounded and not fit:
        polish = (_stage("newton", max_steps=30, scale=None, sparse=True),)
    sparse = bounded and not fit and size >= SPARSE and (not dense or not problem.one_sided)
    large = (_stage("sqp", max_steps=60, sparse=True), *polish) if sparse else ()
    multipliers = (_stage("augmented_lagrangian"), *polish)
    if not problem.one_sided:
        return (
            *large,
            *((Stage(ProjectedLevenbergMarquardt(), max_steps=300),) if fit else ()),
            _stage("proximal_gradient", max_steps=50),
            *polish,
            _stage("proximal_gradient", max_steps=20000, scale=None),
        )
    if dense and bounded:
        return (_stage("sqp", max_steps=60), *polish, *multipliers)
    going_on = () if dense else (_stage("augmented_lagrangian", max_steps=40, scale=None),)
    return (*large, _stage("augmented_lagrangian", max_steps=12), *polish, *going_on, *multipliers)


def choose(problem: Problem, batch: int, size: int) -> Any:
    """The solver for a problem: the one its kind names, or a :class:`Polyalgorithm` of :func:`stages`."""
    if problem.kind.solver:
        return get_solver(problem.kind.solver)
    if isinstance(problem, ConstrainedMinimisation):
        return Polyalgorithm(_program_stages(problem, batch))
    if isinstance(problem, LeastSquares) and problem.loss != "linear" and size <= _NEWTON:
        return Polyalgorithm(_ROBUST_FEW)
    return Polyalgorithm(stages(problem.kind, batch, size))


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

    @property
    def solves(self) -> str:
        """What the first stage solves."""
        return str(self.stages[0].make().solves)

    @property
    def scales(self) -> bool:  # type: ignore[override]
        """Whether one of the stages does."""
        return any(stage.make().scales for stage in self.stages)

    def run(self, f: Evaluations, z0: Tensor, options: Options) -> Outcome:
        stages = self.stages
        while len(stages) > 1 and not stages[0].serves(f, z0):
            stages = stages[1:]
        solver = stages[0].make()
        total = solver.run(f, z0, _limited(options, stages[0].max_steps))
        total.solver = _title(self.name, [solver.name])
        if total.all_converged or len(stages) == 1:
            return total
        failed = total.status != int(Status.CONVERGED)
        waiting = failed & (total.z == z0).all(
            1
        )  # no stage gets away from where there is no slope: find begins beside it
        if bool(waiting.any()):
            waiting = has_no_slope(f, z0, waiting).any(1)
            if bool((waiting == failed).all()):
                return total
        if f.kind.returns_program:  # the other stages would go on for long
            failed = (total.status != int(Status.CONVERGED)) & torch.isfinite(total.z).all(1)
            falls = falls_forever_within(f, total.z, failed)
            total.status = torch.where(falls, int(Status.UNBOUNDED), total.status)
        start_norm = torch.linalg.vector_norm(f.residual(z0), dim=1)
        finishers = [solver.name] if bool((total.status == int(Status.CONVERGED)).any()) else []
        total = self._go_on(stages[1:], f, z0, options, total, start_norm, waiting, finishers)
        f.evaluations, f.sample_evaluations = total.evaluations, total.sample_evaluations
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
    ) -> Outcome:
        """Some stages for the samples that are open and not ``waiting``; adds to ``finishers``."""
        for stage in stages:
            # a callback's word is final
            open_ = (total.status != int(Status.CONVERGED)) & (total.status != int(Status.STOPPED)) & ~waiting
            if f.kind.returns_program:  # where a start is not finite no stage has another
                open_ = open_ & (total.status != int(Status.UNBOUNDED)) & torch.isfinite(start_norm)
            taken = int(total.steps.max())
            later = options.after(taken)
            if not bool(open_.any()) or (later.max_steps is not None and later.max_steps < 1):
                break
            if not stage.serves(f, z0):
                continue
            samples, system, theta = subset(f, open_, whole=options.watched)
            part = Evaluations(system, theta, stage.make().solves)
            part.evaluations, part.sample_evaluations = total.evaluations, total.sample_evaluations
            begin = torch.where(open_.unsqueeze(1), stage.begin(z0, total.z), total.z).index_select(0, samples)
            granted = self._granted(stage, part, begin)
            if granted is None:
                continue
            solver = granted.make()
            found = solver.run(
                part,
                begin,
                replace(_limited(later, granted.max_steps), start_norm=start_norm.index_select(0, samples)),
            )
            if _merge(total, found, samples, open_.index_select(0, samples)):
                finishers.append(solver.name)
        return total

    def _granted(self, stage: Stage, f: Evaluations, z: Tensor) -> Stage | None:
        """A stage as it may run from ``z`` on; ``None``: it is left out."""
        return stage


def _limited(options: Options, max_steps: int | None) -> Options:
    """The options with the smaller of two step limits."""
    if max_steps is None or (options.max_steps is not None and options.max_steps <= max_steps):
        return options
    # not dataclasses.replace, which costs four times as much: this is on the way of every solve
    return Options(
        options.rtol, options.atol, max_steps, options.trace, options.callback, options.start_norm, options.norm,
        options.atol_is_default
    )  # fmt: skip


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
    total.steps = total.steps.index_add(0, where, found.steps[open_])
    total.evaluations, total.sample_evaluations = found.evaluations, found.sample_evaluations
    total.trace = total.trace + found.trace[1:]
    total.message = found.message
    return bool(solved.any())


def _title(name: str, finishers: list[str]) -> str:
    """``auto (newton)``, ``auto (newton, trust_region)``, or the bare name if nothing was solved."""
    return f"{name} ({', '.join(dict.fromkeys(finishers))})" if finishers else name
