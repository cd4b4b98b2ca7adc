"""Solvers by name: registering, looking up, and which of them serve a problem."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from implicitkit.foundation.errors import CapabilityError
from implicitkit.foundation.options import at_least, check_arguments, flag, optional
from implicitkit.foundation.wording import option_error
from implicitkit.problem.kind import Kind, as_kind, kinds
from implicitkit.registry.table import (
    REQUIRED,
    TABLES,
    Entry,
    check_choice,
    check_name,
    describe,
    describe_value,
    instantiate,
    option_parameters,
    origin,
    refuse_options,
    with_option,
)
from implicitkit.solver.base import Solver
from implicitkit.solver.black_box import BlackBox
from implicitkit.solver.method import Method

T = TypeVar("T")
_TABLE = TABLES["solvers"]
_BATCHES = ("loop", "native", "joint")


def register_solver(
    name: str, *, solves: str, batch: str | None = None, max_size: int | None = None, override: bool = False
) -> Callable[[T], T]:
    """Register a :class:`~implicitkit.Method` or other ``Solver`` subclass, or a function, as a solver.

    Args:
        name: what users write in ``solver="..."``; dots are allowed.
        solves: ``"fixed_point"``, ``"root"``, ``"minimise"``, ``"least_squares"``, ``"steady_state"``, ``"constrained"``
            or ``"quadratic_program"`` (see :func:`serves`), or the word of a kind that a plugin has registered.
        batch: functions only. ``"loop"`` (default): called once per sample with ``z0`` of shape ``(n,)``;
            ``"native"``: called with ``(batch, n)``; ``"joint"``: called with one big system ``(batch * n,)``, without the
            samples that begin with NaN where ``in_dims`` says which rows of the arguments are theirs.
        max_size: the most unknowns that one sample may have; 1 for methods that solve scalar equations only.
        override: replace a solver that already has this name.

    A function must have the form ``find(f, z0, *, rtol, atol, max_steps, **its own options)`` and return the point, or
    :class:`~implicitkit.Found`.  The class or function itself is returned unchanged.

    Raises:
        ValueError: the name is taken or malformed, or ``solves`` / ``batch`` is not one of the above.
        TypeError: the target is neither a ``Solver`` subclass nor a function of that form.
    """
    check_name(name)
    if name == "auto":
        raise ValueError("the name 'auto' is taken: solver=\"auto\" is what the library thinks best")
    if solves in (kind.name for kind in kinds()) and solves not in _words():
        raise ValueError(
            f"solves={solves!r}: problems of that kind are solved by solves={as_kind(solves).served_by[0]!r}"
        )
    check_choice("solves", solves, _words())
    if batch is not None:
        check_choice("batch", batch, _BATCHES)
    check_arguments("register_solver", max_size=(optional(at_least(1)), max_size), override=(flag(), override))

    def register(target: T) -> T:
        if not inspect.isclass(target):
            _check_black_box(name, target)
            mode = batch or "loop"
            entry = Entry("solvers", name, target, origin(target), solves=solves, batch=mode, max_size=max_size)
            _TABLE.add(entry, override)
            return target
        if not issubclass(target, Solver):
            raise TypeError(
                f"cannot register the class {target.__name__} as solver {name!r}: it must be a subclass of "
                "implicitkit.Method (init and step on plain matrices); register a function for a black box"
            )
        if origin(target) != "implicitkit":
            _check_class(name, target)
        if batch is not None:
            raise TypeError(f"batch= is for functions; {target.__name__} is a Method, which is always batched")
        entry = Entry("solvers", name, target, origin(target), solves=solves, max_size=max_size)
        _TABLE.add(entry, override)
        _TABLE.set_name(target, entry)
        cls: Any = target
        cls.solves, cls.max_size = solves, max_size
        return target

    return register


def get_solver(solver: Any, **options: Any) -> Any:
    """The configured solver for a name, a class, a registered function, or an object (which passes through).

    Raises:
        UnknownNameError: no solver has this name. TypeError: it is no solver, or options do not fit it.
    """
    if isinstance(solver, str):
        return _configure(_TABLE.find(solver), options)
    if isinstance(solver, type):
        if issubclass(solver, Solver):
            return _with_purpose(instantiate(solver, options))
    elif isinstance(solver, Solver):
        if options:
            refuse_options(solver, options)
        return _with_purpose(solver)
    elif callable(solver):
        for entry in _TABLE.entries.values():
            if entry.target is solver:
                return _configure(entry, options)
        raise TypeError(
            f"the function {describe_value(solver)} is not registered as a solver: decorate it with "
            "@implicitkit.register_solver(name, solves=...), or make it a layer with @implicitkit.implicit(problem)"
        )
    kind = solver if inspect.isclass(solver) else type(solver)
    raise TypeError(
        f"solver must be a registered name, a configured object such as implicitkit.Anderson(memory=5), or a Method "
        f"subclass; got {describe_value(solver)}"
        + (
            f": use ik.TorchOptim(torch.optim.{kind.__name__}, lr=...)"
            if issubclass(kind, torch.optim.Optimizer)
            else ""
        )
    )


def solvers() -> list[str]:
    """Names of all solvers, plugins' included."""
    return _TABLE.names()


def solvers_with(option: str) -> dict[str, str]:
    """Names of the classes of solvers that have an option of this name, each with how it is written."""
    return with_option("solvers", option)


def serves(solver_solves: str, kind: Kind | str) -> bool:
    """Can a solver of this sort find the solution of a problem of this kind?

    ==================  ================================================================================
    solver's ``solves``  problem kinds it serves
    ==================  ================================================================================
    ``fixed_point``     fixed_point
    ``root``            root, fixed_point, steady_state; stationary points of all other kinds
    ``least_squares``   least_squares, root, fixed_point, steady_state
    ``minimise``        argmin, least_squares, root, fixed_point, steady_state
    ``steady_state``    steady_state
    ``constrained``     argmin with constraints, bounds, a set or a proximal term
    ``quadratic_program``  quadratic_program
    ==================  ================================================================================

    (Each :class:`~implicitkit.extend.Kind` says so itself, in ``served_by``.)
    """
    return solver_solves in as_kind(kind).served_by


def check_serves(solver: Solver, problem: Any, size: int) -> None:
    """Raise :class:`~implicitkit.CapabilityError` unless ``solver`` serves ``problem`` with ``size`` unknowns a sample.

    The message names solvers that would.
    """
    limit, kind = solver.max_size, problem.kind
    served = solver.general or serves(solver.solves, kind)
    if served and (limit is None or size <= limit):
        return
    entries = [e for e in describe("solvers") if serves(e.solves, kind)]
    fitting = [e.name for e in entries if e.max_size is None or size <= e.max_size]
    name = solver.name or type(solver).__name__
    if served:
        raise CapabilityError(
            f"solver {name!r} solves systems of at most {limit} unknown{'s' if limit != 1 else ''} a sample; this one has "
            f"{size}. If they are independent, pass batch_dims= so that each is a sample of its own. Solvers that fit: "
            f"{', '.join(fitting)}."
        )
    takes = ", ".join(k.name for k in kinds() if serves(solver.solves, k)) or "nothing"
    raise CapabilityError(
        f"solver {name!r} (solves={solver.solves!r}) serves problems of kind {takes}; {problem.title} is of "
        f"kind {kind.name!r}. Solvers that fit: {', '.join(fitting) or 'none is registered'}."
    )


def _words() -> tuple[str, ...]:
    """What solvers may say that they solve."""
    return tuple(dict.fromkeys(word for kind in kinds() for word in kind.served_by))


def _configure(entry: Entry, options: dict[str, Any]) -> Any:
    if inspect.isclass(entry.target):
        return instantiate(entry.target, options, entry.name)
    known, anything = option_parameters(entry.target)
    unknown = [] if anything else [o for o in options if o not in {p.name for p in known}]
    if unknown:
        raise TypeError(option_error(repr(entry.name), unknown[0], [p.name for p in known]))
    return BlackBox(entry.target, entry.name, entry.solves, entry.batch, tuple(sorted(options.items())), entry.max_size)


def _with_purpose(solver: Solver) -> Solver:
    if not solver.solves:
        raise TypeError(
            f"{type(solver).__name__} does not say what it solves: register it with "
            "@implicitkit.register_solver(name, solves=...) or set its class attribute `solves`"
        )
    return solver


def _check_class(name: str, target: type[Solver]) -> None:
    """Raise unless the methods of a class are there and take what they are given."""
    forms = {"init": ("f", "z"), "step": ("f", "z", "state")} if issubclass(target, Method) else {}
    for method, given in {"run": ("f", "z0", "options"), **forms}.items():
        form = f"the class {target.__name__}, solver {name!r}, must define {method}({', '.join(given)})"
        own = getattr(target, method)
        if own in (Solver.run, Method.step) and target.run in (Solver.run, Method.run):
            raise TypeError(f"{form}; it does not")
        try:
            static = isinstance(inspect.getattr_static(target, method), (staticmethod, classmethod))
            inspect.signature(own).bind(*given, *(() if static else ("self",)))
        except TypeError as error:
            raise TypeError(f"{form}; such a call fails: {error}") from None


def _check_black_box(name: str, target: Any) -> None:
    form = f"{name!r} must have the form find(f, z0, *, rtol, atol, max_steps, ...)"
    if not callable(target):
        raise TypeError(f"the solver {form}; got {describe_value(target)}")
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        raise TypeError(f"the solver {form}; the signature of {target!r} cannot be read: wrap it in a def") from None
    keywords = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [] if anything else [k for k in REQUIRED if k not in keywords]
    if missing:
        raise TypeError(
            f"the solver {form}; it does not accept {', '.join(missing)}. Its signature: {inspect.signature(target)}"
        )
    try:
        inspect.signature(target).bind(None, None, rtol=0.0, atol=0.0, max_steps=1)
    except TypeError as error:
        raise TypeError(f"the solver {form}; such a call fails: {error}") from None
