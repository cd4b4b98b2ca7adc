"""Which solver ``solver="auto"`` is."""

from __future__ import annotations

from typing import Any

from implicitkit import registry
from implicitkit.problems.base import Problem

__all__ = ["choose"]

_DENSE = 512  # unknowns a sample up to which Newton's dense Jacobian is affordable


def choose(problem: Problem, size: int, rule: Any) -> Any:
    """A solver by problem kind and size.

    Fixed points: Anderson acceleration.  Equations and steady states: Newton with dense Jacobians up to 512 unknowns a
    sample, Newton-Krylov above.  Minimisation and least squares: L-BFGS.  The rule ``unroll`` needs the plain iteration.
    """
    if problem.kind == "fixed_point":
        return registry.get_solver("picard" if getattr(rule, "name", "") == "unroll" else "anderson")
    if problem.kind in ("argmin", "least_squares"):
        return registry.get_solver("lbfgs")
    return registry.get_solver("newton" if size <= _DENSE else "newton_krylov")
