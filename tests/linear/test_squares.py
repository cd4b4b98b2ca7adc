"""``R'R`` of many sparse matrices of one pattern, and products with all of them."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

from implicitkit import extend
from implicitkit.linear.factors import gram_entries as module
from implicitkit.linear.factors.gram import of_sparse, product_of_all
from implicitkit.sparsity.compression import Coloured, as_pattern

#: Rows, columns, and which entries are there.
PATTERNS = {
    "chain": (30, 30, lambda i, j: abs(i - j) <= 1),
    "more rows": (50, 20, lambda i, j: (3 * i + 7 * j) % 5 == 0),
    "an empty column and an empty row": (20, 12, lambda i, j: (j != 5) & (i != 3) & ((i + 2 * j) % 3 == 0)),
    "nothing": (4, 3, lambda i, j: (i < 0) & (j < 0)),
    "one entry a row": (9, 6, lambda i, j: j == i % 6),
    "a long row": (160, 150, lambda i, j: (i == 7) | (i == j + 10)),
}


def _given(name: str, batch: int) -> tuple[Coloured, np.ndarray]:
    m, n, there = PATTERNS[name]
    i, j = np.meshgrid(np.arange(m), np.arange(n), indexing="ij")
    ready = Coloured(as_pattern(sp.csr_matrix(there(i, j)), m, n))
    return ready, np.random.default_rng(m).normal(size=(batch, ready.pattern.nnz))


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", PATTERNS)
def test_squares_are_those_of_the_matrices(
    name: str, batch: int, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products by their places, some at a time, and those of SciPy where there are too many; the whole diagonal is there."""
    monkeypatch.setattr(module, "_CHUNK", 200)
    monkeypatch.setattr(module, "_PAIRS", 1 << 21 if listed else -1)
    ready, values = _given(name, batch)
    assert (module.squares(ready.pattern) is not None) is listed
    grams = of_sparse(ready, values)
    dense = [ready.matrix(v).toarray() for v in values]
    n = ready.shape[1]
    for gram, R in zip(grams, dense, strict=True):
        np.testing.assert_allclose(gram.times(np.eye(n)), R.T @ R, rtol=0, atol=1e-12 * (1 + np.abs(R.T @ R).max()))
        np.testing.assert_allclose(gram.diagonal(), np.square(R).sum(0), rtol=1e-12, atol=1e-14)
        assert len(gram.W) == (name == "a long row")
    d = np.linspace(0.5, 2, n)
    grams[0].both_sides(d)
    scaled = [(d[:, None] * d if k == 0 else 1.0) * (R.T @ R) for k, R in enumerate(dense)]
    v = np.random.default_rng(1).normal(size=(batch, n))
    wanted = np.stack([S @ x for S, x in zip(scaled, v, strict=True)])
    np.testing.assert_allclose(product_of_all(grams)(v), wanted, rtol=0, atol=1e-12 * (1 + np.abs(wanted).max()))


# ---------------------------------------------------------------------------------------------------------------------
# Operators from the entries of their matrices: products, transposed ones and the matrix itself against a dense one.
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
