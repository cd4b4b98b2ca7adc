"""What every application of the gallery begins with, whatever the one before it has set."""

from __future__ import annotations

from typing import Any

import pictures
import torch


def torch_settings(gallery_conf: Any, name: str) -> None:
    """Single precision and a fixed seed."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)


def colours(gallery_conf: Any, name: str) -> None:
    """Lines in colours that colour-blind readers tell apart, as in the other examples."""
    pictures.style()
