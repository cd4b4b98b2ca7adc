"""The verb: where a problem meets a solver and a rule."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import recording
from implicitkit.foundation.arrays import as_args, as_state, from_arrays
from implicitkit.foundation.autocast import cast_as
from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import is_integer
from implicitkit.foundation.tracers import opaque_to_compile, refuse_tracing
from implicitkit.foundation.trees import Layout, tree_flatten, tree_map
from implicitkit.lifting.despite_failures import lift_despite_failures
from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.lifting.lifted import Lifted, check_solution, lift_closed
from implicitkit.lifting.reach import buffers_untouched
from implicitkit.lifting.substitution import resolve
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.auxiliary import auxiliary
from implicitkit.problem.base import Problem, Restated
from implicitkit.problem.catalogue import get_problem_entry
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.root import Root, RootBetween
from implicitkit.problem.steady_state import SteadyState
from implicitkit.reporting import (
    blank_failures,
    check_policy,
    failure_hint,
    plain_solution,
    raise_in_words,
    report_failure,
    warn_if_unsteady,
)
from implicitkit.rule.base import Rule
from implicitkit.rule.catalogue import get_rule
from implicitkit.rule.request import Request
from implicitkit.rule.solver_reports import said_beside
from implicitkit.rule.unroll import Unroll
from implicitkit.solution import Record, Solution
from implicitkit.solver import auto
from implicitkit.solver.base import Outcome, Solver
from implicitkit.solver.catalogue import check_serves, get_solver
from implicitkit.solver.charts import through_charts
from implicitkit.solver.root.bracketed import bracketed, is_known, middle
from implicitkit.solver.settings import asked_for, options_of
from implicitkit.solver.user_solver import Start
from implicitkit.solving.wrong_options import refuse_empty_vmap, refuse_option, refuse_problem
from implicitkit.system import System, check_output


@opaque_to_compile
def solve(
    problem: Problem,
    z0: Any = None,
    args: Any = (),
    *,
    solver: Any = "auto",
    rule: Any = "auto",
    batch_dims: int = 0,
    in_dims: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
    max_steps: int | None = None,
    on_failure: str = "raise",
    trace: bool = False,
    callback: Callable[[int, Any, Tensor], Any] | None = None,
    norm: Any = "l2",
    **unknown: Any,
) -> Solution:
    r"""Find ``z`` where ``problem`` holds, and attach its derivative.

    Units: ``z`` and ``args`` may have any; ``rtol`` is dimensionless, ``atol`` has the units of the residual.  Source:
    Blondel et al. (2022), "Efficient and modular implicit differentiation", for the separation of problem, solver and
    derivative; each problem, solver and rule names its own.

    Args:
        problem: what must hold: ``ik.Root(f)``, ``ik.FixedPoint(f)``, ``ik.Argmin(f)``, ``ik.LeastSquares(f)``,
            ``ik.SteadyState(f)``, or a registered problem of your own.
        z0: where to start, a pytree of real or complex tensors; the solution has its structure, shapes and dtypes.  Its
            derivative is zero.  Floats and NumPy arrays become tensors; an empty batch has an empty
            solution.  Only a problem that knows its unknowns (``ik.QuadraticProgram``) can do without.
        args: what the function gets after ``z``: a tuple of pytrees (a lone tensor is a tuple of one).
        solver: a registered name (``ik.solvers()``), a configured object (``ik.Anderson(memory=8)``), or ``"auto"``.
        rule: likewise (``ik.rules()``); ``"auto"`` is the exact implicit rule.
        batch_dims: the first so many dimensions of every leaf of ``z`` are independent samples.
        in_dims: which arguments carry the batch: for each the dimension where it starts, ``None`` if shared, as in
            ``torch.vmap``.  Given, converged samples are dropped from later evaluations; else they are only frozen.
        rtol, atol: a fixed point has converged when ``|F|_2 <= atol + rtol |z|_2``; anything else when ``|F|_2 <= atol``, or
            every equation holds by its own size, ``|F_i| <= atol + rtol S_i``, ``S_i`` the size of what cancels in it near
            ``z`` (about ``sum_j |J_ij z_j|``), and ``z`` has not run away to infinity.  Defaults follow the dtype:
            ``rtol`` is ``eps^(2/3)`` (float64 3.7e-11, float32 2.4e-5, bfloat16 0.039, float16 0.0098), of fixed points in
            half precision ``2 eps`` (bfloat16 0.016, float16 0.002), with ``eps`` of autocast where that is on; ``atol`` the
            same, but at most ``rtol |F(z0)|``.
            Both zero: ``max_steps`` steps, or as many as lower the residual; then not to converge is no failure.
        max_steps: steps allowed; ``None`` is the solver's own default, 0 evaluates at ``z0`` and reports.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``, for the solve and for the linear solve of its derivative;
            under ``"warn"`` and ``"ignore"`` a sample that ran away or overflowed has derivative zero, as has one that
            failed at a Jacobian too near to singular;
            or ``"nan"``: samples that failed have the value NaN, a derivative of zero, and disturb no other; where only
            the linear solve of the derivative failed, the derivative is NaN.
        trace: keep the residual norms of every step in ``solution.trace``.
        callback: called with ``(step, z, residual_norm)`` after each step, of the present point, not the best; returning
            ``True`` stops the solve.
        norm: what ``|F|`` and scale are in every test of convergence: ``"l2"``, ``"max"``, or a function of something like
            ``z``, batch dimensions included, that returns one number a sample.

    Returns:
        A :class:`~implicitkit.Solution`.

    Raises:
        ConvergenceError: some samples did not converge (under ``on_failure="raise"``); carries the solution.
        CapturedTensorError: a derivative would be lost.
        UnknownNameError, CapabilityError, TypeError, ValueError: the parts or the input do not fit; the message says how.
    """
    if unknown:
        refuse_option(next(iter(unknown)), solve)
    refuse_tracing(linearisable=True)
    args = as_args(args, z0)
    z0 = as_state(z0, args)
    options: dict[str, Any] = {
        "solver": solver,
        "rule": rule,
        "batch_dims": batch_dims,
        "in_dims": in_dims,
        "rtol": rtol,
        "atol": atol,
        "max_steps": max_steps,
        "on_failure": on_failure,
        "trace": trace,
        "callback": callback,
        "norm": norm,
    }
    with recording.refusing():
        return _run(problem, z0, args, **options)


@despite_inference_mode
def _run(problem: Problem, z0: Any, args: Any, **options: Any) -> Solution:
    """One solve, or on a manifold several, one chart after another."""
    with cast_as(z0 if getattr(problem, "under_autocast", False) else ()):
        on_manifold = isinstance(problem, Problem) and problem.manifold is not None
        if not on_manifold or options["max_steps"] == 0 or isinstance(_rule(problem, options["rule"]), Unroll):
            return _solve(problem, z0, args, **options)
        return through_charts(_solve, problem, z0, args, **options)


def _solve(
    problem: Problem,
    z0: Any,
    args: Any,
    *,
    solver: Any,
    rule: Any,
    batch_dims: Any,
    in_dims: Any,
    on_failure: str,
    **watched: Any,
) -> Solution:
    """Restate, lift, one request, attach, report."""
    if not isinstance(problem, Problem):
        refuse_problem(problem)
    batch_dims = _batch_dims(batch_dims)
    given, given_z0, given_args = problem, z0, (args if isinstance(args, tuple) else (args,))
    args = given_args
    restated = _restate(problem, z0, args, batch_dims)
    if restated is not None:
        problem, z0, args, batch_dims = restated.problem, restated.start, restated.args, restated.batch_dims
        in_dims = restated.dims(in_dims)
    if z0 is None:
        raise TypeError(f"solve needs z0, the point to start from: {type(problem).__name__} does not say its unknowns")
    layout = Layout(z0, batch_dims)
    options = options_of(problem, layout, restated, **watched, in_chart=given.manifold is not None)
    check_policy(on_failure)
    if not layout.batch:
        return _of_nobody(problem, layout, z0, args, restated)
    refuse_empty_vmap()
    rule = _rule(problem, rule)
    solver = _solver(solver, problem, layout, rule) if options.max_steps != 0 else Start()
    lifted = _lifted(problem, layout, z0, args, given_args)
    system = System.of(problem, layout, lifted, in_dims, args)
    record, start = Record(), layout.pack(tree_map(resolve, z0))
    first = _first(system, lifted)
    try:
        z, stats = rule.attached(Request(system, solver, options, start, lifted.theta, on_failure, record, first))
    except Exception as error:
        raise_in_words(error, given_z0, given_args, given.function)
    if lifted.branches:
        check_solution(lifted, problem.probe(layout.unpack(z)))
        record.outcome.evaluations += 1
    solution = Solution(layout.unpack(z), stats, layout, record, record.outcome.solver or _name(solver), _name(rule))
    if restated is not None:
        solution.value, solution.multipliers = restated.parts(solution.value)
    record.truncated = not record.outcome.all_converged and asked_for(record, options)
    if on_failure == "nan" and not (record.truncated and isinstance(rule, Unroll)):  # the steps themselves
        blank_failures(solution)
    elif on_failure not in ("ignore", "nan") and not record.outcome.all_converged and not record.truncated:
        plain = plain_solution(solution)
        if restated is not None:
            plain.value, plain.multipliers = restated.plain_parts(plain.value, len(record.outcome.z) // layout.batch)
        report_failure(plain, on_failure, failure_hint(record, given_z0, given_args))
    elif on_failure not in ("ignore", "nan") and record.outcome.all_converged:
        warn_if_unsteady(record)
    if given.has_aux:
        solution.aux = auxiliary(given.function, solution.value, given_args, bool(lifted.failed))
    elif record.outcome.said:
        solution.aux = said_beside(record.outcome.said, record.system.is_batched, stats)
    return solution


_plain_solve = inspect.unwrap(solve)  # for verbs, which are hidden from the compiler themselves


@opaque_to_compile
def root(
    residual: Callable[..., Any], z0: Any = None, args: Any = (), *, bracket: Any = None, **options: Any
) -> Solution:
    """``solve(Root(residual), z0, args, **options)``: ``residual(z, *args) = 0``.

        ik.root(lambda z, c: z**3 - c, args=(c,), bracket=(torch.zeros(5), 1 + c), batch_dims=1)

    ``bracket=(low, high)``: where each scalar equation changes its sign, numbers or tensors of the batch's shape (two
    numbers hold for the whole batch that the arguments have); by ``chandrupatla`` unless ``solver`` names another
    bracketing method, from the middle unless ``z0`` says where.  The derivative by the ends is zero.
    """
    structure = _structure(options)
    if bracket is None:
        return _plain_solve(Root(residual, **structure), z0, args, **options)
    refuse_tracing(linearisable=True)
    args = as_args(args, bracket, z0)
    bracket = from_arrays(bracket, args, z0)
    known = is_known(bracket)
    options["solver"] = bracketed(options.get("solver", "auto"), bracket if known else (0.0, 1.0))
    if z0 is None:
        z0 = middle(bracket, args, options.get("batch_dims", 0), options.get("in_dims"))
    problem = Root(residual, **structure) if known else RootBetween(residual, ends=bracket, **structure)
    return _plain_solve(problem, z0, args, **options)


@opaque_to_compile
def fixed_point(map: Callable[..., Any], z0: Any, args: Any = (), **options: Any) -> Solution:
    """``solve(FixedPoint(map), z0, args, **options)``: ``map(z, *args) = z``."""
    structure = _structure(options)
    return _plain_solve(FixedPoint(map, **structure), z0, args, **options)


@opaque_to_compile
def argmin(
    objective: Callable[..., Any],
    z0: Any,
    args: Any = (),
    *,
    constraints: Any = (),
    bounds: Any = None,
    prox: Any = None,
    project: Any = None,
    degenerate: str = "lstsq",
    manifold: Any = None,
    **options: Any,
) -> Solution:
    """``z = argmin_z objective(z, *args)``, under constraints if wanted: see :class:`Argmin`.

    The same as ``solve(Argmin(objective, constraints=..., ...), z0, args, **options)``.
    """
    problem = Argmin(
        objective,
        constraints=constraints,
        bounds=bounds,
        prox=prox,
        project=project,
        degenerate=degenerate,
        manifold=manifold,
        **_structure(options),
    )
    return _plain_solve(problem, z0, args, **options)


@opaque_to_compile
def least_squares(
    residuals: Callable[..., Any],
    z0: Any,
    args: Any = (),
    *,
    bounds: Any = None,
    loss: Any = "linear",
    f_scale: Any = 1.0,
    x_scale: Any = "auto",
    manifold: Any = None,
    **options: Any,
) -> Solution:
    """``z = argmin_z |residuals(z, *args)|^2 / 2``, within bounds, on a manifold and under a robust loss if wanted.

    The same as ``solve(LeastSquares(residuals, bounds=..., loss=..., manifold=..., ...), z0, args, **options)``:
    :class:`LeastSquares` says what they mean.
    """
    problem = LeastSquares(
        residuals, bounds=bounds, loss=loss, f_scale=f_scale, x_scale=x_scale, manifold=manifold, **_structure(options)
    )
    return _plain_solve(problem, z0, args, **options)


@opaque_to_compile
def steady_state(rhs: Callable[..., Any], z0: Any, args: Any = (), **options: Any) -> Solution:
    """``solve(SteadyState(rhs), z0, args, **options)``: ``dz/dt = rhs(z, *args) = 0``."""
    structure = _structure(options)
    return _plain_solve(SteadyState(rhs, **structure), z0, args, **options)


# ------------------------------------------------------------------------------------------------------------- details
def _structure(options: dict[str, Any]) -> dict[str, Any]:
    """What is said of the function and its Jacobian, taken out of the options of a solve."""
    return {k: options.pop(k) for k in ("jac_sparsity", "symmetric", "positive_definite", "has_aux") if k in options}


def _rule(problem: Problem, rule: Any) -> Rule:
    """The configured rule."""
    found: Rule = get_rule(get_problem_entry(problem).rule if isinstance(rule, str) and rule == "auto" else rule)
    return found


def _restate(problem: Problem, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated | None:
    """The problem that is solved in the place of this one."""
    evaluates = problem.kind.minimisation and (
        getattr(problem, "constrained", False) or getattr(problem, "bounds", None) is not None
    )
    try:
        with buffers_untouched((problem, args)) if evaluates else contextlib.nullcontext():
            return problem.restate(z0, args, batch_dims)
    except Exception as error:
        raise_in_words(error, z0, args)


@recording.unrecorded()
def _lifted(problem: Problem, layout: Layout, z0: Any, args: tuple[Any, ...], given: tuple[Any, ...]) -> Lifted:
    """The problem's function with every tensor explicit; ``given``: the arguments before a restatement."""
    if problem.closed:
        return lift_closed(problem.function, args)
    try:
        check = check_output(problem, layout)
        return lift_despite_failures(problem.function, problem.probe(z0), args, check, layout.batch)
    except Exception as error:
        raise_in_words(error, z0, given, problem.function, layout.batch_shape)


def _batch_dims(batch_dims: Any) -> int:
    if not (is_integer(batch_dims) and batch_dims >= 0):
        raise ValueError(f"batch_dims must be an integer >= 0, got {batch_dims!r}")
    return int(batch_dims)


def _of_nobody(problem: Problem, layout: Layout, z0: Any, args: Any, restated: Restated | None) -> Solution:
    """The solution of an empty batch: empty, and with derivative zero by everything that the function uses."""
    out = args if problem.closed else problem.function(problem.probe(z0), *args)
    parts = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())]
    link = 0 * sum((t.real if t.is_complex() else t).sum() for t in parts)
    empty = torch.zeros(0, dtype=layout.dtype, device=layout.device)
    count = torch.zeros(0, dtype=torch.int64, device=layout.device)
    outcome = Outcome(layout.pack(z0).detach(), empty, count, count, evaluations=0 if problem.closed else 1)
    value = tree_map(lambda t: t.detach() + link, z0)
    solution = Solution(value, None, layout, Record(outcome), "none", "none")
    if restated is not None:
        solution.value, solution.multipliers = restated.parts(value)
    return solution


def _solver(solver: Any, problem: Problem, layout: Layout, rule: Rule) -> Solver:
    """The configured solver, which serves the problem, as the rule does."""
    if isinstance(solver, str) and solver == "auto":
        solver = rule.solver_for(problem.kind) or auto.choose(problem, layout.batch, layout.size)
    found: Solver = get_solver(solver)
    check_serves(found, problem, layout.size)
    if isinstance(problem.x_scale, str) and problem.x_scale == "jac" and not found.scales:
        raise CapabilityError(
            f'x_scale="jac" is a matter of methods with a trust region of its shape, and solver {_name(found)!r} has none: '
            "use solver='levenberg_marquardt' or 'dogleg', or give the scales as numbers"
        )
    if rule.needs and problem.kind.name not in rule.needs:
        raise CapabilityError(
            f"rule {rule.name!r} is made for problems of kind {', '.join(rule.needs)}, and {type(problem).__name__} is of "
            f"kind {problem.kind}: use rule='implicit'"
        )
    return found


def _first(system: System, lifted: Lifted) -> Tensor | None:
    """The kernel's value at the start, if lifting has computed it already and no graph is needed with it."""
    if lifted.probe is None or not system.problem.kind.returns_state:
        return None
    return system.layout.pack(lifted.probe).detach()


def _name(part: Any) -> str:
    return getattr(part, "name", "") or type(part).__name__
