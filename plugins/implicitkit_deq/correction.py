"""Losses on what the solver passes through, so that early iterates are good answers too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from implicitkit.extend import options


def fixed_point_correction(criterion: Callable[[Any], Tensor], states: Sequence[Any], gamma: float = 0.8) -> Tensor:
    r"""``sum_i gamma^{k - i} criterion(states_i)``, ``i = 1..k``: the last, the equilibrium, has weight one.

    The fixed-point correction of Bai, Geng, Savani & Kolter 2022 (deep equilibrium optical flow, eq. 6).

        loss = fixed_point_correction(lambda z: criterion(head(z), y), layer.states(x, at=(2, 4, 8)))

    Shapes: states as the layer returns them, ``(batch, ...)`` each; the sum is a scalar if ``criterion`` is.  Units:
    those of ``criterion``; ``gamma`` is dimensionless.

    Args:
        criterion: of one state. states: what :meth:`DEQ.states` returns. gamma: in [0, 1].

    Raises:
        ValueError: no state, or ``gamma`` out of range.
    """
    options.check_arguments(
        "fixed_point_correction",
        criterion=(options.function("criterion(state)"), criterion),
        states=(options.instance("a list of states, as layer.states returns", list, tuple), states),
        gamma=(options.part_of_one(), gamma),
    )
    if not states:
        raise ValueError("there are no states to compute a loss from")
    *early, last = states
    total = criterion(last)
    for distance, state in enumerate(reversed(early), 1):
        total = total + gamma**distance * criterion(state)
    return total
