"""``solver="auto"``: which methods are tried, in which order, by kind, size and structure."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from implicitkit.problem.argmin import Bounded, Projected
from implicitkit.problem.base import Problem
from implicitkit.problem.bounded_least_squares import BoundedLeastSquares
from implicitkit.problem.constrained import ConstrainedMinimisation
from implicitkit.problem.kind import Kind, as_kind
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.constrained.augmented_lagrangian import AugmentedLagrangian
from implicitkit.solver.constrained.inside_newton import InsideNewton, domain_ends
from implicitkit.solver.constrained.model import DENSE, SPARSE, Model
from implicitkit.solver.constrained.projected import ProjectedLevenbergMarquardt, ProjectedNewton
from implicitkit.solver.constrained.proximal_gradient import ProximalGradient
from implicitkit.solver.constrained.proximal_newton import ProximalNewton
from implicitkit.solver.constrained.sqp import SQP
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.fixed_point.attracting import PATH, PATH_STEPS, Attracting
from implicitkit.solver.fixed_point.frugal import FrugalAnderson
from implicitkit.solver.fixed_point.impatient import Impatient
from implicitkit.solver.least_squares.frugal import FrugalLevenbergMarquardt
from implicitkit.solver.least_squares.levenberg_marquardt import LevenbergMarquardt
from implicitkit.solver.minimise.convex_newton import ConvexNewton
from implicitkit.solver.minimise.frugal import FrugalNewtonCG
from implicitkit.solver.polyalgorithm import Polyalgorithm, Stage
from implicitkit.solver.root.df_sane import DFSANE
from implicitkit.solver.root.frugal import FrugalNewton
from implicitkit.solver.root.idle_unknowns import Awakened
from implicitkit.solver.root.newton import Newton
from implicitkit.solver.root.trust_region import TrustRegion
from implicitkit.sparsity.patterns import SMALLEST

_DENSE = 1024  # unknowns a sample up to which Newton's dense Jacobian is the first choice
_DENSE_AT_ALL = 4096  # ... up to which it is the last resort
_DENSE_NUMBERS = 1 << 25  # numbers in all Jacobians of the batch, at most
_MOST_NUMBERS = 1 << 27  # ... for Newton's method alone, that gives way to products where these do
_SHARED_NUMBERS = 1 << 30  # ... where they are one
_EXPANSIONS = 40  # doublings of the way in which a change of sign is looked for: up to 1e11 of it
_FEW = 32  # unknowns a sample up to which a fit under a loss that is not modelled leaves slow steps early


def _stage(
    solver: str, *, max_steps: int | None = None, scale: float | None = 1.0, sparse: bool = False, **options: Any
) -> Stage:
    """A stage by its solver's name and options."""
    return Stage(solver, tuple(options.items()), max_steps, scale, sparse)


#: What is tried, in this order.  Monotone descent on ``|F|`` and undamped Newton steps fail on different problems.
_DENSE_NEWTON = (
    Stage(FrugalNewton(), max_steps=100),
    _stage("newton", line_search=False, max_steps=60),
    Stage(Awakened(TrustRegion()), max_steps=200, scale=None),
    _stage("trust_region", max_steps=200),
    _stage("trust_region", subproblem="levenberg_marquardt", max_steps=300),
    _stage("newton", max_steps=100, scale=0.1),
    _stage("newton", max_steps=100, scale=0.01),
    _stage("trust_region", max_steps=200, scale=0.1),
    _stage("trust_region", max_steps=200, scale=0.01),
    Stage(Impatient(DFSANE(), window=50, horizon=500), max_steps=500),
)
#: One unknown: where Newton's steps are caught at a minimum of ``|F|``, a change of sign is looked for on both sides; if
#: there is none, a zero that ``F`` touches is for Newton's steps, and for nothing else.
_SCALAR_NEWTON = (
    *_DENSE_NEWTON[:2],
    _stage("chandrupatla", expansions=_EXPANSIONS, max_steps=100),
    _DENSE_NEWTON[3],
    *_DENSE_NEWTON[5:7],
)
_MATRIX_FREE = (
    _stage("newton_krylov", max_steps=100),
    _stage("newton_krylov", max_steps=100, scale=0.1),
    _stage("newton_krylov", max_steps=100, scale=0.01),
    _stage("df_sane", max_steps=500),
)
#: Between the two: a dense Jacobian where products cost more, or have failed.
_EITHER = (Stage(FrugalNewton(), max_steps=100), *_DENSE_NEWTON[1:5], *_MATRIX_FREE[1:])
#: Newton's method above the size where a dense Jacobian is the first choice, for Jacobians that are sparse.
_SPARSE_NEWTON = (
    Stage(FrugalNewton(), max_steps=100, sparse=True),
    _stage("newton", line_search=False, max_steps=60, sparse=True),
)
#: Many dense Jacobians: for as long as products cost less, these.
_MANY_NEWTON = Stage(FrugalNewton(), max_steps=100)
#: A linear equation for many right-hand sides: one factorisation, whatever all samples' Jacobians would take.
_SHARED_NEWTON = Stage(FrugalNewton(), max_steps=100, shared=True)
#: Newton's steps, too, where acceleration is slow and factors would cost less.  Where it gets nowhere and factors are sparse
#: Newton's method goes on.  Where the residual has stopped falling the map's own path, along which it may rise first: it
#: leads to no fixed point that the map leaves again (a Riccati equation has those, too).
_ANDERSON = (
    Stage(Attracting(Impatient(FrugalAnderson(), window=50, horizon=1e4))),
    _stage("newton", max_steps=4, scale=None, sparse=True),
    Stage(PATH, max_steps=PATH_STEPS),
    _stage("anderson", max_steps=500, scale=None),
)
#: What goes on along a long valley: whichever of the two gets on there, with ever more steps in turn.
_VALLEY = (
    _stage("newton_cg", max_steps=50, scale=None),
    _stage("lbfgs", max_steps=1000, scale=None),
    _stage("newton_cg", max_steps=200, scale=None),
    _stage("lbfgs", scale=None),
    _stage("newton_cg", max_steps=500),
)
#: From where full Newton steps no longer pay those in a trust region, while each costs little; from there on L-BFGS.
_LOWER = (Stage(FrugalNewtonCG(), max_steps=100, scale=None), _stage("lbfgs", max_steps=500, scale=None))
_MINIMISE = (*_LOWER, *_VALLEY)
#: Where the Hessian is sparse, its products do more than gradients, and so does a factorisation a step where these would be
#: too many.
_SPARSE_MINIMISE = _stage("newton_cg", max_steps=300, sparse=True)
#: Along the valleys of stiff chains and of shells their steps are short, but far longer than those of gradients.
_SPARSE_VALLEY = _stage("newton_cg", max_steps=2000, scale=None, sparse=True)
_FIT = (
    Stage(FrugalLevenbergMarquardt(), max_steps=300),
    _stage("newton_cg", max_steps=200, scale=None),
    _stage("newton_cg", max_steps=500),
    _stage("lbfgs"),
)
#: A fit of few unknowns again from its start, Gauss-Newton's steps first: a valley that short ones lead to may have no end.
_FIT_FEW = (_FIT[0], _stage("levenberg_marquardt", damping=1e-10, max_steps=200), *_FIT[1:])
#: Few unknowns under a robust loss whose curvature Levenberg-Marquardt does not see: it is left where it is slow.
_ROBUST_FEW = (
    Stage(Impatient(LevenbergMarquardt(), window=4, horizon=8)),
    _stage("newton_cg", max_steps=30, scale=None),
    _stage("levenberg_marquardt", max_steps=300, scale=None),
    *_FIT[1:],
)


@dataclass(frozen=True)
class _AtItsEdge(Stage):
    """A stage for objectives whose domain ends at the edge of the set, or nearly there."""

    def serves(self, f: Evaluations, z0: Tensor) -> bool:
        return bool(domain_ends(Model(f), z0).any())


_INSIDE = _AtItsEdge(InsideNewton(), max_steps=100)
#: What is left within bounds or a set: many cheap steps, as long as they get on.
_LAST_PROXIMAL = Stage(Impatient(ProximalGradient(), window=1000, horizon=20000), max_steps=20000, scale=None)
#: What is left for programs that SQP fails on; impatient, since each of its steps is a minimisation.
_LAST = Impatient(AugmentedLagrangian(inner_steps=100), window=4, horizon=40)
_LAST_MANY = Impatient(AugmentedLagrangian(), window=5, horizon=100)
#: Programs that are nearly quadratic; the others are for an interior point.  Of many unknowns a quadratic program costs more
#: than many of its steps.
_FEW_SQP = Stage(Impatient(SQP(), window=8, horizon=20), max_steps=60)
_MANY_SQP = Stage(Impatient(SQP(), window=3, horizon=10), max_steps=60)
_SPARSE_SQP = Stage(Impatient(SQP(), window=5, horizon=20), max_steps=60, sparse=True)
#: Once more from the start, where neither has found a solution: often there is none.
_AGAIN_SQP = Impatient(SQP(), window=36, horizon=60)


def stages(kind: Kind | str, batch: int, size: int) -> tuple[Stage, ...]:
    """The stages for a problem kind, samples and unknowns a sample.

    Equations of one unknown: Newton, then bracketing (Chandrupatla) where a sign changes anywhere around the start.
    Equations and steady states: Newton with dense Jacobians up to 4,096 unknowns a sample, and with sparse ones beyond,
    Newton-Krylov where there is no pattern, and what they fail on by other routes (where a batch has more than 32 million
    numbers in dense Jacobians Newton-Krylov alone, and from 128 million on first of all); no factors are bought as long as
    Krylov vectors cost less (:class:`~implicitkit.solver.root.frugal.FrugalNewton`).  Fixed points: Anderson acceleration,
    from where it is slow and factors are cheap Newton's method
    (:class:`~implicitkit.solver.fixed_point.frugal.FrugalAnderson`), from where it gets nowhere the plain iteration, then
    like equations.  Steady states: first along the flow, since Newton steps do not care for its direction and often end in
    a state that the flow leaves.
    Minimisation: of 128 unknowns and more first Newton steps in a trust region, where the Hessian has a sparsity pattern, by
    its products and, where these would cost more, its factors; then Newton steps while the Hessian is positive definite and
    they pay, from 1,024 unknowns on by products alone (:class:`~implicitkit.solver.minimise.convex_newton.ConvexNewton`);
    then Newton steps in a trust region while each costs little
    (:class:`~implicitkit.solver.minimise.frugal.FrugalNewtonCG`); then L-BFGS, then Newton with conjugate gradients in a
    trust region, whatever they cost.
    Least squares: Levenberg-Marquardt first, at every size; by conjugate gradients while these cost less than factors
    (:class:`~implicitkit.solver.least_squares.frugal.FrugalLevenbergMarquardt`), and else whether its Jacobian is sparse,
    dense or never formed is for the method to say.
    """
    kind = as_kind(kind)
    affordable = batch * size * size <= _DENSE_NUMBERS
    if kind.minimisation:
        if not kind.of_residuals:
            newton = Stage(ConvexNewton(formed=size <= _DENSE and affordable), max_steps=50, scale=None)
            if size < SMALLEST:
                return (newton, *_MINIMISE)
            return (_SPARSE_MINIMISE, newton, *_LOWER, _SPARSE_VALLEY, *_VALLEY)
        return _FIT_FEW if size < SMALLEST else _FIT
    equations: tuple[Stage, ...]
    if size <= _DENSE and affordable:
        equations = _SCALAR_NEWTON if size == 1 else _DENSE_NEWTON
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


class _Form(NamedTuple):
    """What the stages of a program depend on.

    Attributes:
        size: unknowns and multipliers. constrained: are there constraints? bounded: is there no set but bounds? within: are
            there bounds? fit: is it a sum of squares? projected: is there another set?
    """

    size: int
    constrained: bool
    bounded: bool
    within: bool
    fit: bool
    projected: bool

    @classmethod
    def of(cls, problem: ConstrainedMinimisation) -> _Form:
        within = isinstance(problem.prox, Bounded)
        size, fit = problem.size + len(problem.one_sided), isinstance(problem, BoundedLeastSquares)
        projected = isinstance(problem.prox, Projected)
        return cls(size, bool(problem.one_sided), within or problem.prox is None, within, fit, projected)


def _program_stages(form: _Form, batch: int) -> tuple[Stage, ...]:
    """Constrained minimisation: SQP where there are constraints and no set but bounds, proximal gradient where there is
    only a set or a term, with Newton steps where these pay (within bounds first projected ones, of least squares
    Levenberg-Marquardt's, and SQP along long valleys), the augmented Lagrangian else; each finished by Newton steps on the
    natural map where dense Jacobians are affordable.  SQP and these are for sparse matrices beyond that size, and from 256
    unknowns on within bounds alone."""
    size, constrained, bounded, within, fit, projected = form
    dense = size <= _DENSE and batch * size * size <= _DENSE_NUMBERS
    polish = (_stage("newton", max_steps=30, scale=None),) if dense else ()
    if not dense and bounded and not fit:
        polish = (_stage("newton", max_steps=30, scale=None, sparse=True),)
    convex = dense and within and not fit
    sparse = bounded and not fit and size >= SPARSE and (not dense or not constrained)
    large = (_SPARSE_SQP,) if sparse else ()
    formed = size <= DENSE and batch * size * size <= _DENSE_NUMBERS
    inside = (_stage("filter_interior_point", max_steps=250, sparse=not formed), *polish) if bounded and not fit else ()
    if not constrained and not bounded:
        return (
            *((_INSIDE,) if dense and projected else ()),
            Stage(ProximalNewton(), max_steps=5000),
            *polish,
            _LAST_PROXIMAL,
        )
    if not constrained:
        return (
            *large,
            *(polish if large else ()),
            *((Stage(ProjectedLevenbergMarquardt(), max_steps=300),) if fit else ()),
            *((Stage(ProjectedNewton(), max_steps=50),) if convex else ()),
            _stage("proximal_gradient", max_steps=50, scale=None if convex else 1.0),
            *((_stage("sqp", max_steps=60, scale=None),) if convex else ()),
            *polish,
            _LAST_PROXIMAL,
        )
    if dense and bounded:
        # where there are no multipliers the last ones converge ever more slowly, a few hundred evaluations a step
        first = _FEW_SQP if size < SMALLEST else _MANY_SQP
        return (first, *inside, Stage(_AGAIN_SQP, max_steps=60), *polish, Stage(_LAST), *polish)
    going_on = () if dense else (Stage(_LAST_MANY, max_steps=40, scale=None),)
    return (
        *large,
        *inside,
        _stage("augmented_lagrangian", max_steps=12),
        *polish,
        *going_on,
        Stage(_LAST_MANY),
        *polish,
    )


def choose(problem: Problem, batch: int, size: int) -> Any:
    """The solver for a problem: the one its kind names, or a :class:`Polyalgorithm` of :func:`stages`."""
    if problem.kind.solver == FrugalNewton.name:
        return Newton() if problem.wants_factors else FrugalNewton()
    if problem.kind.solver:
        return get_solver(problem.kind.solver)
    if isinstance(problem, ConstrainedMinimisation):
        return _for_programs(_Form.of(problem), batch)
    if isinstance(problem, LeastSquares) and not problem.loss_is_modelled and size <= _FEW:
        return Polyalgorithm(_ROBUST_FEW)
    return _usual(problem.kind, batch, size)


@functools.lru_cache(maxsize=1024)
def _for_programs(form: _Form, batch: int) -> Polyalgorithm:
    """Made once, as well."""
    return Polyalgorithm(_program_stages(form, batch))


@functools.lru_cache(maxsize=1024)
def _usual(kind: Kind, batch: int, size: int) -> Polyalgorithm:
    """Made once: its members are checked, which takes as long as some evaluations."""
    return Polyalgorithm(stages(kind, batch, size))
