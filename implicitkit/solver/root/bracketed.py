"""``bracket=`` of a solve: the solver and the start that follow from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.solver.base import Solver
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.steps.bracketing import Ends, check_ends

__all__ = ["bracketed", "is_known", "middle"]


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


def is_known(bracket: Any) -> bool:
    """Can a solver be given it: are there no transforms at work, or only numbers (or no pair, as :func:`bracketed` says)?"""
    if not isinstance(bracket, (tuple, list)) or len(bracket) != 2:
        return True
    return not compat.transforms_active() or not any(isinstance(end, Tensor) for end in bracket)


def middle(bracket: Ends, batch_dims: int = 0) -> Tensor:
    """``(low + high) / 2``.

    Raises:
        ValueError: there is a batch, and neither end says how large it is.
    """
    low, high = bracket
    if batch_dims and not any(isinstance(end, Tensor) and end.dim() for end in bracket):
        raise ValueError(
            "bracket: both ends are numbers, which say nothing of the batch: give one of them, or z0, with one number for "
            "each sample"
        )
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        return 0.5 * (low + high)
    return torch.tensor(0.5 * (low + high))
