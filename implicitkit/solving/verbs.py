"""The verb, ``solve``, and its shorthands: what a user types."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from implicitkit.foundation import recording
from implicitkit.foundation.arrays import as_args, as_state, from_arrays
from implicitkit.foundation.tracers import opaque_to_compile, refuse_tracing
from implicitkit.problem.argmin import Argmin
from implicitkit.problem.base import Problem
from implicitkit.problem.fixed_point import FixedPoint
from implicitkit.problem.least_squares import LeastSquares
from implicitkit.problem.root import Root, RootBetween
from implicitkit.problem.steady_state import SteadyState
from implicitkit.solution import Solution
from implicitkit.solving.bracket import bracketed, is_known, middle
from implicitkit.solving.one_solve import run
from implicitkit.solving.wrong_options import refuse_option


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
    with recording.refusing():
        return run(
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
            norm=norm,
        )


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
