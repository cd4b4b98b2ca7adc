"""``c`` by which an objective is multiplied, where its curvature along the slope is known: ``1 / curvature``."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from implicitkit.foundation.trees import Layout
from implicitkit.problem.cost import cost_of

DOUBLE = torch.float64
ONES = torch.ones(4, dtype=DOUBLE)
B = torch.tensor([1.0, 0.7, -0.3, 0.9], dtype=DOUBLE)
EPS = torch.finfo(DOUBLE).eps
Objective = Callable[[Tensor], Tensor]


def bent(z: Tensor, at: float) -> Tensor:
    return 0.5 * (z - at).square().sum()


# name -> objective, start, curvature there (None: slopes are no smaller than unknowns, and ``c`` is one)
CASES: dict[str, tuple[Objective, Tensor, float | None]] = {
    "a slope of 1e-6": (lambda z: 1e-6 * bent(z, 3.0), ONES, 1e-6),
    "a slope of 1e-6 at a minimum of curvature one": (lambda z: bent(z, 1 + 1e-6), ONES, None),
    "a curvature that ends": (lambda z: 1e-9 * torch.cosh(z - 3).log().sum(), ONES, 1e-9 / math.cosh(2) ** 2),
    "a curvature that is seen far out": (lambda z: 1e-9 * ((B * z).sum() + 1e-12 * bent(z, 1)), ONES, 1e-21),
    "a curvature that is seen nearby only": (
        lambda z: 1e-9 * ((B * z).sum() + 2e-8 * (bent(z, 10) + 750 * (z - 10).pow(4).sum())), 10 * ONES, 2e-17,
    ),
    "a slope with noise of some units": (
        lambda z: 1e-9 * ((B * z - 30 * EPS / 1e9 * torch.cos(1e9 * z)).sum() + 1e-12 * bent(z, 1)), ONES, 1e-21,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_unit_is_one_over_the_curvature(name: str) -> None:
    objective, z0, curvature = CASES[name]
    c = cost_of(objective, None, z0, (), Layout(z0, 0))
    if curvature is None:
        assert c is None
    else:
        assert c is not None and abs(math.log2(float(c) * curvature)) < 0.6
        assert math.log2(float(c)).is_integer()  # nothing is rounded


def test_it_stays_a_number_of_float32() -> None:
    z0 = ONES.float()
    c = cost_of(lambda z: 1e-30 * bent(z, 3.0), None, z0, (), Layout(z0, 0))
    assert c is not None and float(c) == 2.0**60
