"""A feed-forward network as one weight-tied, input-injected cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.cells.stacked import Composed


class Tied(Composed):
    r"""``z~ <- \sigma(W_z z~ + W_x x + b~)`` whose equilibrium is what a network of ``L`` layers computes.

    For ``z[k+1] = \sigma[k](W[k] z[k] + b[k])``, ``k = 0..L-1``, ``z[0] = x`` (Bai, Kolter & Koltun 2019, theorem 3):
    ``z~ = [z[1]; ..; z[L]]``, ``W_z`` has ``W[1..L-1]`` below its diagonal, ``W_x = [W[0]; 0; ..]``, and ``b~``, ``\sigma``
    are stacked.  ``W_z`` is nilpotent: from any start, block ``k`` is exact after ``k`` applications, all of it after ``L``,
    and the implicit gradient is backpropagation.  The price is width: the sum of the layers'.

    The state is a dict ``"layer1"``, ``"layer2"``, ...; the network's modules are used as they are and stay its own.  A
    layer is a module with parameters and those without that follow it (activations, dropout): see :func:`ik.tie`, whose
    problem is ``tied``; ``tied.matrices()`` forms ``W_z``, ``W_x`` and ``b~`` of a network of ``nn.Linear``.

    Raises:
        TypeError: no ``nn.Sequential``. ValueError: it is empty.
    """

    def __init__(self, network: nn.Sequential) -> None:
        super().__init__()
        if not isinstance(network, nn.Sequential):
            raise TypeError(f"tie_weights takes an nn.Sequential, got {type(network).__name__}")
        self.tied = ik.tie(network)
        self.network = network

    def maps(self) -> dict[str, tuple[Any, Callable[..., Any], str | None]]:
        """The layers; each reads the one before, and not its own state."""
        found: dict[str, tuple[Any, Callable[..., Any], str | None]] = {}
        below: str | None = None
        for name, layer in self.tied.gamma.functions.items():
            found[name] = (layer, layer, below)
            below = name
        return found

    def output(self, z: dict[str, Tensor]) -> Tensor:
        """``z[L]``."""
        return z[self.tied.output_node]

    def state_shape(self, x: Tensor) -> dict[str, tuple[int, ...]]:
        """The shapes of the layers' outputs (by one application of the network)."""
        return {name: tuple(t.shape[1:]) for name, t in self.tied.start(x).items()}
