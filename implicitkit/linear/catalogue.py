"""Linear solvers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from implicitkit.registry.table import TABLES

T = TypeVar("T")
_TABLE = TABLES["linear_solvers"]


def register_linear_solver(name: str, *, override: bool = False) -> Callable[[T], T]:
    """Register a :class:`~implicitkit.LinearSolver` subclass under a name.  Sets its ``name``.

    Raises:
        ValueError: the name is taken (``override=True`` replaces) or malformed.
    """
    return _TABLE.register(name, override, "solve", "implicitkit.LinearSolver")


def get_linear_solver(linear_solver: Any, **options: Any) -> Any:
    """The configured linear solver for a name, a class, or an object (which passes through)."""
    return _TABLE.get(linear_solver, options, "solve", "implicitkit.linear.GMRES(restart=20)")


def linear_solvers() -> list[str]:
    """Names of all linear solvers, plugins' included."""
    return _TABLE.names()
