"""What every application of the gallery begins with, whatever the one before it has set."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pictures
import torch

import implicitkit_deq  # noqa: F401  # its warnings, too


def torch_settings(gallery_conf: Any, name: str) -> None:
    """Single precision and a fixed seed."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def colours(gallery_conf: Any, name: str) -> None:
    """Lines in colours that colour-blind readers tell apart, as in the other examples."""
    pictures.style()


def errors(gallery_conf: Any, name: str) -> None:
    """What this library and its plugins warn of is an error of the application: else the page would show it, and the build
    be green."""
    for kind in _below(Warning):
        if kind.__module__.startswith("implicitkit"):
            warnings.filterwarnings("error", category=kind)


def _below(kind: type[Warning]) -> Iterator[type[Warning]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _below(inner)
