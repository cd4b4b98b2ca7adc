r"""DEQ-INR: a photograph as a function of the place, whose features are an equilibrium.

    f(z; p) = sin(W (z + sin(u_0)) + b + u_1),   (u_0, u_1) = U p + c

Source: Huang, Bai & Kolter (2021), "(Implicit)^2: implicit layers for implicit representations"; deq-zoo/deq-inr, the
"siren_like" filter with one layer.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.zoo.base import Model
from benchmarks.zoo.photographs import photograph

__all__ = ["Photograph"]

WIDTH, POINTS, SCALE = 64, 400, 30.0


class Photograph(Model):
    """Shapes: ``p (batch, 2)`` in [-1, 1]^2, ``z (batch, 64)``; the output ``(batch, 3)``."""

    zoo: ClassVar[dict[str, Any]] = {"f_solver": "fixed_point_iter", "f_max_iter": 100, "grad": 3}

    def __init__(self) -> None:
        super().__init__()
        self.places, self.weight, self.head = nn.Linear(2, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        with torch.no_grad():
            self.places.weight.mul_(SCALE / math.sqrt(2))
            self.places.bias.uniform_(-math.pi, math.pi)
            self.weight.weight.uniform_(-(WIDTH**-0.5), WIDTH**-0.5)

    def inject(self, p: Tensor) -> tuple[Tensor, ...]:
        """``sin(u_0)`` and ``u_1``."""
        first, second = self.places(p).chunk(2, -1)
        return first.sin(), second

    def update(self, z: Tensor, first: Tensor, second: Tensor) -> Tensor:
        """One layer."""
        return torch.sin(self.weight(z + first) + second)

    def state_shape(self, p: Tensor) -> tuple[int, ...]:
        """``(64,)``."""
        return (WIDTH,)

    def batch(self, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Random pixels: where, and their colours."""
        image = photograph("flower", 10)
        generator = torch.Generator().manual_seed(seed)
        height, width = image.shape[1:]
        rows, columns = (torch.randint(n, (POINTS,), generator=generator) for n in (height, width))
        places = torch.stack([2 * (rows + 0.5) / height - 1, 2 * (columns + 0.5) / width - 1], 1)
        return (places,), image[:, rows, columns].T

    def loss(self, z: Tensor, target: Tensor) -> Tensor:
        """Mean square of the error of a colour."""
        return (self.head(z) - target).square().mean()
