"""The smallest cell: one dense layer, or two with a hidden one between."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell


class MLP(Cell):
    r"""``f(z; x) = \phi(W z + U x + b)``, or with a hidden layer ``f(z; x) = \phi(V \phi(W z + U x + b) + c)``.

    Shapes: ``x (batch, in_features)``, ``z (batch, features)``; further dimensions may stand between the batch and the
    features.  ``U x + b`` is the injection.  The Lipschitz constant is at most ``|W|_2`` (``|V|_2 |W|_2``) for an
    activation of slope at most one.

    Source: El Ghaoui, Gu, Travacca, Askari & Tsai (2021), "Implicit deep learning".

    Args:
        in_features: of ``x``. features: of the state. hidden: width of the hidden layer; ``None``: none.
        activation: elementwise, of slope at most 1 if the bound is to hold.
        scale: the recurrent weights start with orthogonal rows or columns and spectral norm ``scale`` (the product of both,
            with a hidden layer), so that the map is a contraction for ``scale < 1`` and such an activation.

    Raises:
        ValueError: a size or ``scale`` that is not positive.
    """

    def __init__(
        self,
        in_features: int,
        features: int,
        hidden: int | None = None,
        *,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
        scale: float = 0.9,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        options.check_arguments(
            "MLP",
            in_features=(options.at_least(1), in_features),
            features=(options.at_least(1), features),
            hidden=(options.optional(options.at_least(1)), hidden),
            activation=(options.function("activation(x)"), activation),
            scale=(options.positive(), scale),
        )
        width = features if hidden is None else hidden
        self.features, self.activation = features, activation
        self.injection = nn.Linear(in_features, width, dtype=dtype, device=device)
        self.recurrent = nn.Linear(features, width, bias=False, dtype=dtype, device=device)
        self.readback = None if hidden is None else nn.Linear(hidden, features, dtype=dtype, device=device)
        weights = self.recurrent_weights()
        for weight in weights:
            nn.init.orthogonal_(weight, gain=scale ** (1 / len(weights)))

    def inject(self, x: Tensor) -> tuple[Tensor]:
        """``U x + b``."""
        return (self.injection(x),)

    def update(self, z: Tensor, injected: Tensor) -> Tensor:
        """``\\phi(W z + injected)``, with a hidden layer ``\\phi(V ... + c)`` after it."""
        z = self.activation(self.recurrent(z) + injected)
        return z if self.readback is None else self.activation(self.readback(z))

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """The shape of ``x``, with ``features`` in the place of ``in_features``."""
        return (*x.shape[1:-1], self.features)

    def recurrent_weights(self) -> list[Tensor]:
        """``W`` (and ``V``)."""
        layers = (self.recurrent,) if self.readback is None else (self.recurrent, self.readback)
        return [layer.weight for layer in layers]
