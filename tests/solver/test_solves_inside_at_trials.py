"""A solve inside the function that has no solution at some trial point: that is no place to be, and no reason to stop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import implicitkit as ik

F64 = torch.float64


def root_of(x: Tensor, **options: int) -> Tensor:
    """``u^2 = x``, of which a negative ``x`` has none."""
    return ik.root(lambda u, x: u**2 - x, torch.ones_like(x), (x,), solver="newton", max_steps=20, **options).value


def test_a_line_search_comes_back() -> None:
    """``min (u - 0.1)^2`` over ``x`` with ``u^2 = x``: the first steps lead to negative ``x``."""
    found = ik.argmin(lambda x: 100 * (root_of(x) - 0.1).square().sum(), torch.tensor([0.5, 2.0], dtype=F64))
    torch.testing.assert_close(found.value, torch.full((2,), 0.01, dtype=F64), rtol=1e-5, atol=0)


def test_newton_comes_back_and_the_derivative_is_right() -> None:
    c = torch.tensor([0.3], dtype=F64, requires_grad=True)
    found = ik.root(lambda x, c: torch.atan(20 * (root_of(x) - c)), torch.tensor([0.7], dtype=F64), (c,)).value
    torch.testing.assert_close(found, c.detach() ** 2, rtol=1e-8, atol=0)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), c)[0], 2 * c.detach(), rtol=1e-6, atol=0)


def test_each_sample_by_itself() -> None:
    """Beside one that leads there, the others are solved as they are alone."""
    c = torch.tensor([[0.3], [0.6], [0.31]], dtype=F64)
    found = ik.root(
        lambda x, c: torch.atan(20 * (root_of(x, batch_dims=1) - c)),
        torch.tensor([[0.7], [0.4], [0.09]], dtype=F64),
        (c,),
        batch_dims=1,
    )
    torch.testing.assert_close(found.value, c**2, rtol=1e-8, atol=0)


def test_a_look_far_out_keeps_its_failure_to_itself() -> None:
    """A penalty of ``e^l``, best at infinity: asked whether it falls forever, the objective is tried at 1e12."""
    g = torch.Generator().manual_seed(0)
    X, y = torch.randn(20, 3, generator=g, dtype=F64), torch.randn(20, generator=g, dtype=F64)

    def outer(log: Tensor) -> Tensor:
        ridge = lambda w, log: (X @ w - y).square().mean() + log.exp() * w.square().sum()  # noqa: E731
        return ik.argmin(ridge, torch.zeros(3, dtype=F64), (log,), solver="newton").value.square().sum()

    with pytest.raises(ik.ConvergenceError, match="diverged"):
        ik.argmin(outer, torch.tensor(-1.0, dtype=F64))


def test_where_nothing_else_is_left_it_is_said() -> None:
    with pytest.raises(ik.ConvergenceError, match="a solve inside the function failed where it was tried"):
        ik.fixed_point(lambda x: root_of(x) - 0.5, torch.tensor([0.3], dtype=F64), solver="picard")


def test_at_the_start_the_error_is_its_own() -> None:
    with pytest.raises(ik.ConvergenceError) as caught:
        ik.root(lambda x: root_of(x) - 0.1, torch.tensor([-1.0], dtype=F64))
    assert "inside the function" not in str(caught.value)
