"""Programs whose unknowns are shares, down to 1e-20 of the largest, with an entropy that keeps them apart from zero.

    minimise  g |F'w|^2 / 2 - mu'w + c sum_i w_i log w_i,     sum_i w_i = 1

At the solution ``w = softmax((mu - g F y) / c)`` with ``y = F'w``: a few equations, solved here by Newton's method.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import implicitkit as ik
from implicitkit.linear.conditions import kkt

D = torch.float64
COST = 0.01


class Shares:
    """``n`` shares that have ``k`` factors in common."""

    def __init__(self, n: int, k: int = 5, spread: float = 0.1) -> None:
        draw = torch.Generator().manual_seed(n)
        self.F = torch.randn(n, k, dtype=D, generator=draw) / k**0.5
        self.mu = spread * torch.randn(n, dtype=D, generator=draw)
        self.even = torch.full((n,), 1 / n, dtype=D)
        self.weights = n * torch.cos(torch.arange(n, dtype=D))

    def objective(self, w: Tensor, g: Tensor) -> Tensor:
        return g * (self.F.T @ w).square().sum() / 2 - self.mu @ w + COST * (w * torch.log(w)).sum()

    def by_hand(self, g: float) -> Tensor:
        shares = lambda y: torch.softmax((self.mu - g * self.F @ y) / COST, 0)  # noqa: E731
        y, eye = torch.zeros_like(self.F[0]), torch.eye(self.F.shape[1], dtype=D)
        for _ in range(200):
            w = shares(y)
            mean, left = self.F.T @ w, self.F.T @ w - y
            step = torch.linalg.solve(
                g / COST * (self.F.T @ (w[:, None] * self.F) - torch.outer(mean, mean)) + eye, left
            )
            while float((self.F.T @ shares(y + step) - y - step).norm()) > float(left.norm()) > 1e-14:
                step = step / 2
            y = y + step
        return shares(y)

    def slope(self, g: float, h: float = 1e-4) -> float:
        """The derivative of ``weights @ w`` by differences."""
        return float(self.weights @ (self.by_hand(g + h) - self.by_hand(g - h))) / (2 * h)


ALL = ik.Equality(lambda w, g: w.sum() - 1)


def test_factors_of_interior_points_serve_the_derivative(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hessian that is diagonal but for a few factors: products alone said that the solution was not unique."""
    monkeypatch.setattr(kkt, "_lu", None)
    program, g = Shares(800, spread=0.03), torch.tensor(5.0, dtype=D, requires_grad=True)
    s = ik.argmin(program.objective, program.even, (g,), constraints=ALL, solver="filter_interior_point")
    torch.testing.assert_close(s.value, program.by_hand(5.0), rtol=1e-8, atol=1e-14)
    (found,) = torch.autograd.grad(program.weights @ s.value, g)
    assert float(found) == pytest.approx(program.slope(5.0), rel=1e-6)


def test_units_that_products_do_not_see() -> None:
    """A solver of one's own hands over no factors: a derivative of zero, with a warning that there is none."""
    program, g = Shares(800), torch.tensor(5.0, dtype=D, requires_grad=True)

    @ik.implicit(ik.Argmin(program.objective, constraints=ALL))
    def shares(z0: Tensor, g: Tensor) -> Tensor:
        return program.by_hand(float(g))

    (found,) = torch.autograd.grad(program.weights @ shares(program.even, g), g)
    assert float(found) == pytest.approx(program.slope(5.0), rel=1e-6)


def test_dense_programs_of_more_than_a_thousand_unknowns() -> None:
    """At 1,001 to 1,024 unknowns and multipliers the default was refused by its own first stage."""
    n = 1010
    draw = torch.Generator().manual_seed(n)
    Q = torch.randn(n, n, dtype=D, generator=draw) / n**0.5
    P = Q @ Q.T + torch.eye(n, dtype=D)
    g = torch.tensor(5.0, dtype=D, requires_grad=True)
    s = ik.argmin(lambda w, g: w @ P @ w / 2 - g * w[0], torch.zeros(n, dtype=D), (g,), constraints=ALL)
    (found,) = torch.autograd.grad(s.value[0], g)
    first, ones = torch.linalg.solve(P, torch.eye(n, dtype=D)[:, :1]), torch.linalg.solve(P, torch.ones(n, 1, dtype=D))
    expected = float(first[0] - ones[0] * first.sum() / ones.sum())
    assert float(found) == pytest.approx(expected, rel=1e-8) and s.evaluations < 100, s
