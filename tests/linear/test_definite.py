"""Symmetric definite blocks that are large are factored by CHOLMOD where it is installed, and others are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch

from implicitkit.linear.factors import definite, sparse_factors
from implicitkit.linear.factors.sparse_blocks import SparseBlocks
from implicitkit.sparsity.compression import known_entries

SIDE = 30
_INSTALLED = definite.is_installed()


def _grid(skew: float = 0.0, shift: float = 0.0) -> sp.csr_matrix:
    """Diffusion on a grid in the plane of 900 points, too wide for a band, with convection ``skew``."""
    line = sp.diags([-1.0 - skew, 2.0, -1.0 + skew], [-1, 0, 1], shape=(SIDE, SIDE))
    A = sp.csr_matrix(sp.kronsum(line, line) + shift * sp.identity(SIDE * SIDE))
    A.sort_indices()
    return A


MATRICES = {
    "definite": (_grid(), True),
    "negative definite": (-_grid(), True),
    "convection": (_grid(skew=0.1), False),
    "indefinite": (_grid(shift=-2.0), False),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of CHOLMOD has found factors; without it, those of SuperLU where all eigenvalues have one sign."""
    found: list[bool] = []

    def stand_in(A: sp.csc_matrix) -> Any:
        eigenvalues = np.linalg.eigvalsh(A.toarray())
        return sla.splu(A) if eigenvalues[0] * eigenvalues[-1] > 0 else None

    make = definite.definite_factors if _INSTALLED else stand_in

    def recorded(A: sp.csc_matrix) -> Any:
        factors = make(A)
        found.append(factors is not None)
        return factors

    monkeypatch.setattr(sparse_factors, "is_installed", lambda: True)
    monkeypatch.setattr(sparse_factors, "definite_factors", recorded)
    monkeypatch.setattr(sparse_factors, "_SUPERNODES", 100)
    monkeypatch.setattr(sparse_factors, "_TOGETHER", 0)
    return found


@pytest.mark.parametrize("name", MATRICES)
def test_definite_blocks_have_cholesky_factors(name: str, calls: list[bool]) -> None:
    """Two samples, both with ``A`` and its transposed; those that are not definite are solved as well."""
    A, is_definite = MATRICES[name]
    values = np.stack([A.data, 2 * A.data])
    pattern = sp.csr_matrix((np.ones(A.nnz, dtype=bool), A.indices, A.indptr), shape=A.shape)
    blocks = SparseBlocks(known_entries(pattern), values)
    b = torch.randn(2, A.shape[0], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x, y = blocks.solve(b), blocks.T.solve(b)
    factors = blocks.factor
    assert isinstance(factors, sparse_factors.SparseFactor)
    assert [isinstance(lu, sparse_factors._Unscaled) for lu in factors._lus] == [is_definite] * 2
    for i, M in enumerate((A.toarray(), 2 * A.toarray())):
        matrix = torch.from_numpy(M)
        torch.testing.assert_close(matrix @ x[i], b[i], rtol=0, atol=1e-10)
        torch.testing.assert_close(matrix.T @ y[i], b[i], rtol=0, atol=1e-10)
    asked = [True, True] if is_definite else [] if name == "convection" else [False]  # once of a pattern
    assert calls == asked


def test_small_blocks_and_those_without_the_package_are_not_asked(
    monkeypatch: pytest.MonkeyPatch, calls: list[bool]
) -> None:
    A, _ = MATRICES["definite"]
    pattern = sp.csr_matrix((np.ones(A.nnz, dtype=bool), A.indices, A.indptr), shape=A.shape)
    b = torch.ones(1, A.shape[0], dtype=torch.float64)
    monkeypatch.setattr(sparse_factors, "_SUPERNODES", 4096)
    SparseBlocks(known_entries(pattern), A.data[None]).solve(b)
    monkeypatch.setattr(sparse_factors, "_SUPERNODES", 100)
    monkeypatch.setattr(sparse_factors, "is_installed", lambda: False)
    SparseBlocks(known_entries(pattern), A.data[None]).solve(b)
    assert calls == []
