"""Fixed points of maps that hardly contract: acceleration is left for Newton's steps where factors cost less."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.solver.fixed_point import frugal

D = torch.float64


def _matrix(n: int, radius: float, seed: int = 0) -> Tensor:
    """Random, of this spectral radius."""
    W = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=D)
    return radius * W / torch.linalg.eigvals(W).abs().max()


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=D)


@pytest.mark.parametrize(("n", "batch"), [(30, 1), (30, 64), (100, 1), (100, 8), (150, 1)])
def test_stiff_maps_with_dense_jacobians(n: int, batch: int) -> None:
    """Acceleration alone takes 130 evaluations of them, to 300."""
    W, x = _matrix(n, 0.999), _random(batch, n)
    solution = ik.fixed_point(lambda z, x: z @ W.T - 1e-3 * (z**3 - x), torch.zeros_like(x), (x,), batch_dims=1)
    assert solution.solver == "auto (newton)" and solution.evaluations <= 70
    z = solution.value
    assert float((z @ W.T - 1e-3 * (z**3 - x) - z).norm(dim=1).max()) <= 1e-9 * float(z.norm(dim=1).max())


def test_swift_maps_stay_with_acceleration() -> None:
    """Of many samples, whose factors would cost more than all that is left to do."""
    W, x = _matrix(100, 0.5), _random(16, 100)
    solution = ik.fixed_point(lambda z, x: z @ W.T + x, torch.zeros_like(x), (x,), batch_dims=1)
    assert solution.solver == "auto (anderson)"


def test_jacobians_that_would_fill_the_memory_are_not_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of all samples together: 50,000 of 64 unknowns are 1.6 GB."""
    monkeypatch.setattr(frugal, "_NUMBERS", 4 * 30 * 30 - 1)
    W, x = _matrix(30, 0.999), _random(4, 30)
    solution = ik.fixed_point(
        lambda z, x: z @ W.T + x, torch.zeros_like(x), (x,), batch_dims=1, max_steps=40, on_failure="ignore"
    )
    assert "newton" not in solution.solver


def test_samples_that_newton_does_not_help_go_on_with_acceleration() -> None:
    """Far outside of where Newton's method converges: monotone descent would end where the residual has a minimum."""
    W = torch.randn(50, 50, generator=torch.Generator().manual_seed(1), dtype=D) / 50**0.5 * 1.1
    x = _random(16, 50)
    solution = ik.fixed_point(lambda z, x: torch.tanh(z @ W.T + 0.3 * x), torch.zeros_like(x), (x,), batch_dims=1)
    assert solution.solver == "auto (anderson, newton)" and int(solution.steps.max()) <= 250
    assert bool(solution.converged.all())


@pytest.mark.parametrize("hidden", [True, False])
def test_a_map_without_a_derivative_needs_none(hidden: bool) -> None:
    W, x = _matrix(50, 0.99), _random(50)

    def by_numpy(z: Tensor) -> Tensor:
        return torch.from_numpy(W.numpy() @ z.numpy() + x.numpy())

    step = (lambda z: W @ z.detach() + x) if hidden else by_numpy
    with torch.no_grad():
        solution = ik.fixed_point(step, torch.zeros(50, dtype=D), rtol=1e-9)
    assert solution.solver == "auto (anderson)"
    torch.testing.assert_close(solution.value, torch.linalg.solve(torch.eye(50, dtype=D) - W, x), rtol=1e-6, atol=1e-6)


def test_where_newton_finds_a_fixed_point_that_repels_the_map_has_the_last_word() -> None:
    """Newton's steps lead from the slow way of the map into the next repelling point; the map comes to an attracting one."""
    g = torch.Generator().manual_seed(60)
    W = torch.randn(5, 5, generator=g, dtype=D) / 5**0.5 * 1.05
    W, x = (W + W.T) / 2**0.5, torch.randn(5, generator=g, dtype=D)
    f = lambda z, x: torch.tanh(W @ z + 0.2 * x)  # noqa: E731
    solution = ik.fixed_point(f, torch.zeros(5, dtype=D), (x,))
    assert float(torch.linalg.eigvals(torch.func.jacrev(f)(solution.value, x)).abs().max()) < 1


def test_the_derivative() -> None:
    W, x = _matrix(50, 0.99), _random(50).requires_grad_()
    solution = ik.fixed_point(lambda z, x: W @ z + x + 1e-3 * torch.sin(z), torch.zeros(50, dtype=D), (x,))
    assert solution.solver == "auto (newton)"
    (slope,) = torch.autograd.grad(solution.value.sum(), x)
    J = torch.eye(50, dtype=D) - W - 1e-3 * torch.diag(torch.cos(solution.value.detach()))
    torch.testing.assert_close(slope, torch.linalg.solve(J.T, torch.ones(50, dtype=D)), rtol=1e-8, atol=1e-8)
