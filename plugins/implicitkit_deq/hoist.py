"""Reparametrised weights (weight norm, spectral norm, ...) computed once per call instead of once per evaluation.

A weight under ``torch.nn.utils.parametrize`` is recomputed wherever it is read.  In a solve that would be at every
evaluation, and spectral normalisation, which takes a power step each time, would make each of them another map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

import implicitkit as ik

__all__ = ["computed", "held", "places"]

Place = tuple[nn.ModuleDict, str, nn.Module, str, bool]


class _Held(nn.Module):
    """Stands in for a list of parametrisations: returns a weight that has been computed already."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = (weight,)  # in a tuple: not to be registered

    def forward(self) -> Tensor:
        return self.weight[0]


def places(module: Any) -> list[Place]:
    """Every reparametrised weight below a module: where its parametrisation is kept, where the weight is read, and whether
    the module is compiled."""
    if not isinstance(module, nn.Module):
        return []
    compiled = ik.extend.holds_compiled([module])
    found: list[Place] = []
    for m in module.modules():
        if parametrize.is_parametrized(m):
            table = m.parametrizations
            assert isinstance(table, nn.ModuleDict)
            found.extend((table, name, m, name, compiled) for name in table)
    return found


def computed(where: Sequence[Place]) -> tuple[Tensor, ...]:
    """The weights, differentiable in what they are made of."""
    return tuple(getattr(owner, attribute) for _, _, owner, attribute, _ in where)


def held(where: Sequence[Place], weights: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Inside, the weights read these values (on this thread)."""
    if not where:
        return contextlib.nullcontext()
    entries = [(table, "_modules", name, _Held(w)) for (table, name, _, _, _), w in zip(where, weights, strict=True)]
    return ik.extend.replaced(entries, everywhere=any(compiled for *_, compiled in where))
