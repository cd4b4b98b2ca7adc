r"""Several resolutions of an image that reach their equilibrium together (MDEQ)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from implicitkit.extend import options
from implicitkit_deq.cells.base import Cell, check_image


class Multiscale(Cell):
    r"""States ``z = (z_1, ..., z_n)``, ``z_i`` of ``channels[i]`` at ``1 / 2^{i-1}`` of the resolution.  Each goes through a
    residual block of its own, and then all are fused:

        y_i = W_i' * \phi(N(W_i * z_i)) + [i = 1] U * x
        f_i = N(\phi(\sum_j S_{ij} y_j))

    ``S_{ii}`` is the identity; ``S_{ij}`` for ``j > i`` a 1 x 1 convolution and interpolation, for ``j < i`` convolutions of
    stride two.  The input enters at the highest resolution only.  Unlike the block of the paper, the sum does not pass the
    state on (``y_i + z_i``) and is normalised once: so the size of ``W'`` against ``U * x`` decides how strongly ``f``
    depends on ``z``, and a small ``scale`` is a contraction to start training from.

    Shapes: ``x (batch, in_channels, H, W)``; the state is a tuple, ``z_i (batch, channels[i], H_i, W_i)`` with
    ``H_i = ceil(H / 2^{i-1})``.

    Args:
        in_channels: of ``x``. channels: of each resolution. groups: of the group normalisations. expansion: of the
            hidden channels in the residual blocks. scale: standard deviation of the initial ``W'``.

    Raises:
        ValueError: sizes that do not fit.

    Source: Bai, Koltun & Kolter (2020), "Multiscale deep equilibrium models", section 3.1.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int] = (24, 24),
        *,
        groups: int = 8,
        expansion: int = 2,
        scale: float = 0.004,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        size = options.at_least(1)
        options.check_arguments(
            "Multiscale",
            in_channels=(size, in_channels),
            channels=(options.instance("a tuple of integers, one for each resolution", tuple, list), channels),
            groups=(size, groups),
            expansion=(size, expansion),
            scale=(options.positive(), scale),
        )
        for c in channels:
            options.check_arguments("Multiscale", channels=(size, c))
        channels = tuple(channels)
        if not channels:
            raise ValueError("Multiscale: channels is empty: there must be a resolution")
        if any(c % groups for c in channels):
            raise ValueError(f"groups ({groups}) must divide every entry of channels {channels}")
        self.channels = channels
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        self.injection = nn.Conv2d(in_channels, channels[0], 3, padding=1, **made)
        branches = [_Branch(c, expansion * c, groups, **made) for c in channels]
        self.branches = nn.ModuleList(branches)
        self.paths = nn.ModuleList(
            nn.ModuleList(_path(j, i, channels, **made) for j in range(len(channels))) for i in range(len(channels))
        )
        self.norms = nn.ModuleList(nn.GroupNorm(groups, c, **made) for c in channels)
        for branch in branches:
            nn.init.normal_(branch.second.weight, std=scale)

    def inject(self, x: Tensor) -> tuple[Tensor]:
        """``U * x``."""
        check_image(x)
        return (self.injection(x),)

    def update(self, z: tuple[Tensor, ...], injected: Tensor) -> tuple[Tensor, ...]:
        """Residual blocks, then fusion."""
        y = [branch(z_i) for branch, z_i in zip(self.branches, z, strict=True)]
        y[0] = y[0] + injected
        fused = []
        for i, (paths, norm) in enumerate(zip(self.paths, self.norms, strict=True)):
            total = y[i]
            for j, path in enumerate(paths.children()):
                if j != i:
                    moved = path(y[j])
                    total = total + (functional.interpolate(moved, size=y[i].shape[2:]) if j > i else moved)
            fused.append(norm(torch.relu(total)))
        return tuple(fused)

    def state_shape(self, x: Tensor) -> tuple[tuple[int, ...], ...]:
        """One shape a resolution."""
        sizes = [tuple(x.shape[2:])]
        for _ in self.channels[1:]:
            sizes.append(tuple(-(-side // 2) for side in sizes[-1]))
        return tuple((c, *size) for c, size in zip(self.channels, sizes, strict=True))

    def recurrent_weights(self) -> list[Tensor]:
        """Every convolution but the injection: all of them are applied to the state."""
        return [m.weight for m in self.modules() if isinstance(m, nn.Conv2d) and m is not self.injection]


class _Branch(nn.Module):
    """``W' * \\phi(N(W * z))`` at one resolution."""

    def __init__(self, channels: int, hidden: int, groups: int, **made: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, hidden, 3, padding=1, bias=False, **made)
        self.norm = nn.GroupNorm(groups, hidden, **made)
        self.second = nn.Conv2d(hidden, channels, 3, padding=1, bias=False, **made)

    def forward(self, z: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(z))))


def _path(source: int, target: int, channels: Sequence[int], **made: Any) -> nn.Module:
    """From one resolution to another: strided convolutions down, a 1 x 1 convolution (then interpolation) up."""
    a, b = channels[source], channels[target]
    if source == target:
        return nn.Identity()
    if source > target:
        return nn.Conv2d(a, b, 1, bias=False, **made)
    steps: list[nn.Module] = []
    for i in range(source, target):
        last = i == target - 1
        steps += [nn.Conv2d(a, b if last else a, 3, stride=2, padding=1, bias=False, **made)] + [nn.ReLU()] * (not last)
    return nn.Sequential(*steps)
