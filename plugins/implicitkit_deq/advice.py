"""What keeps the equilibria of a training, by the kind of the cell: is anything normalised in it?"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from torch import nn

_NORM = re.compile(r"(?<!Weight)(?<!Spectral)Norm(\dd)?$")  # a parametrisation normalises no state
_BOUND = "add jacobian_penalty to the loss, bound the weights (bound_weights), or lower the learning rate"
_NORMALISED = (
    "let the input outweigh the state. A bound on weights does nothing where a normalisation follows before the input is "
    "added: there bound that normalisation's gain (bound_weights(cell, 0.1 * norm.weight.numel() ** 0.5, 'frobenius', "
    "weights=[norm.weight])), elsewhere the state's weights (bound_weights, of W in norm(relu(W z + U x))). Or add "
    "jacobian_penalty to the loss, or lower the learning rate"
)


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
