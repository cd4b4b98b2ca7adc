"""Any solver as a layer: ``@ik.implicit(problem)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from implicitkit.foundation.trees import Layout
from implicitkit.problem.base import Problem
from implicitkit.solution import Solution
from implicitkit.solver.user_solver import UserSolver
from implicitkit.solving import solve

__all__ = ["implicit"]


def implicit(
    problem: Problem,
    *,
    rule: Any = "auto",
    batch_dims: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    on_failure: str = "raise",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function that solves ``problem`` by any means differentiable.

        @ik.implicit(ik.Root(residual))
        def my_solver(z0, theta):          # NumPy, SciPy, a subprocess: plain tensors come in
            return scipy.optimize.fsolve(...)

        z = my_solver(z0, theta)           # differentiable in theta, through every transform

    The function is called as ``my_solver(z0, *args)`` with detached tensors that belong to no transform (under
    ``torch.vmap`` once per sample), and returns the solution: a pytree like ``z0`` of tensors, arrays or numbers, or
    ``ik.Found(z, factorisation=lu)`` with the factors it has of the Jacobian, which then serve the derivative.  Its
    derivative is that of ``problem`` at the point returned; the residual there is evaluated and judged.

    Args:
        problem: what holds at the point that the function returns, with the same ``args``.
        rule, batch_dims, on_failure: as in :func:`ik.solve`.
        rtol, atol: what residual is accepted as a solution.  The solver has a tolerance of its own, so these only tell a
            solution from a failure: both default to ``eps^(1/4)`` (float64 1.2e-4, float32 1.9e-2).

    Returns:
        A decorator.  The decorated function returns ``z``; its attribute ``solve`` does the same and returns the whole
        :class:`~implicitkit.Solution`.

    Raises (when called):
        ConvergenceError: the residual at the point returned is too large, or the solver raised.
    """
    if not isinstance(problem, Problem):
        raise TypeError(
            f"ik.implicit needs a problem, as in @ik.implicit(ik.Root(residual)); got {type(problem).__name__}"
        )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        solver = UserSolver(function, getattr(function, "__name__", type(function).__name__))

        def whole(z0: Any, *args: Any) -> Solution:
            default = torch.finfo(Layout(z0, batch_dims).dtype).eps ** 0.25
            return solve(
                problem,
                z0,
                args,
                solver=solver,
                rule=rule,
                batch_dims=batch_dims,
                rtol=default if rtol is None else rtol,
                atol=default if atol is None else atol,
                on_failure=on_failure,
            )

        @functools.wraps(function)
        def layer(z0: Any, *args: Any) -> Any:
            return whole(z0, *args).value

        layer.solve = whole  # type: ignore[attr-defined]
        return layer

    return decorate
