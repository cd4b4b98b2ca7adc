"""``bracket=`` of a solve: the solver and the start that follow from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.solver.base import Solver
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.steps.bracketing import Ends, check_ends

__all__ = ["bracketed", "middle"]


def bracketed(solver: Any, bracket: Ends) -> Any:
    """The solver with this bracket; ``"auto"`` is Chandrupatla's method.

    Raises:
        TypeError: a configured object (the bracket is an option of its own), or a solver that has no use for a bracket.
        ValueError: the bracket is no pair with low below high.
    """
    check_ends(bracket)
    if isinstance(solver, Solver):
        raise TypeError(
            f"bracket= goes with the name of a solver; give it to the solver itself: "
            f"ik.{type(solver).__name__}(..., bracket=bracket)"
        )
    return get_solver("chandrupatla" if isinstance(solver, str) and solver == "auto" else solver, bracket=bracket)


def middle(bracket: Ends) -> Tensor:
    """``(low + high) / 2``."""
    low, high = bracket
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return 0.5 * (low + high)
    return torch.tensor(0.5 * (low + high))
