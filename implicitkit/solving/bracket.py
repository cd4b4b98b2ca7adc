"""``bracket=`` of a solve: the solver and the start that follow from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import compat
from implicitkit.foundation.arrays import as_state
from implicitkit.foundation.trees import tree_flatten
from implicitkit.solver.base import Solver
from implicitkit.solver.catalogue import get_solver
from implicitkit.solver.steps.bracketing import Ends, check_ends


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
    if isinstance(solver, str) and solver == "auto":
        return get_solver("chandrupatla", bracket=bracket)
    try:
        return get_solver(solver, bracket=bracket)
    except TypeError as error:
        raise TypeError(
            f"solver {solver!r} has no use for a bracket: leave solver= out, or name one that has (chandrupatla, bisection, "
            "scipy.root_scalar.brentq, ...)"
        ) from error


def is_known(bracket: Any) -> bool:
    """Can a solver be given it: are there no transforms at work, or only numbers (or no pair, as :func:`bracketed` says)?"""
    if not isinstance(bracket, (tuple, list)) or len(bracket) != 2:
        return True
    return not compat.transforms_active() or not any(isinstance(end, Tensor) for end in bracket)


def middle(bracket: Ends, args: Any, batch_dims: int, in_dims: Any) -> Any:
    """``(low + high) / 2``, one number for each sample: a batch that the ends do not show is that of ``args``.

    Raises:
        ValueError: there is a batch, and neither an end nor ``args`` say how large it is.
    """
    low, high = bracket
    half = 0.5 * (low + high)
    if not batch_dims or any(isinstance(end, Tensor) and end.dim() for end in bracket):
        return half
    shapes = _batches(args, batch_dims, in_dims)
    if len(shapes) == 1:
        return as_state(half, args).expand(shapes.pop())
    known = f"args have {' and '.join(map(str, sorted(map(tuple, shapes))))}" if shapes else "no argument has a batch"
    raise ValueError(
        f"bracket: both ends are numbers, which say nothing of the batch, and {known}: give one end, or z0, with one number "
        "for each sample"
    )


def _batches(args: Any, batch_dims: int, in_dims: Any) -> set[torch.Size]:
    """The batch shapes that arguments can have: by ``in_dims``, or by their first dimensions."""
    args = args if isinstance(args, tuple) else (args,)
    dims = [0] * len(args) if in_dims is None else [in_dims] * len(args) if isinstance(in_dims, int) else list(in_dims)
    return {
        leaf.shape[dim : dim + batch_dims]
        for arg, dim in zip(args, dims, strict=False)
        if isinstance(dim, int)
        for leaf in tree_flatten(arg)[0]
        if isinstance(leaf, Tensor) and leaf.ndim >= dim + batch_dims
    }
