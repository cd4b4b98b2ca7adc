"""Symmetric arrowhead matrices by their Schur complement: solutions, inertia, and where sparse factors are to take over."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp

from implicitkit.linear.conditions.sparse_saddle import Layout, SparseSaddle
from implicitkit.linear.factors.arrowhead import ArrowheadFactors

#: Unknowns, full rows, signs of the first entries of the diagonal, the corner, and is it for the Schur complement?
MATRICES = {
    "convex": (40, 3, (), 0.0, True),
    "one row": (9, 1, (), 0.0, True),
    "with a corner": (40, 3, (), -0.5, True),
    "an entry below zero": (40, 3, (-1,), 0.0, True),
    "a corner above zero": (40, 3, (), 1e3, False),
    "all entries below zero": (12, 2, (-1,) * 12, 0.0, False),
    "an entry of next to nothing": (40, 3, (1e-9,), 0.0, False),
    "as many rows as unknowns": (4, 4, (), 0.0, False),
}


def _matrix(name: str, full: float = 1.0) -> tuple[sp.csc_matrix, int]:
    """Scaled to rows of size one; its whole diagonal is there."""
    n, m, first, corner, _ = MATRICES[name]
    rng = np.random.default_rng(n + m)
    d, C = rng.uniform(0.5, 1.5, n), rng.normal(size=(m, n)) * (rng.random((m, n)) < full) / n
    d[: len(first)] *= first
    dense = np.block([[np.diag(d), C.T], [C, np.diag(np.full(m, corner))]])
    there = (dense != 0) | np.eye(n + m, dtype=bool)
    K = sp.csc_matrix(there.astype(float))
    K.data = dense[K.indices, np.repeat(np.arange(n + m), np.diff(K.indptr))]
    return K, n


@pytest.mark.parametrize("name", MATRICES)
def test_solutions_and_inertia_are_those_of_the_matrix(name: str) -> None:
    K, n = _matrix(name)
    b = np.random.default_rng(0).normal(size=K.shape[0])
    saddle = SparseSaddle(K, n, scale=np.ones(K.shape[0]))
    assert isinstance(saddle.lu, ArrowheadFactors) is MATRICES[name][-1], name
    once = saddle.once(b)
    assert np.abs(K @ once - b).max() < 1e-6 * (1 + np.abs(once).max()), name  # they are regularised
    x, left = saddle.solve(b)
    assert left < 1e-14, name
    assert np.abs(K @ x - b).max() < 1e-12 * (1 + np.abs(x).max()), name
    assert saddle.negative == int((np.linalg.eigvalsh(K.toarray()) < 0).sum()), name


PATTERNS = {"full rows": (1.0, False, True), "sparse rows": (0.2, False, False), "no diagonal": (1.0, True, False)}


@pytest.mark.parametrize("name", PATTERNS)
def test_what_is_an_arrowhead(name: str) -> None:
    full, more, wanted = PATTERNS[name]
    K, n = _matrix("convex", full)
    if more:
        beside = sp.csc_matrix(([0.1, 0.1], ([0, 1], [1, 0])), shape=K.shape)
        K = sp.csc_matrix(K + beside + sp.diags_array(np.where(K.diagonal() == 0, 1e-300, 0.0)))
    assert (Layout(K).arrowhead(n) is not None) is wanted
