"""What to do where samples of a training call are not solved: by what ended their solves, and the kind of the cell."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import nn

import implicitkit as ik

_NORM = re.compile(r"(?<!Weight)(?<!Spectral)Norm(\dd)?$")  # a parametrisation normalises no state
_BOUND = "add jacobian_penalty to the loss, bound the weights (bound_weights), or lower the learning rate"
_NORMALISED = (
    "let the input outweigh the state. A bound on weights does nothing where a normalisation follows before the input is "
    "added: there bound that normalisation's gain (bound_weights(cell, 0.1 * norm.weight.numel() ** 0.5, 'frobenius', "
    "weights=[norm.weight])), elsewhere the state's weights (bound_weights, of W in norm(relu(W z + U x))). Or add "
    "jacobian_penalty to the loss, or lower the learning rate"
)
_UNTRAINED = (
    "The cell may have no equilibrium that can be found before it is trained, as blocks with normalisation last. "
    "Let the input outweigh the state there at first: start with a tenth of the state's weights (of W in "
    "norm(relu(W z + U x))) or, where they are normalised before the input is added, of that normalisation's gain "
    "(nn.init.constant_(norm.weight, 0.1)). Or pretraining=Pretraining(calls=100, steps=8, deepest=20) unrolls a "
    "few steps of it in the first calls, in each another number"
)


def ended(solution: ik.Solution, limit: int | None) -> str:
    """What somebody asked for that ended the solves of all samples that failed: a callback's stop, or a ``limit`` of steps;
    ``""`` where neither did."""
    statuses = set(solution.status[~solution.converged].tolist())
    if statuses == {int(ik.Status.STOPPED)}:
        return "because a callback stopped them: let it return True later, or never"
    if statuses == {int(ik.Status.MAX_STEPS)} and limit is not None:
        return f"because they had no more than max_steps={limit}: give them more, or leave it out"
    return ""


def advice(solution: ik.Solution, first: bool, cell: Any, limit: int | None) -> str:
    """What to do where so many samples failed that the call raises; ``first``: none before has gone well."""
    early = ended(solution, limit)
    if early and (solution.status == int(ik.Status.STOPPED)).any():
        return f"This is {early}"
    said = _UNTRAINED if first else f"Training has lost the equilibria: {cure(cell)}"
    return f"This is {early}. {said}" if early else said


def cure(cell: Any) -> str:
    """What to do where solves of this cell get hard: bounds on weights, or on the gains of what normalises their products.

    ``n(W z)`` is the same for every multiple of ``W``, so that a bound on ``|W|`` bounds nothing there, and its gain all.
    """
    return _NORMALISED if any(map(_normalises, _modules(cell))) else _BOUND


def _normalises(module: nn.Module) -> bool:
    return _NORM.search(type(module).__name__) is not None


def _modules(cell: Any) -> Iterable[nn.Module]:
    """All modules of a module, or of those that a function holds by a name."""
    held = [cell, getattr(cell, "__self__", None)]
    with suppress(TypeError, ValueError):  # no function, or one that holds a name without a value
        names = inspect.getclosurevars(cell)
        held += [*names.nonlocals.values(), *names.globals.values()]
    return [m for part in held if isinstance(part, nn.Module) for m in part.modules()]
