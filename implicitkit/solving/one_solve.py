"""One solve, where a problem meets a solver and a rule: restated, lifted, asked for, differentiated, reported."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat, recording
from implicitkit.foundation.autocast import cast_as
from implicitkit.foundation.errors import CapabilityError, ConvergenceError
from implicitkit.foundation.nesting import nested
from implicitkit.foundation.options import is_integer
from implicitkit.foundation.trees import Layout, tree_flatten, tree_map
from implicitkit.lifting.despite_failures import lift_despite_failures
from implicitkit.lifting.inference import despite_inference_mode
from implicitkit.lifting.lifted import Lifted, check_solution, lift_closed
from implicitkit.lifting.reach import buffers_untouched
from implicitkit.lifting.substitution import resolve
from implicitkit.problem.auxiliary import auxiliary
from implicitkit.problem.base import Problem, Restated
from implicitkit.problem.catalogue import get_problem_entry
from implicitkit.reporting import (
    blank_failures,
    check_policy,
    failure_hint,
    plain_solution,
    report_failure,
    warn_if_unsteady,
)
from implicitkit.rule.base import Rule
from implicitkit.rule.catalogue import get_rule
from implicitkit.rule.request import Request
from implicitkit.rule.solver_reports import said_beside
from implicitkit.rule.unroll import Unroll
from implicitkit.solution import Record, Solution, Status
from implicitkit.solver import auto
from implicitkit.solver.base import Outcome, Solver, account
from implicitkit.solver.catalogue import check_serves, get_solver
from implicitkit.solver.user_solver import Start
from implicitkit.solving.charts import through_charts
from implicitkit.solving.epigraphs import by_epigraphs, chosen, may_be_lifted
from implicitkit.solving.kinks import along_a_kink
from implicitkit.solving.settings import asked_for, options_of
from implicitkit.solving.users_errors import raise_in_words
from implicitkit.solving.wrong_options import refuse_empty_vmap, refuse_problem
from implicitkit.system import System, check_output


@despite_inference_mode
@nested
def run(problem: Problem, z0: Any, args: Any, **options: Any) -> Solution:
    """One solve, or on a manifold several, one chart after another."""
    if not isinstance(z0, Tensor) or z0.is_inference():
        z0 = tree_map(compat.ordinary, z0)
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
    lifts: bool = True,
    **watched: Any,
) -> Solution:
    """Restate, lift, one request, attach, report."""
    if not isinstance(problem, Problem):
        refuse_problem(problem)
    given, given_z0, batch_dims = problem, z0, _batch_dims(batch_dims)
    given_args = args = args if isinstance(args, tuple) else (args,)
    problem, lifts = problem.within(watched["rtol"]), lifts and may_be_lifted(problem, solver, rule)
    restated = _restate(problem, z0, args, batch_dims)
    if restated is not None:
        problem, z0, args, batch_dims = restated.problem, restated.start, restated.args, restated.batch_dims
        in_dims = restated.dims(in_dims)
    if z0 is None:
        raise TypeError(f"solve needs z0, the point to start from: {type(problem).__name__} does not say its unknowns")
    layout = Layout(z0, batch_dims)
    rule, asked = _rule(problem, rule), solver
    options = options_of(problem, layout, restated, **watched, in_chart=given.manifold is not None, lifts=lifts)
    check_policy(on_failure)
    if not layout.batch:
        return _of_nobody(problem, layout, z0, args, restated)
    refuse_empty_vmap()
    solver = _solver(solver, problem, layout, rule) if options.max_steps != 0 else Start()
    lifted = _lifted(problem, layout, z0, args, given_args)
    system = System.of(problem, layout, lifted, in_dims, args)
    record, start = Record(), layout.pack(tree_map(resolve, z0))
    first = _first(system, lifted)
    try:
        z, stats = rule.attached(Request(system, solver, options, start, lifted.theta, on_failure, record, first))
    except Exception as error:
        failed = isinstance(error, ConvergenceError) and record.outcome is not None and not record.outcome.all_converged
        if not failed or on_failure != "raise" or asked_for(record, options):
            raise_in_words(error, given_z0, given_args, given.function)
        z, stats = start, None  # a derivative in forward mode at no solution: the solve's own failure is said
    if lifted.branches:
        check_solution(lifted, problem.probe(layout.unpack(z)))
        record.outcome.evaluations += 1
    solution = Solution(layout.unpack(z), stats, layout, record, record.outcome.solver or _name(solver), _name(rule))
    if restated is not None:
        solution.value, solution.multipliers = restated.parts(solution.value)
    if record.outcome.lifts or record.outcome.kink is not None:
        again = functools.partial(_solve, **watched, solver=asked, rule=rule, in_dims=None, lifts=False)
        if (beyond := _beyond_kinks(again, solution, restated, on_failure, given, given_z0, given_args)) is not None:
            return beyond
    record.truncated = not record.outcome.all_converged and asked_for(record, options)
    _report(solution, restated, on_failure, rule, given_z0, given_args)
    if given.has_aux:
        solution.aux = auxiliary(given.function, solution.value, given_args, bool(lifted.failed))
    elif record.outcome.said:
        solution.aux = said_beside(record.outcome.said, record.system.is_batched, stats)
    return solution


def _beyond_kinks(
    solve_once: functools.partial[Solution],
    found: Solution,
    restated: Restated | None,
    on_failure: str,
    problem: Any,
    z0: Any,
    args: tuple[Any, ...],
) -> Solution | None:
    """What a first method has come to an end with, among kinks, by epigraphs, and what these leave open by all methods; what
    all of these have, by branches (``None``: there are none)."""
    if not found._record.outcome.lifts:
        return along_a_kink(
            functools.partial(solve_once, batch_dims=0, on_failure="ignore"), found, restated, problem, args
        )
    solve_once = functools.partial(solve_once, batch_dims=found._layout.batch_dims)
    solution = by_epigraphs(solve_once, found, problem, z0, args, on_failure)
    if solution is None:
        whole = solve_once(problem, z0, args, on_failure=on_failure)
        account(whole._record.outcome, found._record.outcome)
        return whole
    outcome = solution._record.outcome
    if not outcome.all_converged and not bool((outcome.status == int(Status.STOPPED)).any()):
        whole = solve_once(problem, z0, args, on_failure="ignore")
        account(whole._record.outcome, outcome)
        solution = chosen(solution.converged & ~whole.converged, solution, whole)
    solution._record.truncated = False
    _report(solution, restated, on_failure, get_rule(solution.rule), z0, args)
    if problem.has_aux:
        solution.aux = auxiliary(problem.function, solution.value, args, False)
    return solution


def _report(
    solution: Solution, restated: Restated | None, on_failure: str, rule: Rule, z0: Any, args: tuple[Any, ...]
) -> None:
    """Say what failed, in the words of what the user gave."""
    record, layout = solution._record, solution._layout
    if on_failure == "nan":
        if not (record.truncated and isinstance(rule, Unroll)):  # the steps themselves
            blank_failures(solution)
    elif on_failure != "ignore":
        if record.outcome.all_converged:
            warn_if_unsteady(record)
        elif not record.truncated:
            plain = _plain(solution, restated, len(record.outcome.z) // layout.batch)
            report_failure(plain, on_failure, failure_hint(record, z0, args))


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


def _plain(solution: Solution, restated: Restated | None, calls: int) -> Solution:
    """The solution on plain tensors, for messages; under ``torch.vmap`` of so many calls."""
    plain = plain_solution(solution)
    if restated is not None:
        plain.value, plain.multipliers = restated.plain_parts(plain.value, calls)
    return plain


def _name(part: Any) -> str:
    return getattr(part, "name", "") or type(part).__name__
