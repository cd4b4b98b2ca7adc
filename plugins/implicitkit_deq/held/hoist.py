"""Reparametrised weights (weight norm, spectral norm, ...) computed once per call instead of once per evaluation.

A weight under ``torch.nn.utils.parametrize`` is recomputed wherever it is read, and one of the older
``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` before every call of its module.  In a solve that would be
at every evaluation, and spectral normalisation, which takes a power step each time, would make each of them another map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

import implicitkit as ik
from implicitkit_deq.compat import SETTING, hooks_that_set, parametrized


class Place(NamedTuple):
    """Where a weight is made: the module that keeps what makes it, in which of its dicts and under which key; where it is
    read; and whether the module is compiled."""

    keeper: nn.Module
    kind: str
    key: Any
    owner: nn.Module
    attribute: str
    compiled: bool


class _Held(nn.Module):
    """Stands in for a list of parametrisations: returns a weight that has been computed already."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = (weight,)  # in a tuple: not to be registered

    def forward(self) -> Tensor:
        return self.weight[0]


def _as_it_is(_module: nn.Module, _inputs: Any) -> None:
    """Stands in for a hook that sets a weight before a call: it has been set."""


def places(module: Any) -> list[Place]:
    """Every reparametrised weight below a module."""
    if not isinstance(module, nn.Module):
        return []
    found: list[tuple[nn.Module, str, Any, nn.Module, str]] = []
    for m in ik.extend.below(module):
        if parametrized(m):
            table = m.parametrizations
            assert isinstance(table, nn.ModuleDict)
            found.extend((table, "_modules", name, m, name) for name in table)
        found.extend((m, SETTING, key, m, name) for key, name, _ in hooks_that_set(m))
    compiled = bool(found) and ik.extend.holds_compiled([module])
    return [Place(*where, compiled) for where in found]


def computed(where: Sequence[Place]) -> tuple[Tensor, ...]:
    """The weights, differentiable in what they are made of."""
    for owner in {place.owner for place in where if place.kind == SETTING}:
        for _, _, hook in hooks_that_set(owner):
            hook(owner, ())
    return tuple(getattr(place.owner, place.attribute) for place in where)


def held(where: Sequence[Place], weights: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Inside, the weights read these values (on this thread, but for those that a hook sets)."""
    if not where:
        return contextlib.nullcontext()
    entries: list[tuple[nn.Module, str, Any, Any]] = []
    for place, w in zip(where, weights, strict=True):
        if place.kind == SETTING:
            entries.append((place.owner, SETTING, place.key, _as_it_is))
            entries.append((place.owner, "", place.attribute, w))
        else:
            entries.append((place.keeper, place.kind, place.key, _Held(w)))
    return ik.extend.replaced(entries, everywhere=any(place.compiled for place in where))
