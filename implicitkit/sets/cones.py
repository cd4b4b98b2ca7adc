"""Cones of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from implicitkit.foundation import trees
from implicitkit.foundation.clamping import held
from implicitkit.foundation.options import check_options, flag
from implicitkit.sets.base import Projection, length


@dataclass(frozen=True)
class Nonnegative(Projection):
    """``{x >= 0}``."""

    separable: ClassVar[bool] = True

    def project(self, v: Tensor) -> Tensor:
        return v.clamp_min(0)

    def ends(self, v: Tensor) -> tuple[Any, Any]:
        """The bounds that the set is made of, for numbers like those of ``v``."""
        return 0.0, None

    def natural(self, z: Any, slope: Any) -> Any:
        """``z - P(z - slope)`` of a tensor, or of each leaf of a pytree, without its cancellation: ``min(slope, z)``."""
        return trees.tree_map(lambda x, g: held(g, None, x), z, slope)


@dataclass(frozen=True)
class SecondOrderCone(Projection):
    """``{(t, x): |x|_2 <= t}``, ``t`` the first entry.  Inside: itself; inside the polar cone: zero; else
    ``(|x| + t) / 2 (1, x / |x|)``."""

    def project(self, v: Tensor) -> Tensor:
        t, x = v[..., :1], v[..., 1:]
        norm = length(x)
        between = norm > t.abs()
        scale = 0.5 * (1 + t / torch.where(between, norm, 1))
        side = torch.cat([0.5 * (norm + t), scale * x], -1)
        polar = (norm <= -t) & (t < 0)
        return torch.where(between, side, torch.where(polar, torch.zeros_like(v), v))


@dataclass(frozen=True)
class Monotone(Projection):
    """``{x_1 <= x_2 <= ... <= x_n}``: isotonic regression, ``x_i = max_{j<=i} min_{k>=i} mean(v_j, ..., v_k)``.

    (Robertson, Wright & Dykstra 1988, section 1.4.)  The derivative averages over each level block.  Memory ``n^2``.

    Args:
        decreasing: ``x_1 >= x_2 >= ...`` instead.
    """

    decreasing: bool = False

    def __post_init__(self) -> None:
        check_options(self, decreasing=flag())

    def project(self, v: Tensor) -> Tensor:
        if self.decreasing:
            return -self._increasing(-v)
        return self._increasing(v)

    @staticmethod
    def _increasing(v: Tensor) -> Tensor:
        n = v.shape[-1]
        if n == 0:
            return v
        total = torch.cat([torch.zeros_like(v[..., :1]), v.cumsum(-1)], -1)
        with torch.no_grad():
            plain = total.detach()
            first = torch.arange(n, device=v.device)
            counts = (first.unsqueeze(0) - first.unsqueeze(1) + 1).clamp_min(1)  # of j..k, row j, column k
            means = (plain[..., None, 1:] - plain[..., :-1, None]) / counts
            means = torch.where(first.unsqueeze(0) >= first.unsqueeze(1), means, torch.inf)
            # min over k >= i, for every i >= j: a running minimum from the right
            least, last = means.flip(-1).cummin(-1)
            least, last = least.flip(-1), n - 1 - last.flip(-1)
            least = torch.where(first.unsqueeze(0) >= first.unsqueeze(1), least, -torch.inf)
            begin = least.argmax(-2)  # the j for each i
            end = last.gather(-2, begin.unsqueeze(-2)).squeeze(-2)
        return (total.gather(-1, end + 1) - total.gather(-1, begin)) / (end - begin + 1).to(v.dtype)
