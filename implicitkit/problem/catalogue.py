"""Problems by name, each with the rule and the linear solver that fit it."""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeVar

from implicitkit.problem.base import Problem
from implicitkit.problem.kind import Kind, register_kind
from implicitkit.registry.table import TABLES, Entry, check_name, describe_value, origin

T = TypeVar("T")
_TABLE = TABLES["problems"]


def register_problem(
    cls: T, *, name: str | None = None, rule: Any = "implicit", linear_solver: Any = "gmres", override: bool = False
) -> T:
    """Register a :class:`~implicitkit.Problem` subclass, with the rule and the linear solver that fit it.

    Args:
        cls: the problem class; its ``kind`` says which solvers serve it.
        name: default: the class name in snake case.
        rule: a registered name or a configured object, for ``rule="auto"``.
        linear_solver: likewise, for the derivative's large linear systems.
        override: replace a problem that already has this name.

    Returns:
        The class itself, so that it can be used as a decorator.

    Raises:
        TypeError: ``cls`` is no :class:`~implicitkit.Problem` subclass. ValueError: the name is taken or malformed.
    """
    if not inspect.isclass(cls):
        raise TypeError(f"register_problem takes a Problem subclass, not {describe_value(cls)}")
    kind = getattr(cls, "kind", None)
    if not isinstance(kind, Kind):
        raise TypeError(f"{cls.__name__} is not a Problem subclass: its kind is {kind!r}")
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower() if name is None else name
    check_name(name)
    register_kind(kind)
    entry = Entry("problems", name, cls, origin(cls), solves=kind.name, rule=rule, linear_solver=linear_solver)
    _TABLE.add(entry, override)
    return cls


def get_problem_entry(problem: Problem | type[Problem] | str) -> Entry:
    """What is registered for a problem object, class or name.

    A class that is not registered itself takes the entry of its nearest registered ancestor, or else the entry of its
    ``kind``.
    """
    if isinstance(problem, str):
        return _TABLE.find(problem)
    cls = problem if inspect.isclass(problem) else type(problem)
    entries = {entry.target: entry for entry in _TABLE.entries.values()}
    for ancestor in cls.__mro__:
        if ancestor in entries:
            return entries[ancestor]
    kind = getattr(cls, "kind", None)
    if isinstance(kind, Kind):
        return _TABLE.entries.get(kind.name) or _TABLE.find("root")
    raise TypeError(f"{cls.__name__} is not a problem: expected an implicitkit.Problem such as implicitkit.Root(f)")


def problems() -> list[str]:
    """Names of all problem kinds, plugins' included."""
    return _TABLE.names()
