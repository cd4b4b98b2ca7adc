r"""What a change of parameters changes of sums that a flow conserves.

That is ``(J_\theta d\theta) w`` and its transposed, with ``K w = z - z_0`` (:mod:`implicitkit.rule.conserved`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from implicitkit.foundation import autodiff
from implicitkit.rule.linear_functions import kept, solved

Slope = Callable[..., Tensor]  # of a state and parameters


def pushed(
    request: Any,
    F: Slope,
    z: Tensor,
    start: Tensor | None,
    theta: Sequence[Tensor],
    own: Sequence[Tensor],
    tangents: Sequence[Tensor],
) -> Tensor:
    r"""``(J_\theta d\theta) w``, of ``F`` of a state and of parameters ``own``; zero where no sum depends on them."""
    if not own or start is None or not request.held.moves:
        return torch.zeros_like(z)
    return autodiff.jvp(_along(request, F, z, start, theta), list(own), list(tangents))


def pulled(
    request: Any,
    F: Slope,
    z: Tensor,
    start: Tensor | None,
    theta: Sequence[Tensor],
    own: Sequence[Tensor],
    u: Tensor,
) -> Sequence[Tensor | None]:
    """The gradient of ``u' B J w`` by each of ``own``."""
    if not own or start is None or not request.held.moves:
        return [None] * len(own)
    found: Sequence[Tensor] = autodiff.vjp(_along(request, F, z, start, theta), *own)[1](
        kept(request, "back", z, u, theta)
    )
    return found


def _along(request: Any, F: Slope, z: Tensor, start: Tensor, theta: Sequence[Tensor]) -> Callable[..., Tensor]:
    """``J w`` as a function of parameters."""
    w = solved(request, False, z, z - start, theta)
    return lambda *own: autodiff.jvp(lambda y: F(y, *own), (z,), (w,))
