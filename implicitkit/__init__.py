"""Layers defined by equations: state what must hold, let any solver find it, get exact derivatives of the solution.

The public names are listed in ``__init__.pyi``, each with the module that defines it.  A module is imported when one of
its names is first used; ``import implicitkit`` itself loads torch and little else.
"""

from __future__ import annotations

import ast
import difflib
import importlib
from pathlib import Path
from typing import Any

from implicitkit.registry.operations import provide
from implicitkit.registry.plugins import announce

__version__ = "0.1.0"

_MODULES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(_MODULES)

#: Names for authors of parts: :mod:`implicitkit.extend` lists them, and they answer here too.
_FOR_AUTHORS = (
    "AutoQP",
    "BlackBox",
    "InteriorPoint",
    "LinearSolution",
    "Operator",
    "Polyalgorithm",
    "Stage",
    "autodiff",
    "get_solver",
    "has_forward_level",
    "modules_held",
    "opaque_to_compile",
    "solve_qp",
    "transforms_active",
    "trees",
)

#: What other libraries call it.
_ELSEWHERE = {
    "minimize": "argmin", "minimise": "argmin", "root_scalar": "root", "fsolve": "root", "find_root": "root",
    "fixedpoint": "fixed_point", "leastsq": "least_squares", "odeint": "InitialValue", "solve_ivp": "InitialValue",
}  # fmt: skip

# Rooms that register parts, imported when a name is first looked up; SciPy's solvers only for a name of theirs.
for _room in ("linear", "problem.builtin", "rule.builtin", "solver.builtin"):
    announce(f"implicitkit.{_room}")
announce("implicitkit.interop", prefix="scipy.")
announce("implicitkit.composition.joint", prefix="joint")

# Operations that lower floors offer and upper floors carry out.
provide("chain", "implicitkit.composition.joint:chain")
provide("integrate", "implicitkit.interop.paths:integrate")
provide("analyse", "implicitkit.diagnostics.composition:analyse")


def __getattr__(name: str) -> Any:
    module = "implicitkit.extend" if name in _FOR_AUTHORS else _MODULES.get(name)
    if module is None:
        other = _ELSEWHERE.get(name.lower()) or _alike(name)
        hint = f". Did you mean ik.{other}?" if other else ""
        raise AttributeError(f"module 'implicitkit' has no attribute {name!r}{hint}")
    # a name that is a module of its own stands for itself
    value = importlib.import_module(f"implicitkit.{name}") if module == "implicitkit" else None
    value = value or getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def _alike(name: str) -> str:
    """The public name that is spelt most like this one, in letters of any size; empty: none is."""
    spelt = {} if name.startswith("_") else {known.lower(): known for known in (*_FOR_AUTHORS, *__all__)}
    return next((spelt[near] for near in difflib.get_close_matches(name.lower(), spelt, 1)), "")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
