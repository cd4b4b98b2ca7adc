"""Rules by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from implicitkit.registry.table import TABLES, with_option

T = TypeVar("T")
_TABLE = TABLES["rules"]


def register_rule(name: str, *, override: bool = False) -> Callable[[T], T]:
    """Register a class as a rule: how the derivative of a solution is formed.  Sets its ``name``.

    Raises:
        ValueError: the name is taken (``override=True`` replaces) or malformed.
    """
    return _TABLE.register(name, override, "attach", "implicitkit.Rule")


def get_rule(rule: Any, **options: Any) -> Any:
    """The configured rule for a name, a class, or an object (which passes through)."""
    return _TABLE.get(rule, options, "attach", "implicitkit.Implicit(linear_solver='gmres')")


def rules() -> list[str]:
    """Names of all rules, plugins' included."""
    return _TABLE.names()


def rules_with(option: str) -> dict[str, str]:
    """Names of the classes of rules that have an option of this name, each with how it is written."""
    return with_option("rules", option)
