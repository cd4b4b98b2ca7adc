"""What is asked of every entry of a large matrix, part by part, is what whole matrices of sizes would give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from implicitkit.foundation import in_parts

SHAPES = [(1, 5, 5), (3, 4, 4), (1, 700, 700), (2, 500, 400), (40, 100, 120), (1, 1, 300_000), (0, 3, 3)]


def matrix(shape: tuple[int, int, int], transposed: bool) -> Tensor:
    batch, m, n = shape
    found = torch.randn(
        batch, n if transposed else m, m if transposed else n, generator=torch.Generator().manual_seed(0)
    )
    found = found.double().mT if transposed else found.double()
    if m > 2:
        found[:, 1], found[:, :, 2] = 0.0, 0.0
    return found


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_make_the_whole(shape: tuple[int, int, int], transposed: bool) -> None:
    A, numbers = matrix(shape, transposed), 2 * in_parts._NUMBERS
    x = torch.randn(shape[0], shape[2], 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat(in_parts.rows(A), 1), A)
    assert all(part.numel() <= max(numbers, shape[0] * shape[2]) for part in in_parts.rows(A))
    torch.testing.assert_close(in_parts.absolute_product(A, x), A.abs() @ x.abs())
    rows, columns = in_parts.sizes(A)
    size = A.abs()
    wanted = torch.where(size.amax(2, keepdim=True) > 0, size.amax(2, keepdim=True), 1)
    assert torch.equal(rows, wanted)
    wanted = (size / wanted).amax(1, keepdim=True)
    assert torch.equal(columns, torch.where(wanted > 0, wanted, 1))
    if shape[0] == 1:
        assert torch.equal(in_parts.largest(A[0]), size[0].amax(1))


def test_what_is_not_a_number_is_not_passed_over() -> None:
    A = torch.ones(700, 700, dtype=torch.float64)
    A[650, 3], A[651, 4] = torch.nan, -torch.inf
    found = in_parts.largest(A)
    assert bool(found[650].isnan()) and float(found[651]) == torch.inf and float(found[649]) == 1.0
    assert bool(in_parts.absolute_product(A[None], A.new_ones(1, 700, 1))[0, 650, 0].isnan())
