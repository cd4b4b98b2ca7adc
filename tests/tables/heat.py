"""Hock & Schittkowski (1981), no. 106: a heat exchanger, whose unknowns and constraints differ in size by ten thousand."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["HEAT_BOUNDS", "HEAT_START", "heat_exchanger"]

HEAT_START = [5000.0, 5000.0, 5000.0, 200.0, 350.0, 150.0, 225.0, 425.0]
HEAT_BOUNDS = ([100.0, 1000.0, 1000.0] + [10.0] * 5, [10000.0] * 3 + [1000.0] * 5)


def heat_exchanger(x: Tensor) -> Tensor:
    """What must not be positive; the objective is the sum of the first three unknowns."""
    a, b, c, d, e, f, g, h = x.unbind(-1)
    return torch.stack(
        [
            0.0025 * (d + f) - 1,
            0.0025 * (e + g - d) - 1,
            0.01 * (h - e) - 1,
            -a * f + 833.33252 * d + 100 * a - 83333.333,
            -b * g + 1250 * e + b * d - 1250 * d,
            -c * h + 1250000 + c * e - 2500 * e,
        ],
        -1,
    )
