"""Reparametrised weights (weight norm, spectral norm, ...) computed once per call instead of once per evaluation.

A weight under ``torch.nn.utils.parametrize`` is recomputed wherever it is read.  In a solve that would be at every
evaluation, and spectral normalisation, which takes a power step each time, would make each of them another map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = ["computed", "held", "places"]

Place = tuple[nn.ModuleDict, str, nn.Module, str]


class _Held(nn.Module):
    """Stands in for a list of parametrisations: returns a weight that has been computed already."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = (weight,)  # in a tuple: not to be registered

    def forward(self) -> Tensor:
        return self.weight[0]


def places(module: Any) -> list[Place]:
    """Every reparametrised weight below a module: where its parametrisation is kept, and where the weight is read."""
    if not isinstance(module, nn.Module):
        return []
    found: list[Place] = []
    for m in module.modules():
        if parametrize.is_parametrized(m):
            table = m.parametrizations
            assert isinstance(table, nn.ModuleDict)
            found.extend((table, name, m, name) for name in table)
    return found


def computed(where: Sequence[Place]) -> tuple[Tensor, ...]:
    """The weights, differentiable in what they are made of."""
    return tuple(getattr(owner, attribute) for _, _, owner, attribute in where)


@contextlib.contextmanager
def held(where: Sequence[Place], weights: Sequence[Tensor]) -> Iterator[None]:
    """Inside, the weights read these values."""
    old = [table[name] for table, name, _, _ in where]
    try:
        for (table, name, _, _), weight in zip(where, weights, strict=True):
            table[name] = _Held(weight)
        yield
    finally:
        for (table, name, _, _), parametrisation in zip(where, old, strict=True):
            table[name] = parametrisation
