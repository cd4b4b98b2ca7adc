"""Tests that notice mutants which others let live: starts, units of a norm, first terms, signs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap

import implicitkit as ik
from implicitkit import extend
from implicitkit.linear.iterative.neumann import NeumannSeries
from implicitkit.solver.root.pseudo_transient import PseudoTransient, _implicit_euler
from implicitkit.solver.steps.restarts import watch

D = torch.float64


def _operator(matrix: Tensor) -> extend.Operator:
    def mv(v: Tensor) -> Tensor:
        return (matrix @ v.unsqueeze(2)).squeeze(2)

    def rmv(v: Tensor) -> Tensor:
        return (matrix.mT @ v.unsqueeze(2)).squeeze(2)

    return extend.Operator(mv, rmv, lambda: matrix, batch=matrix.shape[0], size=matrix.shape[1], like=matrix[:, 0])


def test_the_series_begins_with_its_first_term() -> None:
    """``J = 0``: the first term is the sum."""
    b = torch.randn(2, 3, dtype=D, generator=torch.Generator().manual_seed(0))
    answer = NeumannSeries().solve(
        _operator(-torch.eye(3, dtype=D).expand(2, 3, 3)), b, rtol=1e-12, atol=0, max_steps=9
    )
    assert torch.equal(answer.x, -b)
    assert answer.steps.tolist() == [1, 1]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_implicit_euler_by_products_is_that_by_factors(sign: float) -> None:
    """``(I / delta - s J) p = F``."""
    g = torch.Generator().manual_seed(0)
    matrix, F = torch.randn(2, 4, 4, dtype=D, generator=g), torch.randn(2, 4, dtype=D, generator=g)
    inverse, s = torch.tensor([8.0, 9.0], dtype=D), torch.tensor([sign, sign], dtype=D)
    f: Any = SimpleNamespace(active=torch.tensor([True, True]))
    J: Any = SimpleNamespace(A=_operator(matrix), dense=None, sparse=None)
    p = _implicit_euler(f, J, F, inverse, s)
    left = torch.diag_embed(inverse[:, None].expand_as(F)) - sign * matrix
    torch.testing.assert_close(p, torch.linalg.solve(left, F), rtol=1e-2, atol=1e-3)


def test_a_residual_beyond_the_safeguard_forgets() -> None:
    f: Any = SimpleNamespace(norm=torch.tensor([10.0, 2.0]), best_norm=torch.tensor([1.0, 1.0]))
    forget, _ = watch(f, {"step": 1}, safeguard=5.0, patience=100)
    assert forget is not None
    assert forget.tolist() == [True, False]


def test_starts_of_a_batch_are_those_of_its_samples() -> None:
    """Two roots, told apart by the start, whose samples are the middle dimension."""
    start = torch.tensor([[1.0, -2.0, 3.0], [-1.5, 0.5, -0.7]], dtype=D).unsqueeze(2)  # (rows, samples, n)

    def root(z0: Tensor) -> Tensor:
        return ik.root(lambda z: z**2 - 1, z0, solver="newton", batch_dims=1).value

    torch.testing.assert_close(vmap(root, in_dims=1, out_dims=1)(start), start.sign())


@pytest.mark.parametrize("norm", ["max", lambda z: 100 * z.abs().sum(-1)])
def test_methods_compare_in_2_norms_whatever_the_norm(norm: Any) -> None:
    """Units of the tolerance and of the best residual follow the method's own norm."""
    seen: list[tuple[float, float, float]] = []

    class Watching(ik.Method):
        solves = "root"

        def step(self, f: Any, z: Tensor, state: Any) -> tuple[Tensor, Any]:
            r = f.residual(z)
            seen.append((float(f.norm / r.norm()), float(f.tolerance / f.norm), float(f.best_norm / f.norm)))
            return z - 0.5 * r, state

    c = torch.tensor([1.0, 2.0, 3.0], dtype=D)
    solution = ik.root(lambda z: z - c, torch.zeros(3, dtype=D), solver=Watching(), norm=norm, rtol=0.0, atol=1e-3)
    values = {"max": lambda r: float(r.abs().max())}.get(
        norm if isinstance(norm, str) else "", lambda r: float(norm(r))
    )
    assert bool(solution.converged)
    for k, (same, ratio, best) in enumerate(seen):
        r = 0.5**k * c
        assert same == pytest.approx(1)
        assert ratio == pytest.approx(1e-3 / values(r))
        assert best == pytest.approx(1)


@pytest.mark.parametrize(
    ("verb", "function"),
    [
        (ik.root, lambda z: z - 1),
        (ik.root, lambda z: 1 - z),
        (ik.steady_state, lambda z: 1 - z),
        (ik.argmin, lambda z: (z - 1).square().sum()),
        (ik.fixed_point, lambda z: 0.5 * z),
    ],
    ids=["rising", "falling", "rest", "minimum", "map"],
)
def test_the_flow_of_pseudo_time_leads_to_the_solution(verb: Any, function: Any) -> None:
    """One small step, whatever the sign of ``F``; away from it the best point would be the start."""
    z0 = torch.full((2,), 3.0, dtype=D)
    solver = PseudoTransient(step_size=1e-3)
    solution = verb(function, z0, solver=solver, max_steps=1, on_failure="ignore")
    assert bool((solution.value < 3).all()) and bool((solution.value > 2.9).all())
