"""Reparametrised weights (weight norm, spectral norm, ...) computed once per call instead of once per evaluation.

A weight under ``torch.nn.utils.parametrize`` is recomputed wherever it is read, and one of the older
``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` before every call of its module.  In a solve that would be
at every evaluation, and spectral normalisation, which takes a power step each time, would make each of them another map.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

import implicitkit as ik

__all__ = ["Place", "computed", "held", "places"]

_HOOKS = "_forward_pre_hooks"


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
    compiled = ik.extend.holds_compiled([module])
    found: list[Place] = []
    for m in module.modules():
        if parametrize.is_parametrized(m):
            table = m.parametrizations
            assert isinstance(table, nn.ModuleDict)
            found.extend(Place(table, "_modules", name, m, name, compiled) for name in table)
        found.extend(Place(m, _HOOKS, key, m, name, compiled) for key, name in _hooked(m))
    return found


def _hooked(module: nn.Module) -> Iterator[tuple[int, str]]:
    """The hooks that set a weight before every call of the module, and its name."""
    for key, hook in module._forward_pre_hooks.items():
        if isinstance(hook, (SpectralNorm, WeightNorm)):
            yield key, hook.name
        elif isinstance(hook, BasePruningMethod):
            yield key, hook._tensor_name


def computed(where: Sequence[Place]) -> tuple[Tensor, ...]:
    """The weights, differentiable in what they are made of."""
    for place in where:
        if place.kind == _HOOKS:
            place.owner._forward_pre_hooks[place.key](place.owner, ())
    return tuple(getattr(place.owner, place.attribute) for place in where)


def held(where: Sequence[Place], weights: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """Inside, the weights read these values (on this thread, but for those that a hook sets)."""
    if not where:
        return contextlib.nullcontext()
    entries: list[tuple[nn.Module, str, Any, Any]] = []
    for place, w in zip(where, weights, strict=True):
        if place.kind == _HOOKS:
            entries.append((place.owner, _HOOKS, place.key, _as_it_is))
            entries.append((place.owner, "", place.attribute, w))
        else:
            entries.append((place.keeper, place.kind, place.key, _Held(w)))
    return ik.extend.replaced(entries, everywhere=any(place.compiled for place in where))
