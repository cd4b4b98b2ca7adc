"""Arrowhead matrices of linear programs: unknowns without curvature stay with the rows, and no sparse factors are asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize as so
import torch

import implicitkit as ik
from implicitkit.linear.factors.arrowhead import ArrowheadMatrix, PivotedFactors
from implicitkit.linear.factors.ordering import Ordering

F64 = torch.float64


def _matrix(small: int, n: int = 20, m: int = 6, seed: int = 0) -> ArrowheadMatrix:
    g = np.random.default_rng(seed)
    d = g.uniform(0.5, 1.5, n) * g.choice([-1.0, 1.0], n)
    d[g.permutation(n)[:small]] = 1e-12
    return ArrowheadMatrix(d, g.standard_normal((m, n)), -1e-9 * np.eye(m))


@pytest.mark.parametrize("small", [1, 4, 6])
@pytest.mark.parametrize("seed", range(3))
def test_few_small_pivots(small: int, seed: int) -> None:
    K = _matrix(small, seed=seed)
    factors, whole = K.factor(), K.compressed().toarray()
    assert isinstance(factors, PivotedFactors)
    assert factors.negative == (np.linalg.eigvalsh(whole) < 0).sum()
    b = np.random.default_rng(7).standard_normal(len(whole))
    np.testing.assert_allclose(factors.solve(b), np.linalg.solve(whole, b), rtol=1e-9, atol=1e-11)


def test_more_small_pivots_than_rows() -> None:
    assert _matrix(7).factor() is None


def test_a_linear_program_asks_for_no_sparse_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    n, m, asked = 300, 30, []
    g = torch.Generator().manual_seed(0)
    A = torch.randn(m, n, generator=g, dtype=F64)
    b, y = A @ torch.rand(n, generator=g, dtype=F64), torch.randn(m, generator=g, dtype=F64)
    c = (A.T @ y + torch.rand(n, generator=g, dtype=F64)).requires_grad_()
    factor = Ordering.factor

    def watched(self: Ordering, *args: Any) -> Any:
        asked.append(1)
        return factor(self, *args)

    monkeypatch.setattr(Ordering, "factor", watched)
    s = ik.argmin(
        lambda z, c: c @ z, torch.zeros(n, dtype=F64), (c,),
        constraints=[ik.Equality(lambda z, c: A @ z - b)], bounds=(0.0, None),
    )  # fmt: skip
    assert bool(s.converged) and not asked
    best = so.linprog(c.detach().numpy(), A_eq=A.numpy(), b_eq=b.numpy(), bounds=(0, None))
    np.testing.assert_allclose(s.value.detach().numpy(), best.x, rtol=0, atol=1e-9)
