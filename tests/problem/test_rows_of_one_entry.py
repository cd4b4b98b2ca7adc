"""Sparse quadratic programs whose rows bound one unknown each: bounds to the solver, rows with multipliers to the user, and
the factors of the solve serve the derivative."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.conditions.active_factors import ActiveFactors
from implicitkit.solver.qp.single_rows import Bounds

D = torch.float64
N = 40


def program(seed: int, scaled: bool) -> dict[str, Any]:
    """A strictly convex program with two equalities and three rows beside the bounds."""
    rng = np.random.default_rng(seed)
    S = sp.random(N, N, 0.05, random_state=rng, format="csr")
    slopes = rng.choice([-2.0, -0.5, 1.0, 3.0], N) if scaled else np.ones(N)
    bounds = sp.diags_array(slopes).tocsr()
    G = sp.vstack([sp.random(3, N, 0.3, random_state=rng), bounds]).tocsr()
    h = np.r_[rng.uniform(0.1, 0.5, 3), np.abs(slopes) * rng.uniform(0.05, 0.6, N)]
    A = sp.random(2, N, 0.5, random_state=rng, format="csr")
    return {
        "P": sp.csr_matrix(S.T @ S + sp.identity(N)),
        "q": 2 * rng.standard_normal(N),
        "A": A,
        "b": np.asarray(A @ np.full(N, 0.02)),
        "G": G,
        "h": h,
    }


def two_sided(seed: int) -> dict[str, Any]:
    parts = program(seed, False)
    lower = -0.6 * parts["h"]
    lower[[0, 7]] = -np.inf
    parts["h"][[1, 9]] = np.inf
    parts["h"][12] = lower[12]  # pinned
    return parts | {"lower": lower}


def repeated(seed: int) -> dict[str, Any]:
    """Each bound twice, the second one nearer or further."""
    parts = program(seed, True)
    nearer = np.random.default_rng(seed).uniform(0.5, 2.0, N)
    return parts | {
        "G": sp.vstack([parts["G"], parts["G"][3:]]).tocsr(),
        "h": np.r_[parts["h"], nearer * parts["h"][3:]],
    }


def only_lower(seed: int) -> dict[str, Any]:
    parts = program(seed, True)
    return parts | {"lower": -parts.pop("h")}


def linear(seed: int) -> dict[str, Any]:
    """A linear program in a box: a corner."""
    q = np.random.default_rng(seed).standard_normal(N)
    return {"q": q, "G": sp.identity(N).tocsr(), "h": np.full(N, 0.7), "lower": np.full(N, -0.3)}


MADE = {
    "bounds": lambda seed: program(seed, False),
    "rows of other slopes": lambda seed: program(seed, True),
    "both sides": two_sided,
    "each twice": repeated,
    "lower ones": only_lower,
    "a linear program": linear,
}


def solve(parts: dict[str, Any], dense: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Value and multipliers, and the derivatives by ``q``, ``b``, ``h`` and ``lower``."""
    leaves = {k: torch.tensor(parts[k], requires_grad=True) for k in ("q", "b", "h", "lower") if k in parts}
    fixed = {k: torch.as_tensor(v.toarray()) if dense else v for k, v in parts.items() if sp.issparse(v)}
    s = ik.solve(
        ik.QuadraticProgram(fixed.pop("P", None), leaves["q"], **fixed, **{k: v for k, v in leaves.items() if k != "q"})
    )
    weights = torch.cos(torch.arange(N, dtype=D))
    loss = weights @ s.value + torch.sin(s.multipliers.inequality + 1).sum()
    finite = {k: torch.isfinite(v) for k, v in leaves.items()}
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    found = [torch.where(ok, g, 0) for g, ok in zip(gradients, finite.values(), strict=True)]
    return [s.value.detach(), *(m.detach() for m in s.multipliers if m is not None)], found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MADE)
def test_values_multipliers_and_derivatives_are_those_of_dense_matrices(name: str, seed: int) -> None:
    parts = MADE[name](seed)
    (point, slopes), (same, other) = solve(parts, dense=False), solve(parts, dense=True)
    for one, two in zip(point, same, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-8)
    for one, two in zip(slopes, other, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-7)


def test_the_factors_of_the_solve_are_those_of_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    plain = ActiveFactors.solve
    monkeypatch.setattr(ActiveFactors, "solve", lambda self, b: calls.append(self.transposed) or plain(self, b))

    def refuse(*args: object) -> None:
        raise AssertionError("no other factors are needed")

    monkeypatch.setattr("implicitkit.linear.conditions.kkt._by_factors", refuse)
    monkeypatch.setattr("implicitkit.linear.factors.sparse_factors.SparseFactor.__init__", refuse)
    solve(two_sided(0) | {"h": program(0, False)["h"]}, dense=False)
    assert calls and all(calls)


def test_the_nearest_bound_counts_and_contradictions_stay_rows() -> None:
    G = sp.csr_matrix([[2.0, 0, 0], [0, -1.0, 0], [1.0, 0, 0], [1.0, 1.0, 0], [0, 0, 1.0]])
    bounds = Bounds(G, np.array([4.0, 3.0, 5.0, 1.0, np.inf]))
    assert bounds.taken.tolist() == [True, True, True, False, False]
    assert bounds.upper.tolist() == [2.0, np.inf, np.inf] and bounds.lower.tolist() == [-np.inf, -3.0, -np.inf]
    assert bounds.multipliers(np.array([6.0, -1.0, 0.0])).tolist() == [3.0, 1.0, 0.0, 0.0, 0.0]
    none = Bounds(sp.csr_matrix([[1.0], [-1.0]]), np.array([0.0, -1.0]))
    assert not none.taken.any() and none.upper[0] == np.inf


def test_a_linear_program_with_a_whole_edge_of_solutions() -> None:
    """Where the objective does not depend on an unknown it may lie anywhere within its bounds."""
    parts = linear(0)
    parts["q"][:5] = 0.0
    given = {k: v if sp.issparse(v) else torch.as_tensor(v) for k, v in parts.items()}
    s = ik.solve(ik.QuadraticProgram(P=None, **given))
    corner = torch.where(given["q"] > 0, given["lower"], given["h"])
    torch.testing.assert_close(s.value[5:], corner[5:], rtol=0, atol=1e-9)
    assert bool((s.value[:5] >= -0.3 - 1e-9).all()) and bool((s.value[:5] <= 0.7 + 1e-9).all())
