"""Operators from the entries of their matrices: products, transposed ones and the matrix itself against a dense one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicitkit import extend

ROWS = torch.tensor([0, 0, 2, 1, 2, 2])
COLUMNS = torch.tensor([0, 2, 1, 1, 2, 2])  # the last place twice
D = torch.float64


def _matrices(values: Tensor) -> Tensor:
    """By one sum for each sample."""
    full = torch.zeros(len(values), 3, 3, dtype=D)
    for sample, row in enumerate(values.double()):
        for i, j, v in zip(ROWS.tolist(), COLUMNS.tolist(), row.tolist(), strict=True):
            full[sample, i, j] += v
    return full


@pytest.mark.parametrize("dtype", [D, torch.float32])
@pytest.mark.parametrize("ready", [False, True], ids=["by the entries", "by the blocks"])
def test_operators_of_entries(ready: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 6, generator=generator, dtype=D)
    x = torch.randn(2, 3, generator=generator, dtype=D).to(dtype)
    A, full = extend.of_entries(ROWS, COLUMNS, values, x), _matrices(values).to(dtype)
    if ready:
        torch.testing.assert_close(A.dense(), full)
    for found, expected in ((A.mv(x), full), (A.rmv(x), full.mT)):
        assert found.dtype == dtype
        torch.testing.assert_close(found, (expected @ x.unsqueeze(2)).squeeze(2))
