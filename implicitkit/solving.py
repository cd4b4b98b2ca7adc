"""The verb: where a problem meets a solver and a rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit import compat
from implicitkit.errors import CapabilityError, ConvergenceWarning, warn
from implicitkit.lifting.lifted import Lifted, check_solution, lift, lift_closed
from implicitkit.lifting.watch import resolve
from implicitkit.problem import Argmin, FixedPoint, LeastSquares, Problem, Root, SteadyState
from implicitkit.problem.base import Restated
from implicitkit.registry import table as registry
from implicitkit.rule.base import Request
from implicitkit.solution import Record, Solution, Status
from implicitkit.solver import auto
from implicitkit.solver.base import Direct
from implicitkit.solver.driver import Options
from implicitkit.system import System, check_output
from implicitkit.trees import Layout, describe_leaves, tree_map

__all__ = ["argmin", "fixed_point", "least_squares", "root", "solve", "steady_state"]

POLICIES = ("raise", "warn", "ignore", "nan")


@compat.opaque_to_compile
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
) -> Solution:
    r"""Find ``z`` where ``problem`` holds, and attach its derivative.

    Args:
        problem: what must hold: ``ik.Root(f)``, ``ik.FixedPoint(f)``, ``ik.Argmin(f)``, ``ik.LeastSquares(f)``,
            ``ik.SteadyState(f)``, or a registered problem of your own.
        z0: where to start, a pytree of real or complex tensors; the solution has its structure, shapes and dtypes.  Its
            derivative is zero.  Only a problem that knows its unknowns (``ik.QuadraticProgram``) can do without.
        args: what the function gets after ``z``: a tuple of pytrees (a lone tensor is a tuple of one).
        solver: a registered name (``ik.solvers()``), a configured object (``ik.Anderson(memory=8)``), or ``"auto"``.
        rule: likewise (``ik.rules()``); ``"auto"`` is the exact implicit rule.
        batch_dims: the first so many dimensions of every leaf of ``z`` are independent samples.
        in_dims: which arguments carry the batch: for each the dimension where it starts, ``None`` if shared, as in
            ``torch.vmap``.  Given, converged samples are dropped from later evaluations; else they are only frozen.
        rtol, atol: a sample has converged when ``|F(z)|_2 <= atol + rtol * scale``; scale is ``|z|_2`` for a fixed point,
            else ``|F(z0)|_2``.  Defaults follow the dtype: both ``eps^(2/3)`` (float64 3.7e-11, float32 2.4e-5).
        max_steps: steps allowed; ``None`` is the solver's own default.
        on_failure: ``"raise"``, ``"warn"`` or ``"ignore"``, for the solve and for the linear solve of its derivative;
            or ``"nan"``: samples that failed have the value NaN, a derivative of zero, and disturb no other; where only
            the linear solve of the derivative failed, the derivative is NaN.
        trace: keep the residual norms of every step in ``solution.trace``.
        callback: called with ``(step, z, residual_norm)`` after each step; returning ``True`` stops the solve.

    Returns:
        A :class:`~implicitkit.Solution`.

    Raises:
        ConvergenceError: some samples did not converge (under ``on_failure="raise"``); carries the solution.
        CapturedTensorError: a derivative would be lost.
        UnknownNameError, CapabilityError, TypeError, ValueError: the parts or the input do not fit; the message says how.
    """
    if torch.is_inference_mode_enabled():  # tensors made here cannot be saved or differentiated, even inside a solver
        with torch.inference_mode(False), torch.no_grad():
            z0, args = (tree_map(_ordinary, tree) for tree in (z0, args))
            return solve(
                problem,
                z0,
                args,
                solver=solver,
                rule=rule,
                batch_dims=batch_dims,
                in_dims=in_dims,
                rtol=rtol,
                atol=atol,
                max_steps=max_steps,
                on_failure=on_failure,
                trace=trace,
                callback=callback,
            )
    if not isinstance(problem, Problem):
        raise TypeError(
            f"problem must be a Problem such as ik.Root(f) or ik.FixedPoint(f), got {type(problem).__name__}"
            + ("; wrap the function in one" if callable(problem) else "")
        )
    if not isinstance(args, tuple):
        args = (args,)
    given_z0, given_args = z0, args
    restated = problem.restate(z0, args, _batch_dims(batch_dims))
    if restated is not None:
        problem, z0, args, batch_dims = restated.problem, restated.start, restated.args, restated.batch_dims
    if z0 is None:
        raise TypeError(f"solve needs z0, where to start: {type(problem).__name__} does not say what its unknowns are")
    layout = Layout(z0, _batch_dims(batch_dims))
    options = _options(layout, rtol, atol, max_steps, trace, callback, restated)
    if on_failure not in POLICIES:
        raise ValueError(f"on_failure must be one of {', '.join(map(repr, POLICIES))}, got {on_failure!r}")
    rule = registry.get_rule(registry.get_problem_entry(problem).rule if rule == "auto" else rule)
    solver = (
        auto.choose(problem, layout.batch, layout.size, rule)
        if isinstance(solver, str) and solver == "auto"
        else (registry.get_solver(solver))
    )
    if not isinstance(solver, Direct):
        registry.check_serves(solver, problem, layout.size)
    if rule.needs and problem.kind not in rule.needs:
        raise CapabilityError(
            f"rule {rule.name!r} is made for problems of kind {', '.join(rule.needs)}, and {type(problem).__name__} is of "
            f"kind {problem.kind}: use rule='implicit'"
        )
    if problem.closed:
        lifted = lift_closed(problem.function, args)
    else:
        lifted = lift(problem.function, problem.probe(z0), args, check_output(problem, layout))
    system = System.of(problem, layout, lifted, in_dims, args)
    record = Record()
    request = Request(
        system,
        solver,
        options,
        layout.pack(tree_map(resolve, z0)),
        lifted.theta,
        on_failure,
        record,
        _first(system, lifted),
    )
    z, stats = rule.attach(request)
    if lifted.branches:
        check_solution(lifted, problem.probe(layout.unpack(z)))
        record.outcome.evaluations += 1
    solution = Solution(layout.unpack(z), stats, layout, record, record.outcome.solver or _name(solver), _name(rule))
    if restated is not None:
        solution.value, solution.multipliers = restated.split(solution.value)
    if on_failure == "nan":
        _blank(solution)
    elif on_failure != "ignore" and not record.outcome.all_converged:
        _report(solution, given_z0, given_args, on_failure, restated)
    return solution


@compat.opaque_to_compile
def root(residual: Callable[..., Any], z0: Any, args: Any = (), **options: Any) -> Solution:
    """``solve(Root(residual), z0, args, **options)``: ``residual(z, *args) = 0``."""
    return solve(Root(residual), z0, args, **options)


@compat.opaque_to_compile
def fixed_point(map: Callable[..., Any], z0: Any, args: Any = (), **options: Any) -> Solution:
    """``solve(FixedPoint(map), z0, args, **options)``: ``map(z, *args) = z``."""
    return solve(FixedPoint(map), z0, args, **options)


@compat.opaque_to_compile
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
    **options: Any,
) -> Solution:
    """``z`` minimises ``objective(z, *args)``, under constraints: :class:`Argmin` says which there are.

    The same as ``solve(Argmin(objective, constraints=..., ...), z0, args, **options)``.
    """
    problem = Argmin(
        objective, constraints=constraints, bounds=bounds, prox=prox, project=project, degenerate=degenerate
    )
    return solve(problem, z0, args, **options)


@compat.opaque_to_compile
def least_squares(residuals: Callable[..., Any], z0: Any, args: Any = (), **options: Any) -> Solution:
    """``solve(LeastSquares(residuals), z0, args, **options)``: ``z`` minimises half the squared norm of the residuals."""
    return solve(LeastSquares(residuals), z0, args, **options)


@compat.opaque_to_compile
def steady_state(rhs: Callable[..., Any], z0: Any, args: Any = (), **options: Any) -> Solution:
    """``solve(SteadyState(rhs), z0, args, **options)``: ``dz/dt = rhs(z, *args) = 0``."""
    return solve(SteadyState(rhs), z0, args, **options)


# ------------------------------------------------------------------------------------------------------------- details
def _ordinary(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


def _batch_dims(batch_dims: Any) -> int:
    if not isinstance(batch_dims, int) or batch_dims < 0:
        raise ValueError(f"batch_dims must be an integer >= 0, got {batch_dims!r}")
    return batch_dims


def _options(
    layout: Layout,
    rtol: float | None,
    atol: float | None,
    max_steps: int | None,
    trace: bool,
    callback: Any,
    restated: Restated | None,
) -> Options:
    dtype = layout.dtype
    if torch.is_autocast_enabled(
        layout.device.type
    ):  # the function computes, and can be solved, in that precision only
        dtype = torch.get_autocast_dtype(layout.device.type)
    default = torch.finfo(dtype).eps ** (2 / 3)
    rtol, atol = default if rtol is None else float(rtol), default if atol is None else float(atol)
    if not (rtol >= 0 and atol >= 0 and math.isfinite(rtol + atol)):
        raise ValueError(f"tolerances must be finite and not negative: rtol={rtol}, atol={atol}")
    if rtol == 0 and atol == 0:
        raise ValueError("rtol and atol cannot both be zero: no floating-point residual can be asked to vanish")
    if max_steps is not None and (not isinstance(max_steps, int) or max_steps < 1):
        raise ValueError(f"max_steps must be an integer >= 1 (or None for the solver's default), got {max_steps!r}")
    if callback is not None and not callable(callback):
        raise TypeError(f"callback must be callable as callback(step, z, residual_norm), got {type(callback).__name__}")
    return Options(rtol, atol, max_steps, trace, callback and _on_trees(callback, layout, restated))


def _on_trees(
    callback: Callable[[int, Any, Tensor], Any], layout: Layout, restated: Restated | None
) -> Callable[[int, Tensor, Tensor], Any]:
    """The user's callback, given the state as he knows it (under vmap with the batch in front)."""

    def view(matrix: Tensor) -> Any:
        state = layout.unpack(matrix)
        return state if restated is None else restated.split(state)[0]

    def call(step: int, z: Tensor, norm: Tensor) -> Any:
        if len(z) == layout.batch:
            return callback(step, view(z), layout.unpack_batch(norm))
        lead = len(z) // layout.batch
        tree = torch.func.vmap(view)(z.reshape(lead, layout.batch, layout.size))
        return callback(step, tree, layout.unpack_batch(norm, (lead,)))

    return call


def _first(system: System, lifted: Lifted) -> Tensor | None:
    """The kernel's value at the start, if lifting has computed it already and no graph is needed with it."""
    if lifted.probe is None or system.problem.returns != "state":
        return None
    return system.layout.pack(lifted.probe).detach()


def _name(part: Any) -> str:
    return getattr(part, "name", "") or type(part).__name__


def _blank(solution: Solution) -> None:
    """NaN for the samples that failed."""
    good = solution.converged

    def blank(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return torch.where(good.reshape(good.shape + (1,) * (t.ndim - good.ndim)), t, torch.nan)

    solution.value, solution.multipliers = tree_map(blank, solution.value), tree_map(blank, solution.multipliers)


def _report(solution: Solution, z0: Any, args: tuple[Any, ...], on_failure: str, restated: Restated | None) -> None:
    """Raise or warn, on plain tensors, whatever transforms surround the call."""
    outcome = solution._record.outcome
    hint = ""
    if bool(((outcome.status == int(Status.NONFINITE)) & (outcome.steps == 0)).any()):

        def nonfinite(t: Tensor) -> bool:
            return not bool(torch.isfinite(_physical(t)).all())

        culprits = describe_leaves(z0, "z0", nonfinite) + describe_leaves(args, "args", nonfinite)
        hint = f"NaN or Inf in: {', '.join(culprits)}." if culprits else "The function is not finite at z0."
    elif solution._record.system is not None:
        system, theta = solution._record.system, solution._record.theta
        hint = system.problem.explain(system, outcome.z, theta, outcome.status != int(Status.CONVERGED))
    plain = Solution(
        _plain_value(solution),
        None,
        solution._layout,
        solution._record,
        solution.solver,
        solution.rule,
    )
    if restated is not None:
        plain.value, plain.multipliers = restated.split(plain.value)
    error = plain._error(hint)
    if on_failure == "raise":
        raise error
    warn(str(error), ConvergenceWarning)


def _physical(t: Tensor) -> Tensor:
    while compat.is_wrapped(t):
        t = compat.unwrap(t)
    return t.detach()


def _plain_value(solution: Solution) -> Any:
    layout, z = solution._layout, solution._record.outcome.z
    if len(z) == layout.batch:
        return layout.unpack(z)
    return torch.func.vmap(layout.unpack)(z.reshape(-1, layout.batch, layout.size))
