"""Two photographs that scikit-learn brings along."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

__all__ = ["patches", "photograph"]


@functools.cache
def photograph(name: str, shrink: int) -> Tensor:
    """``"china"`` or ``"flower"``, ``(3, height, width)``, numbers from -1 to 1, so many times smaller."""
    from sklearn.datasets import load_sample_image

    image = torch.tensor(load_sample_image(f"{name}.jpg")).movedim(2, 0).float() / 127.5 - 1
    return torch.nn.functional.avg_pool2d(image[None], shrink)[0]


def patches(image: Tensor, size: int, count: int, generator: torch.Generator) -> Tensor:
    """``(count, 3, size, size)``, from random places."""
    rows, columns = (torch.randint(n - size, (count,), generator=generator).tolist() for n in image.shape[1:])
    return torch.stack([image[:, i : i + size, j : j + size] for i, j in zip(rows, columns, strict=True)])
