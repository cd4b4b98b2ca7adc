"""What every application of the gallery begins with, whatever the one before it has set."""

from __future__ import annotations

from typing import Any

import torch


def torch_settings(gallery_conf: Any, name: str) -> None:
    """Single precision and a fixed seed."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
