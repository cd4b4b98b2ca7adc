"""Checkpoints of TorchDEQ and locuslab/deq: their names for weight normalisation, and prefixes of their wrappers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicitkit.extend import options

_G, _V = "_g", "_v"


def load_torchdeq(
    module: nn.Module, state: Mapping[str, Tensor], *, prefix: str | None = None, strict: bool = True
) -> Any:
    r"""Load a ``state_dict`` of TorchDEQ or locuslab/deq into a module of the same structure.

        torch.save(model.state_dict(), "model.pt")         # there
        load_torchdeq(layer.cell, torch.load("model.pt"), prefix="func.")

    Their weight normalisation writes ``name_g`` and ``name_v`` for ``W = g V / |V|``, row by row (and PyTorch's newer one
    ``parametrizations.name.original0`` and ``.original1``, which are read as well).  Where the module has the same
    normalisation (:func:`weight_norm`, or ``torch.nn.utils.parametrizations.weight_norm``) they become its ``g`` and
    ``V``; else ``W`` itself is computed and loaded.

    Args:
        module: the cell, or a model. state: what ``torch.load`` returned.
        prefix: in front of every name that is meant, ``""`` for none; names without it are left out.  ``None``: the one
            with which most names fit (a model that keeps its function beside its solver has each parameter twice).
        strict: as in ``nn.Module.load_state_dict``.

    Returns:
        What ``load_state_dict`` returns: the missing and the unexpected names.

    Raises:
        ValueError: no name fits, or only one of ``name_g`` and ``name_v`` is there.
        RuntimeError: shapes differ, or with ``strict`` names are missing or left over.
    """
    options.check_arguments(
        "load_torchdeq",
        module=(options.instance("an nn.Module", nn.Module), module),
        state=(options.instance("a state_dict, what torch.load returned", Mapping), state),
        prefix=(options.optional(options.string()), prefix),
        strict=(options.flag(), strict),
    )
    state = {_older(name): value for name, value in state.items()}
    wanted = set(module.state_dict()) | {name for name, _ in _normalised(module)}
    if prefix is None:
        prefix = _best_prefix(wanted, state)
    mine = {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
    if not any(_plain(name) in wanted for name in mine):
        raise ValueError(
            f"no name of the checkpoint fits {type(module).__name__} with prefix={prefix!r}: it has "
            f"{', '.join(list(state)[:4])}, ...; wanted are {', '.join(sorted(wanted)[:4])}, ..."
        )
    places = dict(_normalised(module))
    loaded: dict[str, Tensor] = {}
    for name, value in mine.items():
        base = _plain(name)
        if base == name or base not in wanted | set(places):
            if not (name in places and f"{name}{_G}" in mine):  # a copy of the weight that g and V make
                loaded[name] = value
            continue
        g, V = mine.get(f"{base}{_G}"), mine.get(f"{base}{_V}")
        if g is None or V is None:
            raise ValueError(f"the checkpoint has {name!r} without its other half: g and V of a weight go together")
        if base in places:
            loaded |= {f"{places[base]}.original0": g, f"{places[base]}.original1": V}
        else:
            loaded[base] = g * V / torch.linalg.vector_norm(V.flatten(1), dim=1).view(-1, *[1] * (V.ndim - 1))
    return module.load_state_dict(loaded, strict=strict)


def _older(name: str) -> str:
    """``path.name_g`` and ``path.name_v`` for what ``torch.nn.utils.parametrizations.weight_norm`` calls the two."""
    return re.sub(r"parametrizations\.(\w+)\.original([01])$", lambda m: m[1] + (_V if m[2] == "1" else _G), name)


def _plain(name: str) -> str:
    """The weight that a name belongs to."""
    return name[:-2] if name.endswith((_G, _V)) else name


def _normalised(module: nn.Module) -> list[tuple[str, str]]:
    """Weights under a parametrisation of two tensors: their plain name, and where the two are kept."""
    found = []
    for path, m in module.named_modules():
        if parametrize.is_parametrized(m):
            dot = f"{path}." if path else ""
            for name, kept in m.parametrizations.items():
                if hasattr(kept, "original1"):
                    found.append((f"{dot}{name}", f"{dot}parametrizations.{name}"))
    return found


def _best_prefix(wanted: set[str], state: Mapping[str, Tensor]) -> str:
    """The prefix of the checkpoint's names with which most are wanted; of equals the shortest."""
    names = list(state)
    prefixes = {""} | {name[: i + 1] for name in names for i, c in enumerate(name) if c == "."}
    count = {p: len({_plain(n[len(p) :]) for n in names if n.startswith(p)} & wanted) for p in prefixes}
    return min(count, key=lambda p: (-count[p], len(p), p))
