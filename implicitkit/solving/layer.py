"""Any solver as a layer: ``@ik.implicit(problem)``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation.arrays import as_state
from implicitkit.foundation.options import at_least, check_arguments, flag, not_negative, optional
from implicitkit.foundation.options import function as callable_as
from implicitkit.foundation.trees import Layout, tree_flatten
from implicitkit.foundation.wording import kind_of
from implicitkit.problem.base import Problem
from implicitkit.reporting import check_policy
from implicitkit.rule.catalogue import get_rule
from implicitkit.solution import Solution
from implicitkit.solver.user_solver import UserSolver
from implicitkit.solving.verbs import solve


def implicit(
    problem: Problem,
    *,
    rule: Any = "auto",
    batch_dims: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    on_failure: str = "raise",
    has_aux: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function that solves ``problem`` by any means differentiable.

        @ik.implicit(ik.Root(residual))
        def my_solver(z0, theta):          # NumPy, SciPy, a subprocess: plain tensors come in
            return scipy.optimize.fsolve(lambda z: z**3 + z - theta.numpy(), z0.numpy())

        z = my_solver(z0, theta)           # differentiable in theta, through every transform
        z = my_solver(z0, theta=theta)     # the same

    The function is called as ``my_solver(z0, *args)`` with detached tensors that belong to no transform (under
    ``torch.vmap`` once per sample), and returns the solution: a pytree like ``z0`` of tensors, arrays or numbers, or
    ``ik.Found(z, factorisation=lu)`` with the factors it has of the Jacobian, which then serve the derivative.  Its
    derivative is that of ``problem`` at the point returned; the residual there is evaluated and judged.  Of a constrained
    ``ik.Argmin`` it returns the point alone: the multipliers follow from it.

    Arguments may be given by name.  The problem's function gets them by position, in the order of the solver's
    parameters (where the solver takes ``**anything``, in the order of the problem's function's own parameters).  What is
    keyword-only in the solver is an option of the solver alone, and no tensor that a derivative is asked of.

    Units and shapes: as in :func:`ik.solve`.  Source: Blondel et al. (2022), "Efficient and modular implicit
    differentiation", the decorator ``custom_root``.

    Args:
        problem: what holds at the point that the function returns, with the same ``args``.
        rule, batch_dims, on_failure: as in :func:`ik.solve`.
        rtol, atol: what residual is accepted as a solution.  The solver has a tolerance of its own, so these only tell a
            solution from a failure: both default to ``eps^(1/4)`` (float64 1.2e-4, float32 1.9e-2).
        has_aux: the function returns ``(z, info)``, and so does the decorated one.  ``info``, any pytree, is passed on as it
            is, with derivative zero; under ``torch.vmap`` its numbers, arrays and tensors are one tensor each, with the
            batch in front, and of everything else there is a list.

    Returns:
        A decorator.  The decorated function returns ``z``; its attribute ``solve`` does the same and returns the whole
        :class:`~implicitkit.Solution` (``info`` is its ``aux``).

    Raises (at once): TypeError, ValueError: an option that cannot be.
    Raises (when called):
        ConvergenceError: the residual at the point returned is too large, or the solver raised.
        TypeError: arguments that do not fit the solver; no pair with ``has_aux=True``.
    """
    tolerance = optional(not_negative())
    check_arguments(
        "ik.implicit",
        batch_dims=(at_least(0), batch_dims),
        rtol=(tolerance, rtol),
        atol=(tolerance, atol),
        has_aux=(flag(), has_aux),
    )
    _check(problem, rule, on_failure, has_aux)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        check_arguments("ik.implicit", solver=(callable_as("solver(z0, *args)"), function))
        name = getattr(function, "__name__", type(function).__name__)
        order = functools.cache(lambda: _Order(function, problem.function, name))

        def whole(*args: Any, **named: Any) -> Solution:
            called = order().positions(args, named) if named or not args else _Called(args)
            z0, *rest = called.values
            default = torch.finfo(Layout(as_state(z0, rest), batch_dims).dtype).eps ** 0.25
            return solve(
                problem,
                z0,
                tuple(rest),
                solver=UserSolver(called.caller(function), name, has_aux=has_aux),
                rule=rule,
                batch_dims=batch_dims,
                rtol=default if rtol is None else rtol,
                atol=default if atol is None else atol,
                on_failure=on_failure,
            )

        @functools.wraps(function)
        def layer(*args: Any, **named: Any) -> Any:
            solution = whole(*args, **named)
            return (solution.value, solution.aux) if has_aux else solution.value

        layer.solve = whole  # type: ignore[attr-defined]
        return layer

    return decorate


def _check(problem: Any, rule: Any, on_failure: str, has_aux: bool) -> None:
    """Raise unless this is a problem, and fits the options.

    Raises:
        TypeError: no problem, or no rule. ValueError: no such rule or policy, or two auxiliary values.
    """
    if not isinstance(problem, Problem):
        of_class = isinstance(problem, type)
        made = f"the class {problem.__name__}: create an instance first" if of_class else kind_of(problem)
        raise TypeError(f"ik.implicit needs a problem, as in @ik.implicit(ik.Root(residual)); got {made}")
    check_policy(on_failure)
    if not (isinstance(rule, str) and rule == "auto"):
        get_rule(rule)
    if has_aux and problem.has_aux:
        raise ValueError(
            "has_aux=True of ik.implicit is what the solver returns beside z, and that of the problem what its function "
            "returns beside its value: solution.aux can be one of them only"
        )


class _Called:
    """One call: ``values`` (``z0`` and the arguments of the problem), the last of which have ``names`` in the solver's
    ``**anything``, and ``options`` that only the solver gets."""

    def __init__(
        self, values: tuple[Any, ...], names: tuple[str, ...] = (), options: dict[str, Any] | None = None
    ) -> None:
        self.values, self.names, self.options = values, names, options or {}

    def caller(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The solver, to be called with values by position."""
        if not self.names and not self.options:
            return function
        first = len(self.values) - len(self.names)

        def call(*values: Any) -> Any:
            return function(*values[:first], **dict(zip(self.names, values[first:], strict=True)), **self.options)

        return call


class _Order:
    """Which position a name has, by the signatures of the solver and of the problem's function."""

    def __init__(self, solver: Callable[..., Any], function: Callable[..., Any], name: str) -> None:
        self.name, self.form = name, inspect.signature(solver)
        parameters = list(self.form.parameters.values())
        self.free = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self.alone = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        self.function = function

    def positions(self, args: tuple[Any, ...], named: dict[str, Any]) -> _Called:
        """The values in their order.

        Raises:
            TypeError: they do not fit, ``z0`` is missing, or a tensor is an option.
        """
        try:
            bound = self.form.bind(*args, **named)
        except TypeError as error:
            raise TypeError(f"{self.name}: {error}; its signature is {self.name}{self.form}") from None
        given = set(bound.arguments)
        bound.apply_defaults()
        options = {n: bound.arguments[n] for n in self.alone if n in given}
        for n, value in options.items():
            if any(isinstance(t, Tensor) for t in tree_flatten(value)[0]):
                raise TypeError(
                    f"{self.name} was given a tensor for its keyword-only parameter {n!r}, which the problem's function "
                    "does not get, so that its derivative would be lost: make it an ordinary parameter, before the '*'"
                )
        values = list(bound.args[: self._last(bound, given)])
        names = self._by_name(dict(bound.arguments[self.free]), len(values)) if self.free in given else {}
        return _Called((*values, *names.values()), tuple(names), options)

    def _last(self, bound: inspect.BoundArguments, given: set[str]) -> int:
        """How many values by position there are: up to the last one that was given, defaults in between included."""
        last = 0
        for position, p in enumerate(self.form.parameters.values()):
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name in given:
                last = position + 1
            elif p.kind is p.VAR_POSITIONAL and p.name in given:
                last = position + len(bound.arguments[p.name])
        return last

    def _by_name(self, named: dict[str, Any], first: int) -> dict[str, Any]:
        """What stands in ``**anything``, in the order of the problem's function's parameters from ``first`` on."""
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][first:]
        if sorted(named) != sorted(names[: len(named)]):
            raise TypeError(
                f"{self.name} was called with {', '.join(sorted(named))} by name, where the problem's function takes "
                f"{', '.join(names) or 'nothing more'}"
            )
        return {n: named[n] for n in names[: len(named)]}
