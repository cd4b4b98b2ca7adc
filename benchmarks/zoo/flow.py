r"""DEQ-Flow: how far has each pixel moved?  A convolutional GRU looks up correlations where the present flow points.

    c = lookup(correlations, w);  m = motion(c, w);  h' = SepConvGRU(h, [x, m]);  w' = (1 - leak) w + head(h')

Correlations are those of all pairs of features, in a pyramid; ``x`` are features of the context.  The flow is differentiated
(``--all_grad``).  Source: Bai et al. (2022), "Deep equilibrium optical flow estimation"; Teed & Deng (2020), "RAFT";
deq-zoo/deq-flow.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, grid_sample, interpolate

from benchmarks.zoo.base import Model
from implicitkit_deq import Pretraining

__all__ = ["FlowUpdate"]

FEATURES, HIDDEN, LEVELS, RADIUS, SIZE, COARSE, BATCH = 24, 16, 2, 2, 24, 2, 8


class FlowUpdate(Model):
    """Shapes: features ``(batch, 24, n, n)``, context ``(batch, 16, n, n)``; the state is ``h (batch, 16, n, n)`` and the
    flow ``w (batch, 2, n, n)``, x first, in pixels of the features.

    ``leak``: of the flow in a step; zero in the original, which has no equilibrium where nothing tells how far a pixel has
    moved: there the flow goes on by a little for ever."""

    leak: ClassVar[float] = 0.1
    zoo: ClassVar[dict[str, Any]] = {"f_solver": "simple_fixed_point_iter", "f_max_iter": 36, "n_states": 6, "grad": 1}
    rate, steps, penalty = 4e-3, 200, 0.3
    training_options: ClassVar[dict[str, Any]] = {"rtol": 1e-2, "pretraining": Pretraining(180, 6)}

    def __init__(self) -> None:
        super().__init__()
        self.features, self.context = _encoder(FEATURES), _encoder(HIDDEN)
        looked_up = LEVELS * (2 * RADIUS + 1) ** 2
        self.correlation = nn.Sequential(
            nn.Conv2d(looked_up, 24, 1), nn.ReLU(), nn.Conv2d(24, 16, 3, padding=1), nn.ReLU()
        )
        self.motion = nn.Sequential(
            nn.Conv2d(2, 16, 7, padding=3), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1), nn.ReLU()
        )
        self.both = nn.Conv2d(24, HIDDEN - 2, 3, padding=1)
        self.across, self.down = _GRU((1, 5)), _GRU((5, 1))
        last = nn.Conv2d(HIDDEN, 2 * HIDDEN, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * HIDDEN, 2, 3, padding=1)
        self.head = nn.Sequential(*last)

    def inject(self, first: Tensor, second: Tensor, context: Tensor) -> tuple[Tensor, ...]:
        """The context and the pyramid of correlations, ``(batch, n^2, n / 2^l, n / 2^l)``."""
        n = first.shape[2:]
        level = (first.flatten(2).mT @ second.flatten(2) / first.shape[1] ** 0.5).unflatten(2, n)
        pyramid = [level]
        for _ in range(LEVELS - 1):
            pyramid.append(avg_pool2d(pyramid[-1], 2))
        return (context, *pyramid)

    def update(self, state: tuple[Tensor, Tensor], context: Tensor, *pyramid: Tensor) -> tuple[Tensor, Tensor]:
        """One look, one step of the GRU, one correction."""
        h, w = state
        seen = [self.correlation(_look(pyramid, w)), self.motion(w)]
        x = torch.cat([context, torch.relu(self.both(torch.cat(seen, 1))), w], 1)
        h = self.down(self.across(h, x), x)
        return h, (1 - self.leak) * w + self.head(h)

    def state_shape(self, first: Tensor, *others: Tensor) -> tuple[tuple[int, ...], ...]:
        """Of ``h`` and of ``w``."""
        return (HIDDEN, *first.shape[2:]), (2, *first.shape[2:])

    def batch(self, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Random textures, the same moved, and the flow at the resolution of the features."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(BATCH, 3, SIZE // COARSE, SIZE // COARSE, generator=generator)
        second = interpolate(noise, (SIZE, SIZE), mode="bicubic")
        coarse = 1.5 * torch.randn(BATCH, 2, 2, 2, generator=generator).clamp(-1, 1)
        flow = interpolate(coarse, (SIZE, SIZE), mode="bilinear", align_corners=True)
        place = (_pixels(second) + COARSE * flow).movedim(1, -1) / (SIZE - 1) * 2 - 1
        first = grid_sample(second, place, "bilinear", "border", align_corners=True)
        return (first, second), avg_pool2d(flow, COARSE)

    def encode(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        """Features of both, and of the first what the GRU may know."""
        return self.features(first), self.features(second), torch.relu(self.context(first))

    def loss(self, z: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        """Length of the error, in pixels of the features."""
        return ((z[1] - target).square().sum(1) + 1e-6).sqrt().mean()


class _GRU(nn.Module):
    """``h + g (tanh(C [r h, x]) - h)``, gates ``g, r = sigmoid(G [h, x])``, kernels along one direction."""

    def __init__(self, kernel: tuple[int, int]) -> None:
        super().__init__()
        self.gates = nn.Conv2d(3 * HIDDEN, 2 * HIDDEN, kernel, padding="same")
        self.new = nn.Conv2d(3 * HIDDEN, HIDDEN, kernel, padding="same")

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        gate, reset = torch.sigmoid(self.gates(torch.cat([h, x], 1))).chunk(2, 1)
        return torch.lerp(h, torch.tanh(self.new(torch.cat([reset * h, x], 1))), gate)


def _encoder(channels: int) -> nn.Module:
    """To half the resolution."""
    first, second = nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.Conv2d(32, channels, 3, padding=1)
    return nn.Sequential(first, nn.InstanceNorm2d(32), nn.ReLU(), second, nn.InstanceNorm2d(channels))


def _pixels(like: Tensor) -> Tensor:
    """The places of the pixels, ``(2, n, m)``, x first."""
    n, m = (torch.arange(size, dtype=like.dtype, device=like.device) for size in like.shape[2:])
    return torch.stack(torch.meshgrid(m, n, indexing="xy"))


def _look(pyramid: tuple[Tensor, ...], w: Tensor) -> Tensor:
    """Correlations around the place where ``w`` points, on all levels: ``(batch, levels (2 r + 1)^2, n, n)``."""
    batch, _, n, m = w.shape
    offset = torch.arange(-RADIUS, RADIUS + 1, dtype=w.dtype, device=w.device)
    around = torch.stack(torch.meshgrid(offset, offset, indexing="xy"), -1)
    centre = (_pixels(w) + w).movedim(1, -1).reshape(-1, 1, 1, 2)
    found = []
    for i, level in enumerate(pyramid):
        size = torch.tensor([level.shape[3] - 1, level.shape[2] - 1], dtype=w.dtype, device=w.device)
        place = (centre / 2**i + around) / size * 2 - 1
        found.append(grid_sample(level.flatten(0, 1).unsqueeze(1), place, align_corners=True).view(batch, n, m, -1))
    return torch.cat(found, -1).movedim(-1, 1)
