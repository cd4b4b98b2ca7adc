"""Two kinks close together, both crossed by a move that is long beside them: no rounding errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import implicitkit as ik

_ROWS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "a dead zone": (lambda z: torch.relu(z - 1) - torch.relu(-z - 1) + 0.5 * z - 2, 2.0),
    "uneven": (lambda z: torch.relu(z - 1) - 2 * torch.relu(-z - 0.3) + 0.1 * z - 1, 20 / 11),
    "a clip": (lambda z: z.clamp(-1, 1) + 0.01 * z - 0.5, 0.5 / 1.01),
    "a step that is steep": (lambda z: torch.tanh(3 * z) + 0.1 * z - 0.3, 0.099538870513),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("unit", [1e-4, 1e-6, 1e-8, 1e-10, 1e-15])
@pytest.mark.parametrize("name", list(_ROWS))
def test_the_same_in_every_unit(name: str, unit: float, dtype: torch.dtype) -> None:
    residual, at = _ROWS[name]
    for start in (0.3, -0.5, 0.0, 3.0):
        z0 = torch.full((2,), start * unit, dtype=dtype)
        found = ik.root(lambda z: unit * residual(z / unit), z0, on_failure="ignore")
        close = 1e-3 if dtype == torch.float32 else 1e-5
        assert bool(found.converged), (start, found)
        torch.testing.assert_close(found.value / unit, torch.full_like(z0, at), rtol=close, atol=close, msg=f"{start}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_rounding_beside_a_zero_is_taken_for_it(dtype: torch.dtype) -> None:
    """``cos(z) - 1 + z / 3``: of the cosine nothing but rounding is left."""
    found = ik.root(lambda z: (torch.cos(z) + z / 3) - 1, torch.full((2,), 1e-3, dtype=dtype))
    assert float(found.value.abs().max()) < 1e-3
