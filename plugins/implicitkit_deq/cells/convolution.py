r"""A residual block of convolutions, for images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell, check_image


class ConvBlock(Cell):
    r"""``f(z; x) = N_3(\phi(z + N_2(W_2 * N_1(\phi(W_1 * z)) + U * x)))``, ``N_i`` group normalisations, ``\phi`` ReLU.

    Shapes: ``x (batch, in_channels, H, W)``, ``z (batch, channels, H, W)``.  ``U * x`` is the injection.  Group
    normalisation keeps no statistics and treats samples apart, as a solve needs it.

    Args:
        in_channels, channels: of ``x`` and of the state. hidden: channels in the middle (default ``channels``).
        kernel: odd. groups: of the normalisations; must divide ``channels`` and ``hidden``.
        scale: standard deviation of the initial weights of ``W_1`` and ``W_2``: small, so that the block contracts.

    Raises:
        ValueError: sizes that do not fit.

    Source: Kolter, Duvenaud & Johnson (2020), "Deep implicit layers", chapter 4 (the residual cell).
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        hidden: int | None = None,
        *,
        kernel: int = 3,
        groups: int = 8,
        scale: float = 0.01,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        size = options.at_least(1)
        options.check_arguments(
            "ConvBlock",
            in_channels=(size, in_channels),
            channels=(size, channels),
            hidden=(options.optional(size), hidden),
            groups=(size, groups),
            kernel=(size, kernel),
            scale=(options.positive(), scale),
        )
        hidden = channels if hidden is None else hidden
        if kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, so that the image keeps its size; got {kernel}")
        if channels % groups or hidden % groups:
            raise ValueError(f"groups ({groups}) must divide channels ({channels}) and hidden ({hidden})")
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.channels = channels
        self.injection = nn.Conv2d(in_channels, channels, kernel, padding="same", **made)
        self.first = nn.Conv2d(channels, hidden, kernel, padding="same", bias=False, **made)
        self.second = nn.Conv2d(hidden, channels, kernel, padding="same", bias=False, **made)
        self.norms = nn.ModuleList(nn.GroupNorm(groups, c, **made) for c in (hidden, channels, channels))
        for weight in self.recurrent_weights():
            nn.init.normal_(weight, std=scale)

    def inject(self, x: Tensor) -> tuple[Tensor]:
        """``U * x``."""
        check_image(x)
        return (self.injection(x),)

    def update(self, z: Tensor, injected: Tensor) -> Tensor:
        """One block."""
        hidden = self.norms[0](torch.relu(self.first(z)))
        return self.norms[2](torch.relu(z + self.norms[1](self.second(hidden) + injected)))

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """``(channels, H, W)``."""
        return (self.channels, *x.shape[2:])

    def recurrent_weights(self) -> list[Tensor]:
        """``W_1`` and ``W_2``."""
        return [self.first.weight, self.second.weight]
