r"""MDEQ: each resolution through a residual block, then all fused; which photograph is a patch from?

    y_i = GN(relu(z_i + GN(W_i' GN-relu(W_i z_i) + [i = 1] x))),   f_i = GN(P_i relu(\sum_j S_ij y_j))

``S_ii`` is the identity, ``S_ij`` a 1 x 1 convolution, GN and interpolation (``j > i``) or strided convolutions with GN
(``j < i``), as ``MDEQModule`` of deq-zoo/mdeq.  Source: Bai, Koltun & Kolter (2020), "Multiscale deep equilibrium models".
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from benchmarks.zoo.base import Model
from benchmarks.zoo.photographs import patches, photograph
from implicitkit_deq import Pretraining

__all__ = ["MDEQ"]

CHANNELS, GROUPS, EXPANSION, SIZE, BATCH = (16, 16), 4, 5, 16, 8


class MDEQ(Model):
    """Shapes: ``x (batch, C_1, H, W)``, the stem's features; ``z_i (batch, C_i, H / 2^{i-1}, W / 2^{i-1})``."""

    zoo: ClassVar[dict[str, Any]] = {"f_solver": "broyden", "f_max_iter": 22, "grad": 5, "tau": 0.5}
    steps, penalty = 120, 10.0
    training_options: ClassVar[dict[str, Any]] = {"rtol": 1e-2, "pretraining": Pretraining(100, 6)}

    def __init__(self) -> None:
        super().__init__()
        first = CHANNELS[0]
        convolutions = nn.Conv2d(3, first, 3, padding=1, bias=False), nn.Conv2d(first, first, 3, padding=1, bias=False)
        norms = nn.BatchNorm2d(first), nn.BatchNorm2d(first)
        self.stem = nn.Sequential(convolutions[0], norms[0], nn.ReLU(), convolutions[1], norms[1], nn.ReLU())
        self.branches = nn.ModuleList(_Branch(c) for c in CHANNELS)
        levels = range(len(CHANNELS))
        self.paths = nn.ModuleList(nn.ModuleList(_path(j, i) for j in levels) for i in levels)
        self.after = nn.ModuleList(
            nn.Sequential(nn.ReLU(), nn.Conv2d(c, c, 1, bias=False), nn.GroupNorm(GROUPS // 2, c)) for c in CHANNELS
        )
        self.head = nn.Linear(sum(CHANNELS), 2)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.normal_(m.weight, 0, 0.01)

    def update(self, z: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        """Residual blocks, then fusion."""
        y = [branch(z_i, x if i == 0 else None) for i, (branch, z_i) in enumerate(zip(self.branches, z, strict=True))]
        fused = []
        for i, (paths, after) in enumerate(zip(self.paths, self.after, strict=True)):
            moved = [path(y_j) for path, y_j in zip(paths.children(), y, strict=True)]
            fused.append(after(sum(m if j <= i else interpolate(m, size=y[i].shape[2:]) for j, m in enumerate(moved))))
        return tuple(fused)

    def state_shape(self, x: Tensor) -> tuple[tuple[int, ...], ...]:
        """One shape a resolution."""
        return tuple((c, x.shape[2] >> i, x.shape[3] >> i) for i, c in enumerate(CHANNELS))

    def batch(self, seed: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """Half of the patches from either photograph."""
        generator = torch.Generator().manual_seed(seed)
        halves = [patches(photograph(name, 2), SIZE, BATCH // 2, generator) for name in ("china", "flower")]
        return (torch.cat(halves),), torch.arange(2).repeat_interleave(BATCH // 2)

    def encode(self, image: Tensor) -> tuple[Tensor, ...]:
        """The stem, with batch normalisation, outside of the equilibrium."""
        return (self.stem(image),)

    def loss(self, z: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """Cross-entropy of the means over the pixels of all resolutions."""
        return cross_entropy(self.head(torch.cat([z_i.mean((2, 3)) for z_i in z], 1)), target)


class _Branch(nn.Module):
    """A residual block at one resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = EXPANSION * channels
        self.first, self.first_norm = nn.Conv2d(channels, wide, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, wide)
        self.second = nn.Conv2d(wide, channels, 3, padding=1, bias=False)
        self.second_norm, self.last_norm = nn.GroupNorm(GROUPS, channels), nn.GroupNorm(GROUPS, channels)

    def forward(self, z: Tensor, x: Tensor | None) -> Tensor:
        out = self.second(torch.relu(self.first_norm(self.first(z))))
        out = self.second_norm(out if x is None else out + x)
        return self.last_norm(torch.relu(out + z))


def _path(source: int, target: int) -> nn.Module:
    """From one resolution to another, before interpolation."""
    a, b = CHANNELS[source], CHANNELS[target]
    if source == target:
        return nn.Identity()
    if source > target:
        return nn.Sequential(nn.Conv2d(a, b, 1, bias=False), nn.GroupNorm(GROUPS, b))
    parts: list[nn.Module] = []
    for i in range(source, target):
        last = i == target - 1
        out = b if last else a
        parts += [nn.Conv2d(a, out, 3, stride=2, padding=1, bias=False), nn.GroupNorm(GROUPS, out)]
        parts += [] if last else [nn.ReLU()]
    return nn.Sequential(*parts)
