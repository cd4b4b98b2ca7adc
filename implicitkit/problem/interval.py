r"""Scalar equations between ends that belong to a transform: ``z = low + t (high - low)``, solved for ``t`` in ``[0, 1]``.

A solver runs below all transforms of ``torch.func`` and cannot be given ends that do not exist there; the equation in ``t``
has the same ends for every sample, and the true ones among its arguments.  The solution does not depend on the ends: its
derivative by them is zero, and is not formed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicitkit.problem.around import Around
from implicitkit.problem.base import Restated, deeper
from implicitkit.problem.root import Root

__all__ = ["RootBetween"]


@dataclass(frozen=True, repr=False)
class RootBetween(Root):
    """:class:`~implicitkit.Root` with a bracket.

    Args:
        ends: ``(low, high)``, numbers or tensors that broadcast against ``z``, or of the batch's shape.
    """

    ends: Any = field(default=None, kw_only=True)

    def restate(self, z0: Any, args: tuple[Any, ...], batch_dims: int) -> Restated:
        low, high = (_like(torch.as_tensor(end, device=z0.device).to(z0).detach(), z0) for end in self.ends)
        inner = Root(
            _Between(self.equation),
            jac_sparsity=self.jac_sparsity,
            symmetric=self.symmetric,
            positive_definite=self.positive_definite,
            has_aux=self.has_aux,
        )
        start = (z0.detach() - low) / (high - low)
        return deeper(inner, start, args, batch_dims, (low, high - low), lambda t, g: g[0] + t * g[1])


def _like(end: Tensor, z0: Tensor) -> Tensor:
    """An end, for every entry of ``z0``."""
    if end.ndim and end.shape == z0.shape[: end.ndim]:
        end = end.reshape(*end.shape, *(1,) * (z0.ndim - end.ndim))
    return end.expand_as(z0)


class _Between(Around):
    """``function(low + t (high - low), *args)`` as a function of ``t``, with ``(low, high - low)`` the first argument."""

    def __call__(self, t: Tensor, ends: tuple[Tensor, Tensor], *args: Any) -> Any:
        return self.function(ends[0] + t * ends[1], *args)
