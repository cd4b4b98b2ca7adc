"""Fits of a batch that end at different times: those at rest are not factored again, and keep factors for the derivative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.factors.gram import Gram
from implicitkit.linear.factors.sparse_normal import NormalFactors, SparseNormal
from implicitkit.solver.evaluations import Evaluations
from implicitkit.solver.steps import normal_equations

D = torch.float64
N = 150
HEIGHTS = torch.tensor([0.01, 1.0, 2.0, 2.5], dtype=D).unsqueeze(1)


def chain(z: Tensor, x: Tensor) -> Tensor:
    return torch.cat([2.1 * z + z**3 - z.roll(1, -1) - z.roll(-1, -1) - x, 0.1 * z], -1)


def dense(z: Tensor, x: Tensor) -> Tensor:
    W = torch.randn(N, N, generator=torch.Generator().manual_seed(0), dtype=D) / N**0.5
    return torch.cat([2.1 * z + z**3 - z @ W.T - x, 0.1 * z], -1)


def gradient(f: Any, heights: Tensor, solver: str) -> tuple[Any, Tensor]:
    x = (heights * torch.linspace(0.5, 1.5, N, dtype=D)).requires_grad_()
    s = ik.least_squares(f, torch.zeros_like(x), (x,), batch_dims=1, solver=solver)
    return s, torch.autograd.grad(s.value.square().sum(), x)[0]


@pytest.mark.parametrize("f", [chain, dense], ids=["chain", "dense"])
@pytest.mark.parametrize("solver", ["levenberg_marquardt", "gauss_newton", "dogleg"])
def test_each_fit_and_its_derivative_are_those_alone(f: Any, solver: str) -> None:
    s, slope = gradient(f, HEIGHTS, solver)
    assert bool(s.converged.all()) and len(set(s.steps.tolist())) > 1
    for i in range(len(HEIGHTS)):
        alone, of_alone = gradient(f, HEIGHTS[i : i + 1], solver)
        torch.testing.assert_close(s.value[i : i + 1], alone.value, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(slope[i : i + 1], of_alone, rtol=1e-6, atol=1e-9)


def test_a_fit_at_rest_is_not_factored(monkeypatch: pytest.MonkeyPatch) -> None:
    """One factorisation for each sample that a trial step is asked of; the derivative has factors of all of them."""
    asked, made, left = [0], [0], list[Any]()
    solve, factor = SparseNormal.solve, Gram.factor

    def counting(self: SparseNormal, mu: Tensor, g: Tensor, which: Tensor) -> Tensor:
        asked[0] += int(which.sum())
        found = solve(self, mu, g, which)
        assert not bool(found[~which].any())
        left.append(self.factors)
        return found

    monkeypatch.setattr(SparseNormal, "solve", counting)
    monkeypatch.setattr(Gram, "factor", lambda *given: (made.__setitem__(0, made[0] + 1), factor(*given))[1])
    s, _ = gradient(chain, HEIGHTS, "levenberg_marquardt")
    assert bool(s.converged.all()) and all(isinstance(factors, NormalFactors) for factors in left)
    assert asked[0] < len(left) * len(HEIGHTS) and made[0] == asked[0]


def test_dense_factors_of_some_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the others stand, and their steps are zero."""
    R = torch.randn(3, 40, 30, generator=torch.Generator().manual_seed(1), dtype=D)
    g, mu, rows = R.sum(1), torch.ones(3, dtype=D), []
    cholesky = normal_equations.cholesky_batched
    monkeypatch.setattr(normal_equations, "cholesky_batched", lambda A: (rows.append(len(A)), cholesky(A))[1])
    model, which = normal_equations._Dense(R), torch.tensor([False, True, False])
    model.solve(mu, g, ~which)
    p = model.solve(4 * mu, g, which)
    assert rows == [3, 1] and not bool(p[~which].any())
    A = R.mT @ R + torch.diag_embed(torch.tensor([1.0, 4.0, 1.0], dtype=D)[:, None].expand(3, 30))
    torch.testing.assert_close(p[1], -torch.linalg.solve(A[1], g[1]), rtol=1e-9, atol=0)
    torch.testing.assert_close(model.factors.solve(g), torch.linalg.solve(A, g), rtol=1e-9, atol=0)


def test_sparse_factors_of_a_sample_at_rest() -> None:
    """They are those of the point before, in its units, whatever is done to the others."""
    x = HEIGHTS * torch.linspace(0.5, 1.5, N, dtype=D)
    problem = ik.LeastSquares(chain)
    seen: list[tuple[Any, Tensor, Tensor]] = []

    def watch(f: Evaluations, z: Tensor, free: Tensor | None = None, **options: Any) -> Any:
        found = f.residuals_sparse(z)
        seen.append((found, z, f.active))
        return plain(f, z, free, **options)

    plain = normal_equations.normal_equations
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("implicitkit.solver.least_squares.levenberg_marquardt.normal_equations", watch)
        ik.solve(problem, torch.zeros_like(x), (x,), batch_dims=1, solver="levenberg_marquardt")
    (found, z, _), scale = seen[1], torch.full_like(x, 3.0)
    first = SparseNormal(*found, z)
    first.scale(2 * scale)
    first.solve(torch.ones(4, dtype=D), z)
    before, rest = first.factors, torch.tensor([True, False, False, True])
    assert before is not None
    b = torch.sin(torch.arange(4 * N, dtype=D)).view(4, N)
    kept = before.solve(b)
    model = SparseNormal(*seen[2][0], seen[2][1], before, rest)
    assert not bool(model.columns[rest].any()) and bool((model.columns[~rest] > 0).all())
    assert not bool(model.times(b)[rest].any()) and bool(model.times(b)[~rest].any(1).all())
    model.scale(scale)
    assert model.largest()[rest].tolist() == [0.0, 0.0]
    p = model.solve(torch.full((4,), 0.5, dtype=D), b)
    assert not bool(p[rest].any()) and model.factors is not None
    solved = model.factors.solve(b)
    torch.testing.assert_close(solved[rest], kept[rest], rtol=1e-12, atol=0)
    torch.testing.assert_close(solved[~rest], -p[~rest], rtol=1e-12, atol=0)
    assert np.array_equal(model.D[1], scale[1].numpy())
    some = b * ~rest.unsqueeze(1)
    torch.testing.assert_close(model.factors.solve(some), solved * ~rest.unsqueeze(1), rtol=1e-12, atol=0)
